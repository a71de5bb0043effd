"""Graphs compiled for Qualcomm's NPU, where the package is installed; refused by name."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from tools import operations  # noqa: F401

from kvcap.cli import run
from kvcap.export.files import sha256
from kvcap.export.graphs import manifest
from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.spec import Spec
from kvcap.export.graphs.write import write
from kvcap.export.qnn import compiled as qnn
from kvcap.export.qnn import worker as qnn_worker
from kvcap.export.verify import verify
from kvcap.policies import load_policy
from kvcap.runtime.errors import ExtraMissing, ManifestError, NotExportable, ToleranceError

SHAPE = Shape(kv_heads=2, heads=6, head_dim=32, block=8, budget=24, slots=32)
COMMAND = [
    "export",
    "scorer",
    "keydiff",
    "--kv-heads",
    "2",
    "--heads",
    "6",
    "--head-dim",
    "32",
    "--block-size",
    "8",
    "--budget-tokens",
    "24",
    "--quick",
]
STATIC = ["--static", "32", "--dtype", "fp16"]
installed = pytest.mark.skipif(
    not find_spec("onnxruntime_qnn"), reason="needs onnxruntime-qnn: pip install '.[qnn]'"
)


def spec(name="keydiff", stage="score", shape=SHAPE, dtype="fp16"):
    return Spec(load_policy(name), shape, stage, dtype=dtype)


def missing(name):
    raise PackageNotFoundError(name)


def damage(file):
    """Let a graph of KeyDiff compute something else, in a manifest that admits to it."""
    model = onnx.load(file)
    (mean,) = (node for node in model.graph.node if node.op_type == "ReduceMean")
    mean.op_type = "ReduceMax"
    onnx.save(model, file)
    said = json.loads(file.with_suffix(".json").read_text())
    said["graph"]["sha256"] = sha256(file)
    file.with_suffix(".json").write_text(json.dumps(said))


# --- refused by name, whether or not the package is there


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--qnn", "v75", "--dtype", "fp16"], "add --static N"),
        (["--qnn", "v75", "--static", "32"], "--dtype fp16"),
        (["--qnn", "v99", *STATIC], "v68, v69, v73, v75, v79, v81 and SM8850"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_anything_is_written(
    arguments, said, tmp_path, capsys
):
    assert run([*COMMAND, *arguments, "-o", str(tmp_path / "new")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(qnn, "version", missing)
    assert run([*COMMAND, *STATIC, "--qnn", "sm8650", "-o", str(tmp_path / "new")]) == 1
    assert "pip install '.[qnn]'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    with pytest.raises(ExtraMissing):
        qnn.target_of("v75", spec())


def test_a_compiled_graph_is_left_unchecked_where_the_package_is_missing(
    tmp_path, monkeypatch, capsys
):
    """Everything else is checked, the file and the reason are told, and it is no success."""
    monkeypatch.setattr(qnn, "version", missing)
    file, _ = write(spec(), tmp_path, quick=True)
    compiled = tmp_path / f"{file.stem}.sm8650{qnn.SUFFIX}"
    compiled.write_bytes(b"a context")
    said = manifest.read(file)
    target = {"chip": "SM8650", "soc_model": 57, "hexagon": 75, "options": {}}
    said |= {"schema": qnn.SCHEMA, "source": said["graph"], "target": target}
    said["graph"] = {"file": compiled.name, "sha256": sha256(compiled)}
    compiled.with_suffix(".json").write_text(json.dumps(said))

    assert run(["export", "verify", str(tmp_path), "--quick"]) == 1
    told = capsys.readouterr()
    assert f"{file.name}  (ONNX Runtime" in told.out
    assert f"{compiled.name}  NOT CHECKED: graphs for QNN need onnxruntime-qnn" in told.out
    assert f"{compiled.name} was not checked" in told.err
    assert "pip install '.[qnn]'" in told.err

    damage(file)
    assert run(["export", "verify", str(tmp_path), "--quick", "--json"]) == 1
    told = capsys.readouterr()
    assert [found["ok"] for found in json.loads(told.out)] == [False, None]
    assert "differs by" in told.err  # a fault is told first

    compiled.write_bytes(b"another")
    assert run(["export", "verify", str(compiled)]) == 2
    assert "sha256" in capsys.readouterr().err


def test_chips_and_versions_name_targets(monkeypatch):
    monkeypatch.setattr(qnn, "version", lambda name: "2.7.0")
    for chip, (model, hexagon) in qnn.CHIPS.items():
        assert qnn.target_of(chip.lower(), spec()) == qnn.CompileTarget(chip, model, hexagon)
        assert qnn.target_of(f"v{hexagon}", spec()).hexagon == hexagon


def test_nodes_outside_of_the_context_are_named(tmp_path):
    """A model is refused unless its one node is a context: the rest would run on the CPU."""
    make = onnx.helper.make_node
    said = {"policy": {"name": "tova"}}
    context, other = make("EPContext", ["x"], ["y"]), make("Not", ["y"], ["z"])
    for nodes, named in (([context, other], "Not"), ([context, context], "connections"), ([], "")):
        file = tmp_path / "x.onnx"
        onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], [])), file)
        with pytest.raises(NotExportable, match=f"outside of it are {named}"):
            qnn._one_context(file, said)


def test_a_fall_back_to_the_cpu_is_an_error(tmp_path):
    """ONNX Runtime only prints a line when it takes another provider."""
    session = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    runtime = SimpleNamespace(InferenceSession=lambda *a, **k: session)
    with pytest.raises(RuntimeError, match="took CPUExecutionProvider"):
        qnn_worker._simulate(runtime, None, {"context": "x", "cases": ["0"]}, tmp_path)
    runtime = SimpleNamespace(get_ep_devices=list, SessionOptions=SimpleNamespace, __version__="1")
    with pytest.raises(RuntimeError, match="finds no device"):
        qnn_worker._options(runtime, {})


def test_a_process_that_fails_says_why(tmp_path):
    (tmp_path / "x.onnx").write_bytes(b"no graph")
    job = {"compile": True, "graph": str(tmp_path / "x.onnx"), "cases": []}
    with pytest.raises(NotExportable, match=r"QNN cannot compile x\.onnx: .*\w+"):
        qnn._work(tmp_path, tmp_path / "y.onnx", {"htp_arch": "75"}, job)


# --- compiled, and run in the simulator


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with a graph that was exported, and the same compiled."""
    folder = tmp_path_factory.mktemp("qnn")
    file, _ = write(spec(), folder, quick=True)
    return file, qnn.write(file, qnn.target_of("v75", spec()))


