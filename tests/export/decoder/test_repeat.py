"""A decoder of many layers from a trace of a few, and from weights that stay in their files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import onnx
import pytest
import torch
from conftest import small_policy, tiny_model
from families import model_of
from make import argv
from onnx import TensorProto, helper
from tools import operations  # noqa: F401

from kvcap import pocket
from kvcap.cli import run
from kvcap.export.decoder import check as checking
from kvcap.export.decoder import spec
from kvcap.export.decoder import write as writing
from kvcap.export.decoder.depth import enough, first_layers, kinds_of, layers_of, numbered
from kvcap.export.decoder.graph import DecoderGraph
from kvcap.export.decoder.repeat import Numbered, repeat
from kvcap.export.decoder.spec import Source, layout_for, open_model
from kvcap.export.decoder.write import write
from kvcap.policies import load_policy
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import ToleranceError
from kvcap.runtime.models.checkpoint import Checkpoint, empty, empty_model, fill, streaming
from kvcap.runtime.models.files import load_config
from kvcap.runtime.models.rounding import Rounding
from kvcap.runtime.types import MANIFEST

BUDGET, BLOCK, LAYERS = 12, 4, 5


def made(family="llama", policy="keydiff", **changes):
    model = tiny_model(family, num_hidden_layers=LAYERS, **changes)
    eviction = small_policy(policy, model.config)
    return model, layout_for(model.config, CacheSettings(BUDGET, BLOCK, eviction))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a directory of a tied model of five layers, in bfloat16."""
    folder = tmp_path_factory.mktemp("repeat") / "model"
    model, _ = made("qwen2", tie_word_embeddings=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((pocket.path() / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def known():
    """Return what was traced, by config, layout and type; a graph has no weights."""
    return {}


@pytest.fixture
def traced_once(known, monkeypatch):
    """Trace nothing twice, for tests of what comes after, or of one of two exports."""

    def remembered(trace):
        def recall(module):
            layout = module.layout
            model = getattr(module, "model", None)
            sizes = (model.config.to_json_string(), model.dtype) if model else (module.cache,)
            key = (type(module), repr(layout), *sizes)
            if key not in known:
                known[key] = trace(module)
            return type(known[key]).FromString(known[key].SerializeToString())

        return recall

    for name in ("trace", "trace_evictor"):
        monkeypatch.setattr(writing, name, remembered(getattr(writing, name)))


# --- layers that are alike


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("family", "policy"), [
    ("llama", "keydiff"), ("qwen3", "snapkv"), ("qwen2", "h2o"), ("granite", "criticalkv"),
    ("gelu", "keydiff"),
])  # fmt: skip
def test_a_repeated_layer_is_a_traced_one(family, policy, tmp_path, monkeypatch):
    """The whole graph is checked beside PyTorch, and has the nodes of one traced as a whole."""
    repeated = []
    monkeypatch.setattr(
        "kvcap.export.decoder.write.repeat",
        lambda *given: repeated.append(repeat(*given)) or repeated[-1],
    )
    changes = {"hidden_act": "gelu_pytorch_tanh"} if family == "gelu" else {}
    model, layout = made("llama" if changes else family, policy, **changes)
    assert enough(kinds_of(model, layout)) == 3
    manifest, report = write(Source("tiny", model, None), layout, "fp32", tmp_path / "x", True)
    assert repeated == [True]
    assert report.ok
    assert len(model.model.layers) == model.config.num_hidden_layers == LAYERS
    names = [port["name"] for port in manifest["inputs"]]
    graph = onnx.load(str(tmp_path / "x/decoder.onnx"), load_external_data=False).graph
    assert [value.name for value in graph.input] == names
    assert [value.name for value in graph.output] == [port["name"] for port in manifest["outputs"]]
    counts = [name for name in names if name.startswith("keys.")]
    assert counts == [f"keys.{layer}" for layer in range(LAYERS)]
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("GroupQueryAttention") == LAYERS
    assert kinds.count("RotaryEmbedding") == (0 if policy == "keydiff" else 2 * LAYERS)
    assert kinds.count("Cos") == kinds.count("Sin") == 1  # all layers share them
    assert [entry["layers"] for entry in manifest["evictors"]] == [list(range(LAYERS))]


ALTERNATING = {
    "gemma2": "sfsfsf",
    "gemma3_text": "ssfssfss",
    "cohere2": "fsfsfsf",
    "olmo3": "ssfssf",
}
KIND = {"s": "sliding_attention", "f": "full_attention"}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("family", "policy", "kv_dtype"), [
    ("gemma3_text", "keydiff", None), ("gemma2", "snapkv", None), ("cohere2", "h2o", None),
    ("olmo3", "keydiff", "int8"),
])  # fmt: skip
def test_layers_that_alternate_are_repeated_by_their_kind(
    family, policy, kv_dtype, tmp_path, monkeypatch
):
    """All layers are checked beside PyTorch, and the graph has the nodes of one traced whole."""
    order = [KIND[kind] for kind in ALTERNATING[family]]
    model = model_of(family, num_hidden_layers=len(order), layer_types=order)
    layout = layout_for(
        model.config, CacheSettings(BUDGET, BLOCK, small_policy(policy, model.config))
    )
    kinds = kinds_of(model, layout)
    assert [kinds[0] == kind for kind in kinds] == [order[0] == kind for kind in order]
    assert enough(kinds) in (4, 5)
    counts, done = [], []

    def repeated(*given):
        done.append(repeat(*given))
        return done[-1]

    monkeypatch.setattr(writing, "repeat", repeated)
    source = Source("tiny", model, None)
    for name in ("repeated", "whole"):
        manifest, report = write(source, layout, "fp32", tmp_path / name, True, kv_dtype=kv_dtype)
        assert report.ok
        graph = onnx.load(str(tmp_path / name / "decoder.onnx"), load_external_data=False).graph
        assert [value.name for value in graph.input] == [
            port["name"] for port in manifest["inputs"]
        ]
        assert [value.name for value in graph.output] == [
            port["name"] for port in manifest["outputs"]
        ]
        counts.append(Counter(node.op_type for node in graph.node))
        monkeypatch.setattr(writing, "enough", lambda kinds: None)
    assert done == [True]
    assert counts[0] == counts[1]


def test_layers_that_differ_are_of_other_kinds():
    model, layout = made()
    assert kinds_of(model, layout) == [0] * LAYERS
    assert kinds_of(*made(policy="pyramidkv")) == list(range(LAYERS))
    model.model.layers[4].self_attn.scaling *= 2
    assert kinds_of(model, layout) == [0, 0, 0, 0, 1]
    model, layout = made()
    model.model.layers[3].mlp.act_fn = torch.nn.ReLU()
    assert kinds_of(model, layout) == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(("kinds", "count"), [
    ("aaaa", 3), ("baaa", 3), ("aaa", None), ("ababab", 4), ("aabaabaab", 4), ("aaaaabaaaaab", 7),
    ("abcd", None), ("aaab", None), ("abbbb", 3), ("abcabc", 5), ("aabb", None),
])  # fmt: skip
def test_enough_layers_are_traced_to_see_every_kind_and_one_twice(kinds, count):
    assert enough([ord(kind) for kind in kinds]) == count


def test_a_model_has_all_its_layers_again():
    model, layout = made()
    with first_layers(model, layout, 2) as few:
        assert len(few.budgets) == len(model.model.layers) == 2
        assert model.config.num_hidden_layers == 2
    assert len(model.model.layers) == model.config.num_hidden_layers == LAYERS


def chain(second="Relu", third="Relu", skip=False):
    """Three layers: x becomes f(x) + w, the last one is handed to the tail."""
    value, node = helper.make_tensor_value_info, helper.make_node
    names = ["x", *(f"layers.{i}.w" for i in range(3)), *(f"keys.{i}" for i in range(3))]
    nodes = [node("Shape", ["keys.2"], ["n"])]
    for i, kind in enumerate(("Relu", second, third)):
        before = "x" if i == 0 else f"y{i - 1}"
        nodes += [
            node(kind, [before], [f"a{i}"]),
            node("Add", [f"a{i}", f"layers.{i}.w"], [f"y{i}"]),
        ]
        nodes.append(node("Mul", [f"keys.{i}", f"y{i}"], [f"present_keys.{i}"]))
    nodes.append(node("Sub", ["y2", "y1" if skip else "x"], ["out"]))
    floats = [value(name, TensorProto.FLOAT, [2]) for name in names]
    outputs = [f"present_keys.{i}" for i in range(3)] + ["out"]
    ends = [value(name, TensorProto.FLOAT, [2]) for name in outputs]
    return helper.make_model(helper.make_graph(nodes, "chain", floats, ends))


def test_a_chain_of_three_becomes_one_of_six():
    import re

    how = Numbered(re.compile(r"^(?:layers|keys|present_keys)\.(\d+)"))
    model = chain()
    assert repeat(model, how, 3, [0] * 6)
    onnx.checker.check_model(model)
    from onnx.reference import ReferenceEvaluator

    given = {value.name: torch.randn(2).numpy() for value in model.graph.input}
    files = dict(
        zip(
            [v.name for v in model.graph.output],
            ReferenceEvaluator(model).run(None, given),
            strict=True,
        )
    )
    x = torch.from_numpy(given["x"])
    y = x
    for layer in range(6):
        y = y.relu() + torch.from_numpy(given[f"layers.{layer}.w"])
        kept = torch.from_numpy(files[f"present_keys.{layer}"])
        torch.testing.assert_close(kept, y * torch.from_numpy(given[f"keys.{layer}"]))
    torch.testing.assert_close(torch.from_numpy(files["out"]), y - x)
    assert not repeat(chain(third="Neg"), how, 3, [0] * 6)
    assert not repeat(chain(skip=True), how, 3, [0] * 6)  # past the layer before


# --- weights that stay in their files


def test_a_checkpoint_gives_a_loaded_models_weights(checkpoint):
    where = str(checkpoint)
    config = load_config(where)
    model = empty_model(where, config, torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    loaded = spec.load(where, "fp32").model
    weights = Checkpoint.of(where, model, torch.float32, "model.")
    assert set(weights) == {f"model.{name}" for name in loaded.state_dict()}
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(weights[f"model.{name}"], tensor), name
    for (name, mine), theirs in zip(model.named_buffers(), loaded.buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.to_dict() == loaded.generation_config.to_dict()


def test_a_streaming_model_computes_the_same_and_holds_a_layer(checkpoint):
    where, ids = str(checkpoint), torch.arange(3, 9)[None]
    loaded = spec.load(where, "fp32").model
    model = empty_model(where, load_config(where), torch.float32).eval()
    weights = Checkpoint.of(where, model, torch.float32)
    held = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda *_: held.append(sum(not p.is_meta for p in model.model.layers.parameters()))
        )
    loaded.config._attn_implementation = model.config._attn_implementation = "eager"
    with torch.no_grad(), streaming(model, layers_of(model)[1], weights):
        logits = model(ids).logits
        assert torch.equal(logits, loaded(ids).logits)
    assert held == [len(list(model.model.layers[0].parameters()))] * LAYERS
    assert all(parameter.is_meta for parameter in model.parameters())
    filled = fill(model, weights)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    empty(filled)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("fault", ["missing", "shape", "dtype"])
def test_what_a_checkpoint_cannot_give_is_left_to_transformers(checkpoint, fault):
    where = str(checkpoint)
    config = load_config(where)
    if fault == "missing":
        config.attention_bias = True
        config.num_hidden_layers = LAYERS + 1
        config.layer_types = ["full_attention"] * (LAYERS + 1)
    if fault == "shape":
        config.intermediate_size *= 2
    model = empty_model(where, config, torch.float32)
    if fault == "dtype":
        model._keep_in_fp32_modules = ["norm"]
    kind = torch.float16 if fault == "dtype" else torch.float32
    assert Checkpoint.of(where, model, kind) is None


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "positions"), [
    ("int4", "compact"), ("fp16", "compact"), ("fp16", "true"),  # the last has a cache in float16
])  # fmt: skip
def test_an_export_from_the_files_is_that_of_the_loaded_model(
    checkpoint, dtype, positions, tmp_path, monkeypatch, request
):
    """Both are traced, but in float16 over a cache in float32: its parts are in the others."""
    if (dtype, positions) == ("fp16", "compact"):
        request.getfixturevalue("traced_once")
    where, folders = str(checkpoint), [tmp_path / "loaded", tmp_path / "files"]
    layout = layout_for(
        load_config(where), CacheSettings(BUDGET, BLOCK, load_policy("keydiff"), positions)
    )
    assert open_model(where, dtype).checkpoint is None  # it is small
    sources = [spec.load(where, dtype)]
    monkeypatch.setattr(spec, "LOADED", 0)
    sources.append(open_model(where, dtype))
    assert sources[1].checkpoint is not None
    reports = [
        write(source, layout, dtype, folder, True)[1]
        for source, folder in zip(sources, folders, strict=True)
    ]
    reading_weights = "decoder.onnx", "embeddings.onnx"  # which may lie in another order
    for name in sorted(path.name for path in folders[0].iterdir()):
        if name not in (MANIFEST, "decoder.onnx.data", *reading_weights):
            assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    for name in reading_weights:
        graphs = [onnx.load(str(folder / name)).graph for folder in folders]
        tensors = [{t.name: t.raw_data for t in graph.initializer} for graph in graphs]
        assert tensors[0] == tensors[1]
        assert list(map(str, graphs[0].node)) == list(map(str, graphs[1].node))
    assert {row.who for row in reports[1].rows} == {
        f"{who} to {other}{more}"
        for who, other in (("module", "runtime"), ("graph", "module"))
        for more in ("", ", 3 layers")
    }
    assert all(parameter.is_meta for parameter in sources[1].model.parameters())


