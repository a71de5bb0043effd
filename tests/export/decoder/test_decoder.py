"""A whole decoder as one graph: the same logits, kept tokens and text as PyTorch, or no file."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import FAMILIES, in_turn, small_policy, tiny_config, tiny_model
from exported import BLOCK, BUDGET, STEPS, beside_the_runtime, decoder, graph_of
from make import argv
from tools import operations  # noqa: F401
from transformers import AutoConfig

from kvcap import pocket
from kvcap.cli import run
from kvcap.export.decoder import check as checking
from kvcap.export.decoder.check import check, facts_of, opened
from kvcap.export.decoder.fuse import fuse
from kvcap.export.decoder.manifest import _turns, settings_of
from kvcap.export.decoder.spec import Source, layout_for
from kvcap.export.decoder.write import check_out, trace, write
from kvcap.export.files import file_entry
from kvcap.export.verify import verify_decoder
from kvcap.policies import PolicyError, load_policy, policies
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.backends.onnxruntime.manifest import read
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import (
    ExportExists,
    GraphBroken,
    ManifestError,
    ModelFilesBroken,
    ModelNotFound,
    NotExportable,
    PlanInfeasible,
    ShapeError,
    ToleranceError,
    UnsupportedModel,
)
from kvcap.runtime.types import MANIFEST

EVICTIONS = {name: load_policy(name) for name in policies() if name != "full"}
RAGGED = {name for name, e in EVICTIONS.items() if e.head_budget is not None or e.layers_move}
CORRECTED = {name for name, e in EVICTIONS.items() if e.corrector is not None} - RAGGED
EXPORTED = sorted(EVICTIONS.keys() - RAGGED - CORRECTED)


# --- the module that is traced is the runtime, whatever is asked for


@pytest.mark.slow(keep=16)
@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_computes_what_the_runtime_does(family, positions):
    beside_the_runtime(decoder(family, positions=positions))


@pytest.mark.slow(keep=19)
@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("policy", EXPORTED)
def test_every_policy_keeps_what_the_runtime_keeps(policy, positions):
    beside_the_runtime(decoder(policy=policy, positions=positions))


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(("policy", "positions", "evict_every"), in_turn(
    ["keydiff", "pyramidkv", "h2o", "tova", "criticalkv"],
    [("compact", 3), ("true", 8), ("compact", 8), ("true", 3)], 2,
))  # fmt: skip
def test_several_tokens_are_evicted_at_once(policy, positions, evict_every):
    """In spare slots: a prompt that follows may find less than a block free."""
    beside_the_runtime(decoder(policy=policy, positions=positions), STEPS, evict_every=evict_every)


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_compact_positions_with_every_rope(rope):
    import transformers

    scaling = {
        "rope_type": rope,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    if rope == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope == "linear":
        del scaling["original_max_position_embeddings"]
    newer = int(transformers.__version__.split(".")[0]) >= 5
    beside_the_runtime(decoder(**{"rope_parameters" if newer else "rope_scaling": scaling}))


@pytest.mark.parametrize(("policy", "options"), [
    ("snapkv", {"window": 30, "kernel": 3, "pool": "avg"}),  # beyond the budget: the cap wins
    ("snapkv", {"window": 2, "kernel": 15}),  # most scores are equal
    ("criticalkv", {"window": 2, "kernel": 15}),
    ("keydiff", {"sink_tokens": 3, "recent_tokens": 5}),
    ("keydiff", {"anchor": "median", "metric": "euclidean"}),
])  # fmt: skip
def test_windows_and_pins_of_any_size(policy, options):
    beside_the_runtime(decoder(policy=load_policy(policy, **options)))


def test_pinned_spans_stay():
    compared = beside_the_runtime(decoder(), pins=((2, 6), (11, 12)), evict_every=2)
    for rows in compared.positions(0):
        for head in rows:
            assert {2, 3, 4, 5, 11} <= set(head.tolist())


# --- files


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Return the folder of a checkpoint and of its export by the command."""
    folder = tmp_path_factory.mktemp("decoder")
    model = tiny_model("qwen2", vocab_size=2560, eos_token_id=[2, 5])
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    model.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(pocket.path() / name, folder / "model")
    code = run(
        argv(
            "export decoder {} -o {} --policy keydiff --budget-tokens 20 --block-size 8",
            folder / "model",
            folder / "made",
        )
    )
    assert code == 0
    return folder


