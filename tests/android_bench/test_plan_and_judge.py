"""On-device latency: plans, the runner, what is made of samples, what a table may be called."""

from __future__ import annotations

import copy
import csv
import json
import os
import re
import shutil
import signal
import statistics as plain
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from make import argv, ran
from tools import PATIENCE

from kvcap.android_bench.documents import (
    BENCH,
    plan_id,
    read_plan,
    read_result,
    schema,
    validate,
    write_json,
)
from kvcap.android_bench.errors import NotComparable, PlanBroken, ResultBroken
from kvcap.android_bench.plan.presets import (
    KEYDIFF,
    PRESETS,
    SIZES,
    Group,
    PlanPreset,
    PolicyVariant,
    Rules,
)
from kvcap.android_bench.plan.write import PlanRequest, write_plan
from kvcap.android_bench.results import chart, judge, regress, source, table
from kvcap.android_bench.runner import device, inputs
from kvcap.android_bench.runner.measure import Bound
from kvcap.android_bench.runner.parity import parity
from kvcap.android_bench.runner.statistics import COLUMNS, csv_text, statistics
from kvcap.cli import run
from kvcap.export.graphs.forms import forms_of
from kvcap.export.graphs.formulations import FORMULATIONS
from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.spec import with_graphs_of_their_own
from kvcap.policies import load_policy

ROOT = Path(__file__).parents[2]
SHAPE = Shape(kv_heads=2, heads=4, head_dim=16, block=16)
RULES = Rules(warmup_seconds=0.001, min_runs=6, min_seconds=0.006)
SMALL = PlanPreset(
    (
        Group("score", (KEYDIFF[1], PolicyVariant("criticalkv")), (40, 56, 72), ("fp32",)),
        Group("score", (KEYDIFF[1],), (40,), ("fp16",)),
        Group(
            "evict", (KEYDIFF[3], PolicyVariant("h2o"), PolicyVariant("snapkv")), (32,), ("fp32",)
        ),
    ),
    RULES,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a plan with every kind of input and check."""
    path = tmp_path_factory.mktemp("android") / "plan"
    write_plan(PlanRequest("quick", SMALL, SHAPE, "small"), path)
    return path


@pytest.fixture(scope="module")
def result(folder, tmp_path_factory):
    """That plan, run here by the command. The file's own content."""
    path = tmp_path_factory.mktemp("result") / "result.json"
    assert run(["android", "host", str(folder), "-o", str(path), "--threads", "1,2"]) == 0
    return read_result(path)


@pytest.fixture
def clean(result):
    """Return a result without a doubt, with samples that are known: 1 to 100 times the slots."""
    document = copy.deepcopy(result)
    document["rules"] |= {"warmup_runs": 5, "warmup_seconds": 0.5, "min_runs": 50, "min_seconds": 2}
    for row in (*document["cells"], *document["baselines"]):
        for name in [name for name in row if name.endswith("_us") or name == "gb_per_s"]:
            del row[name]
        middle = 1000.0 * row.get("n", 10)
        row["samples_us"] = [[middle * (0.9 + i / 500) for i in range(100)] for _ in range(3)]
    first = document["cells"][0]
    document["repeat"] = {
        name: first[name] for name in ("id", "threads", "provider_asked", "runs_per_sample")
    }
    document["repeat"]["samples_us"] = list(first["samples_us"][0])
    for name in ("derived", "validity"):
        del document[name]
    return document


def edited(folder: Path, target: Path, change: Any) -> Path:
    """Return a copy of a plan's folder with the plan changed and its id put right."""
    shutil.copytree(folder, target)
    plan = json.loads((target / "plan.json").read_text())
    change(plan)
    plan["id"] = plan_id(plan)
    (target / "plan.json").write_text(json.dumps(plan))
    return target


RUNNER = (sys.executable, "-m", "kvcap.android_bench.runner")


def runner(
    folder: Path, out: Path, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the runner in a process of its own, with more variables in its environment."""
    command = [*RUNNER, str(folder), str(out), json.dumps(options)]
    return ran(command, cwd=out.parent, env={**os.environ, **(env or {})})


def ran_as(folder: Path, out: Path, change: Any = lambda plan: None, **options: Any) -> Any:
    """Run a changed copy of a plan in a process of its own; return the judged result."""
    done = runner(edited(folder, out.with_name("plan"), change), out, **options)
    assert done.returncode == 0, done.stderr
    return judge.judged(read_result(out))


def only_reference(plan: dict[str, Any]) -> None:
    plan["cells"] = [cell for cell in plan["cells"] if cell["id"] == plan["reference"]]


# Plans


def test_a_plan_lists_its_files_and_they_are_whole(folder):
    plan = read_plan(folder)
    on_disk = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert on_disk - {"plan.json"} == {entry["file"] for entry in plan["files"]}
    named = set(re.findall(r'"(?:file|model)": "([^"]+)"', (folder / "plan.json").read_text()))
    assert named == on_disk - {"plan.json"}
    ids = [cell["id"] for cell in plan["cells"]]
    assert len(set(ids)) == len(ids) == 10
    assert plan["reference"] == "keydiff.stateless.score.fp32.n40"
    assert not list(folder.parent.glob(".kvcap*"))
    kinds = {port["check"]["kind"] for cell in plan["cells"] for port in cell["outputs"]}
    assert kinds == {"values", "slots", "rows", "by_slot"}
    fills = {port["fill"]["kind"] for cell in plan["cells"] for port in cell["inputs"]}
    assert fills == {"hash", "constant", "permutation", "file"}


def test_types_share_what_is_expected(folder):
    cells = {cell["id"]: cell for cell in read_plan(folder)["cells"]}
    checks = [cells[f"keydiff.stateless.score.{t}.n40"]["outputs"] for t in ("fp32", "fp16")]
    assert checks[0] == checks[1]


def test_the_generator_is_what_its_rule_says():
    """By Python's integers, one at a time."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
        return x ^ (x >> 16)

    for seed in (1, 7, 2**32 - 1):
        expected = [mix((i + mix(seed)) & 0xFFFFFFFF) >> 21 for i in range(500)]
        assert inputs.hash11(seed, 500).tolist() == expected
    fill = {"kind": "hash", "seed": 3, "scale": 2**-9, "offset": -2.0}
    ports = [{"dtype": dtype, "shape": [4, 512], "fill": fill} for dtype in ("float16", "float32")]
    low, high = (inputs.filled(port, Path()) for port in ports)
    assert low.dtype == np.float16
    assert (low.astype(np.float32) == high).all()
    assert abs(high.mean()) < 0.1
    assert 1.0 < high.std() < 1.3


def test_positions_are_a_permutation_with_the_newest_last(folder):
    port = {
        "dtype": "int32",
        "shape": [1, 2, 640],
        "fill": {"kind": "permutation", "multiplier": 10007, "first": 512},
    }
    rows = inputs.filled(port, Path()).reshape(-1, 640)
    for row in rows.tolist():
        assert sorted(row) == list(range(640))
        assert row[512:] == list(range(512, 640))
        assert row[:512] != sorted(row[:512])


def test_presets_hold_what_their_names_promise():
    (group,) = PRESETS["table19"]().groups
    assert group.sizes == SIZES == (512, 1024, 2048, 4096, 8192)
    assert group.dtypes == ("fp16",)
    assert {v.policy for v in group.variants} == {"snapkv", "tova", "keydiff", "h2o"}
    full = PRESETS["full"]()
    assert PRESETS["table19"]().rules == full.rules == Rules()
    for group in full.groups:
        forms = {v.formulation for v in group.variants if v.policy == "keydiff"}
        assert forms == set(FORMULATIONS)
        assert {v.policy for v in group.variants} == set(with_graphs_of_their_own())
        assert len(group.variants) == len({repr(v) for v in group.variants})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "slow"], "no preset 'slow'; there are table19, quick, full"),
        (["--policies", "nothing"], "no policy 'nothing'; it has snapkv, tova"),
        (["--dtypes", "int8"], "no dtype 'int8'; it has fp16, fp32"),
        (["--policies", "h2o", "--stages", "evict"], "no cell with all that was requested"),
        (["--sizes", "0"], "'0' will not work; use whole numbers above 0"),
        (["--threads", "1,1"], "'1,1' will not work"),
        (["--kv-heads", "3", "--heads", "4"], "cannot share 3 KV heads evenly"),
    ],
)
def test_plans_that_cannot_be_are_refused(tmp_path, kvcap, options, message):
    assert message in kvcap.refused("android", "plan", "-o", str(tmp_path / "plan"), *options)
    assert not list(tmp_path.iterdir())


