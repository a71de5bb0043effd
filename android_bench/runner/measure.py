"""Times every cell in rounds of random order, by the plan's rules, and collects raw samples."""

from __future__ import annotations

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # onnxruntime reads it when it is imported

import gc
import hashlib
import importlib
import json
import math
import random
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

import numpy as np

from kvcap.android_bench.runner import decoder
from kvcap.android_bench.runner.device import Refused, conditions, cores_for, device, peak_memory
from kvcap.android_bench.runner.inputs import DTYPES, Array, Cell, hash11, inputs_of
from kvcap.android_bench.runner.parity import parity
from kvcap.android_bench.runner.statistics import percentiles_line, statistics

VERSION = "1"
BENCH = "kvcap.android_bench/1"
TRACE_WARM, TRACE_RUNS = 5, 20  # runs of a profile: to warm up, and counted


def library() -> ModuleType:
    """Import ONNX Runtime, and return it.

    Raises:
        Refused: ONNX Runtime is not installed.
    """
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise Refused("the package onnxruntime is not installed for this Python") from error


def short_name(provider: str) -> str:
    """Return the short name of a provider, such as 'cpu' for `CPUExecutionProvider`."""
    return provider.removesuffix("ExecutionProvider").lower()


def provider_named(name: str) -> str:
    """Return ONNX Runtime's own name of a provider.

    Raises:
        Refused: this ONNX Runtime has no such provider; the message lists those that it has.
    """
    providers = {short_name(full): full for full in library().get_available_providers()}
    if name not in providers:
        raise Refused(f"this ONNX Runtime has no provider {name}; it has {', '.join(providers)}")
    return str(providers[name])


def timer_us() -> float:
    """Return the smallest observed step of the clock, in microseconds."""
    steps = []
    for _ in range(200):
        start = now = time.perf_counter_ns()
        while now == start:
            now = time.perf_counter_ns()
        steps.append(now - start)
    return min(steps) / 1000


class Bound:
    """A cell that is ready to run: session, inputs and preallocated outputs.

    Args:
        cell: a cell of the plan.
        folder: the plan's folder.
        threads: threads of one operation.
        provider: the execution provider. Only if it cannot run the whole graph, the CPU runs the
            rest, and `self.provider` ends in '+cpu'.
        trace: prefix of the profiler's file; None runs no profiler.
    """

    def __init__(
        self, cell: Cell, folder: Path, threads: int, provider: str, trace: Path | None = None
    ) -> None:
        onnxruntime = library()
        model = (folder / cell["model"]).read_bytes()
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.provider = provider
        if provider == "cpu" or trace is not None:
            self._open(model, threads, provider, trace, alone=False)
        else:
            try:
                self._open(model, threads, provider, None, alone=True)
            except Exception:  # ONNX Runtime's own classes have no common base
                self._open(model, threads, provider, None, alone=False)
                self.provider += "+cpu"
        self.given = inputs_of(cell, folder)
        self.binding = self.session.io_binding()
        for name, array in self.given.items():
            self.binding.bind_cpu_input(name, array)
        self.outputs = {
            port["name"]: onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                port["shape"], DTYPES[port["dtype"]], "cpu", 0
            )
            for port in cell["outputs"]
        }
        for name, value in self.outputs.items():
            self.binding.bind_ortvalue_output(name, value)

    def _open(
        self, model: bytes, threads: int, provider: str, trace: Path | None, alone: bool
    ) -> None:
        onnxruntime = library()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4
        own = {}
        if alone:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if provider == "xnnpack":
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            own["intra_op_num_threads"] = str(threads)
        if provider == "qnn":
            own["backend_path"] = "libQnnHtp.so"
        if trace is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(trace)
        start = time.perf_counter()
        self.session = onnxruntime.InferenceSession(
            model, options, [(provider_named(provider), own)], enable_fallback=0
        )
        self.load_ms = (time.perf_counter() - start) * 1000

    def run(self) -> None:
        """Run the graph once."""
        self.session.run_with_iobinding(self.binding)

    def results(self) -> dict[str, Array]:
        """Return the outputs of the last run."""
        return {name: value.numpy() for name, value in self.outputs.items()}


def operators(bound: Bound) -> list[Cell]:
    """Run a traced cell; return each operator's mean count and microseconds per run."""
    for _ in range(TRACE_WARM + TRACE_RUNS):
        bound.run()
    events = json.loads(Path(bound.session.end_profiling()).read_text(encoding="utf-8"))
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0])
    ended = 0  # runs; the trace has a run's nodes before its `model_run`
    for event in events:
        if event["name"] == "model_run":
            ended += 1
        elif event["cat"] == "Node" and "_kernel_time" in event["name"] and ended >= TRACE_WARM:
            entry = sums[event["args"]["op_name"], short_name(event["args"]["provider"])]
            entry[0] += 1
            entry[1] += event["dur"]
    assert ended == TRACE_WARM + TRACE_RUNS
    return [
        {"operator": name, "provider": provider, "count": count / TRACE_RUNS, "us": us / TRACE_RUNS}
        for (name, provider), (count, us) in sums.items()
    ]


