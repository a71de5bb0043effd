"""The C runner by itself: what it refuses, what it sees, how it is built for a phone."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make import ran
from tools import ROOT, TOOLS, compilers, installed, runner_here, small_plan

from kvcap.android_bench.documents import read_result
from kvcap.android_bench.results.judge import judged
from kvcap.android_bench.runner.measure import RunOptions, measured
from kvcap.android_bench.runner.statistics import (
    COLUMNS,
    csv_text,
    percentiles_line,
    statistics,
)

pytestmark = [installed, compilers]


@pytest.mark.slow
def test_the_build_for_a_phone_takes_onnxruntime_for_android_by_its_checksum(tmp_path):
    """All that the NDK's toolchain file adds is said by hand; the archives are local."""
    header = TOOLS / "source" / "onnxruntime_c_api.h"
    with zipfile.ZipFile(tmp_path / "ort.aar", "w") as archive:
        archive.write(header, "headers/onnxruntime_c_api.h")
        archive.writestr("jni/arm64-v8a/libonnxruntime.so", b"the library")
    sha256 = hashlib.sha256((tmp_path / "ort.aar").read_bytes()).hexdigest()

    def configured(folder: str, checksum: str) -> subprocess.CompletedProcess[str]:
        return ran(
            [
                "cmake",
                "-S",
                ROOT / "android_bench" / "c_runner",
                "-B",
                tmp_path / folder,
                "-DANDROID_ABI=arm64-v8a",
                "-DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc",
                "-DCMAKE_SYSTEM_NAME=Linux",
                f"-DCJSON={TOOLS / 'source' / 'cjson'}",
                f"-DORT_AAR=file://{tmp_path / 'ort.aar'}",
                f"-DORT_AAR_SHA256={checksum}",
            ]
        )

    assert configured("good", sha256).returncode == 0
    assert ran(["cmake", "--build", tmp_path / "good"]).returncode == 0
    assert (tmp_path / "good" / "kvcap-bench").is_file()
    assert (tmp_path / "good" / "libonnxruntime.so").read_bytes() == b"the library"
    wrong = configured("wrong", "0" * 64)
    assert wrong.returncode != 0
    assert "hash" in wrong.stderr.lower()


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return small_plan(tmp_path_factory)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return runner_here(tmp_path_factory)


@pytest.fixture
def bench(here, plan, tmp_path):
    """Run it on a copy of the plan, which a test may break before."""
    copy = shutil.copytree(plan, tmp_path / "copy")

    def call(*options: str, **more: Any) -> subprocess.CompletedProcess[str]:
        out = ["-o", str(tmp_path / "r.json"), "--lib", str(here / "libonnxruntime.so")]
        return ran([here / "kvcap-bench", copy / "plan.json", *out, *options], **more)

    call.folder, call.out = copy, tmp_path / "r.json"
    return call


def changed(folder: Path, change) -> None:
    document = json.loads((folder / "plan.json").read_text())
    change(document)
    (folder / "plan.json").write_text(json.dumps(document))


def test_the_c_runner_refuses_wrong_input(bench):
    for options in (
        ["--threads", "0"],
        ["--cores", "1,x"],
        ["--cores", "900"],
        ["--what"],
        ["-o", "/no/such/folder/r.json"],
        ["--csv", "/no/such/folder/r.csv"],
    ):
        done = bench(*options)
        assert done.returncode == 2, done.stderr
        assert "kvcap-bench" in done.stderr
    assert bench("--lib", "/none.so").returncode == 1
    for change in (
        lambda plan: plan.update(schema="kvcap.android_plan/2"),
        lambda plan: plan["generator"]["check"].insert(0, 1),
        lambda plan: plan["rules"].pop("rounds"),
        lambda plan: plan["cells"][0]["inputs"][0].update(dtype="int4"),
    ):
        before = (bench.folder / "plan.json").read_text()
        changed(bench.folder, change)
        assert bench().returncode == 2
        (bench.folder / "plan.json").write_text(before)
    assert not bench.out.exists()


@pytest.mark.parametrize("kind", ["values", "slots", "rows", "by_slot"])
def test_the_c_runner_sees_wrong_outputs(kind, bench):
    """Expected values off by a little, slots exchanged, rows of another input: parity fails."""

    def spoil(plan: dict) -> None:
        for cell in plan["cells"]:
            for port in cell["outputs"]:
                if port["check"]["kind"] != kind:
                    continue
                if kind == "rows":
                    other = {"keys": "values", "values": "keys"}
                    port["check"]["of"] = other.get(port["check"]["of"], port["check"]["of"])
                    continue
                file = bench.folder / port["check"]["file"]
                raw = file.read_bytes()
                if kind == "slots":
                    file.write_bytes(bytes(2 - mark for mark in raw))
                else:  # every number, as some belong to slots that go
                    file.write_bytes((np.frombuffer(raw, "<f4") + 0.01).tobytes())

    changed(bench.folder, spoil)
    assert bench().returncode == 0
    cells = json.loads(bench.out.read_text())["cells"]
    wrong = {cell["stage"] for cell in cells if not cell["parity"]["passed"]}
    assert wrong == ({"score"} if kind == "values" else {"evict"})
    assert all(cell["parity"].get("text") for cell in cells if not cell["parity"]["passed"])


