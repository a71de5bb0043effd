"""Exported graphs: every policy, stage and type; shapes and state; what verification catches."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import in_turn, small_options
from make import argv, in_python
from onnx import numpy_helper
from safetensors.numpy import load_file
from tools import operations  # noqa: F401

from kvcap.cli import run
from kvcap.export.files import sha256
from kvcap.export.graphs import compare, manifest
from kvcap.export.graphs.cases import Case, inputs
from kvcap.export.graphs.check import feed, session
from kvcap.export.graphs.forms import form_of, graph_part
from kvcap.export.graphs.ports import PORTS
from kvcap.export.graphs.shape import Shape, model_sizes
from kvcap.export.graphs.spec import Spec, with_graphs_of_their_own
from kvcap.export.graphs.trace import OPSET
from kvcap.export.graphs.write import write
from kvcap.export.verify import verify
from kvcap.policies import load_policy
from kvcap.runtime.backends.onnxruntime import library as libraries
from kvcap.runtime.errors import (
    ExtraMissing,
    GraphBroken,
    ManifestError,
    NotExportable,
    ShapeError,
    ToleranceError,
)

ROOT = Path(__file__).parents[3]
ODD = Shape(kv_heads=3, heads=9, head_dim=24, batch=3, block=10, budget=40)
SMALL = argv("--kv-heads 2 --heads 4 --head-dim 16 --budget-tokens 40 --block-size 8")
OWN = sorted([*with_graphs_of_their_own(), "keydiff-window"])
FORMS = ["naive", "stateless", "inverse_norms", "running_anchor"]


def export(folder, name, stage="score", form=None, dtype="fp32", shape=ODD, quick=True, **options):
    return write(Spec(load_policy(name, **options), shape, stage, form, dtype), folder, quick)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Return a function that exports a graph once for several tests."""
    folder = tmp_path_factory.mktemp("shelf")
    made: dict[tuple[str, ...], Path] = {}

    def get(name: str, stage: str = "score", form: str | None = None, dtype: str = "fp32") -> Path:
        form = form or ("stateless" if name == "keydiff" else "naive")
        key = (name, stage, form, dtype)
        if key not in made:
            options = small_options(name) if load_policy(name).least() > ODD.budget else {}
            made[key] = export(folder, name, stage, form, dtype, quick=False, **options)[0]
        return made[key]

    return get


def copy_of(source: Path, folder: Path) -> Path:
    """Three files that a test may break: the graph, its manifest, its samples."""
    for file in source.parent.glob(f"{source.stem}.*"):
        shutil.copy(file, folder)
    return folder / source.name


@pytest.fixture
def copied(shelf, tmp_path):
    return copy_of(shelf("keydiff"), tmp_path)


def manifest_of(file: Path) -> dict:
    return json.loads(file.with_suffix(".json").read_text())


def altered(file: Path, model: onnx.ModelProto) -> None:
    """Another graph under a manifest that admits to it."""
    file.write_bytes(model.SerializeToString())
    manifest = manifest_of(file)
    manifest["graph"]["sha256"] = sha256(file)
    file.with_suffix(".json").write_text(json.dumps(manifest))


def matched(file: Path, long: bool = True) -> dict:
    """Return the manifest of a graph that was found to match eager at every number of slots."""
    manifest = manifest_of(file)
    slots = [case["slots"] for case in manifest["verified"]["cases"]]
    assert slots == [1, 2, 40, 50, 50, 50, 50, *[8192] * long]
    assert manifest["verified"]["ok"]
    return manifest


# --- every policy, stage and type: writing verifies, at 1, 2, N, N + block and 8,192 slots


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", OWN)
def test_every_policy_is_exported_and_matches(name, shelf):
    file = shelf(name)
    long = not load_policy(name).policy.compares_pairs  # of 8,192 slots there are 67 million pairs
    model, manifest = onnx.load(file), matched(file, long)
    assert manifest["formula"]
    assert manifest["paper"]
    assert file.stat().st_size <= 9216
    read = {x for node in model.graph.node for x in node.input}
    assert {p["name"] for p in manifest["inputs"]} == {v.name for v in model.graph.input} <= read
    for port in (*manifest["inputs"], *manifest["outputs"]):
        assert set(port) == {"name", "dtype", "axes", "unit", "meaning"}
        assert port["meaning"]


