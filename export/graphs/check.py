"""Checks in ONNX Runtime that a graph computes what its policy does, on fresh inputs.

Scores may differ from the policy's eager code by a multiple of eager's own error to float64. Kept
slots must be the same but for ties: scores that are nearer to each other than that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcap.dtypes import ONNX
from kvcap.export.graphs import compare, manifest
from kvcap.export.graphs.cases import Case, cases, inputs
from kvcap.export.graphs.spec import Spec
from kvcap.export.graphs.stages import StageGraph
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.errors import (
    ManifestError,
    ShapeError,
    ToleranceError,
)

SEED = 20  # seed of the inputs to check with; those that traced the graph have another


@dataclass(frozen=True)
class CheckedCase:
    """The result of comparing a graph with the policy's own code on one case."""

    kind: str
    slots: int
    error: float  # largest difference from eager
    allowed: float
    overlap: float  # share of the slots kept in float64 that are kept here
    misses: int  # slots kept or evicted wrongly; ties do not count
    finite: bool
    ok: bool


@dataclass(frozen=True)
class GraphReport:
    """A report on all cases of one graph."""

    file: str
    rows: list[CheckedCase]
    runtime: str  # ONNX Runtime's version

    @property
    def ok(self) -> bool:
        """Return whether every case is right."""
        return all(row.ok for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "file": self.file,
            "onnxruntime": self.runtime,
            "ok": self.ok,
            "cases": [asdict(row) for row in self.rows],
        }

    def table(self) -> str:
        """Return a table for a terminal."""
        lines = [f"{self.file}  (ONNX Runtime {self.runtime}, CPU)"]
        lines.append(f"  {'inputs':<10} {'slots':>6} {'error':>9} {'allowed':>9} {'kept':>7}  ")
        for row in self.rows:
            verdict = "ok" if row.ok else "FAILED" if row.finite else "NOT FINITE"
            lines.append(
                f"  {row.kind:<10} {row.slots:>6} {row.error:>9.1e} {row.allowed:>9.1e} "
                f"{row.overlap:>7.2%}  {verdict}"
            )
        return "\n".join(lines)

    def require(self) -> None:
        """Raise if the graph failed.

        Raises:
            ToleranceError: naming the first case that failed.
        """
        for row in sorted(self.rows, key=lambda row: row.finite):
            if not row.ok:
                why = (
                    "is not finite"
                    if not row.finite
                    else f"differs by {row.error:.2g}, allowed are {row.allowed:.2g}"
                    if row.error > row.allowed
                    else f"keeps {row.misses} other slots, {row.overlap:.1%} as float64"
                )
                raise ToleranceError(f"{self.file} {why} on {row.kind} inputs of {row.slots} slots")


def check(file: Path, facts: dict[str, Any], quick: bool = False) -> GraphReport:
    """Run one graph on every case and compare it with the policy's own code.

    Args:
        file: the graph.
        facts: its manifest.
        quick: leave the long case out.

    Raises:
        GraphBroken: ONNX Runtime cannot load the graph.
        ManifestError: the manifest describes no known policy or graph.
        ShapeError: its inputs or outputs are not those of the manifest.
    """
    spec = manifest.spec_of(facts)
    run = session(file)
    signature(run, facts)
    graph = spec.graph()
    with torch.inference_mode():
        rows = [_row(run, spec, graph, case) for case in cases(graph, quick)]
    return GraphReport(file.name, rows, library("onnxruntime").__version__)


def session(file: Path) -> Any:
    """Make an ONNX Runtime session on one thread.

    Raises:
        GraphBroken: the file cannot be loaded.
    """
    return Graph(file, threads=1).session


def signature(run: Any, facts: dict[str, Any]) -> None:
    """Check that a session's inputs and outputs are those that its manifest lists.

    Raises:
        ManifestError: the manifest's inputs or outputs cannot be read.
        ShapeError: naming the first difference.
    """
    for kind, real in (("inputs", run.get_inputs()), ("outputs", run.get_outputs())):
        try:
            expected = [
                (p["name"], ONNX[p["dtype"]], [a["size"] for a in p["axes"]]) for p in facts[kind]
            ]
        except (KeyError, TypeError) as error:
            raise ManifestError(f"the manifest's {kind} cannot be read: {error}") from error
        actual = [(p.name, p.type, list(p.shape)) for p in real]
        for want, port in zip(expected, actual, strict=False):
            if want != port:
                raise ShapeError(f"the manifest's {kind} say {want}, the graph has {port}")
        if len(expected) != len(actual):
            raise ShapeError(f"the manifest has {len(expected)} {kind}, the graph {len(actual)}")


def feed(run: Any, feeds: dict[str, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Run the session on the inputs that it has; return its outputs by name.

    Raises:
        ShapeError: ONNX Runtime refuses the inputs.
    """
    names = [port.name for port in run.get_inputs()]
    outputs = [port.name for port in run.get_outputs()]
    try:
        results = run.run(outputs, {name: feeds[name].numpy() for name in names})
    except Exception as error:  # ONNX Runtime's classes have no common base
        raise ShapeError(f"ONNX Runtime refuses the inputs: {str(error)[:300]}") from error
    return dict(zip(outputs, results, strict=True))


def _row(run: Any, spec: Spec, graph: StageGraph, case: Case) -> CheckedCase:
    feeds = inputs(graph, case, spec.torch_dtype, SEED)
    outputs = {name: torch.from_numpy(array) for name, array in feed(run, feeds).items()}
    return CheckedCase(case.kind, case.slots, *compare.compared(graph, feeds, outputs))