@pytest.fixture
def copied(shelf, tmp_path):
    """Return an export that a test may break."""
    return Path(shutil.copytree(shelf / "made", tmp_path / "made"))


def facts(folder: Path) -> dict:
    return json.loads((folder / MANIFEST).read_text())


def by_the_manifest(folder: Path, runs: list[list[int]], answer: int) -> list[int]:
    """Run the runner of docs/decoder-format.md, which knows nothing but the manifest."""
    page = (Path(__file__).parents[3] / "docs" / "decoder-format.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    known: dict = {}
    exec(code.replace('"pocket-onnx"', repr(str(folder))).partition("\nids, answer")[0], known)
    tokens, pending = [], [list(block) for block in runs]
    while len(tokens) < answer:
        token = known["run"](pending.pop(0) if pending else [tokens[-1]])
        if not pending:
            tokens.append(token)
    return tokens


def blocks_of(sample: dict) -> list[list[int]]:
    ids = iter(sample["prompt"])
    return [[next(ids) for _ in range(length)] for length in sample["runs"]]


@pytest.mark.slow
def test_a_runner_that_knows_only_the_manifest_gives_the_same_text(shelf):
    sample = facts(shelf / "made")["sample"]
    assert sum(sample["runs"]) == len(sample["prompt"]) > BUDGET + BLOCK
    text = by_the_manifest(shelf / "made", blocks_of(sample), len(sample["greedy"]))
    assert text == sample["greedy"]


@pytest.mark.slow
def test_the_runner_in_the_documentation_runs(shelf, capsys):
    page = (Path(__file__).parents[3] / "docs" / "decoder-format.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code.replace('"pocket-onnx"', repr(str(shelf / "made"))), {})
    assert capsys.readouterr().out == "True\n"
    for name in facts(shelf / "made"):
        assert f"`{name}`" in page, f"docs/decoder-format.md does not say what {name} is"


def test_the_manifest_says_what_a_runner_needs(shelf):
    folder = shelf / "made"
    manifest = facts(folder)
    session = library("onnxruntime").InferenceSession(
        str(folder / "decoder.onnx"), providers=["CPUExecutionProvider"]
    )
    types = {"float32": "float", "int32": "int32", "int64": "int64"}
    for kind, real in (("inputs", session.get_inputs()), ("outputs", session.get_outputs())):
        stated = [
            (p["name"], f"tensor({types[p['dtype']]})", [a["size"] for a in p["axes"]])
            for p in manifest[kind]
        ]
        assert stated == [(p.name, p.type, list(p.shape)) for p in real]
    held = sum(np.zeros(s["full"], s["dtype"]).nbytes for s in manifest["state"])
    assert manifest["state_bytes"] == held == 2 * 2 * (BUDGET + BLOCK) * (2 * 16 * 4 + 4)
    listed = {entry["file"]: entry["bytes"] for entry in manifest["files"]}
    assert listed == {p.name: p.stat().st_size for p in folder.iterdir() if p.name != MANIFEST}
    assert manifest["model"]["weights_bytes"] == listed["decoder.onnx.data"]
    assert manifest["generation"]["eos_token_id"] == [2, 5]
    assert manifest["generation"]["temperature"] == 0.5
    assert manifest["tokenizer"]["chat_template"] == "chat_template.jinja"
    assert manifest["opset"] == 18
    assert manifest["policy"]["pins"] == {"sinks": 2, "recents": [0, 0]}
    assert manifest["verified"]["ok"]
    assert read(folder)


def test_nothing_of_this_machine_is_in_the_files(shelf):
    for file in ("decoder.onnx", MANIFEST, "config.json"):
        text = (shelf / "made" / file).read_bytes()
        assert b"site-packages" not in text
        assert b"kvcap_layer" not in text
        assert str(Path(__file__).parents[3]).encode() not in text
    assert not list(shelf.glob(".kvcap-*"))


def test_verify_knows_a_decoders_folder(shelf, kvcap):
    (report,) = kvcap.document("export", "verify", str(shelf / "made"), "--quick")
    assert report["ok"]
    assert report["agreed"] == checking.ANSWER
    assert {row["who"] for row in report["runs"]} == {"module to runtime", "graph to module"}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "positions", "dtype"), [
    ("pyramidkv", "compact", "fp32"),  # layers of unequal budgets, a window of queries
    ("criticalkv", "true", "fp16"),  # state of slots, weights of the output projection
    ("keydiff", "compact", "fp16"),  # keys that are turned in place, in float32
    ("h2o", "compact", "int8"),
    ("criticalkv", "compact", "int4"),
])  # fmt: skip
def test_graphs_of_policies_and_types(policy, positions, dtype, tmp_path):
    layers = 2 if policy == "pyramidkv" else 1
    sizes = {"hidden_size": 256, "num_hidden_layers": layers, "vocab_size": 512}
    sizes = {} if dtype == "fp32" else sizes
    made = decoder(policy=policy, positions=positions, **sizes)
    model = made.model.half() if dtype == "fp16" else made.model
    manifest, report = write(Source("tiny", model, None), made.layout, dtype, tmp_path / "x", True)
    assert report.ok
    assert not report.ties
    slots = {s["layer"]: s["full"][2] for s in manifest["state"] if s["name"] == "keys"}
    assert list(slots.values()) == [budget + BLOCK for budget in manifest["budgets"]]
    assert len(manifest["evictors"]) == len(set(manifest["budgets"]))
    types = {s["dtype"] for s in manifest["state"] if s["name"] == "keys"}
    assert types == {"float16" if dtype == "fp16" and positions == "true" else "float32"}
    weights = {x.name: x for x in onnx.load(str(tmp_path / "x/decoder.onnx")).graph.initializer}
    numbers = sum(p.numel() for p in model.parameters())
    size = manifest["model"]["weights_bytes"] / numbers
    assert size < {"fp32": 4.3, "fp16": 2.1, "int8": 1.2, "int4": 0.85}[dtype]  # with scales, zeros
    assert weights


