"""A model's files: counted from their headers, refused by name where they are broken or evil."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import FAMILIES, tiny_config, tiny_model
from families import STATES, model_of
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_chat import save

from kvcap import KvcapError, Runtime
from kvcap.runtime.errors import (
    ChatTemplateMissing,
    ModelFilesBroken,
    ModelNotFound,
    UnsupportedModel,
)
from kvcap.runtime.memory.free_memory import FreeMemory
from kvcap.runtime.models import files, weights
from kvcap.runtime.models.files import load_config, load_model
from kvcap.runtime.models.weights import INDEX, SINGLE, Tensor, read_headers, weigh

Break = Callable[[Path], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A model that can chat, to be broken."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def load(folder: Path) -> Runtime:
    return Runtime.from_pretrained(folder, budget_tokens=16, device="cpu")


# What the headers say ---------------------------------------------------------------------------


def held(model: Any) -> int:
    """Return the bytes of all that is saved of a model, what is tied once."""
    return sum({x.data_ptr(): x.nbytes for x in model.state_dict().values()}.values())


@pytest.mark.slow(keep=42)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "size"), [
    *((family, size) for family in FAMILIES for size in ("1GB", "30KB")),
    *((family, "1GB") for family in STATES),
])  # fmt: skip
def test_headers_say_what_loading_takes(family, dtype, size, tmp_path):
    """Files may have other names, a matrix for each expert, and parts that the model leaves out."""
    model_of(family).save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / SINGLE).exists() == (size == "1GB")
    if family in ("qwen3_5_text", "qwen3_next", "olmo_hybrid"):
        tensors(lambda x: x.update({"mtp.layers.0.input_layernorm.weight": torch.ones(64)}))(
            tmp_path
        )
    where = str(tmp_path)
    config = load_config(where)
    weighed = weigh(config, dtype, read_headers(where))
    assert weighed == (held(load_model(where, config, dtype)), "safetensors headers")
    assert weighed.nbytes == weigh(config, dtype).nbytes


@pytest.mark.parametrize("tied", [False, True])
def test_tied_tensors_count_once_and_others_are_not_loaded(tied, tmp_path):
    model = tiny_model("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    config, headers = load_config(str(tmp_path)), read_headers(str(tmp_path))
    weighed = weigh(config, torch.float32, headers)
    assert weighed.nbytes == held(load_model(str(tmp_path), config, torch.float32))


def test_a_tied_tensor_under_its_other_name_is_loaded_or_refused(tmp_path):
    """Other programs keep lm_head of the two; transformers 4.57 cannot load that."""
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    where = str(tmp_path)
    config = load_config(where)
    nbytes = weigh(config, torch.float32, read_headers(where)).nbytes
    if transformers.__version__.startswith("4."):
        with pytest.raises(ModelFilesBroken, match=r"lack model\.embed_tokens\.weight"):
            load_model(where, config, torch.float32)
        return
    loaded = load_model(where, config, torch.float32)
    assert nbytes == held(loaded)
    assert torch.equal(loaded.get_input_embeddings().weight, tensors["lm_head.weight"])


def test_quantised_weights_stay_as_the_files_have_them():
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "some"}
    headers = {
        "model.layers.0.mlp.up_proj.weight": Tensor("I8", (5, 2)),
        "model.layers.0.mlp.up_proj.weight_scale": Tensor("BF16", (7,)),
        "model.norm.weight": Tensor("BF16", (3,)),  # of the model itself: as it is loaded
        "model.layers.0.mlp.up_proj.weight.codes": Tensor("F4", (8,)),
        "vision_tower.layers.0.mlp.up_proj.weight": Tensor("I8", (9,)),  # is not loaded
    }
    assert weigh(config, torch.float32, headers).nbytes == 10 + 14 + 12 + 4


def test_no_weights_are_read(tmp_path, monkeypatch, kvcap):
    """64 GiB that are not there: the file is as long as its header says, and empty."""
    sizes = {"hidden_size": 1024, "vocab_size": 1 << 24, "num_attention_heads": 16}
    config = tiny_config("llama", **sizes, tie_word_embeddings=True, num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    header, end = {}, 0
    for parameter in weights._parameters(weights.on_meta(config, torch.float32)):
        size = 4 * torch.Size(parameter.shape).numel()
        facts = {"dtype": "F32", "shape": parameter.shape, "data_offsets": [end, end + size]}
        header[parameter.names[0]] = facts
        end += size
    text = json.dumps(header).encode()
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    assert end > 64 << 30
    free = FreeMemory(8 << 30, "a test")
    monkeypatch.setattr("kvcap.runtime.cli.commands.free_memory", lambda: free)
    with pytest.warns(UserWarning, match="8,589,934,592 are free .a test.; the largest"):
        printed = kvcap.document("plan", str(tmp_path), "--dtype", "bfloat16")
    assert printed["weights"] == end // 2
    assert printed["free_bytes"] == 8 << 30


def test_without_weights_the_config_is_counted(folder, kvcap):
    (folder / SINGLE).unlink()
    assert kvcap.document("plan", str(folder))["weights_from"] == "config"
    with pytest.raises(ModelFilesBroken, match="the weights of"):
        load(folder)


# Repositories of the hub ------------------------------------------------------------------------


def test_the_hub_is_asked_for_headers(monkeypatch, saved):
    headers = read_headers(str(saved))
    tensors = {k: SimpleNamespace(dtype=x.dtype, shape=list(x.shape)) for k, x in headers.items()}
    answer: Any = SimpleNamespace(files_metadata={SINGLE: SimpleNamespace(tensors=tensors)})

    def ask(repository):
        assert repository == "some/model"
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(weights, "get_safetensors_metadata", ask)
    assert read_headers("some/model") == headers
    answer = OSError("offline")
    assert read_headers("some/model") is None
    answer = NotASafetensorsRepoError("none")
    with pytest.raises(ModelFilesBroken, match="pickles"):
        read_headers("some/model")
    answer = SafetensorsParsingError("too long")
    with pytest.raises(ModelFilesBroken, match="too long"):
        read_headers("some/model")


def test_what_is_in_the_cache_is_read_there(monkeypatch, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    expected = read_headers(str(tmp_path))
    there = {INDEX: str(tmp_path / INDEX)}
    monkeypatch.setattr(weights, "try_to_load_from_cache", lambda _, name: there.get(name))
    assert read_headers("some/model") == expected
    next(tmp_path.glob("*.safetensors")).unlink()  # not downloaded yet
    assert read_headers("some/model") is None  # offline here


# What is broken ---------------------------------------------------------------------------------


def write(name: str, content: bytes | str) -> Break:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def changed(name: str, change: Callable[[dict[str, Any]], object]) -> Break:
    def rewrite(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values))

    return rewrite


def update(name: str, **changes: Any) -> Break:
    return changed(name, lambda values: values.update(changes))


def cut(name: str, to: int) -> Break:
    return lambda folder: os.truncate(folder / name, to)


def header(change: Callable[[dict[str, Any]], object] = lambda _: None, length: int = 0) -> Break:
    """Another header before the same data."""

    def rewrite(folder: Path) -> None:
        data = (folder / SINGLE).read_bytes()
        old = struct.unpack("<Q", data[:8])[0]
        values = json.loads(data[8 : 8 + old])
        change(values)
        text = json.dumps(values).encode()
        start = struct.pack("<Q", length or len(text))
        (folder / SINGLE).write_bytes(start + text + data[8 + old :])

    return rewrite


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    """A valid file of other tensors."""

    def rewrite(folder: Path) -> None:
        by_name = load_file(folder / SINGLE)
        change(by_name)
        save_file(by_name, folder / SINGLE, {"format": "pt"})

    return rewrite


def index(*names: Any) -> Break:
    """An index of `names` in the place of the file."""

    def rewrite(folder: Path) -> None:
        shutil.move(folder / SINGLE, folder / "a.safetensors")
        shards = {f"tensor.{i}": name for i, name in enumerate(names)}
        (folder / INDEX).write_text(json.dumps({"weight_map": shards}))

    return rewrite


NORM = "model.norm.weight"
BROKEN: dict[str, tuple[Break, str]] = {
    "config is no JSON": (write("config.json", "{"), "config.json"),
    "config is no object": (write("config.json", "[]"), "config.json"),
    "config is deep": (write("config.json", "[" * 100_000), "config.json"),
    "config is no text": (write("config.json", b"\xff\xfe\0"), "config.json"),
    "config names no type": (
        changed("config.json", lambda x: x.pop("model_type")), "no model_type"),
    "type is a list": (update("config.json", model_type=["llama"]), "config.json"),
    "no heads": (update("config.json", num_attention_heads=0), "config.json"),
    "words for numbers": (update("config.json", hidden_size="large"), "config.json"),
    "negative sizes": (update("config.json", intermediate_size=-5), "config.json"),
    "endless layers": (update("config.json", num_hidden_layers=10**9), "1,000,000,000 layers"),
    "no dtype of models": (update("config.json", dtype="int8"), "models do not run in torch.int8"),
    "no dtype at all": (update("config.json", dtype="float128"), "config.json"),
    "other files named": (
        update("config.json", transformers_weights="../x.safetensors"), "transformers_weights"),
    "empty file": (cut(SINGLE, 0), "header too small"),
    "header cut": (cut(SINGLE, 100), "invalid header length"),
    "data cut": (cut(SINGLE, 20_000), "not fully covered"),
    "header is no JSON": (write(SINGLE, struct.pack("<Q", 8) + b"not json"), "invalid JSON"),
    "header is absurdly long": (header(length=1 << 60), "header too large"),
    "header ends beyond the file": (header(length=1 << 24), "invalid header length"),
    "offsets overlap": (header(lambda x: x[NORM].update(data_offsets=[0, 128])), "offset"),
    "offsets beyond the file": (
        header(lambda x: x[NORM].update(data_offsets=[1 << 40, (1 << 40) + 128])), "offset"),
    "offsets backwards": (header(lambda x: x[NORM].update(data_offsets=[128, 0])), "offset"),
    "a size that overflows": (header(lambda x: x[NORM].update(shape=[1 << 62, 8])), "overflow"),
    "unknown type of numbers": (header(lambda x: x[NORM].update(dtype="F33")), "F33"),
    "another shape": (tensors(lambda x: x.update({NORM: torch.ones(3)})), r"norm.*\[3\] and not"),
    "integers": (tensors(lambda x: x.update({NORM: torch.ones(32).long()})), "norm.* is I64"),
    "a tensor too few": (tensors(lambda x: x.pop(NORM)), f"lack {NORM}, which would be random"),
    "no tensors": (tensors(lambda x: x.clear()), "lack .* and [0-9]+ more"),
    "index is no JSON": (lambda x: (index()(x), write(INDEX, "{")(x)), "no index"),
    "index is a list": (lambda x: (index()(x), write(INDEX, "[]")(x)), "no index"),
    "index without a map": (lambda x: (index()(x), write(INDEX, "{}")(x)), "no index"),
    "index of numbers": (index(1, 2), "no index"),
    "index of lists": (index([]), "no index"),
    "index is deep": (lambda x: (index()(x), write(INDEX, "[" * 100_000)(x)), "no index"),
    "shard missing": (index("a.safetensors", "b.safetensors"), "is not in"),
    "shard elsewhere": (index("../../etc/passwd"), "no safetensors file beside it"),
    "shard elsewhere, named well": (index("../a.safetensors"), "no safetensors file beside it"),
    "shard by its full path": (index("/etc/a.safetensors"), "no safetensors file beside it"),
    "shard is a pickle": (index("pytorch_model.bin"), "no safetensors file beside it"),
    "shard is a folder": (
        lambda x: (index("b.safetensors")(x), (x / "b.safetensors").mkdir()), "is not in"),
    "distributed": (
        write("shard-00001-model-00001-of-00001.safetensors", b""), "distributed checkpoint"),
}  # fmt: skip


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a model is loaded."""
    load_model = "kvcap.runtime.backends.pytorch.runtime.load_model"
    monkeypatch.setattr(load_model, lambda *_: pytest.fail("was loaded"))