def visit(run: Callable[[], None], rules: Cell) -> list[float]:
    """Warm up; return one round's samples in microseconds."""
    _timed(run, rules["warmup_runs"], rules["warmup_seconds"])
    rounds = rules["rounds"]
    return _timed(run, math.ceil(rules["min_runs"] / rounds), rules["min_seconds"] / rounds)


def _timed(run: Callable[[], None], runs: int, seconds: float) -> list[float]:
    """Return samples in microseconds: at least `runs`, that last at least `seconds` together."""
    samples: list[float] = []
    clock, left = time.perf_counter_ns, seconds * 1e9
    gc.disable()
    try:
        while len(samples) < runs or left > 0:
            start = clock()
            run()
            took = max(clock() - start, 1)
            left -= took
            samples.append(took / 1000)
    finally:
        gc.enable()
    return samples


@dataclass(frozen=True)
class RunOptions:
    """A set of options of a run on this machine."""

    cores: str = "auto"  # the fastest; none: any; or such as 7 or 4-7
    provider: str = "cpu"  # or xnnpack, nnapi, qnn or another one of this ONNX Runtime
    profile: bool = False  # adds the time of each cell's operators
    threads: Sequence[int] = ()  # the plan's where there are none


def measured(folder: Path, options: RunOptions) -> Cell:
    """Measure the plan in a folder, which was checked; return the whole result.

    Raises:
        Refused: an option cannot be had here, or inputs would be made by other rules.
    """
    plan: Cell = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    check = plan["generator"]["check"]
    if hash11(1, len(check)).tolist() != check:
        raise Refused("plan.json: inputs would not be those of the plan's generator")
    cores_for(options.cores, 1)
    return PlanRun(plan, folder, options).document()