BASES = {"adakv": "snapkv", "cake": "cake+cake", "calidrop-h2o": "h2o", "criticalkv-adakv":
         "criticalkv", "criticalkv-headkv": "criticalkv", "duoattention": "keydiff", "headkv":
         "snapkv", "pyramidkv": "snapkv", "calidrop": "snapkv+calidrop",
         "calidrop-streaming_llm": "streaming_llm"}  # fmt: skip


def test_policies_with_graphs_of_their_own():
    assert {"andpro", "cake", "criticalkv", "keydiff", "obcache-h2o", "snapkv"} <= set(OWN)
    assert not {"full", *BASES} - {"cake"} & set(OWN)


@pytest.mark.parametrize("name", BASES)
def test_a_preset_that_shares_out_budgets_exports_its_base(name):
    """The same graph, hence one export; and a note of what is not in it."""
    options = {"kernel": 5, "pool": "avg"} if name == "calidrop" else {}
    options |= {"sinks": 32} if name == "calidrop-streaming_llm" else {}
    for stage in ("score", "evict"):
        spec = Spec(load_policy(name), ODD, stage)
        base = Spec(load_policy(BASES[name], **options), ODD, stage)
        assert {**spec.recipe(), "name": ""} == {**base.recipe(), "name": ""}
        assert spec.notes()


@pytest.mark.parametrize("name", OWN)
def test_scores_have_no_operation_that_other_engines_refuse(name):
    """ExecuTorch has no sort, Core ML's tools no cosine similarity."""
    shape = replace(ODD, slots=50)
    graph = Spec(load_policy(name), shape, formulation="naive").graph()
    given = inputs(graph, Case("random", 50), torch.float32)
    with torch.inference_mode():
        program = torch.export.export(graph, tuple(given[port.name] for port in graph.inputs))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert called
    assert not {x for x in called if "sort" in x or "cosine_similarity" in x}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", OWN[::3])
def test_scores_are_exported_in_float16(name, shelf):
    file = shelf(name, dtype="fp16")
    long = not load_policy(name).policy.compares_pairs
    types = {port["name"]: port["dtype"] for port in matched(file, long)["inputs"]}
    assert types.get("keys", "float16") == types.get("values", "float16") == "float16"
    assert (
        manifest_of(file)["outputs"][0]["dtype"] == "float32"
    )  # worth is never rounded to float16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    # What evicts is the same code behind every score, which the tests above hold for each: one of
    # each kind of inputs and state. Of those that read keys alone, all forms of KeyDiff follow.
    [("andpro", "fp16"), ("cake", "fp16"), ("criticalkv", "fp32"), ("dropkv", "fp32"),
     ("h2o", "fp32"), ("snapkv", "fp32"), ("streaming_llm", "fp32"), ("tova", "fp32")],
)  # fmt: skip
def test_graphs_evict_by_the_score(name, dtype, shelf):
    file = shelf(name, "evict", dtype=dtype)
    outputs = [port["name"] for port in matched(file)["outputs"]]
    assert {"kept_keys", "kept_values", "kept_positions", "kept_slot"} <= set(outputs)
    for state in graph_part(load_policy(name)).state:
        assert f"kept_{state}" in outputs


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", ["score", "evict"])
def test_keydiff_in_every_form(form, stage, dtype, shelf):
    file = shelf("keydiff", stage, form, dtype)
    cases = matched(file)["verified"]["cases"]
    (outliers,) = (case for case in cases if case["kind"] == "outliers")
    assert outliers["overlap"] >= 0.95  # with float64, keys whose squares float16 cannot hold
    if stage == "score":
        assert file.stat().st_size <= 1200


@pytest.mark.slow
@pytest.mark.parametrize("anchor", ["unit_mean", "median", "pairwise"])
def test_keydiff_with_other_anchors(anchor, tmp_path):
    for form in FORMS if anchor == "unit_mean" else FORMS[:1]:
        export(tmp_path, "keydiff", "score", form, anchor=anchor)