@pytest.mark.slow(keep=32)
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_before_anything_is_loaded(name, folder, not_loaded, kvcap):
    break_, message = BROKEN[name]
    break_(folder)
    with pytest.raises(ModelFilesBroken, match=message):
        load(folder)
    kvcap.refused("plan", str(folder))


def test_what_is_no_model_of_ours_is_refused(folder):
    update("config.json", model_type="sonnet")(folder)
    with pytest.raises(UnsupportedModel, match=r"sonnet.*supported: .*llama"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(OSError, match=r"holds no config\.json"):
        load(folder)


@given(st.data())
def test_damaged_files_are_named(saved, tmp_path_factory, data):
    """Bytes of the header at random: the count of a whole file, or an error of ours."""
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copy(saved / "config.json", folder)
    whole = bytearray((saved / SINGLE).read_bytes())
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    (folder / SINGLE).write_bytes(whole[:length])
    try:
        config = load_config(str(folder))
        weighed = weigh(config, torch.float32, read_headers(str(folder)))
        model = load_model(str(folder), config, torch.float32)  # 4.57 needs the metadata, too
    except KvcapError:
        return
    assert weighed.nbytes == held(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda x: x.pop(NORM), f"lack {NORM}"), (lambda x: x.update({NORM: torch.ones(3)}), NORM)],
)
def test_loading_fills_nothing_at_random(change, message, folder):
    """Where headers could not be seen before, as on a hub out of reach."""
    tensors(change)(folder)
    with pytest.raises(ModelFilesBroken, match=message):
        load_model(str(folder), load_config(str(folder)), torch.float32)


