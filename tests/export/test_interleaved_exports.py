"""Exported decoders of models whose RoPE rotates neighbours: right, or found out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import standard_decoder
import torch
from conftest import SIZES, small_policy
from tools import made, operations  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvcap import pocket
from kvcap.export.adopted import check as parity
from kvcap.export.adopted.adopt import adopt
from kvcap.export.adopted.evictor import AdoptedEvictionGraph, example, trace
from kvcap.export.adopted.signature import read_ports
from kvcap.export.adopted.trial import check_evictable
from kvcap.export.decoder.spec import Source, layout_for
from kvcap.export.decoder.write import write
from kvcap.policies import load_policy
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import ToleranceError
from kvcap.runtime.models import config as models
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.rope import Rotation


def tiny_model(family: str, **changes: Any) -> Any:
    """A random model whose attention picks tokens."""
    sizes = {"head_dim": 16} if family != "cohere" else {"logit_scale": 1.0}
    config = AutoConfig.for_model(family, **{**SIZES, **sizes, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="kvcap", dtype=torch.float32
    )
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0.0, 0.15)
    return model.eval()


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM in `model`, and in `found` its decoder as others export it."""

    def make(folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(pocket.path())
        model = tiny_model(
            "glm", vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id, eos_token_id=None
        )
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        standard_decoder.save(folder / "model", folder / "found")

    return made(tmp_path_factory, "glm", make)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("policy", ["keydiff", "snapkv"])
@pytest.mark.parametrize("family", ["glm", "cohere", "ernie4_5"])
def test_a_decoder_in_one_graph_passes_its_own_check(family, policy, tmp_path):
    """Logits and kept slots of graph, module and runtime agree past the budget."""
    model = tiny_model(family)
    layout = layout_for(
        model.config, CacheSettings(20, 8, small_policy(policy, model.config), "compact")
    )
    _, report = write(Source("tiny", model, None), layout, "fp32", tmp_path / "x", True)
    assert report.ok


@pytest.mark.slow
def test_a_graph_that_rotates_by_the_other_layout_is_not_written(tmp_path, monkeypatch):
    model = tiny_model("glm")
    with monkeypatch.context() as patch:
        patch.setattr(models, "INTERLEAVED", ())
        layout = layout_for(model.config, CacheSettings(20, 8, load_policy("keydiff"), "compact"))
    with pytest.raises(ToleranceError, match="differs"):
        write(Source("tiny", model, None), layout, "fp32", tmp_path / "x", True)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_found_decoder_says_and_keeps_what_pytorch_does(glm, tmp_path):
    """Its keys are moved by a graph that rotates neighbours."""
    found = shutil.copytree(glm / "found", tmp_path / "found")
    said = adopt(found, None, [load_policy("keydiff")], budget_tokens=24, block_size=8)
    assert said["positions"] == "compact"
    sizes = {"budget_tokens": 24, "block_size": 8, "positions": "compact"}
    runtimes = (
        OrtRuntime.from_directory(found, **sizes),
        Runtime.from_pretrained(
            str(glm / "model"), "keydiff", dtype="float32", device="cpu", **sizes
        ),
    )
    texts, kept = [], []
    for runtime in runtimes:
        session = runtime.session()
        session.set_generation(do_sample=False, max_new_tokens=60)
        session.generation.eos_token_id = None
        texts.append("".join(session.complete("The old ship left the harbour in the morning.")))
        kept.append(session.cache)
    assert texts[0] == texts[1]
    for mine, layer in zip(kept[0].positions, kept[1].capped_layers, strict=True):
        assert mine.tolist() == layer.segments[0].positions[0].sort(-1).values.tolist()


def test_the_trial_moves_keys_by_the_models_layout_alone(glm, monkeypatch):
    """Driven by the other layout they cannot be moved exactly, so that positions stay true."""
    folder = glm / "found"
    ports, config = read_ports(folder / "model.onnx"), AutoConfig.from_pretrained(folder)
    assert check_evictable(ports, ModelShape.of(config))
    monkeypatch.setattr(models, "INTERLEAVED", ())
    assert not check_evictable(ports, ModelShape.of(config))


def test_an_evictors_graph_rotates_neighbours(tmp_path):
    """Some numbers of a key do not turn; kept keys stand where their rank is."""
    evictor = AdoptedEvictionGraph(
        load_policy("streaming_llm", sinks=1), 1, 1, 10, 3, interleaved=True
    )
    file = tmp_path / "e.onnx"
    file.write_bytes(trace(evictor, torch.float32).SerializeToString())
    parity.check(Graph(file), evictor, torch.float32).require()
    rotation = Rotation(torch.tensor([1.0, 0.5, 0.1]), 40, "cpu", interleaved=True)
    given = example(evictor, torch.float32, past=20, block=7, stay=9)
    given["table"], raw = rotation.table[:30], torch.randn(1, 1, 27, 10)
    given["keys"] = forth(raw, rotation)
    given["base"] = raw[:, :, :20]
    keys, _, positions, base = evictor(*given.values())
    order = given["positions"].shape[2]
    times = torch.cat((given["positions"], (torch.arange(order, 27) + 5)[None, None].int()), 2)
    slots = [times[0, 0].tolist().index(t) for t in positions[0, 0].tolist()]
    torch.testing.assert_close(base, raw[:, :, slots], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys, forth(base, rotation), rtol=1e-5, atol=1e-5)


def forth(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Keys [1, 1, n, D] made at position 0, moved to where each lies."""
    out = x.clone()
    for p in range(x.shape[2]):
        for i, (cos, sin) in enumerate(rotation.table[p].T.tolist()):
            a, b = x[..., p, 2 * i], x[..., p, 2 * i + 1]
            out[..., p, 2 * i], out[..., p, 2 * i + 1] = a * cos - b * sin, b * cos + a * sin
    return out