@pytest.mark.parametrize("options", [{"metric": "dot"}, {"metric": "euclidean"}])
def test_keydiff_with_other_metrics(options, tmp_path):
    assert "naive" in export(tmp_path, "keydiff", **options)[0].name
    with pytest.raises(NotExportable, match="known for it: naive"):
        export(tmp_path, "keydiff", form="stateless", **options)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("name", "stage"),
    [("keydiff", "evict"), ("snapkv", "score"), ("criticalkv", "evict"), ("h2o", "score")],
)
def test_static_shapes(name, stage, tmp_path):
    shape = Shape(kv_heads=3, heads=6, head_dim=16, block=10, budget=40, slots=50)
    file, _ = export(tmp_path, name, stage, shape=shape)
    for value in (v for p in ("inputs", "outputs") for v in manifest_of(file)[p]):
        assert all(isinstance(axis["size"], int) for axis in value["axes"])
    assert file.stat().st_size <= 8192  # no constant of a size that grows with the slots


def test_fewer_slots_than_a_block_or_a_window(tmp_path):
    shape = Shape(kv_heads=2, heads=4, head_dim=16, slots=8)
    export(tmp_path, "snapkv", shape=shape)


def test_a_soft_cap_and_a_scaling_of_its_own(tmp_path):
    shape = Shape(kv_heads=2, heads=4, head_dim=16, scaling=0.1, softcap=5.0, block=10, budget=40)
    export(tmp_path, "tova", shape=shape)


# --- state that a device keeps


def steps(shelf, form: str, dtype: torch.dtype, units: bool = False):
    """Yield scores and eager's, where blocks arrive and are evicted by graphs alone."""
    short = "fp16" if dtype == torch.float16 else "fp32"
    update, evict, score = (
        session(shelf("keydiff", stage, form, short)) for stage in ("update", "evict", "score")
    )
    wide = (ODD.batch, ODD.kv_heads)
    held = {
        "keys": torch.zeros(*wide, 0, ODD.head_dim, dtype=dtype),
        "values": torch.zeros(*wide, 0, ODD.head_dim, dtype=dtype),
        "positions": torch.zeros(*wide, 0, dtype=torch.int32),
        "inverse_norms": torch.zeros(*wide, 0),
    }
    anchor = torch.zeros(*wide, ODD.head_dim)
    generator = torch.Generator().manual_seed(1)
    gone = torch.zeros(*wide, 1, ODD.head_dim, dtype=dtype)
    for step in range(12):
        keys = (torch.randn(*wide, ODD.block, ODD.head_dim, generator=generator) + 1).to(dtype)
        given = {"new_keys": keys, "gone_keys": gone, "anchor": anchor}
        made = {k: torch.from_numpy(v) for k, v in feed(update, given).items()}
        anchor = made.get("next_anchor", anchor)
        positions = torch.arange(step * ODD.block, (step + 1) * ODD.block, dtype=torch.int32)
        new = {
            "keys": keys,
            "values": keys,
            "positions": positions.expand(*wide, -1),
            "inverse_norms": made["new_inverse_norms"],
        }
        held = {name: torch.cat((held[name], new[name]), 2) for name in held}
        pinned = torch.zeros(held["positions"].shape, dtype=torch.bool)
        seen = torch.tensor((step + 1) * ODD.block, dtype=torch.int32)
        given = {**held, "anchor": anchor, "pinned": pinned, "seen": seen}
        policy = load_policy("keydiff").policy
        plain = form_of(graph_part(load_policy("keydiff")), ODD, "naive")
        yield feed(score, given)["scores"], policy.score(plain.observe(given)).numpy()
        kept = {k: torch.from_numpy(v) for k, v in feed(evict, given).items()}
        held = {name: kept[f"kept_{name}"] for name in held}
        anchor = kept.get("kept_anchor", anchor)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", ["inverse_norms", "running_anchor"])
def test_a_device_can_keep_keydiffs_state(form, dtype, shelf):
    """Update, score and evict graphs alone give eager scores over a conversation."""
    for got, eager in steps(shelf, form, dtype):
        np.testing.assert_allclose(got, eager, atol=2e-6)


