"""Found decoders: which are taken, which would be silently wrong, and the graphs made for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import standard_decoder
import torch
from onnx import TensorProto, helper
from tools import found_decoder, made, operations  # noqa: F401
from toy_engine import numpy_scores
from transformers import AutoTokenizer, GenerationConfig

from kvcap.cli import run
from kvcap.export.adopted import check as parity
from kvcap.export.adopted.adopt import adopt
from kvcap.export.adopted.evictor import AdoptedEvictionGraph, example, trace
from kvcap.export.adopted.signature import read_ports
from kvcap.export.decoder.companions import check_tokenizer
from kvcap.export.files import file_entry
from kvcap.export.verify import verify_decoder
from kvcap.policies import load_policy
from kvcap.runtime.backends.numpy_sampler import Generation, NumpySampler
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.backends.onnxruntime.manifest import read
from kvcap.runtime.backends.onnxruntime.tokenizer import Tokenizer
from kvcap.runtime.backends.pytorch import sampler as sampling
from kvcap.runtime.errors import (
    ChatTemplateMissing,
    GraphBroken,
    ManifestError,
    ModelFilesBroken,
    ModelNotFound,
    NotExportable,
    ShapeError,
    ToleranceError,
    UnsupportedModel,
)
from kvcap.runtime.session.messages import render
from kvcap.runtime.types import MANIFEST


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    """A random model's decoder as others export it, and two that go by where slots lie."""

    def make(folder: Path) -> None:
        shutil.copytree(found_decoder(tmp_path_factory), folder)
        (folder / "decoder").rename(folder / "none")
        for fault in ("own positions", "window of slots"):
            standard_decoder.save(folder / "model", folder / fault, fault)

    return made(tmp_path_factory, "decoders", make)


@pytest.fixture
def decoder(decoders, tmp_path):
    shutil.copytree(decoders / "none", tmp_path / "decoder")
    return tmp_path / "decoder"


@pytest.mark.slow(ci=0)
@pytest.mark.parametrize(
    ("fault", "says"),
    [("own positions", "takes no notice of position_ids"), ("window of slots", "where slots lie")],
)
def test_a_decoder_that_goes_by_where_slots_lie_is_refused(decoders, fault, says):
    before = sorted(path.name for path in (decoders / fault).iterdir())
    with pytest.raises(UnsupportedModel, match=says):
        adopt(decoders / fault)
    assert sorted(path.name for path in (decoders / fault).iterdir()) == before


@pytest.mark.slow
def test_a_decoder_is_made_ready_elsewhere(decoder, tmp_path):
    said = adopt(decoder, tmp_path / "out", [load_policy("keydiff", recent=0.25, sink_tokens=3)])
    assert json.loads((tmp_path / "out" / "kvcap.json").read_text()) == said
    assert [entry["positions"] for entry in said["evictors"]] == ["compact", "true"]
    assert said["evictors"][0]["policy"]["pins"] == {"sinks": 3, "recents": 0, "share": 0.25}
    for entry in said["files"]:
        assert (tmp_path / "out" / entry["file"]).stat().st_size == entry["bytes"]
    assert not (decoder / "kvcap.json").exists()
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_frequencies_of_another_model_leave_positions_true(decoder):
    """The decoder turns keys otherwise than its config says, so keys cannot be moved."""
    config = json.loads((decoder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 30.0}
    (decoder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="not exact"):
        adopt(decoder, None, [load_policy("keydiff")], positions="compact")
    said = adopt(decoder, None, [load_policy("keydiff")])
    assert said["positions"] == "true"
    assert [entry["positions"] for entry in said["evictors"]] == ["true"]


def changed(decoder: Path, **changes: Any) -> None:
    config = json.loads((decoder / "config.json").read_text())
    (decoder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_config_of_another_model_is_refused(decoder):
    changed(decoder, num_hidden_layers=3)
    with pytest.raises(UnsupportedModel, match="not of one model"):
        adopt(decoder)
    changed(decoder, num_hidden_layers=2, model_type="gpt2")
    with pytest.raises(UnsupportedModel, match="gpt2"):
        adopt(decoder)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "full", "adakv", "pyramidkv", "calidrop"])