@pytest.mark.skipif(os.name != "posix", reason="needs pipes and devices")
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", SINGLE,
     INDEX, "chat_template.jinja", "special_tokens_map.json", "adapter_config.json",
     "additional_chat_templates/x.jinja"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_what_is_no_file_is_refused_and_not_waited_for(name, kind, folder, kvcap):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    with pytest.raises(ModelFilesBroken, match=f"{Path(name).name} is {kind}, not a file"):
        load(folder)
    assert kind in kvcap.refused("plan", str(folder))


@pytest.mark.parametrize(
    ("name", "size"),
    [("config.json", 1 << 40), ("tokenizer.json", 1 << 40), ("chat_template.jinja", 1 << 30)],
)
def test_texts_too_large_to_be_read_are_refused(name, size, folder):
    """Files with holes, as long as they say and empty."""
    os.truncate(folder / name, size)
    with pytest.raises(ModelFilesBroken, match=rf"{name} has {size:,} bytes, more than"):
        load(folder)


def test_links_to_files_and_to_nothing_are_as_before(folder, tmp_path):
    """A hub's cache is made of links."""
    shutil.move(folder / "config.json", tmp_path / "blob")
    (folder / "config.json").symlink_to(tmp_path / "blob")
    (folder / "left").symlink_to(tmp_path / "nowhere")
    assert load(folder).plan