def test_a_result_has_a_place_before_anything_is_measured(folder, tmp_path, kvcap, monkeypatch):
    for where, says in (("no/r.json", "to write r.json to"), (".", "is a folder; name a file")):
        output = kvcap.refused("android", "host", str(folder), "-o", str(tmp_path / where))
        assert says in output
        assert "[1/" not in output
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    output = kvcap.refused("android", "host", str(folder), "-o", str(tmp_path / "r.json"))
    assert "cannot be written here" in output


def test_a_plan_takes_an_empty_folder_only(folder, kvcap):
    before = sorted(folder.iterdir())
    assert "is not empty; name a new folder" in kvcap.refused("android", "plan", "-o", str(folder))
    assert sorted(folder.iterdir()) == before
    within = str(folder / "plan.json" / "x")
    assert "is a file, not a folder" in kvcap.refused("android", "plan", "-o", within)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "plan.json").unlink(), "no plan.json"),
        (lambda p: (p / "plan.json").write_text("{"), "cannot be read"),
        (lambda p: (p / "plan.json").write_text('{"schema": "other/1"}'), "has schema 'other/1'"),
        (lambda p: next(p.glob("models/*")).unlink(), "is missing; write the plan again"),
        (lambda p: flipped(next(p.glob("expected/*"))), "was changed"),
        (lambda p: rewrite(p, lambda plan: plan.update(preset="full")), "its id is"),
    ],
)
def test_a_damaged_plan_is_refused(folder, tmp_path, kvcap, change, message):
    change(edited(folder, tmp_path / "plan", lambda plan: None))
    assert message in kvcap.refused(
        "android", "host", str(tmp_path / "plan"), "-o", str(tmp_path / "r.json")
    )
    assert not (tmp_path / "r.json").exists()


def flipped(file: Path) -> None:
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