def test_policies_that_need_more_are_refused(name):
    with pytest.raises(NotExportable, match="use lagkv, cur, keydiff, knorm, "):
        AdoptedEvictionGraph(load_policy(name), 2, 2, 16)


def test_where_no_one_decoder_is(decoder, tmp_path):
    with pytest.raises(ModelNotFound, match=r"no \.onnx file"):
        adopt(tmp_path)
    (decoder / "model.onnx").rename(decoder / "a.onnx")
    shutil.copy(decoder / "a.onnx", decoder / "b.onnx")
    with pytest.raises(ModelNotFound, match=r"a\.onnx, b\.onnx"):
        adopt(decoder)
    (decoder / "b.onnx").write_bytes(b"no graph")
    with pytest.raises(GraphBroken, match=r"b\.onnx"):
        adopt(decoder / "b.onnx")


IDS = ("input_ids", "attention_mask", "position_ids")


def ports(tmp_path: Path, **changes: Any) -> Path:
    """A graph with a decoder's ports, of which some are changed or (None) left out."""
    number, length = TensorProto.FLOAT, ["batch", 2, "past", 8]
    names = [f"{i}.{kind}" for i in range(2) for kind in ("key", "value")]
    inputs: dict[str, Any] = {name: (TensorProto.INT64, ["batch", "T"]) for name in IDS}
    inputs |= {f"past_key_values.{name}": (number, length) for name in names}
    inputs |= changes
    inputs = {name: kind for name, kind in inputs.items() if kind is not None}
    nodes = [helper.make_node("Cast", ["input_ids"], ["logits"], to=number)]
    outputs = [helper.make_tensor_value_info("logits", number, None)]
    for name in names:
        if f"past_key_values.{name}" in inputs:
            source = f"past_key_values.{name}"
            nodes.append(helper.make_node("Identity", [source], [f"present.{name}"]))
            kind = inputs[source][0]
            outputs.append(helper.make_tensor_value_info(f"present.{name}", kind, None))
    given = [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
    graph = helper.make_graph(nodes, "decoder", given, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_the_standard_signature_is_taken(tmp_path):
    found = read_ports(ports(tmp_path))
    assert (found.layers, found.kv_heads, found.head_dim) == (2, 2, 8)
    assert found.cache == np.float32


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"position_ids": None}, "no position_ids"),
        ({"attention_mask": None}, "attention_mask"),
        ({"past_key_values.1.value": None}, r"present\.1\.value|past_key_values"),
        ({"use_cache_branch": (TensorProto.BOOL, [1])}, "use_cache_branch"),
        ({"input_ids": (TensorProto.INT32, ["batch", "T"])}, "not int64; export"),
        ({"past_key_values.1.key": (TensorProto.FLOAT, ["batch", 2, "other", 8])}, "2 lengths"),
        ({"past_key_values.1.key": (TensorProto.FLOAT, ["batch", 4, "past", 8])}, "unequally"),
        ({f"past_key_values.{i}.{k}": (TensorProto.FLOAT, ["batch", 2, 64, 8])
          for i in range(2) for k in ("key", "value")}, "length must be open"),
        ({f"past_key_values.{i}.{k}": (TensorProto.BFLOAT16, ["batch", 2, "past", 8])
          for i in range(2) for k in ("key", "value")}, "float or float16"),
        ({f"past_key_values.{i}.{k}": None for i in range(2) for k in ("key", "value")},
         "signature"),
    ],
)  # fmt: skip
def test_other_signatures_are_refused_by_name(tmp_path, changes, says):
    with pytest.raises(UnsupportedModel, match=says):
        read_ports(ports(tmp_path, **changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "pairs"), [("knorm", 6), ("keydiff-window", 0), ("keydiff-window", 8)]
)
def test_an_evictor_in_float16(policy, pairs, tmp_path):
    """Odd sizes, some numbers of a key that do not turn, and everything that stays."""
    evictor = AdoptedEvictionGraph(load_policy(policy), 3, 1, 17, pairs)
    file = tmp_path / "e.onnx"
    file.write_bytes(trace(evictor, torch.float16).SerializeToString())
    assert file.stat().st_size < 8000
    graph = Graph(file)
    for past, block, stay in ((0, 1, 1), (0, 9, 9), (9, 1, 9), (9, 3, 12), (9, 40, 11)):
        given = example(evictor, torch.float16, past=past, block=block, stay=stay)
        with torch.inference_mode():
            wanted = evictor(*given.values())
        got = graph.session.run(None, {name: given[name].numpy() for name in graph.inputs})
        for want, array in zip(wanted, got, strict=True):
            torch.testing.assert_close(torch.from_numpy(array), want, rtol=2e-3, atol=2e-3)
        kept = got[2]
        assert (np.diff(kept, axis=-1) > 0).all()
        assert kept.shape[-1] == stay


