"""Quantised checkpoints: planned as what they hold, run under a cap, refused by name where not."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny_config
from safetensors.torch import load_file, save_file
from tools import goes_on
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from kvcap import Runtime, pocket
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.files import load_config, load_model
from kvcap.runtime.models.fused.decoder import decoder_of
from kvcap.runtime.models.quantised import is_plain, quantisation
from kvcap.runtime.models.weights import held_weights, read_headers, weigh
from kvcap.runtime.models.wrappers import KEPT

OLD = transformers.__version__ < "5"  # loads FP8 on a GPU only, and keeps scales of the unpacked
PACKAGES = {
    "fp8": "accelerate",
    "compressed-tensors": "compressed_tensors",
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
}


def kind(name: str) -> Any:
    missing = importlib.util.find_spec(PACKAGES[name]) is None
    old = OLD and name in ("fp8", "torchao")
    reason = f"needs {PACKAGES[name]}, of some kinds transformers 5"
    return pytest.param(name, marks=pytest.mark.skipif(missing or old, reason=reason))


# What the libraries that quantise warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = [kind(name) for name in PACKAGES]
UNPACKED = KINDS[:2]
PACKED = KINDS[2:]
BLOCK = 128  # of the weights that have a scale of their own


def tiny() -> Any:
    sizes = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2560}
    config = tiny_config("llama", **sizes, eos_token_id=None, dtype=torch.bfloat16)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def save_fp8(folder: Path) -> None:
    """As checkpoints of DeepSeek's kind are: a scale for every 128 x 128 weights."""
    model = tiny()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        blocks = tensors[name].float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scale = blocks.abs().amax((1, 3)) / 448
        whole = (blocks / scale[:, None, :, None]).reshape(tensors[name].shape)
        tensors[name] = whole.to(torch.float8_e4m3fn)
        tensors[name.replace(".weight", ".weight_scale_inv")] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    method = {
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": method}))


def save_compressed(folder: Path) -> None:
    """Four bits a weight, packed, with a scale for every 128."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    model = tiny()
    numbers = QuantizationArgs(num_bits=4, strategy="group", group_size=BLOCK)
    config = QuantizationConfig(
        config_groups={"all": QuantizationScheme(targets=["Linear"], weights=numbers)},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            largest = module.weight.float().unflatten(1, (-1, BLOCK)).abs().amax(2)
            module.weight_scale.data = (largest / 7).to(module.weight_scale.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def save_by_transformers(settings: Callable[[], Any], folder: Path) -> None:
    tiny().save_pretrained(folder / "plain")
    AutoModelForCausalLM.from_pretrained(
        folder / "plain", quantization_config=settings(), dtype=torch.bfloat16, device_map="cpu"
    ).save_pretrained(folder)


def save_torchao(folder: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    settings = transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2))
    save_by_transformers(lambda: settings, folder)


def save_bitsandbytes(folder: Path) -> None:
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    save_by_transformers(lambda: settings, folder)


SAVE = {
    "fp8": save_fp8,
    "compressed-tensors": save_compressed,
    "torchao": save_torchao,
    "bitsandbytes": save_bitsandbytes,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The directory of a quantised checkpoint that can chat, made once."""
    made: dict[str, str] = {}

    def get(kind: str) -> str:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the libraries that quantise
                SAVE[kind](folder)
            AutoTokenizer.from_pretrained(pocket.path()).save_pretrained(folder)
            made[kind] = str(folder)
        return made[kind]

    return get


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", UNPACKED)
def test_what_is_unpacked_is_planned_and_held_unpacked(kind, dtype, checkpoint):
    where = checkpoint(kind)
    config = load_config(where)
    planned = weigh(config, dtype, read_headers(where)).nbytes
    model = load_model(where, config, dtype)
    held = held_weights(model).nbytes
    assert held == pytest.approx(planned, rel=0.02 if OLD else 0)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    with torch.no_grad():
        model(torch.arange(5)[None])
    assert held == held_weights(model).nbytes, "nothing is unpacked later"
    assert all(is_plain(m) for m in model.modules() if isinstance(m, torch.nn.Linear))


@pytest.mark.parametrize("kind", PACKED)
def test_what_stays_packed_is_planned_packed(kind, checkpoint):
    where = checkpoint(kind)
    config = load_config(where)
    assert quantisation(config) == kind
    planned = weigh(config, torch.bfloat16, read_headers(where)).nbytes
    held = held_weights(load_model(where, config, torch.bfloat16)).nbytes
    assert held == pytest.approx(planned, rel=0.005)
    assert planned < 0.8 * weigh(config, torch.bfloat16).nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_they_chat_under_a_cap(kind, checkpoint, tmp_path):
    runtime = Runtime.from_pretrained(checkpoint(kind), budget_tokens=32, device="cpu")
    assert runtime.plan.weights == held_weights(runtime.model).nbytes
    assert runtime.with_policy_name("snapkv", {"window": 4}).plan.weights == runtime.plan.weights
    goes_on(runtime, tmp_path)


@pytest.mark.parametrize("kind", UNPACKED)
def test_unpacked_projections_can_be_read(kind, checkpoint, tmp_path):
    runtime = Runtime.from_pretrained(
        checkpoint(kind), "criticalkv", budget_tokens=32, block_size=32, device="cpu"
    )
    goes_on(runtime, tmp_path)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_projections_are_refused_by_name(kind, checkpoint):
    runtime = Runtime.from_pretrained(
        checkpoint(kind), "criticalkv", budget_tokens=32, device="cpu"
    )
    with pytest.raises(UnsupportedModel, match="choose a policy without criticalkv"):
        runtime.session()


@pytest.mark.parametrize("kind", PACKED)
def test_packed_layers_are_left_to_their_own_code(kind, checkpoint):
    where = checkpoint(kind)
    assert decoder_of(load_model(where, load_config(where), torch.bfloat16)) is None


@pytest.mark.skipif(not OLD, reason="newer transformers unpack it")
def test_fp8_is_refused_by_name_where_it_cannot_be_unpacked(checkpoint):
    where = checkpoint("fp8")
    with pytest.raises(UnsupportedModel, match=r"accelerate|quantised by 'fp8'.*No GPU"):
        load_model(where, load_config(where), torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "packages"),
    [("gptq", {"optimum", "gptqmodel"}), ("awq", {"autoawq"} if OLD else {"gptqmodel"})],
)
def test_missing_packages_are_named_before_anything_is_loaded(
    kind, packages, tmp_path, monkeypatch
):
    if any(importlib.util.find_spec({"autoawq": "awq"}.get(x, x)) for x in packages):
        pytest.skip("one of them is installed")
    tiny().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    method = {"quant_method": kind, "bits": 4, "group_size": 128}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": method}))
    config = load_config(str(tmp_path))
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("was loaded")
    )
    with pytest.raises(UnsupportedModel, match=f"quantised by '{kind}' need a package") as error:
        load_model(str(tmp_path), config, torch.bfloat16)
    assert all(name in str(error.value) for name in packages)