class PlanRun:
    """A run of a plan, which fills the rows of cells and baselines round by round."""

    def __init__(self, plan: Cell, folder: Path, arguments: RunOptions) -> None:
        self.plan, self.folder, self.rules = plan, folder, plan["rules"]
        self.provider, self.cores = arguments.provider, arguments.cores
        provider_named(self.provider)
        self.profiled: bool = arguments.profile
        self.threads = arguments.threads or plan["threads"]
        self.sha256 = {entry["file"]: entry["sha256"] for entry in plan["files"]}
        self.rows = [self._row(cell, count) for count in self.threads for cell in plan["cells"]]
        self.baselines = [
            {**entry, "threads": 1, "runs_per_sample": 1, "samples_us": []}
            for entry in plan["baselines"]
        ]
        self.cells = {cell["id"]: cell for cell in plan["cells"]}
        self.first: Cell | None = None
        self.everywhere = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def _row(self, cell: Cell, threads: int) -> Cell:
        same = (
            "id",
            "policy",
            "formulation",
            "dtype",
            "stage",
            "n",
            "queries",
            "budget",
            "opset",
            "bytes",
        )
        return {
            **{key: cell[key] for key in same},
            "model_sha256": self.sha256[cell["model"]],
            "threads": threads,
            "provider_asked": self.provider,
            "provider_got": None,
            "status": "ok",
            "reason": None,
            "runs_per_sample": 1,
            "samples_us": [],
        }

    def measure(self) -> Cell | None:
        """Measure all cells in rounds of random order.

        Returns:
            Another visit to the first cell at the end, which shows drift; None without cells.
        """
        order: list[tuple[Cell, bool]] = [(row, True) for row in self.rows]
        order += [(row, False) for row in self.baselines]
        shuffle, done = random.Random(self.rules["seed"]), 0
        total = self.rules["rounds"] * len(order)
        for _ in range(self.rules["rounds"]):
            shuffle.shuffle(order)
            for row, is_cell in order:
                done += 1
                if row.get("status", "ok") == "ok":
                    (self._cell if is_cell else self._baseline)(row)
                progress = f"{row['id']} ({row['threads']}) {_last(row)}"
                print(f"[{done}/{total}] {progress}", file=sys.stderr, flush=True)
        if self.first is None or self.first["status"] != "ok":
            return None
        again = {**self.first, "samples_us": []}
        self._cell(again)
        if again["status"] != "ok":
            return None
        same = ("id", "threads", "provider_asked", "runs_per_sample")
        return {**{key: again[key] for key in same}, "samples_us": again["samples_us"][0]}

    def _cell(self, row: Cell) -> None:
        """Measure a cell in one round; a cell that fails stays failed, and the run goes on."""
        cell = self.cells[row["id"]]
        try:
            if lack := self._pin(row["threads"]):
                return _without_samples(row, "skipped", lack)
            bound = Bound(cell, self.folder, row["threads"], self.provider)
            if bound.sha256 != row["model_sha256"]:
                raise Refused(f"{cell['model']} is not the file that the plan names")
            bound.run()
            if "parity" not in row:
                row["parity"] = parity(cell, bound.given, bound.results(), self.folder)
                row["load_ms"], row["provider_got"] = bound.load_ms, bound.provider
            row["samples_us"].append(visit(bound.run, self.rules))
            self.first = self.first or row
        except Refused:
            raise
        except Exception as error:  # ONNX Runtime's own classes have no common base
            lines = str(error).strip().splitlines() or [""]
            _without_samples(row, "failed", f"{type(error).__name__}: {lines[0][:300]}")

    def _baseline(self, row: Cell) -> None:
        """Measure a copy of memory in one round."""
        self._pin(1)
        source = np.ones(row["bytes"], dtype=np.uint8)
        target = np.empty_like(source)
        row["samples_us"].append(visit(lambda: np.copyto(target, source), self.rules))

    def profile(self) -> None:
        """Add each measured cell's operators to its row, from runs of their own."""
        for row in self.rows:
            if row["status"] != "ok":
                continue
            self._pin(row["threads"])
            with tempfile.TemporaryDirectory(prefix="kvcap-") as name:
                cell = self.cells[row["id"]]
                trace = Path(name) / "trace"
                bound = Bound(cell, self.folder, row["threads"], self.provider, trace)
                row["operators"] = operators(bound)

    def decoders(self) -> list[Cell]:
        """Measure the plan's decoder, if any; return a row for each number of threads."""
        if "decoder" not in self.plan:
            return []
        measured = []
        for threads in self.threads:
            row = decoder.row_of(self.plan, threads, self.provider)
            measured.append(row)
            print(f"{row['id']} ({threads})", file=sys.stderr, flush=True)
            self._decoder(row)
        return measured

    def _decoder(self, row: Cell) -> None:
        """Measure all rounds of one decoder; if it fails, the run goes on."""
        settings = self.plan["decoder"]
        try:
            if self.provider != "cpu":
                return _without_samples(row, "skipped", "a decoder runs on the provider cpu only")
            if lack := self._pin(row["threads"]):
                return _without_samples(row, "skipped", lack)
            start = time.perf_counter()
            manifest = self.folder / settings["manifest"]
            loaded = decoder.loaded(manifest, settings["evict_every"], row["threads"])
            row["load_ms"] = (time.perf_counter() - start) * 1000
            row["parity"] = decoder.checked(loaded, settings["check"], self.folder)
            row |= decoder.measured(loaded, settings, self.rules["rounds"])
            row |= {"held_bytes": loaded.nbytes, "provider_got": "cpu"}
        except Exception as error:  # ONNX Runtime's own classes have no common base
            lines = str(error).strip().splitlines() or [""]
            _without_samples(row, "failed", f"{type(error).__name__}: {lines[0][:300]}")

    def _pin(self, threads: int) -> str | None:
        """Pin this process, and threads that it starts from now on, to cores.

        Returns:
            A reason if there are too few cores for so many threads, else None.
        """
        if self.everywhere is None:
            return None
        os.sched_setaffinity(0, self.everywhere)  # so that big_cores chooses among all cores again
        cores = cores_for(self.cores, threads)
        if cores is not None:
            os.sched_setaffinity(0, cores)
        count = len(os.sched_getaffinity(0))
        return (
            f"{threads} threads need as many cores, here are {count}" if count < threads else None
        )

    def document(self) -> Cell:
        """Measure everything; return the whole result."""
        started, before, step = _now(), conditions(), timer_us()
        repeat = self.measure()
        if self.profiled:
            self.profile()
        decoders = self.decoders()
        for row in (*self.rows, *self.baselines):
            if row.get("samples_us"):
                row |= statistics(row["samples_us"])
        for row in self.rows:
            if row["status"] == "ok":
                print(percentiles_line(row), file=sys.stderr)
        pinned = self.everywhere and cores_for(self.cores, max(self.threads))
        return {
            "schema": BENCH,
            "run": {
                "id": str(uuid.uuid4()),
                "plan": self.plan["id"],
                "preset": self.plan["preset"],
                "reference": self.plan["reference"],
                "started": started,
                "finished": _now(),
                "runner": "python",
                "runner_version": VERSION,
                "seed": self.rules["seed"],
                "complete": True,
                "interrupted": [],
            },
            "device": device(),
            "runtime": {
                "name": "onnxruntime",
                "version": library().__version__,
                "timer_us": step,
                "telemetry": False,
                "arena": True,
                "cores": pinned,
            },
            "conditions": {"before": before, "after": conditions()},
            "memory": peak_memory(),
            "shape": self.plan["shape"],
            "rules": self.rules,
            "cells": self.rows,
            "baselines": self.baselines,
            "repeat": repeat,
            **({"decoders": decoders} if decoders else {}),
        }


def _without_samples(row: Cell, status: str, reason: str) -> None:
    """Mark a row as not measured, and drop the samples that it has."""
    row["status"] = status
    row["reason"] = "".join(letter if letter.isprintable() else "?" for letter in reason)
    for key in (
        "samples_us",
        "runs_per_sample",
        "parity",
        "load_ms",
        "first_ms",
        "token_us",
        "long_ms",
        "sustained",
    ):
        row.pop(key, None)


def _last(row: Cell) -> str:
    """Return the last round's median as text, for the line of progress."""
    samples = row.get("samples_us")
    return f"{sorted(samples[-1])[len(samples[-1]) // 2]:,.1f} µs" if samples else row["reason"]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