# --- what verification catches


@pytest.fixture
def right(shelf):
    """Return a right graph, and a maker of the module that it was traced from."""
    return shelf / "made", lambda **changes: decoder("qwen2", vocab_size=2560, **changes)


@pytest.mark.parametrize("fault", [None, "policy", "positions", "weights", "turns"])
def test_another_graph_than_the_modules_is_found(right, fault, monkeypatch):
    folder, make = right
    changes = {"policy": {"policy": "knorm"}, "positions": {"positions": "true"}}
    made = make(**changes.get(fault, {}))
    if fault == "weights":
        made.model.model.layers[0].mlp.down_proj.weight.data[0] *= 1.5
    if fault == "turns":  # the runner's, not the graphs'
        wrong = [0.5] * 8
        monkeypatch.setattr(
            "kvcap.export.decoder.manifest._turns",
            lambda layout: {**_turns(layout), "inv_freq": wrong},
        )
    if fault is None:
        report = check(folder, made, "fp32")
        assert report.ok
        assert report.agreed == checking.ANSWER
        assert {row.kept for row in report.rows} == {1.0}
        return
    # With true positions a graph has one input more.
    with pytest.raises((ToleranceError, ShapeError), match=r"differs|keeps|inputs"):
        check(folder, made, "fp32").require()