def rewrite(folder: Path, change: Any) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    change(plan)
    (folder / "plan.json").write_text(json.dumps(plan))


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/../../x", "a\\b", ""])
def test_a_plan_names_no_file_outside_its_folder(folder, tmp_path, file):
    path = edited(folder, tmp_path / "plan", lambda plan: plan["files"][0].update(file=file))
    with pytest.raises(PlanBroken, match="files/0/file"):
        read_plan(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["cells"].append(p["cells"][0]), "twice"),
        (lambda p: p["cells"][0].update(bytes=p["cells"][0]["bytes"] + 1), "its shapes are"),
        (lambda p: p["cells"][0]["inputs"][0].update(shape=[2**31 - 1] * 8), "its shapes are"),
        (lambda p: p.update(reference="other"), "is no cell of the plan"),
        (lambda p: p["files"].pop(0), "does not list"),
        (lambda p: p["cells"][0]["outputs"][0].update(check={"kind": "rows", "of": "other"}),
         "has no input 'other'"),
        (lambda p: p["cells"][0]["outputs"][0].update(check={"kind": "values"}),
         "outputs/0/check: 'file' is a required"),
        (lambda p: p["cells"][0].update(id="a\n"), "cells/0/id"),
        (lambda p: p["rules"].update(min_seconds=1e300), "rules/min_seconds"),
    ],
)  # fmt: skip
def test_a_plan_that_contradicts_itself_is_refused(folder, tmp_path, change, message):
    with pytest.raises(PlanBroken, match=re.escape(message)):
        read_plan(edited(folder, tmp_path / "plan", change))


# The runner


def test_every_cell_ran_by_the_rules_and_equals_eager(folder, result):
    plan = read_plan(folder)
    assert result["run"]["plan"] == plan["id"]
    expected = {(cell["id"], threads) for cell in plan["cells"] for threads in (1, 2)}
    assert {(row["id"], row["threads"]) for row in result["cells"]} == expected
    for row in result["cells"]:
        assert row["status"] == "ok", row
        assert row["parity"]["passed"], row
        assert row["provider_got"] == "cpu"
        assert len(row["samples_us"]) == 3
        assert all(len(part) >= 2 for part in row["samples_us"])
        assert sum(map(sum, row["samples_us"])) >= 6000
    assert result["repeat"]["id"] in {cell["id"] for cell in plan["cells"]}
    assert [entry["bytes"] for entry in result["baselines"]] == [n * 64 for n in (40, 56, 72)]
    kinds = {flag["kind"] for flag in result["validity"]["flags"]}
    assert "rules" in kinds
    assert not kinds & {"parity", "failed", "endpoint", "rounds", "source", "interrupted"}
    validate(result, BENCH, "result", ResultBroken)


def test_the_runner_gives_samples_of_this_machine_and_leaves_no_telemetry(folder, tmp_path):
    home, out = tmp_path / "home", tmp_path / "r.json"
    home.mkdir()
    done = runner(folder, out, {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")})
    assert done.returncode == 0, done.stderr
    assert not list(home.rglob("*"))
    document = read_result(out)
    assert judge.judged(document)["device"]["source"] == "host"
    for row in document["cells"]:
        assert row.items() >= statistics(row["samples_us"]).items()
        assert f"{row['id']} (cpu, {row['threads']}): p50 {row['p50_us']:.1f}, p90 " in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cores": "big"}, "--cores 'big' is not auto, none, 7 or 4-7"),
        ({"cores": "9999"}, "core 9999 is not to be had"),
        ({"provider": "nnapi"}, "has no provider nnapi; it has azure, cpu"),
    ],
)
def test_the_runner_refuses_by_name(folder, tmp_path, options, message):
    done = runner(folder, tmp_path / "r.json", **options)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not [*tmp_path.iterdir()]


def test_a_graph_that_cannot_run_fails_alone(folder, tmp_path):
    def keep_two(plan):
        plan["cells"] = plan["cells"][:2]
        broken = copy.deepcopy(plan["cells"][0])
        plan["cells"].append({**broken, "id": "broken", "model": plan["files"][0]["file"]})
        assert plan["files"][0]["file"].startswith("expected/")  # no graph

    document = ran_as(folder, tmp_path / "r.json", keep_two)
    states = {row["id"]: row["status"] for row in document["cells"]}
    assert states.pop("broken") == "failed"
    assert set(states.values()) == {"ok"}
    (flag,) = [flag for flag in document["validity"]["flags"] if flag["kind"] == "failed"]
    assert flag["cell"].startswith("broken")
    assert not document["validity"]["ok"]


def test_a_run_without_any_cell_is_doubted(folder, tmp_path):
    def spoil(plan):
        plan["cells"] = [{**plan["cells"][0], "model": plan["files"][0]["file"]}]

    document = ran_as(folder, tmp_path / "r.json", spoil)
    assert document["repeat"] is None
    assert {"failed", "drift"} <= {flag["kind"] for flag in document["validity"]["flags"]}


def test_threads_without_cores_are_skipped(folder, tmp_path):
    some = str(min(os.sched_getaffinity(0)))
    cells = ran_as(folder, tmp_path / "r.json", threads=[1, 2], cores=some)["cells"]
    assert {(row["threads"], row["status"]) for row in cells} == {(1, "ok"), (2, "skipped")}
    reasons = {row["reason"] for row in cells}
    assert "2 threads need as many cores, here are 1" in reasons