def test_an_anchor_follows_what_is_evicted_without_the_evict_graph(shelf):
    run_ = session(shelf("keydiff", "update", "running_anchor"))
    new, gone = (torch.randn(3, 3, n, 24) for n in (10, 6))
    before = torch.randn(3, 3, 24)
    got = feed(run_, {"new_keys": new, "gone_keys": gone, "anchor": before})
    expected = before + new.sum(2) - gone.sum(2)
    np.testing.assert_allclose(got["next_anchor"], expected.numpy(), atol=2e-5)


@pytest.mark.slow
def test_criticalkv_keeps_norms_of_values(shelf):
    assert [p["name"] for p in manifest_of(shelf("criticalkv", "update"))["inputs"]] == [
        "new_values",
        "output_projection",
    ]
    names = [p["name"] for p in manifest_of(shelf("criticalkv"))["inputs"]]
    assert {"output_norm", "pinned", "budget"} <= set(names)


def test_accumulated_attention_goes_in_and_out(shelf):
    run_ = session(shelf("h2o"))
    graph = Spec(load_policy("h2o"), ODD).graph()
    given = inputs(graph, Case("random", 50), torch.float32, seed=3)
    first = feed(run_, given)
    second = feed(run_, {**given, "accumulated": torch.from_numpy(first["next_accumulated"])})
    added = first["scores"] - given["accumulated"].numpy()
    np.testing.assert_allclose(second["scores"], first["scores"] + added, atol=1e-5)


def test_pins_of_the_policy_and_of_the_caller_stay(shelf):
    run_ = session(shelf("streaming_llm", "evict"))
    graph = Spec(load_policy("streaming_llm"), ODD, "evict").graph()
    given = inputs(graph, Case("random", 50), torch.float32)
    given["positions"] = torch.arange(50, dtype=torch.int32).expand(3, 3, 50).contiguous()
    given["seen"] = torch.tensor(50, dtype=torch.int32)
    given["pinned"] = torch.zeros(3, 3, 50, dtype=torch.bool)
    given["pinned"][..., 7] = True
    got = feed(run_, given)["kept_positions"]
    assert sorted(got[0, 0].tolist()) == [0, 1, 2, 3, 7, *range(15, 50)]


# --- the files


@pytest.mark.slow
def test_graphs_hold_no_paths_and_load_on_older_runtimes(shelf):
    for name, stage in (("keydiff", "evict"), ("snapkv", "score"), ("h2o", "evict")):
        file = shelf(name, stage)
        model = onnx.load(file)
        assert [(o.domain, o.version) for o in model.opset_import] == [("", OPSET)]
        assert model.ir_version <= 10
        assert not any(n.metadata_props or n.doc_string or n.name for n in model.graph.node)
        for kind in (file, file.with_suffix(".json")):
            assert not re.search(rb"\.py|/[a-z]+/[a-z]+/|kvcap\.policies", kind.read_bytes())
        assert {"GatherElements", "GatherND"}.isdisjoint(
            {n.op_type for n in model.graph.node} if name != "snapkv" else set()
        )


@pytest.mark.slow
def test_samples_are_what_the_graph_gives(shelf):
    for name, stage in (("keydiff", "score"), ("tova", "evict")):
        file = shelf(name, stage)
        samples = load_file(file.parent / manifest_of(file)["samples"]["file"])
        given = {k[3:]: torch.from_numpy(v) for k, v in samples.items() if k.startswith("in.")}
        for key, value in feed(session(file), given).items():
            np.testing.assert_array_equal(value, samples[f"out.{key}"])


def test_sizes_of_a_model_are_read_from_its_config(tmp_path):
    sizes = model_sizes("pocket")
    assert Shape(**sizes).scale == pytest.approx(sizes["head_dim"] ** -0.5)
    for family, expected in (
        ({"model_type": "gemma2", "query_pre_attn_scalar": 64}, 0.125),
        ({"model_type": "granite", "attention_multiplier": 0.3}, 0.3),
        ({"model_type": "gemma4_text"}, 1.0),  # in its code alone
        ({"model_type": "llama"}, 128**-0.5),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**family, "num_hidden_layers": 2}))
        assert model_sizes(str(tmp_path))["scaling"] == expected


# --- scores that are ranks