@pytest.mark.slow
def test_a_model_whose_layers_all_differ_is_not_loaded_either(checkpoint, tmp_path, monkeypatch):
    """Its first layers are checked at length, and all of them over a few tokens."""
    where = str(checkpoint)
    monkeypatch.setattr(spec, "LOADED", 0)
    config = load_config(where)
    eviction = small_policy("pyramidkv", config)
    layout = layout_for(config, CacheSettings(24, 4, eviction))
    assert enough(kinds_of(empty_model(where, config, torch.float32), layout)) is None
    source = open_model(where, "fp32")
    manifest, report = write(source, layout, "fp32", tmp_path / "x", True)
    assert report.ok
    assert {row.who.partition(", ")[2] for row in report.rows} == {"", "3 layers"}
    written = {entry["file"] for entry in manifest["evictors"]}
    assert {path.name for path in (tmp_path / "x").glob("evictor*")} == written
    assert len(written) > 3
    assert all(parameter.is_meta for parameter in source.model.parameters())


def test_a_matrix_with_fewer_rows_than_the_models_is_found():
    """A matrix is compared a part at a time, and the model's may go on behind the last part."""
    whole = torch.randn(6, 4)

    class Short:
        rounding = Rounding(4)

        def read(self):
            return whole[:4]

    with pytest.raises(ToleranceError, match="rounded by"):
        checking._Rounded({"w": whole}, {"w": Short()})["w"]