@pytest.mark.slow
def test_slots_that_turn_do_not_drift(tmp_path):
    """A key that stays for 400 evictions is where one rotation would bring it."""
    evictor = AdoptedEvictionGraph(load_policy("streaming_llm", sinks=1), 1, 1, 8, 4)
    file = tmp_path / "e.onnx"
    file.write_bytes(trace(evictor, torch.float32).SerializeToString())
    graph, draws = Graph(file), np.random.default_rng(0)
    angles = np.arange(12)[:, None] * np.array([1.0, 0.5, 0.1, 0.01])
    table = np.stack((np.cos(angles), np.sin(angles)), 1).astype(np.float32)
    keys = np.zeros((1, 1, 0, 8), np.float32)
    base, positions = keys, np.zeros((1, 1, 0), np.int32)
    first = None
    for seen in range(1, 401):
        new = draws.standard_normal((1, 1, 1, 8)).astype(np.float32)
        first = new if first is None else first
        keys = np.concatenate((keys, new), 2)
        counts = {"seen": seen, "stay": min(seen, 6), "recents": 0}
        keys, _, positions, base = graph.session.run(
            None,
            {
                "keys": keys,
                "values": keys,
                "positions": positions,
                "base": base,
                "table": table,
                "spans": np.array([[0, 1]], np.int32),
                **{name: np.array(count, np.int32) for name, count in counts.items()},
            },
        )
    assert positions[0, 0].tolist() == [0, 395, 396, 397, 398, 399]
    np.testing.assert_allclose(keys[0, 0, 0], first[0, 0, 0], atol=1e-6)


@pytest.mark.slow
def test_an_evictor_that_computes_something_else_is_not_written(decoder, monkeypatch):

    def other(evictor: AdoptedEvictionGraph, dtype: torch.dtype) -> Any:
        pairs = evictor.sizes["pairs"] or 0
        return trace(AdoptedEvictionGraph(load_policy("random"), 2, 2, 16, pairs), dtype)

    monkeypatch.setattr("kvcap.export.adopted.adopt.trace", other)
    with pytest.raises(ToleranceError, match="differs by"):
        adopt(decoder, None, [load_policy("knorm")])
    with pytest.raises(ToleranceError, match="differs by"):
        adopt(decoder, decoder.parent / "out", [load_policy("knorm")])
    assert not (decoder.parent / "out").exists()
    assert not (decoder / "kvcap.json").exists()
    assert not list(decoder.glob("*kvcap*"))


# --- checked again


@pytest.fixture(scope="module")
def adopted(decoders, tmp_path_factory):
    """A decoder with the graphs of a policy, in both position modes."""

    def make(folder: Path) -> None:
        adopt(decoders / "none", folder, [load_policy("keydiff", recent=0.2)])

    return made(tmp_path_factory, "adopted", make)