COMMON = [  # query heads, KV heads and head size of SmolLM2, Qwen, Llama, Gemma and others
    (9, 3, 64), (15, 5, 64), (32, 8, 64), (14, 2, 64), (16, 8, 128), (28, 4, 128), (32, 8, 128),
    (24, 8, 128), (4, 1, 256), (8, 4, 256),
]  # fmt: skip


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "name"),
    [(*shape, "lagkv") for shape in COMMON] + in_turn(COMMON, OWN, len(OWN) // len(COMMON) + 1),
)
def test_every_policy_matches_at_common_shapes(heads, kv_heads, size, name, tmp_path):
    shape = Shape(heads=heads, kv_heads=kv_heads, head_dim=size)
    _, report = export(tmp_path, name, shape=shape, quick=False)
    assert report.ok


@pytest.mark.parametrize("fault", ["a near tie", "one rank", "another order", "a smaller part"])
def test_ranks_differ_by_near_ties_alone(fault):
    """SmolLM2's shape, where ONNX Runtime once gave two near-equal tokens each other's rank."""
    spec = Spec(load_policy("lagkv"), Shape(heads=9, kv_heads=3, head_dim=64), "score")
    graph = spec.graph()
    with torch.inference_mode():
        feeds = inputs(graph, Case("random", 640), torch.float32)
        wanted = compare.Reference.of(graph, feeds)
        low, high, _ = wanted.range("scores")
        scores = wanted.exact["scores"].float()
        tied = ((high - low) * 32).round()
        assert 0 < float((tied > 0).double().mean()) < 0.1
        if fault == "a near tie":
            scores = high.float()
        elif fault == "one rank":  # of a token that is like no other
            scores[(tied == 0) & (scores == scores[tied == 0][0])] += 1 / 32
        elif fault == "another order":
            scores = 1 - scores
        else:
            other = replace(load_policy("lagkv").policy, lag=31)
            scores = other.score(graph.form.observe(feeds))
        difference = compare.compared(graph, feeds, {"scores": scores})
    assert difference.ok == (fault == "a near tie"), difference


# --- what verification catches


def highest(model: onnx.ModelProto) -> None:
    """Take the highest key where the mean was meant."""
    (mean,) = (n for n in model.graph.node if n.op_type == "ReduceMean")
    mean.op_type = "ReduceMax"


def not_finite(model: onnx.ModelProto) -> None:
    model.graph.node[-1].op_type = "Sqrt"


def more_sinks(model: onnx.ModelProto) -> None:
    (tensor,) = (
        t
        for t in model.graph.initializer
        if t.data_type == 6 and numpy_helper.to_array(t).tolist() == 4
    )
    tensor.CopyFrom(numpy_helper.from_array(np.array(60, dtype=np.int32), tensor.name))


@pytest.mark.parametrize(("name", "stage", "spoil", "says"), [
    ("keydiff", "score", highest, "differs by"), ("keydiff", "score", not_finite, "not finite"),
    ("streaming_llm", "evict", more_sinks, "other slots"),
])  # fmt: skip
def test_a_wrong_graph_is_caught(name, stage, spoil, says, shelf, tmp_path):
    copy = copy_of(shelf(name, stage), tmp_path)
    model = onnx.load(copy)
    spoil(model)
    altered(copy, model)
    (report,) = verify(copy, quick=True)
    assert not report.ok
    with pytest.raises(ToleranceError, match=says):
        report.require()


def test_another_shape_is_caught(copied):
    manifest = manifest_of(copied)
    manifest["inputs"][0]["axes"][3]["size"] = 25
    copied.with_suffix(".json").write_text(json.dumps(manifest))
    with pytest.raises(ShapeError, match="inputs say"):
        verify(copied)
    manifest["inputs"][0]["axes"][3]["size"] = 24
    manifest["outputs"].append({**manifest["outputs"][0], "name": "more"})
    copied.with_suffix(".json").write_text(json.dumps(manifest))
    with pytest.raises(ShapeError, match="2 outputs"):
        verify(copied)