def wrapped(where: Path, folder: Path) -> str:
    """A quantised checkpoint as the text model of Llava, with a plain vision tower."""
    files = load_file(where / "model.safetensors")
    inner = {f"language_model.{key}": tensor for key, tensor in files.items()}
    inner["vision_tower.layers.0.mlp.up_proj.weight"] = torch.zeros(512, 512)
    save_file(inner, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((where / "config.json").read_text())
    method = config.pop("quantization_config")
    for name in KEPT:
        if name in method:
            method[name] = [f"language_model.{module}" for module in method[name]]
    outer = {
        "model_type": "llava",
        "text_config": config,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "clip_vision_model"},
        "dtype": "bfloat16",
        "quantization_config": method,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    return str(folder)


@pytest.mark.skipif(OLD, reason="4.57 cannot load such files' text model alone")
@pytest.mark.parametrize("kind", UNPACKED)
def test_of_a_wrapper_the_text_model_alone_is_unpacked(kind, checkpoint, tmp_path):
    plain = checkpoint(kind)
    where = wrapped(Path(plain), tmp_path)
    config = load_config(where)
    assert quantisation(config) == kind
    model = load_model(where, config, torch.bfloat16)
    alone = load_model(plain, load_config(plain), torch.bfloat16)
    planned = weigh(config, torch.bfloat16, read_headers(where)).nbytes
    assert planned == held_weights(model).nbytes == held_weights(alone).nbytes
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, alone(ids).logits)


@pytest.mark.parametrize("kind", [*PACKED, "gptq"])
def test_a_wrapper_with_packed_weights_is_refused_by_name(kind, tmp_path):
    config = {"model_type": "llava", "text_config": tiny().config.to_dict(),
              "vision_config": {"model_type": "clip_vision_model"},
              "quantization_config": {"quant_method": kind, "bits": 4}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=rf"'llava'.*{kind}.*kvcap\.cap"):
        load_config(str(tmp_path))