def test_a_profile_names_the_graphs_operators(folder, tmp_path):
    document = ran_as(folder, tmp_path / "r.json", only_reference, profile=True)
    (row,) = document["cells"]
    assert row["operators"]
    assert {entry["provider"] for entry in row["operators"]} == {"cpu"}
    assert all(entry["count"] >= 1 and entry["count"] % 1 == 0 for entry in row["operators"])
    path = tmp_path / "plan"
    graph = onnx.load(path / read_plan(path)["cells"][0]["model"]).graph
    matmuls = sum(node.op_type in ("MatMul", "Gemm", "Einsum") for node in graph.node)
    counts = {entry["operator"]: entry["count"] for entry in row["operators"]}
    assert (
        sum(n for name, n in counts.items() if "MatMul" in name or name in ("Gemm", "Einsum"))
        == matmuls
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan", "r.json"]
    text = table.markdown([document])
    assert "| cell | on | threads | operators by their share, each with its µs |" in text
    assert re.search(rf"{row['id']} \| cpu \| 1 \| \w+ \(cpu\) \d+%, ", text)


def test_the_host_passes_provider_and_profile_on(folder, tmp_path, capfd):
    """Azure's provider, which PyPI's ONNX Runtime has, can run no node of these graphs."""
    path, out = edited(folder, tmp_path / "plan", only_reference), tmp_path / "r.json"
    command = ["android", "host", str(path), "-o", str(out)]
    assert run([*command, "--provider", "azure", "--profile"]) == 0
    document = judge.judged(read_result(out))
    (row,) = document["cells"]
    assert (row["provider_got"], row["parity"]["passed"]) == ("azure+cpu", True)
    assert row["operators"]
    endpoints = [f["text"] for f in document["validity"]["flags"] if f["kind"] == "endpoint"]
    assert endpoints == ["ran on azure+cpu"]
    out.unlink()
    assert run([*command, "--provider", "qnn"]) != 0
    assert "has no provider qnn; it has azure, cpu" in capfd.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("options", [["--provider", "xnnpack"], ["--profile"]])
def test_a_page_is_given_no_provider_and_no_profile(folder, tmp_path, kvcap, options):
    command = ["android", "adb", str(folder), "-o", str(tmp_path / "r.json"), "--browser"]
    assert "not with --browser: the page offers" in kvcap.refused(*command, *options)


def test_a_changed_graph_ends_the_run(folder, tmp_path):
    path = edited(folder, tmp_path / "plan", lambda plan: None)
    graph = next(path.glob("models/keydiff.score.stateless.fp32*"))
    graph.write_bytes(graph.read_bytes() + b"\x7a\x00")  # a metadata field: it still loads
    done = runner(path, tmp_path / "r.json")
    assert done.returncode == 1
    assert "is not the file that the plan names" in done.stderr
    assert not (tmp_path / "r.json").exists()


def test_an_interrupted_run_leaves_nothing(folder, tmp_path):
    path = edited(folder, tmp_path / "plan", lambda plan: plan["rules"].update(min_seconds=2))
    out = tmp_path / "r.json"
    process = subprocess.Popen(
        [*RUNNER, str(path), str(out), "{}"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr.readline().startswith("[1/")  # the first of many cells is through
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
        process.communicate()
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


# Parity


@pytest.fixture(scope="module")
def outputs(folder):
    """Right inputs and outputs of a cell, to be spoilt."""
    cells = {cell["id"]: cell for cell in read_plan(folder)["cells"]}
    made: dict[str, Any] = {}

    def get(name: str) -> tuple[Any, Any, Any]:
        (match,) = [cell for key, cell in cells.items() if key.startswith(name)]
        if name not in made:
            bound = Bound(match, folder, 1, "cpu")
            bound.run()
            made[name] = bound.given, {k: v.copy() for k, v in bound.results().items()}
        given, by_name = made[name]
        return match, given, {k: v.copy() for k, v in by_name.items()}

    return get


SCORE, MARKED = "keydiff.stateless.score.fp32.n72", "criticalkv.naive.score.fp32.n72"
ANCHOR, STATE, TIES = (
    f"{name}.evict" for name in ("keydiff.running_anchor", "h2o.naive", "snapkv.naive")
)


def swap_slots(outputs):
    """Let the first head keep a slot that it should evict."""
    slots = outputs["kept_slot"]
    gone = sorted(set(range(48)) - set(slots[0, 0].tolist()))
    slots[0, 0, 0] = gone[0]


@pytest.mark.parametrize(
    ("name", "spoil", "fault"),
    [
        *((name, lambda f: None, None) for name in (SCORE, MARKED, ANCHOR, STATE, TIES)),
        (SCORE, lambda f: f["scores"].__iadd__(1e-3), "differs by 0.001"),
        (SCORE, lambda f: f["scores"].__setitem__((0, 0, 5), np.nan), "is not finite"),
        (SCORE, lambda f: f.update(scores=f["scores"][..., :-1]), "is float32 [1, 2, 71]"),
        (SCORE, lambda f: f.update(scores=f["scores"].astype(np.float64)), "is float64"),
        (SCORE, lambda f: f["scores"].__setitem__((0, 0, 0), 2e30), "has 1 marks, expected are 0"),
        (MARKED, lambda f: np.minimum(f["scores"], 1.0, out=f["scores"]), "has 0 marks"),
        (ANCHOR, swap_slots, "wrong slots"),
        (ANCHOR, lambda f: f["kept_anchor"].__iadd__(0.01), "kept_anchor differs"),
        (ANCHOR, lambda f: f["kept_slot"].__setitem__((0, 1, 0), 48), "that are not there"),
        (ANCHOR, lambda f: f["kept_slot"].__setitem__((0, 1, 0), f["kept_slot"][0, 1, 1]),
         "names a slot twice"),
        (ANCHOR, lambda f: f["kept_values"].__setitem__((0, 1, 3, 2), 9), "is not values of"),
        (ANCHOR, lambda f: f["kept_keys"][0, 0].__setitem__(slice(None), f["kept_keys"][0, 0, ::-1]
                                                            .copy()), "is not keys of"),
        (STATE, lambda f: f["kept_accumulated"].__iadd__(1e-3), "kept_accumulated differs"),
    ],
)  # fmt: skip
def test_wrong_outputs_are_caught_and_right_ones_pass(outputs, folder, name, spoil, fault):
    cell, given, outputs_of = outputs(name)
    spoil(outputs_of)
    faults = parity(cell, given, outputs_of, folder)
    assert faults["passed"] == (fault is None)
    assert (fault or "") in faults.get("text", "")


# The device


def test_files_of_cores_come_in_the_order_of_their_numbers_or_not_at_all(tmp_path):
    for core, khz in ((0, "1800"), (2, "2000"), (10, "3000")):
        folder = tmp_path / f"devices/system/cpu/cpu{core}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "cpuinfo_max_freq").write_text(f"{khz}\n")
    contents = device.sysfs("devices/system/cpu/cpu[0-9]*/cpufreq/cpuinfo_max_freq", str(tmp_path))
    assert contents == ["1800", "2000", "3000"]
    (tmp_path / "cpu0/governor").mkdir(parents=True)  # reading it fails
    assert device.sysfs("cpu*/governor", str(tmp_path)) == []


def test_the_fastest_cores_are_chosen(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6, 7})
    monkeypatch.setattr(device, "core_khz", lambda: [1800] * 4 + [2400] * 3 + [2850])
    assert device.big_cores(1) == [7]
    assert device.big_cores(3) == [5, 6, 7]
    assert device.cores_for("4-6,0", 1) == [4, 5, 6, 0]
    assert device.cores_for("none", 1) is None
    monkeypatch.setattr(device, "core_khz", lambda: [])
    assert device.big_cores(1) == [7]


def test_peak_memory_is_the_systems_or_null_with_its_reason(tmp_path, result, clean):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n")
    assert device.peak_memory(status) == {"of": "process", "peak_bytes": 2 << 20, "reason": None}
    clean["memory"] = device.peak_memory(status)
    assert "peak memory of the process 2.10 MB." in table.markdown([judge.judged(clean)])
    clean["memory"] = device.peak_memory(tmp_path / "none")
    assert clean["memory"]["peak_bytes"] is None
    validate(clean, BENCH, "clean", ResultBroken)
    assert f"peak memory unknown: no VmHWM in {tmp_path}" in table.markdown([judge.judged(clean)])
    assert result["memory"]["peak_bytes"] > 10 << 20  # Python and ONNX Runtime themselves


PHONE = {
    "source": "real",
    "source_reason": "said so",
    "model": "Google Pixel 9",
    "soc": "Tensor",
    "abi": "arm64-v8a",
    "cores": 8,
    "android": "16",
}
NOT_REAL = [
    {"source": "host"},
    {"source": "emulated"},
    {"android": None},
    {"android": ""},
    {"model": "Google sdk_gphone64"},
    {"soc": "ranchu"},
    {"abi": "x86_64"},
    {"gpu": "Google SwiftShader"},
    {"user_agent": "Mozilla/5.0 (Linux; Android 16) HeadlessChrome/140"},
    {"user_agent": "Mozilla/5.0 (X11; Linux x86_64) Chrome/140"},
]


def test_a_phone_is_believed():
    assert source.believed(PHONE)[0] == "real"
    agent = "Mozilla/5.0 (Linux; Android 10; K) AppleWebKit/537.36 Chrome/140 Mobile"
    assert source.believed({**PHONE, "user_agent": agent, "abi": "unknown"})[0] == "real"
    apple = {"user_agent": "Mozilla/5.0 (iPhone; CPU iPhone OS 19_0)", "abi": "iPhone"}
    assert source.believed({**PHONE, **apple, "android": None})[0] == "real"


def test_a_device_cannot_write_its_own_title(clean):
    clean["device"]["model"] = "x |\n# Google Pixel 9\n| y"
    clean["run"]["complete"] = False
    text = table.markdown([judge.judged(clean)])
    title = r"HOST, not a phone: x \| # Google Pixel 9 \| y"
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in text.splitlines() if title in line
    ]


@pytest.mark.parametrize("change", NOT_REAL, ids=str)
def test_nothing_else_can_be_titled_as_a_device(clean, change, tmp_path):
    """Title, headings, column and the chart's title, alone and beside a real one."""
    clean["device"] = {**PHONE, **change}
    document = judge.judged(clean)
    tag = re.compile("EMULATED|HOST")
    assert tag.match(source.title(document))
    assert tag.match(table.short(document, "cpu"))
    text = table.markdown([document])
    assert all(tag.search(line) for line in text.splitlines() if line.startswith("#"))
    real = judge.judged({**clean, "device": PHONE})
    assert not tag.search(table.markdown([real]))
    both = table.markdown([real, document])
    assert len([line for line in both.splitlines() if line.startswith("## ")]) == 2
    assert tag.search(both.splitlines()[0])
    claims = clean["device"]["source"] == "real"
    assert claims == any(flag["kind"] == "source" for flag in document["validity"]["flags"])


# Statistics


def test_statistics_of_known_samples():
    rounds = [[4.0, 1.0], [3.0, 2.0], [10.0]]
    figures = statistics(rounds)
    assert figures == {
        "min_us": 1,
        "p50_us": 3,
        "p90_us": pytest.approx(7.6),
        "p95_us": pytest.approx(8.8),
        "p99_us": pytest.approx(9.76),
        "mean_us": 4,
        "std_us": pytest.approx(plain.stdev([4, 1, 3, 2, 10])),
    }
    draws = np.random.default_rng(0).lognormal(3, 1, 999).tolist()
    figures = statistics([draws[:300], draws[300:]])
    assert figures["p50_us"] == pytest.approx(plain.median(draws))
    deciles = plain.quantiles(draws, n=10, method="inclusive")
    assert figures["p90_us"] == pytest.approx(deciles[-1])
    hundredths = plain.quantiles(draws, n=100, method="inclusive")
    assert figures["p95_us"] == pytest.approx(hundredths[94])
    assert figures["p99_us"] == pytest.approx(hundredths[98])
    assert statistics([[5.0]])["std_us"] == 0


@pytest.mark.parametrize(("t0", "slope"), [(100, 2.0), (0, 3.0), (50, 0.001)])
def test_a_line_is_found_again(t0, slope):
    line = judge.fit(list(SIZES), [t0 + slope * n for n in SIZES])
    assert line["t0_us"] == pytest.approx(t0, abs=1e-6)
    assert line["us_per_1024"] == pytest.approx(slope * 1024)
    assert line["worst"] == pytest.approx(0, abs=1e-9)


def test_a_fit_knows_where_there_is_no_line():
    line = judge.fit(list(SIZES), [n**2 / 1000 for n in SIZES])
    assert line["t0_us"] == 0
    assert line["worst"] > table.WORST
    text = table._line(line)
    assert text.startswith("no line")


def test_derived_numbers_of_known_samples(clean):
    document = judge.judged(clean)
    row = next(r for r in document["cells"] if r["id"] == "keydiff.stateless.score.fp32.n72")
    assert row["p50_us"] == pytest.approx(72000 * 0.999)
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["p50_us"] / 1000)
    values = {(v["id"], v["threads"]): v["value"] for v in document["derived"]["relative"]}
    assert values["keydiff.stateless.score.fp32.n72", 1] == pytest.approx(1.8)
    assert values["keydiff.stateless.score.fp32.n40", 2] == pytest.approx(1)
    assert len(document["derived"]["fits"]) == 2 * 2
    for line in document["derived"]["fits"]:
        assert line["us_per_1024"] == pytest.approx(1024 * 999)
        assert line["t0_us"] == pytest.approx(0, abs=1e-6)