def test_files_that_do_not_belong_together_are_refused(copied, shelf):
    text = copied.with_suffix(".json").read_text()
    copied.write_bytes(copied.read_bytes() + b"\0")
    with pytest.raises(ManifestError, match="sha256"):
        verify(copied)
    copied.with_suffix(".json").write_text(text.replace("kvcap.export/1", "kvcap.export/9"))
    with pytest.raises(ManifestError, match="schema"):
        verify(copied)
    copied.with_suffix(".json").write_text(text[:99])
    with pytest.raises(ManifestError, match="cannot be read"):
        verify(copied)
    copied.with_suffix(".json").write_text('{"schema": "kvcap.export/1"}')
    with pytest.raises(ManifestError, match=r"the whole: .* is a required property"):
        verify(copied)
    copied.with_suffix(".json").unlink()
    with pytest.raises(ManifestError, match="no manifest"):
        verify(copied)


def test_a_graph_that_is_missing_from_a_folder_is_named(copied, shelf):
    copy_of(shelf("knorm"), copied.parent)
    (copied.parent / "other.json").write_text("[1")  # no manifest
    assert len(verify(copied.parent, quick=True)) == 2
    copied.unlink()
    with pytest.raises(ManifestError, match=f"describes {copied.name}, which is missing"):
        verify(copied.parent)
    assert run(["export", "verify", str(copied.parent)]) == 2


@pytest.mark.parametrize(
    ("part", "value", "fault"),
    [
        ("stage", "both", "stage: 'both' is not one of"),
        ("shape", {"kv_heads": 2}, "shape: 'heads' is a required property"),
        ("inputs", [{"name": "keys", "dtype": "int8", "axes": []}], "inputs/0/dtype: 'int8'"),
        ("graph", {"file": "../x.onnx", "sha256": "0" * 64}, "graph/file: '../x.onnx'"),
        ("opset", 18.0, "opset: 18.0 is not of type 'integer'"),
        ("schema", "kvcap.qnn/1", "has schema 'kvcap.qnn/1'"),
    ],
)
def test_a_manifest_that_its_schema_does_not_allow_is_refused(copied, part, value, fault):
    copied.with_suffix(".json").write_text(json.dumps({**manifest_of(copied), part: value}))
    with pytest.raises(ManifestError, match=re.escape(fault)):
        verify(copied)


def test_no_manifest_is_written_that_could_not_be_read(copied, tmp_path):
    with pytest.raises(ManifestError, match="dtype: 'bf16' is not one of"):
        manifest.write({**manifest_of(copied), "dtype": "bf16"}, tmp_path / "x.json")
    assert not list(tmp_path.glob("x*"))


def test_a_manifest_of_a_policy_unknown_here_is_refused(copied):
    manifest = manifest_of(copied)
    manifest["policy"]["parts"] = "keydif"
    copied.with_suffix(".json").write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match="did you mean 'keydiff'"):
        verify(copied)


def test_a_broken_graph_is_refused_by_name(copied):
    for data in (b"", b"no graph", copied.read_bytes()[:200]):
        copied.write_bytes(data)
        manifest = manifest_of(copied)
        manifest["graph"]["sha256"] = sha256(copied)
        copied.with_suffix(".json").write_text(json.dumps(manifest))
        with pytest.raises(GraphBroken, match="no graph"):
            verify(copied)


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    from kvcap.policies.knorm import Knorm

    eager = Knorm.score
    monkeypatch.setattr(
        Knorm, "score", lambda s, obs: eager(s, obs) * (2 if torch.compiler.is_exporting() else 1)
    )
    with pytest.raises(ToleranceError):
        export(tmp_path / "new", "knorm")
    assert not list((tmp_path / "new").iterdir())


# --- the command line