def test_a_cell_that_fails_does_not_stop_the_others(bench):
    plan = json.loads((bench.folder / "plan.json").read_text())
    model = plan["cells"][0]["model"]
    (bench.folder / model).write_bytes(b"no graph")
    expected = plan["cells"][1]["outputs"][0]["check"]["file"]
    (bench.folder / expected).unlink()
    assert bench().returncode == 0
    cells = read_result(bench.out)["cells"]
    failed = [cell for cell in cells if cell["status"] == "failed"]
    assert {cell["id"] for cell in failed} >= {plan["cells"][0]["id"], plan["cells"][1]["id"]}
    assert all(cell["reason"] and "samples_us" not in cell for cell in failed)
    assert any(cell["status"] == "ok" for cell in cells)
    for cell in plan["cells"]:
        (bench.folder / cell["model"]).write_bytes(b"no graph")
    assert bench().returncode == 1  # and a result that says why
    assert {cell["status"] for cell in read_result(bench.out)["cells"]} == {"failed"}
    assert read_result(bench.out)["repeat"] is None


def test_percentiles_and_the_table_are_those_of_the_samples(bench):
    """The C runner computes the percentiles that Python does, and writes the same table."""
    table = bench.out.with_suffix(".csv")
    done = bench("--csv", str(table))
    assert done.returncode == 0, done.stderr
    result = read_result(bench.out)
    for row in (*result["cells"], *result["baselines"]):
        expected = statistics(row["samples_us"])
        for name in ("min_us", "p50_us", "p90_us", "p95_us", "p99_us"):
            assert row[name] == pytest.approx(expected[name])
    percentiles = [line for line in done.stderr.splitlines() if ": p50 " in line]
    assert percentiles == [percentiles_line(row) for row in result["cells"]]
    lines = [
        list(csv.reader(text.splitlines()))
        for text in (table.read_text(), csv_text([result], COLUMNS))
    ]
    assert lines[0] == lines[1]


def test_a_provider_that_the_library_lacks_is_refused(bench):
    for name in ("xnnpack", "nnapi", "qnn", "XNNPACK"):
        done = bench("--provider", name)
        assert done.returncode == 2
        assert f"has no provider {name}; it has azure, cpu" in done.stderr
    assert not bench.out.exists()


def test_help_of_the_cpu_is_told(bench):
    """Azure's provider, which PyPI's ONNX Runtime has, can run no node of these graphs."""
    assert bench("--provider", "azure").returncode == 0
    document = judged(read_result(bench.out))
    providers = {(row["provider_asked"], row["provider_got"]) for row in document["cells"]}
    assert providers == {("azure", "azure+cpu")}
    assert all(row["parity"]["passed"] for row in document["cells"])
    kinds = [flag["kind"] for flag in document["validity"]["flags"]]
    assert kinds.count("endpoint") == len(document["cells"])


def test_providers_are_asked_for_as_onnxruntime_wants_them(bench, here, tmp_path):
    """A library between claims three more, writes down what is asked for, and gives the CPU."""
    between = tmp_path / "between.so"
    options = [
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        f"-I{TOOLS / 'source'}",
        f'-DREAL="{here / "libonnxruntime.so"}"',
        "-o",
        str(between),
    ]
    subprocess.run(["gcc", *options, str(ROOT / "tests" / "providers.c"), "-ldl"], check=True)
    log = tmp_path / "log"
    own = {
        "xnnpack": "XNNPACK intra_op_num_threads=1",
        "nnapi": "NNAPI 0",
        "qnn": "QNN backend_path=libQnnHtp.so",
    }
    for name, expected in own.items():
        log.write_text("")
        done = bench("--provider", name, "--lib", str(between), env={"LOG": str(log)})
        assert done.returncode == 0, done.stderr
        lines = log.read_text().splitlines()
        assert set(lines) >= {expected, "session.disable_cpu_ep_fallback=1"}
        assert lines.count(expected) >= len(read_result(bench.out)["cells"])
        assert ("session.intra_op.allow_spinning=0" in lines) == (name == "xnnpack")
        assert {row["provider_got"] for row in read_result(bench.out)["cells"]} == {f"{name}+cpu"}


def test_a_profile_names_the_operators_that_python_names(bench, tmp_path):
    assert bench("--profile").returncode == 0
    mine = {row["id"]: row["operators"] for row in read_result(bench.out)["cells"]}
    theirs = measured(bench.folder, RunOptions(cores="none", profile=True))["cells"]
    for row in theirs:
        counts = [
            {(one["operator"], one["provider"]): one["count"] for one in operators}
            for operators in (mine[row["id"]], row["operators"])
        ]
        assert counts[0] == pytest.approx(counts[1])
        assert counts[0]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["copy", "r.json"], "no trace is left"


def test_peak_memory_is_what_the_run_needed(bench):
    """A copy of 64 MB raises the peak by both its ends; ONNX Runtime takes some, too."""
    changed(bench.folder, lambda plan: plan["baselines"][0].update(bytes=64_000_000))
    assert bench().returncode == 0
    memory = read_result(bench.out)["memory"]
    assert (memory["of"], memory["reason"]) == ("process", None)
    assert 128_000_000 < memory["peak_bytes"] < 1_000_000_000


def test_short_runs_are_sampled_together(bench):
    """A copy of 3 KB takes two steps of the clock, so a sample is the mean of several."""
    changed(bench.folder, lambda plan: plan["rules"].update(max_timer_share=0.005))
    assert bench().returncode == 0
    result = read_result(bench.out)
    (copy,) = result["baselines"]
    assert copy["runs_per_sample"] > 1
    assert all(min(part) > 0 for part in copy["samples_us"])