@pytest.fixture
def ready(adopted, tmp_path):
    shutil.copytree(adopted, tmp_path / "ready")
    return tmp_path / "ready"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest, which then says of every file what it is now."""
    said = json.loads((folder / MANIFEST).read_text())
    said["files"] = [{**file_entry(folder / e["file"]), "file": e["file"]} for e in said["files"]]
    change(said)
    (folder / MANIFEST).write_text(json.dumps(said))


@pytest.mark.slow
def test_a_directory_is_checked_again(ready, capsys):
    assert run(["export", "verify", str(ready)]) == 0
    assert capsys.readouterr().out.count("  ok\n") == 2
    assert run(["export", "verify", str(ready), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["ok"]
    files = [f"kvcap-evict.keydiff.{mode}.onnx" for mode in ("compact", "true")]
    assert [row["file"] for row in found["evictors"]] == files


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compact", "true"])
def test_a_fault_in_a_graph_that_evicts_is_found(mode, ready, capsys):
    """It keeps the slots that the policy would give up, in a manifest that admits to the file."""
    file = ready / f"kvcap-evict.keydiff.{mode}.onnx"
    model = onnx.load(file)
    (sign,) = (node for node in model.graph.node if node.op_type == "Neg")
    sign.op_type = "Identity"
    onnx.save(model, file)
    assert run(["export", "verify", str(ready)]) == 2
    assert f"{file.name} in" in capsys.readouterr().err
    rewrite(ready, lambda said: None)
    assert run(["export", "verify", str(ready)]) == 1
    told = capsys.readouterr()
    assert f"{file.name} differs by" in told.err
    assert told.out.count("FAILED in") == 1
    assert told.out.count("  ok\n") == 1


def test_what_is_not_finite_or_of_another_shape_differs():
    nothing = torch.zeros(2)
    assert parity._difference(nothing, nothing) == 0
    for other in (torch.tensor([0, torch.nan]), torch.tensor([0, torch.inf]), torch.zeros(1)):
        assert not parity.CheckedGraph("x", "y", 2, parity._difference(other, nothing), 1.0).ok


@pytest.mark.parametrize(("part", "value", "error"), [
    (("evictors", 0, "policy", "parts"), "keydif", "no evictor known here"),
    (("evictors", 0, "policy", "pins", "share"), 0.5, "other pins of keydiff"),
    (("evictors", 0, "positions"), "true", "default_policy"),
    (("evictors", 1, "inputs", 0, "dtype"), "int32", "manifest's inputs say"),
    (("inv_freq", 1), 0.5, "other inv_freq"),
    (("inv_freq",), 3, "inv_freq"),
])  # fmt: skip
def test_a_manifest_that_says_something_else_of_evictors(part, value, error, ready):

    def change(said: Any) -> None:
        for key in part[:-1]:
            said = said[key]
        said[part[-1]] = value

    rewrite(ready, change)
    with pytest.raises((ManifestError, ShapeError), match=error):
        verify_decoder(ready)


def test_another_decoder_under_the_same_graphs(decoders, ready):
    shutil.copy(decoders / "window of slots" / "model.onnx", ready)
    rewrite(ready, lambda said: None)
    with pytest.raises(UnsupportedModel, match="where slots lie"):
        verify_decoder(ready)


def test_large_files_are_read_whole(ready, monkeypatch):
    """A run looks at their size alone."""
    for module in ("kvcap.export.verify", "kvcap.runtime.backends.onnxruntime.manifest"):
        monkeypatch.setattr(f"{module}.HASHED", 1000)
    data = bytearray((ready / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (ready / "model.onnx").write_bytes(data)
    read(ready)
    with pytest.raises(ModelFilesBroken, match=r"model\.onnx in .* is not the file"):
        verify_decoder(ready)


def test_a_model_is_refused_where_none_is_needed(ready, capsys):
    assert run(["export", "verify", str(ready), "--model", "pocket"]) == 2
    assert "leave --model out" in capsys.readouterr().err


# --- a tokenizer and a sampler without transformers


TEMPLATES = {
    "loops": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ bos_token }}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}{{ m.content }}{% endfor %}{{ tools is none }}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ eos_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    "parts": "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}\n"
    "{% endfor %}",
}
TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " <b>Zwölf</b> & 'zwei' \n"},
    {"role": "assistant", "content": "Ja."},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_written_as_transformers_does(decoders, tmp_path, name):
    theirs = AutoTokenizer.from_pretrained(decoders / "model")
    theirs.chat_template = TEMPLATES[name]
    theirs.save_pretrained(tmp_path)
    mine = Tokenizer(tmp_path)
    assert render(mine, TURNS) == render(theirs, TURNS)
    for special in (True, False):
        text = "Hello! Zwölf <|end|> 42"
        assert (
            mine(text, add_special_tokens=special)["input_ids"]
            == (theirs(text, add_special_tokens=special)["input_ids"])
        )
    check_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system prompts') }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for %}",
    ],
)
def test_templates_that_fail_or_reach_too_far_are_refused(decoders, tmp_path, template):
    shutil.copytree(decoders / "none", tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ChatTemplateMissing):
        render(Tokenizer(tmp_path), TURNS)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {}}'])
def test_a_broken_tokenizer_is_named(decoders, tmp_path, text):
    shutil.copytree(decoders / "none", tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelFilesBroken, match="the tokenizer in"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("files", [True, False])
@pytest.mark.parametrize(
    "templates", [{"default": "d", "tool_use": "t"}, {"default": "d"}, {"rag": "r"}, "d"]
)
def test_named_templates_are_those_that_transformers_reads(decoders, tmp_path, templates, files):
    """In files of a folder, and in a list of tokenizer_config.json; and what only is listed."""
    theirs = AutoTokenizer.from_pretrained(decoders / "model")
    theirs.chat_template = templates
    theirs.save_pretrained(tmp_path, save_jinja_files=files)
    expected = AutoTokenizer.from_pretrained(tmp_path).chat_template
    only = isinstance(expected, dict) and expected.keys() == {"default"}
    assert Tokenizer(tmp_path).chat_template == ("d" if only else expected)
    listed = {"tokenizer.json", "tokenizer_config.json"}
    assert Tokenizer(tmp_path, listed).chat_template == (
        None if files else Tokenizer(tmp_path).chat_template
    )


def test_special_tokens_of_older_files(decoders, tmp_path):
    shutil.copy(decoders / "none" / "tokenizer.json", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|bos|>"}, "eos_token": "<|x|>"})
    )
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "<|end|>",
                "chat_template": [
                    {"name": "tools", "template": "t"},
                    {"name": "default", "template": "d"},
                ],
            }
        )
    )
    found = Tokenizer(tmp_path)
    assert found.special_tokens_map == {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    assert found.chat_template == {"tools": "t", "default": "d"}


SETTINGS = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 1.2, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("sampled", [True, False])
def test_scores_are_those_of_transformers_processors(settings, sampled):
    logits = np.random.default_rng(1).standard_normal((1, 60)).astype(np.float32) * 3
    history = np.array([[3, 4, 4, 59]])
    config = GenerationConfig(do_sample=sampled, **{"top_k": 0, **settings})
    theirs = sampling.Sampler(config, torch.Generator())
    penalised = theirs.repetition(torch.from_numpy(history), torch.from_numpy(logits.copy()))
    wanted = theirs.warpers(None, penalised)[0]
    mine = NumpySampler(Generation(do_sample=sampled, **settings), np.random.default_rng(0))
    got = numpy_scores(mine, logits[0], history[0])
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-6)
    if not sampled:
        token = theirs.next(torch.from_numpy(logits), torch.from_numpy(history))
        assert mine.next(logits, history).tolist() == token.tolist()


def test_draws_follow_the_probabilities_and_the_seed():
    logits = np.log(np.array([[0.5, 0.3, 0.2, 1e-9]], np.float32))
    history = np.zeros((1, 0), np.int64)
    sampler = NumpySampler(Generation(do_sample=True), np.random.default_rng(7))
    drawn = [int(sampler.next(logits, history)[0]) for _ in range(4000)]
    shares = np.bincount(drawn, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2, 0], atol=0.03)
    again = NumpySampler(Generation(do_sample=True), np.random.default_rng(7))
    assert [int(again.next(logits, history)[0]) for _ in range(50)] == drawn[:50]


@pytest.mark.parametrize(
    "change",
    [{"top_p": 2}, {"temperature": -1}, {"top_k": "x"}, {"nonsense": 1}, {"max_new_tokens": 0}],
)
def test_settings_that_cannot_be_are_refused_and_change_nothing(change):
    settings = Generation(temperature=0.5)
    with pytest.raises(ValueError, match=next(iter(change))):
        settings.update(**change)
    assert settings == Generation(temperature=0.5)