# What would be executed -------------------------------------------------------------------------


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.write_text, (self.mark, "executed")


def code(mark: Path) -> str:
    return f"open({str(mark)!r}, 'w')\nclass Evil: pass\n"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-1.bin", "model.pt", "x.ckpt"])
@pytest.mark.parametrize("beside", ["nothing", "a whole file", "a broken file"])
def test_pickles_are_never_opened(name, beside, folder, tmp_path):
    mark = tmp_path / "mark"
    (folder / name).write_bytes(pickle.dumps(Payload(mark)))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    if beside == "a whole file":
        assert load(folder).plan.weights_from == "safetensors headers"
    else:
        if beside == "nothing":
            (folder / SINGLE).unlink()
        else:
            cut(SINGLE, 1000)(folder)
        with pytest.raises(ModelFilesBroken, match="pickles" if beside == "nothing" else "cut"):
            load(folder)
    assert not mark.exists()
    pickle.loads((folder / name).read_bytes())
    assert mark.exists()  # it would have been


def test_a_models_own_code_is_never_run(folder, tmp_path):
    """A type that transformers knows runs by transformers' code; another is refused."""
    mark = tmp_path / "mark"
    (folder / "evil.py").write_text(code(mark))
    own = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    update("config.json", auto_map=own)(folder)
    assert type(load(folder).model).__module__.startswith("transformers.")
    update("config.json", model_type="sonnet")(folder)
    with pytest.raises(UnsupportedModel, match="code that comes with a model is not run"):
        load(folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("custom_generate/generate.py", "remove that folder"),
        ("evil.py", "tokenizer .* custom code"),
    ],
)
def test_own_code_to_generate_or_of_a_tokenizer_is_refused(name, says, folder, tmp_path):
    mark = tmp_path / "mark"
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(code(mark) + "generate = print\n")
    if name == "evil.py":
        own = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil"] * 2}}
        update("tokenizer_config.json", **own)(folder)
    with pytest.raises(ModelFilesBroken, match=says):
        load(folder)
    assert not mark.exists()