@installed
def test_one_file_for_one_chip_with_a_manifest(exported):
    file, (compiled, report) = exported
    assert compiled.name == f"{file.stem}.sm8650.qnn.onnx"
    found = json.loads(compiled.with_suffix(".json").read_text())
    assert found["schema"] == qnn.SCHEMA
    assert found["graph"]["sha256"] == sha256(compiled)
    assert found["source"]["sha256"] == sha256(file)
    assert (found["target"]["chip"], found["target"]["hexagon"]) == ("SM8650", 75)
    assert ":75:57:" in found["target"]["says"]  # the file's own word for it
    assert {"onnxruntime", "onnxruntime-qnn", "qairt", "kvcap"} <= set(found["producer"])
    assert [port["name"] for port in found["inputs"]] == ["keys"]
    assert [row.kind for row in report.rows] == ["random", "outliers", "zero keys", "all zero"]
    assert found["simulated"]["ok"]
    (node,) = onnx.load(compiled).graph.node
    assert node.op_type == "EPContext"


@installed
def test_compiled_graphs_are_verified_again(exported, tmp_path):
    file, (compiled, _) = exported
    graph, again = verify(file.parent, quick=True)
    assert graph.ok
    assert again.ok
    assert "Hexagon simulated" in again.table()
    for part in file.parent.iterdir():
        (tmp_path / part.name).write_bytes(part.read_bytes())
    copy = tmp_path / compiled.name
    copy.write_bytes(copy.read_bytes() + b"\0")
    with pytest.raises(ManifestError, match="sha256"):
        verify(copy)
    copy.with_suffix(".json").write_bytes(file.with_suffix(".json").read_bytes())
    with pytest.raises(ManifestError, match=r"expected is 'kvcap\.qnn/1'"):
        verify(copy)


@installed
@pytest.mark.parametrize(
    ("name", "stage", "target"),
    [("obcache", "score", "v73"), ("criticalkv", "evict", "v81"), ("h2o", "evict", "SM8450"),
     ("streaming_llm", "evict", "v79"), ("knorm", "score", "v68"), ("andpro", "score", "SM8650")],
)  # fmt: skip
def test_policies_compile_and_match(name, stage, target, tmp_path):
    """Queries, state, pins and moved slots, for every version of Hexagon."""
    file, _ = write(spec(name, stage), tmp_path, quick=True)
    _, report = qnn.write(file, qnn.target_of(target, spec(name, stage)))
    assert report.ok
    assert {row.kind: row.ok for row in report.rows}["random"]


@installed
def test_a_wrong_graph_is_caught_in_the_simulator(tmp_path):
    file, _ = write(spec(), tmp_path, quick=True)
    damage(file)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ToleranceError, match="differs by"):
        qnn.write(file, qnn.target_of("v75", spec()), quick=True)
    assert sorted(tmp_path.iterdir()) == before


@installed
def test_the_command(tmp_path, monkeypatch, capsys):
    """What the NPU lacks is named; results are alone on stdout; no file of ONNX Runtime's."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    out = tmp_path / "out"
    assert run([*COMMAND, *STATIC, "--qnn", "v75", "-o", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["qnn"]
    assert found["ok"]
    assert Path(found["graph"]).exists()
    assert not list(home.rglob("*"))
    monkeypatch.setattr("sys.argv", ["kvcap"])
    assert (
        run(["export", "scorer", "random", *COMMAND[3:], *STATIC, "--qnn", "v75", "-o", str(out)])
        == 2
    )
    assert "BitShift" in capsys.readouterr().err
    assert not list(out.glob("random*.qnn.*"))