def test_a_module_that_is_not_the_runtime_is_found(right, monkeypatch):
    """The newest tokens are never kept, in the module alone."""
    folder, make = right
    monkeypatch.setattr(
        "kvcap.export.decoder.evictor.evicted",
        lambda worth, positions, stays: torch.arange(int(stays), worth.shape[-1]).expand(
            *worth.shape[:2], -1
        ),
    )
    report = check(folder, make(), "fp32")
    assert not next(row for row in report.rows if row.who == "module to runtime" and not row.ok).ok
    with pytest.raises(ToleranceError):
        report.require()


@pytest.mark.parametrize("budget", [BUDGET, checking.WINDOWS, checking.WINDOWS + 100])
def test_blocks_that_are_checked_overflow_every_budget(budget):
    blocks = list(checking._blocks(decoder(budget=budget), quick=False, brief=False))
    assert sum(block.shape[1] for block in blocks[:-1]) > budget + blocks[0].shape[1]


def test_a_large_model_is_checked_over_two_blocks_whatever_its_budget():
    large = decoder(budget=2 * checking.WINDOWS)
    assert [block.shape[1] for block in checking._blocks(large, quick=False, brief=True)][1:] == [1]


def test_logits_are_compared_by_their_spread_not_by_the_worst_of_thousands():
    wanted = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)) + 3
    chance = wanted.clone()
    chance[1, 7] += 0.5 * wanted.max()
    allowed = checking.INTEGERS.values
    assert checking._distance(chance, wanted) < allowed / 3
    assert checking._distance(wanted + 5, wanted) < 1e-6
    assert checking._distance(wanted.roll(1, -1), wanted) > 1
    assert checking._distance(wanted * 0 + wanted.mean(-1, keepdim=True), wanted) > allowed * 4
    assert checking._distance(chance * torch.nan, wanted) == torch.inf


def test_equal_scores_are_ties_and_unequal_are_not():
    worth = torch.tensor([[[5.0, 1, 1, 4, 3, 2, 7, 6]] * 2])
    chosen = checking.Decided(worth, torch.arange(8, dtype=torch.int32).expand(1, 2, -1))
    mine, theirs = torch.tensor([[[0, 1, 3]] * 2]), torch.tensor([[[0, 2, 3]] * 2])
    assert checking._same(mine, theirs, chosen, 1e-6) == (1.0, True)
    theirs = torch.tensor([[[0, 4, 3]] * 2])
    share, tied = checking._same(mine, theirs, chosen, 1e-6)
    assert share == pytest.approx(2 / 3)
    assert not tied
    assert checking._same(mine, theirs, None, 1e-6) == (0.0, False)  # nothing went