# Doubts


def cell(document: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = document["cells"][1]
    return row


def slower(document: dict[str, Any]) -> None:
    for row in document["cells"]:
        row["samples_us"][-1] = [value * 1.2 for value in row["samples_us"][-1]]


def fail(document: dict[str, Any]) -> None:
    row = cell(document)
    for name in ("samples_us", "parity", "load_ms", "runs_per_sample"):
        del row[name]
    row |= {"status": "failed", "reason": "out of memory"}


def skip(document: dict[str, Any]) -> None:
    fail(document)
    cell(document).update(status="skipped", reason="no shader-f16")


FAULTS = {
    "drift": lambda f: f["repeat"].update(
        samples_us=[value * 1.11 for value in f["repeat"]["samples_us"]]
    ),
    "drift, faster": lambda f: f["repeat"].update(
        samples_us=[value * 0.89 for value in f["repeat"]["samples_us"]]
    ),
    "drift, none": lambda f: f.update(repeat=None),
    "throttled": slower,
    "rounds": lambda f: cell(f)["samples_us"].pop(),
    "runs": lambda f: cell(f).update(samples_us=[part[:16] for part in cell(f)["samples_us"]]),
    "runs, short": lambda f: cell(f).update(samples_us=[[5000.0] * 100] * 3),
    "timer": lambda f: f["runtime"].update(timer_us=1000.0),
    "parity": lambda f: cell(f)["parity"].update(passed=False, text="scores differs by 1"),
    "spread": lambda f: cell(f)["samples_us"][1].__setitem__(7, 1000.0 * cell(f)["n"] / 5),
    "endpoint": lambda f: cell(f).update(provider_got="wasm"),
    "failed": fail,
    "skipped": skip,
    "interrupted": lambda f: f["run"].update(
        interrupted=[{"from": f["run"]["started"], "to": f["run"]["finished"],
                      "reason": "screen locked"}]
    ),
    "interrupted, early": lambda f: f["run"].update(complete=False),
    "rules": lambda f: f["rules"].update(min_runs=49),
    "source": lambda f: f["device"].update(source="real"),
}  # fmt: skip


def test_a_clean_run_has_no_flag(clean):
    assert judge.judged(clean)["validity"] == {"ok": True, "flags": []}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_raise_their_flag_and_no_other(clean, fault):
    FAULTS[fault](clean)
    validate(clean, BENCH, "clean", ResultBroken)
    document = judge.judged(clean)
    kind = fault.partition(",")[0]
    assert {flag["kind"] for flag in document["validity"]["flags"]} == {kind}
    assert document["validity"]["ok"] == (kind in ("rules", "skipped"))
    validate(document, BENCH, "judged", ResultBroken)
    assert f"- {kind}: " in table.markdown([document])


def test_results_say_shape_and_rules_as_plans_do():
    plan = schema("kvcap.android_plan/1")["properties"]
    for name in ("shape", "rules"):
        assert schema(BENCH)["properties"][name] == plan[name]


def test_every_kind_of_flag_can_be_raised():
    items = schema(BENCH)["properties"]["validity"]["properties"]["flags"]["items"]
    assert set(items["properties"]["kind"]["enum"]) == {name.partition(",")[0] for name in FAULTS}


def test_a_sample_of_several_runs_counts_them(clean):
    """A coarse clock: 0.1 ms, but each sample is the mean of 100 runs."""
    clean["runtime"]["timer_us"] = 100.0
    for row in clean["cells"]:
        row["samples_us"] = [[900.0] * 20] * 3
        row["runs_per_sample"] = 100
    clean["repeat"]["samples_us"] = [900.0] * 3
    assert judge.judged(clean)["validity"]["ok"]


@pytest.mark.parametrize("name", statistics([[1.0]]))
def test_statistics_that_contradict_the_samples_are_refused(clean, name):
    right = judge.judged(clean)
    assert judge.judged(right) == right  # what is right stays
    right["cells"][2][name] *= 0.9
    with pytest.raises(ResultBroken, match=f"{name} is .* its samples give"):
        judge.judged(right)


def test_a_row_that_is_there_twice_is_refused(clean):
    clean["cells"].append(copy.deepcopy(clean["cells"][0]))
    with pytest.raises(ResultBroken, match="twice"):
        judge.judged(clean)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda f: f["cells"][0].pop("samples_us"), "cells/0: 'samples_us' is a required"),
        (lambda f: f["cells"][0]["samples_us"].clear(), "cells/0/samples_us"),
        (lambda f: f["cells"][0]["samples_us"][0].append(-1), "cells/0/samples_us/0"),
        (lambda f: f["cells"][0].update(status="odd"), "cells/0/status"),
        (lambda f: f["device"].update(source="phone"), "device/source"),
        (lambda f: f["run"].update(started="today"), "run/started"),
        (lambda f: f["runtime"].update(telemetry=True), "runtime/telemetry"),
        (lambda f: f.update(extra=1), "the whole"),
        (lambda f: f.pop("device"), "the whole: 'device' is a required"),
    ],
)
def test_documents_that_break_the_schema_are_refused(clean, tmp_path, change, path):
    change(clean)
    (tmp_path / "r.json").write_text(json.dumps(clean))
    with pytest.raises(ResultBroken, match=re.escape(path)):
        read_result(tmp_path / "r.json")