@pytest.mark.parametrize("attention", ["stranger/kernels", "flash_attention_2", {"": "x/y"}])
def test_a_config_does_not_choose_kernels(attention, folder):
    update("config.json", attn_implementation=attention, _attn_implementation=attention)(folder)
    assert load(folder).model.config._attn_implementation == "kvcap"


TOKENIZERS: dict[str, Break] = {
    "missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "no JSON": write("tokenizer.json", "{"),
    "a list": write("tokenizer.json", "[]"),
    "cut": cut("tokenizer.json", 5000),
    "no text": write("tokenizer.json", b"\xff\xfe\0"),
    "no words": update("tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": []}),
    "settings are no JSON": write("tokenizer_config.json", "{"),
    "settings are a list": write("tokenizer_config.json", "[]"),
    "of no use for streams": update("tokenizer_config.json", tokenizer_class="ByT5Tokenizer"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_broken_tokenizers_are_refused_before_weights_are_loaded(name, folder, not_loaded):
    TOKENIZERS[name](folder)
    with pytest.raises(ModelFilesBroken, match=r"the tokenizer of|has no tokenizer"):
        load(folder)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '"x"', "[" * 100_000, '{"max_new_tokens": "many"}', '{"temperature": "hot"}',
     '{"eos_token_id": "x"}', '{"eos_token_id": [[1]]}'],
)  # fmt: skip
def test_settings_of_generation_are_checked(text, folder):
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelFilesBroken, match=r"generation_config\.json of"):
        load(folder)
    (folder / "generation_config.json").unlink()
    load(folder)


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_model_is_loaded_without_the_adapter_beside_it(installed, weights, folder, monkeypatch):
    """Also where peft is installed: with it transformers would read the adapter, or its base."""
    expected = load(folder).model.get_input_embeddings().weight
    for name in files.PEFT:
        home = importlib.import_module(f"transformers.{name}")
        monkeypatch.setattr(home, "is_peft_available", lambda: installed, raising=False)
    config = {"peft_type": "LORA", "base_model_name_or_path": "nobody/nothing"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"a": torch.ones(1)}, folder / "adapter_model.safetensors")
    with pytest.warns(UserWarning, match="the adapter beside the model in .* is not applied"):
        loaded = Runtime.from_pretrained(folder, budget_tokens=16, device="cpu", weights=weights)
    if weights is None:
        assert torch.equal(loaded.model.get_input_embeddings().weight, expected)
    assert "".join(loaded.session(seed=0).complete("Hello"))


@pytest.mark.parametrize("config", [False, True])
@pytest.mark.parametrize(("adapter", "of"), [
    ('{"base_model_name_or_path": "some/base"}', "of 'some/base' "), ("{", ""), ("[]", ""),
])  # fmt: skip
def test_an_adapter_alone_is_refused_by_name(adapter, of, config, folder):
    (folder / "adapter_config.json").write_text(adapter)
    (folder / SINGLE).rename(folder / "adapter_model.safetensors")
    if not config:
        (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=f"holds an adapter {of}and no model; merge it once"):
        load(folder)


def test_a_missing_package_is_named(folder, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise ImportError("4-bit weights need accelerate")

    monkeypatch.setattr("kvcap.runtime.models.files.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(UnsupportedModel, match="a package that is not installed: 4-bit weights"):
        load(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "{% for x in ().__class__.__bases__ %}{{ x }}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) }}",
        "{% if",
        "{{ raise_exception('no system prompts') }}",
        "{{ 'x' * 10 ** 10 }}",
    ],
)
def test_templates_that_fail_or_reach_out_are_refused(template, folder, tmp_path, kvcap):
    mark = tmp_path / "mark"
    (folder / "chat_template.jinja").write_text(template.replace("MARK", str(mark)))
    with pytest.raises(ChatTemplateMissing, match="chat template fails"):
        "".join(load(folder).session().send("Hello!"))
    assert not mark.exists()
    kvcap.refused("generate", str(folder), "Hello!")