def test_nothing_is_written_where_checking_fails_and_what_was_there_stays(
    right, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    out.mkdir()
    (out / MANIFEST).write_text("{}")
    monkeypatch.setitem(checking.TOLERANCES, "fp32", checking.Tolerance(-1.0, 0.0, 1.0, 0.0))

    def traced(export, *_):
        export.evictors = facts(right[0])["evictors"]
        return "its graph", []

    monkeypatch.setattr("kvcap.export.decoder.write._Export._traced", traced)

    def saved(model, made, weights, scales, file, *_):
        for name in ("decoder.onnx", "decoder.onnx.data", "evictor.onnx"):
            shutil.copy(right[0] / name, file.parent)
        return 1

    monkeypatch.setattr("kvcap.export.decoder.write.save", saved)
    made = right[1]()
    with pytest.raises(ToleranceError):
        write(Source("tiny", made.model, None), made.layout, "fp32", out, True, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in out.iterdir()] == [MANIFEST]


def test_an_export_of_something_else_is_not_replaced_unasked(right, tmp_path):
    made = right[1]()
    out = tmp_path / "out"
    out.mkdir()
    (out / MANIFEST).write_text(json.dumps(settings_of("tiny", made.layout, "fp32")))
    check_out(out, settings_of("tiny", made.layout, "fp32"))  # the same again
    others = {
        "dtype fp32 instead of fp16": settings_of("tiny", made.layout, "fp16"),
        "name tiny instead of large": settings_of("large", made.layout, "fp32"),
        f"block_size {made.layout.block_size} instead of 1": settings_of(
            "tiny", replace(made.layout, block_size=1), "fp32"
        ),
    }
    for says, other in others.items():
        with pytest.raises(ExportExists, match=f"{says}.*--force.* -o"):
            check_out(out, other)
    check_out(out, None)  # --force
    with pytest.raises(ExportExists, match="--force"):
        write(Source("large", made.model, None), made.layout, "fp32", out, True)
    (out / MANIFEST).write_text("no JSON")
    with pytest.raises(ExportExists, match="no export that can be read"):
        check_out(out, settings_of("tiny", made.layout, "fp32"))


# --- refused by name


def refused_layouts():
    """Yield a config, settings, and the error that they end with."""
    plain = tiny_config("llama")
    for names, why in ((RAGGED, "fixed sizes"), (CORRECTED, "evicted tokens"), ({"full"}, "never")):
        for name in sorted(names):
            policy = small_policy(name, plain)
            yield pytest.param(plain, {"policy": policy}, NotExportable, why, id=name)
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    rope = "rope_parameters" if hasattr(plain, "rope_parameters") else "rope_scaling"
    dynamic = tiny_config("llama", **{rope: scaling})
    yield dynamic, {"positions": "true"}, NotExportable, "dynamic"
    yield AutoConfig.for_model("gpt2"), {}, UnsupportedModel, "gpt2"
    yield plain, {"budget_tokens": 3, "sink_tokens": 4}, PolicyError, "at least 4"
    yield plain, {"block_size": 0, "sink_tokens": 4}, PlanInfeasible, "block_size=0"


@pytest.mark.parametrize(("config", "settings", "error", "why"), [*refused_layouts()])
def test_what_has_no_graph(config, settings, error, why):
    sizes = {"budget_tokens": BUDGET, "block_size": BLOCK, "policy": "keydiff"}
    with pytest.raises(error, match=why):
        layout_for(config, CacheSettings(**{**sizes, **settings}))


@pytest.mark.parametrize(("arguments", "code", "says"), [
    (["pocket", "--dtype", "int3"], 2, "fp32, fp16, int8, int4"),
    (["pocket", "--policy", "adakv"], 2, "unequal numbers of slots"),
    (["nothing-there"], 2, "nothing-there"),
    (["pocket", "--budget-tokens", "0"], 2, "--budget-tokens"),
    (["pocket", "-o", "{here}"], 2, "something else"),
])  # fmt: skip
def test_wrong_input_ends_before_weights_are_read(arguments, code, says, tmp_path, capsys):
    here = tmp_path / "here"
    here.mkdir()
    (here / "letter.txt").write_text("dear")
    arguments = [x.replace("{here}", str(here)) for x in arguments]
    if "-o" not in arguments:
        arguments += ["-o", str(tmp_path / "out")]
    assert run(["export", "decoder", *arguments]) == code
    assert says in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["here"]
    assert (here / "letter.txt").read_text() == "dear"


def test_another_model_than_that_of_the_export_is_refused(copied):
    with pytest.raises(ManifestError, match="has family llama, and this export was made from"):
        verify_decoder(copied, "pocket")


@pytest.mark.parametrize(("change", "error"), [
    ({"policy": {"parts": "nothing", "parameters": {}}}, ManifestError),
    ({"dtype": "int3"}, ManifestError),
    ({"schema": "kvcap.decoder/9"}, ManifestError),
    ({"model": {"name": "nowhere"}}, ModelNotFound),
    ({"budget_tokens": 21}, ManifestError),
    ({"positions": "true"}, ShapeError),
])  # fmt: skip
def test_a_manifest_that_says_something_else(copied, change, error):
    manifest = facts(copied)
    if "model" in change:
        change = {"model": {**manifest["model"], **change["model"]}}
    (copied / MANIFEST).write_text(json.dumps({**manifest, **change}))
    with pytest.raises(error):
        verify_decoder(copied, quick=True).require()


def admit(folder: Path, name: str) -> None:
    """Let the manifest say of a file what it is now."""
    manifest = facts(folder)
    entries = [
        file_entry(folder / e["file"]) if e["file"] == name else e for e in manifest["files"]
    ]
    (folder / MANIFEST).write_text(json.dumps({**manifest, "files": entries}))


def half_its_weights(folder: Path) -> None:
    """Set half of the weights to zero, under a manifest that admits to them."""
    data = bytearray((folder / "decoder.onnx.data").read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    (folder / "decoder.onnx.data").write_bytes(data)
    admit(folder, "decoder.onnx.data")


def no_graph(folder: Path) -> None:
    (folder / "decoder.onnx").write_bytes(b"no graph")
    admit(folder, "decoder.onnx")


@pytest.mark.parametrize(("spoil", "error", "named"), [
    (lambda x: (x / "decoder.onnx.data").unlink(), ModelFilesBroken, r"decoder\.onnx\.data"),
    (lambda x: (x / "config.json").write_text(" "), ModelFilesBroken, r"config\.json"),
    (half_its_weights, ToleranceError, None), (no_graph, GraphBroken, r"decoder\.onnx"),
])  # fmt: skip
def test_a_broken_folder_is_refused_by_name(copied, spoil, error, named):
    spoil(copied)
    with pytest.raises(error, match=named):
        verify_decoder(copied, quick=True).require()


def test_a_graph_without_an_input_is_not_this_decoders(copied):
    made = decoder("llama", "snapkv", num_hidden_layers=2)
    with pytest.raises(ShapeError, match="outputs"):
        opened(copied, facts_of(made, "fp32"), made)


# --- few nodes


def test_a_decoder_says_in_few_nodes_what_it_was_traced_as(shelf):
    nodes = onnx.load(str(shelf / "made/decoder.onnx"), load_external_data=False).graph.node
    kinds = [node.op_type for node in nodes]
    assert kinds.count("SkipSimplifiedLayerNormalization") == 2 * kinds.count("GroupQueryAttention")
    assert not {"RotaryEmbedding", "Transpose", "Reshape", "Neg", "Reciprocal", "Max"} & set(kinds)
    assert kinds.count("Sqrt") == kinds.count("Div") == 1  # what is read first has no sum


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(("family", "policy", "changes", "packed", "rotates"), [
    ("llama", "keydiff", {"head_dim": 16}, True, True),
    ("qwen2", "keydiff", {"head_dim": 16}, True, True),  # with biases
    ("qwen3", "keydiff", {"head_dim": 16}, False, True),  # heads are normed first
    ("llama", "keydiff", {"head_dim": 24}, False, False),  # no multiple of 16
    ("llama", "snapkv", {"head_dim": 16}, False, False),  # rotated queries are given out
    ("llama", "pyramidkv", {"head_dim": 16}, False, False),
])  # fmt: skip
def test_attention_takes_what_products_give_where_it_can(family, policy, changes, packed, rotates):
    layers = 2 if policy == "pyramidkv" else 1
    nodes = trace(decoder(family, policy, num_hidden_layers=layers, **changes)).graph.node
    attention = [node for node in nodes if node.op_type == "GroupQueryAttention"]
    assert [not node.input[1] for node in attention] == [packed] * len(attention)
    assert [len(node.input) > 7 for node in attention] == [rotates] * len(attention)


def before_and_after(model, given):
    """Fuse a model; return its kinds of nodes then, and what it gave before and after."""
    results = []
    for step in (lambda model: None, fuse):
        step(model)
        session = library("onnxruntime").InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        results.append(session.run(None, given))
    return [node.op_type for node in model.graph.node], results


def test_a_norm_that_differs_from_an_rms_norm_is_left():
    """A mean over another axis, another power, or a gain that is no vector."""
    make, array = onnx.helper.make_node, onnx.numpy_helper.from_array
    tensor, floats = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT

    def normed(axis=-1, power=2.0, gain=(8,)):
        nodes = [
            make("Add", ["x", "r"], ["s"]),
            make("Pow", ["s", "power"], ["p"]),
            make("ReduceMean", ["p", "axis"], ["m"]),
            make("Add", ["m", "small"], ["e"]),
            make("Sqrt", ["e"], ["q"]),
            make("Div", ["s", "q"], ["d"]),
            make("Mul", ["g", "d"], ["y"]),
            make("Neg", ["s"], ["z"]),
        ]
        constants = [array(np.array(power, np.float32), "power"), array(np.float32(0.1), "small")]
        constants.append(array(np.array([axis], np.int64), "axis"))
        inputs = [tensor(name, floats, [1, 3, 8]) for name in "xr"]
        inputs.append(tensor("g", floats, gain))
        outputs = [tensor(name, floats, None) for name in "yz"]
        return graph_of(nodes, inputs, outputs, constants)

    draws = np.random.default_rng(0)
    for changes in ({}, {"axis": 1}, {"power": 4.0}, {"gain": (1, 3, 8)}):
        model = normed(**changes)
        given = {name: draws.random((1, 3, 8), np.float32) - 0.5 for name in "xr"}
        given["g"] = draws.random(changes.get("gain", (8,)), np.float32)
        kinds, results = before_and_after(model, given)
        assert ("SkipSimplifiedLayerNormalization" in kinds) == (not changes), changes
        for one, other in zip(*results, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_what_only_looks_like_a_rotation_is_left():
    """Halves that are cut elsewhere, or swapped: the nodes stay as they are."""
    make, array = onnx.helper.make_node, onnx.numpy_helper.from_array
    tensor, floats = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT

    def rotary(cut: int, swapped: bool):
        nodes = [
            make("Unsqueeze", ["c", "one"], ["cos"]),
            make("Unsqueeze", ["s", "one"], ["sin"]),
            make("Slice", ["x", "none", "cut", "last"], ["a"]),
            make("Slice", ["x", "cut", "far", "last"], ["b"]),
            make("Neg", ["a" if swapped else "b"], ["n"]),
            make("Concat", ["n", "b" if swapped else "a"], ["h"], axis=3),
            make("Mul", ["x", "cos"], ["p"]),
            make("Mul", ["h", "sin"], ["t"]),
            make("Add", ["p", "t"], ["y"]),
            make("Identity", ["s0"], ["s"]),
            make("Identity", ["c0"], ["c"]),
        ]
        nodes = nodes[-2:] + nodes[:-2]
        numbers = {"none": 0, "cut": cut, "far": 99, "last": 3, "one": 1}
        constants = [array(np.array([n], np.int64), name) for name, n in numbers.items()]
        inputs = [tensor("x", floats, [1, 2, 3, 8])]
        inputs += [tensor(name, floats, [1, 3, 8]) for name in ("c0", "s0")]
        outputs = [tensor("y", floats, None)]
        return graph_of(nodes, inputs, outputs, constants)

    draws = np.random.default_rng(0)
    angles = np.tile(draws.random((1, 3, 4)), 2)
    given = {"x": draws.random((1, 2, 3, 8)), "c0": np.cos(angles), "s0": np.sin(angles)}
    given = {name: x.astype(np.float32) for name, x in given.items()}
    for cut, swapped, fused in ((4, False, True), (3, False, False), (4, True, False)):
        model = rotary(cut, swapped)
        kinds, (one, other) = before_and_after(model, given)
        assert ("RotaryEmbedding" in kinds) == fused, (cut, swapped)
        np.testing.assert_allclose(one[0], other[0], atol=1e-6)