def test_a_graph_of_something_else_is_not_replaced_unasked(tmp_path, capsys):
    def export(*options: str) -> tuple[int, str]:
        sizes = ["--kv-heads", "1", "--heads", "2", "--quick", "-o", str(tmp_path)]
        code = run(["export", "scorer", "knorm", *sizes, *options])
        return code, capsys.readouterr().err

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    assert export("--head-dim", "8")[0] == 0
    before = files()
    assert export("--head-dim", "8", "--dtype", "float32")[0] == 0
    assert files().keys() == before.keys()
    for options in (["--head-dim", "16"], ["--head-dim", "8", "--policy-option", "sink_tokens=2"]):
        before = files()
        code, err = export(*options)
        assert code == 2
        assert " instead of " in err
        assert "--force" in err
        assert files() == before
    assert "head_dim 8 instead of 16" in export("--head-dim", "16")[1]
    assert export("--head-dim", "16", "--force")[0] == 0
    (manifest,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert manifest["shape"]["head_dim"] == 16
    next(tmp_path.glob("*.json")).write_text("{")
    assert "no export that can be read" in export("--head-dim", "16")[1]


@pytest.mark.parametrize("dtype", ["fp16", "float16", "half"])
def test_types_have_the_names_that_people_use(dtype):
    spec = Spec(load_policy("keydiff"), ODD, dtype=dtype)
    assert (spec.dtype, spec.torch_dtype) == ("fp16", torch.float16)


def test_the_commands(tmp_path, capsys, kvcap):
    assert run(["export", "scorer", "tova", *SMALL, "-o", str(tmp_path), "--quick"]) == 0
    assert "tova.score.naive.fp32.onnx" in capsys.readouterr().out
    given = argv("--window 4 --policy-option pool=avg --quick -o {}", tmp_path)
    printed = kvcap.document("export", "scorer", "snapkv", *SMALL, *given)
    assert manifest_of(Path(printed["graph"]))["policy"]["parameters"]["window"] == 4
    assert run(["export", "verify", str(tmp_path), "--quick", "--json"]) == 0
    assert [x["ok"] for x in json.loads(capsys.readouterr().out)] == [True, True]


def test_exit_codes(copied, capsys, kvcap, tmp_path):
    assert "never evicts" in kvcap.refused("export", "scorer", "full")
    assert "choose --stage score or evict" in kvcap.refused(
        "export", "scorer", "snapkv", "--stage", "update"
    )
    assert run(["export", "scorer", "tova", "--dtype", "int8"]) == 2
    assert run(["export", "scorer", "tova", "--stage", "both"]) == 2
    assert run(["export", "scorer", "tova", "--heads", "9", "--kv-heads", "2"]) == 2
    assert run(["export", "scorer", "h2o", "--window", "8"]) == 2
    assert run(["export", "scorer", "snapkv", "--stage", "evict", "--budget-tokens", "0"]) == 2
    assert run(["export", "verify", str(tmp_path / "none")]) == 2
    model = onnx.load(copied)
    highest(model)
    altered(copied, model)
    assert run(["export", "verify", str(copied), "--quick"]) == 1
    captured = capsys.readouterr()
    assert "FAILED" in captured.out
    assert "differs by" in captured.err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ExtraMissing, match=r"pip install '\.\[onnx\]'"):
        libraries.require()
    assert run(["export", "scorer", "knorm"]) == 1
    assert run(["export", "verify", "."]) == 1
    assert "onnxscript" in capsys.readouterr().err


@pytest.mark.slow
def test_no_telemetry(shelf, tmp_path):
    """A command leaves no file of ONNX Runtime's in a home of its own, though the user allows it.

    Without the variable it leaves a device's id and a queue there.
    """
    home = tmp_path / "home"
    home.mkdir()
    env = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "ORT_DISABLE_TELEMETRY": "0",
    }
    program = "import sys\nfrom kvcap.cli import run\nsys.exit(run(sys.argv[1:]))"
    done = in_python(
        program, "export", "verify", str(shelf("knorm")), "--quick", env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert not [path for path in home.rglob("*") if "onnxruntime" in str(path)]


@pytest.mark.slow
def test_the_page(tmp_path, monkeypatch, capsys):
    """Its commands run, and its tables name every input, field and formulation."""
    page = (ROOT / "docs" / "export.md").read_text()
    engines = (ROOT / "docs" / "export-engines.md").read_text()
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    commands = [line.split("#")[0].split() for line in block.splitlines() if line]
    for program, *arguments in commands:
        assert program == "kvcap"
        quick = [] if "--json" in arguments else ["--quick"]
        assert run([*arguments, *quick]) == 0, capsys.readouterr().err
    for code in re.findall(r"```python\n(.*?)```", page + engines, re.DOTALL):
        exec(code, {})
    assert "scores" in capsys.readouterr().out
    manifest = json.loads(next(tmp_path.rglob("*.json")).read_text())
    for name in (*manifest, *FORMS, *PORTS):
        assert f"`{name}`" in page, f"docs/export.md does not say what {name} is"