# Reports


@pytest.fixture
def saved(clean, tmp_path):
    """Return a function that writes results to files."""

    def save(name: str, change: Any = lambda document: None) -> str:
        document = copy.deepcopy(clean)
        change(document)
        write_json(document, tmp_path / name)
        return str(tmp_path / name)

    return save


def faster(factor: float) -> Any:
    def change(document: dict[str, Any]) -> None:
        for row in document["cells"]:
            row["samples_us"] = [[v * factor for v in part] for part in row["samples_us"]]

    return change


def test_a_report_shows_absolute_and_relative_times_and_the_fit(saved, tmp_path, capsys):
    out, picture, rows = tmp_path / "r.md", tmp_path / "r.png", tmp_path / "rows.json"
    code = run(
        argv("android report {} -o {} --plot {} --rows {}", saved("a.json"), out, picture, rows)
    )
    text = capsys.readouterr().out
    assert code == 0
    assert text == out.read_text()
    assert "| keydiff, stateless | 39,960 (36,000–43,128) | 55,944 (50,400–60,379) | " in text
    assert " + 1,022,976 per 1,024 (±0%) |" in text
    assert "| keydiff, stateless | 1.00 | 1.40 | 1.80 |" in text
    assert "20 of 20 cells ran and gave what eager code gives." in text
    (lean,) = json.loads(rows.read_text())["results"]
    assert len(lean["cells"]) == 20
    assert all(row["p50_us"] and "samples_us" not in row for row in lean["cells"])
    import matplotlib.image

    height, width, _ = matplotlib.image.imread(picture).shape
    assert width > 1000
    assert height > 400