@pytest.mark.slow
def test_a_wrong_weight_is_found_though_the_graph_is_right(
    checkpoint, tmp_path, monkeypatch, traced_once
):
    """A matrix of another layer, rounded as it should be."""
    where = str(checkpoint)
    monkeypatch.setattr(spec, "LOADED", 0)
    layout = layout_for(load_config(where), CacheSettings(BUDGET, BLOCK, load_policy("keydiff")))
    source = open_model(where, "int4")
    files = dict(source.checkpoint.files)
    wrong = Checkpoint(files, torch.float32)
    one, other = (f"model.model.layers.{i}.mlp.up_proj.weight" for i in (4, 1))

    class Swapped(Checkpoint):
        def __getitem__(self, name):
            return super().__getitem__(other if name == one and not self.right else name)

    wrong = Swapped(files, torch.float32)
    wrong.right = False

    def check(*given, streaming=writing.check_streaming):
        wrong.right = True
        return streaming(*given)

    monkeypatch.setattr(writing, "check_streaming", check)
    with pytest.raises(ToleranceError, match=r"layers\.4\.mlp\.up_proj.*rounded by"):
        write(replace(source, checkpoint=wrong), layout, "int4", tmp_path / "x", True)
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_was_asked(checkpoint, tmp_path, capsys, kvcap, traced_once):
    out = tmp_path / "x"
    given = argv("export decoder {} -o {} --policy keydiff --dtype int4", checkpoint, out)
    given += argv("--budget-tokens 12 --block-size 4")
    assert kvcap.document(*given, *argv("--quick"))["dtype"] == "int4"
    assert json.loads((out / MANIFEST).read_text())["symmetric"] is False
    assert run(["export", "verify", str(out), "--quick"]) == 0
    capsys.readouterr()
    assert "positions compact instead of true" in kvcap.refused(*given, *argv("--positions true"))


def test_names_are_numbered_by_their_layer():
    model, layout = made()
    how = numbered(DecoderGraph(model, layout).model, "model.")
    assert how.of("present_keys.3") == 3
    assert how.at("model.model.layers.1.mlp.up_proj.weight", 7) == (
        "model.model.layers.7.mlp.up_proj.weight"
    )
    assert how.of("v12") is how.of("model.lm_head.weight") is how.of("input_ids") is None