def test_devices_stand_side_by_side(saved, capsys):
    phone = saved("phone.json", lambda f: (f.update(device=PHONE), faster(2)(f)))
    assert run(["android", "report", saved("a.json"), phone]) == 0
    text = capsys.readouterr().out
    assert "| cell | threads | HOST " in text
    assert "| Google Pixel 9 (python, cpu) |" in text
    times = "39,960 (36,000–43,128) | 79,920 (72,000–86,256)"
    assert f"| keydiff.stateless.score.fp32.n40 | 1 | {times} |" in text
    assert text.splitlines()[0].startswith("# Latency of eviction scores. HOST, not a phone: ")


def in_page(document: dict[str, Any]) -> None:
    """Make a result one of WebAssembly, twice as slow, and of WebGPU, four times."""
    document["cells"] = [row for row in document["cells"] if row["threads"] == 1]
    slow = copy.deepcopy(document["cells"])
    for rows, provider, factor in ((document["cells"], "wasm", 2), (slow, "webgpu", 4)):
        faster(factor)({"cells": rows})
        for row in rows:
            row |= {"provider_asked": provider, "provider_got": provider}
    document["cells"] += slow
    document["repeat"]["provider_asked"] = "wasm"
    document["run"]["runner"] = "browser"


def test_providers_of_one_cell_stand_side_by_side(saved, capsys):
    """The host computes on cpu, the page by wasm and webgpu: three columns of one row."""
    assert run(["android", "report", saved("a.json"), saved("page.json", in_page)]) == 0
    text = capsys.readouterr().out
    names = "python, cpu", "browser, wasm", "browser, webgpu"
    head = "".join(rf" HOST [^|]*\({name}\) \|" for name in names)
    assert re.search(rf"\| cell \| threads \|{head}", text)
    medians = r"39,960 \([^)]*\) \| 79,920 \([^)]*\) \| 159,840 \([^)]*\)"
    assert re.search(rf"\| keydiff.stateless.score.fp32.n40 \| 1 \| {medians} \|", text)
    assert len(re.findall(r"\| keydiff.stateless.score.fp32.n40 \| 1 \|", text)) == 1


def test_a_report_shows_and_writes_percentiles(saved, tmp_path, capsys):
    table_file = tmp_path / "cells.csv"
    results = saved("a.json"), saved("page.json", in_page)
    code = run(argv("android report {} {} --csv {}", *results, table_file))
    assert code == 0
    assert "| cell | on | threads | p50 | p90 | p95 | p99 |" in capsys.readouterr().out
    with table_file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    assert len(rows) == 40
    assert [row["runner"] for row in rows] == ["python"] * 20 + ["browser"] * 20
    first = rows[0]
    samples = [1000.0 * int(first["n"]) * (0.9 + i / 500) for i in range(100)] * 3
    for share in (50, 90, 95, 99):
        assert float(first[f"p{share}_us"]) == pytest.approx(np.percentile(samples, share))


def test_texts_of_a_table_are_quoted_and_computed_by_no_spreadsheet():
    rows = [{"id": 'a "b", c', "n": 3, "status": "failed"}, {"id": "=1+1", "p50_us": 2.5}]
    text = csv_text([{"run": {"runner": "c"}, "cells": rows}], ["runner", "id", "n", "p50_us"])
    assert text == '"runner","id","n","p50_us"\n"c","a ""b"", c",3,\n"c","\'=1+1",,2.5\n'


def test_a_report_as_json(saved, kvcap):
    report = kvcap.document("android", "report", saved("a.json"))
    assert report["title"].startswith("Latency of eviction scores. HOST, not a phone: ")
    (document,) = report["results"]
    validate(document, BENCH, "said", ResultBroken)
    assert document["validity"]["ok"]
    assert report["regressions"] == []


def test_a_report_is_relative_to_what_was_asked(saved, capsys, kvcap):
    name = "keydiff.stateless.score.fp32.n72"
    assert run(["android", "report", saved("a.json"), "--relative-to", name]) == 0
    assert "| keydiff, stateless | 0.56 | 0.78 | 1.00 |" in capsys.readouterr().out
    assert "no cell 'other'" in kvcap.refused(
        "android", "report", saved("a.json"), "--relative-to", "other"
    )


def test_a_baseline_catches_what_became_slower(saved, capsys):
    before = saved("before.json")
    same = ["android", "report", saved("same.json", faster(1.09)), "--baseline", before]
    assert run(same) == 0
    assert "no cell is slower than before by more than 10%" in capsys.readouterr().out
    assert run([*same, "--max-regress", "5%"]) == 1
    worse = saved("worse.json", lambda f: faster(1.2)({"cells": f["cells"][3:4]}))
    capsys.readouterr()
    assert run(["android", "report", worse, "--baseline", before, "--max-regress", "10%"]) == 1
    printed = capsys.readouterr()
    name = json.loads(Path(worse).read_text())["cells"][3]["id"]
    assert f"- slower: {name} (cpu, 1): " in printed.out
    assert "+20%" in printed.out
    assert f"1 cells became slower by more than 10%: {name}" in printed.err
    gone = saved("gone.json", fail)
    assert run(["android", "report", gone, "--baseline", before]) == 1
    assert "ran before and does no more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["device"].update(model="other"), "device has model 'other'"),
        (lambda f: f["device"].update(source="emulated"), "device has source 'emulated'"),
        (lambda f: f["shape"].update(head_dim=64), "another shape"),
        (lambda f: [row.update(id=row["id"] + "x") for row in f["cells"]], "no cell in common"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(clean, change, message):
    other = copy.deepcopy(clean)
    change(other)
    other["repeat"] = None
    with pytest.raises(NotComparable, match=re.escape(message)):
        regress.regressions(judge.judged(clean), judge.judged(other), 0.1)


@pytest.mark.parametrize("text", ["ten", "-5%", "nan", "inf%", "", "5%"])
def test_a_wrong_percentage_or_one_alone_is_refused(saved, text, kvcap):
    says = "give it as --baseline" if text == "5%" else "use a percentage such as 10%"
    assert says in kvcap.refused("android", "report", saved("a.json"), "--max-regress", text)


# Documents


def test_formulations_have_one_name_in_code_and_documents(folder):
    assert forms_of(load_policy("keydiff")).keys() == FORMULATIONS.keys()
    plan = read_plan(folder)
    used = {cell["formulation"] for cell in plan["cells"]}
    assert plan["formulations"] == {name: FORMULATIONS[name] for name in sorted(used)}
    for page in ("export.md", "android-results.md"):
        text = (ROOT / "docs" / page).read_text()
        assert all(f"`{name}`" in text for name in FORMULATIONS)
    assert set(FORMULATIONS) == set(chart.FORMS)


def test_the_page_names_presets_flags_and_fields():
    page = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("android*.md")))
    for name in PRESETS:
        assert f"`{name}`" in page
    items = schema(BENCH)["properties"]["validity"]["properties"]["flags"]["items"]
    for name in items["properties"]["kind"]["enum"]:
        assert f"`{name}`" in page, f"docs/android-results.md lacks the flag {name}"
    for document in (schema(BENCH), schema("kvcap.android_plan/1")):
        for name in (*document["properties"], *document["$defs"]["cell"]["properties"]):
            assert f"`{name}`" in page, f"docs/android-files.md does not say what {name} is"
