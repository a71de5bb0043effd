"""Checks that evictor graphs compute the same as the modules that they are traced from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvcap.export.adopted.evictor import GONE, AdoptedEvictionGraph, example
from kvcap.export.graphs.check import feed
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.errors import ToleranceError

# Each case: slots held, tokens that arrive, slots that stay.
CASES = ((0, 5, 5), (0, 1, 1), (20, 7, 27), (64, 1, 64), (64, 16, 64), (1, 1, 1), (64, 9, 40))
CLOSE = {torch.float32: 1e-5, torch.float16: 1e-2}


@dataclass(frozen=True)
class CheckedGraph:
    """A checked graph's largest error, with the output and the case that it occurs in."""

    file: str
    output: str
    slots: int  # slots per KV head before the eviction
    error: float  # infinite if the output is not finite or has another shape
    allowed: float

    @property
    def ok(self) -> bool:
        """Return whether the error is allowed."""
        return self.error <= self.allowed

    def require(self) -> None:
        """Raise if the graph failed.

        Raises:
            ToleranceError: the error is larger than allowed.
        """
        if not self.ok:
            raise ToleranceError(
                f"{self.file} differs by {self.error:.2g} in {self.output}, of {self.slots} slots"
            )


@dataclass(frozen=True)
class AdoptedReport:
    """A report on all evictors of one decoder."""

    file: str
    runtime: str  # ONNX Runtime's version
    rows: list[CheckedGraph]

    @property
    def ok(self) -> bool:
        """Return whether the errors of all graphs are allowed."""
        return all(row.ok for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "file": self.file,
            "onnxruntime": self.runtime,
            "ok": self.ok,
            "evictors": [{**asdict(row), "ok": row.ok} for row in self.rows],
        }

    def table(self) -> str:
        """Return a table for a terminal."""
        lines = [f"{self.file}  (ONNX Runtime {self.runtime}, CPU)"]
        width = max((len(row.file) for row in self.rows), default=0)
        lines.append(f"  {'evictor':<{width}} {'slots':>6} {'error':>9} {'allowed':>9}  ")
        for row in self.rows:
            verdict = "ok" if row.ok else f"FAILED in {row.output}"
            lines.append(
                f"  {row.file:<{width}} {row.slots:>6} {row.error:>9.1e} "
                f"{row.allowed:>9.1e}  {verdict}"
            )
        return "\n".join(lines)

    def require(self) -> None:
        """Raise if a graph failed.

        Raises:
            ToleranceError: naming the first graph that failed.
        """
        for row in self.rows:
            row.require()


def check(graph: Graph, evictor: AdoptedEvictionGraph, dtype: torch.dtype) -> CheckedGraph:
    """Run a graph and the module that it was traced from on `CASES`, and compare all outputs.

    Args:
        graph: the graph in ONNX Runtime.
        evictor: the module.
        dtype: the type of keys and values.

    Raises:
        ShapeError: the graph has other inputs or outputs, or refuses what the module takes.
    """
    inputs, outputs = evictor.inputs, evictor.outputs
    graph.require({port.name for port in inputs}, {port.name for port in outputs})
    rows = []
    for past, block, stay in CASES:
        feeds = example(evictor, dtype, past=past, block=block, stay=stay, seed=past + block)
        with torch.inference_mode():
            wanted = evictor(*feeds.values())
        got = feed(graph.session, feeds)
        for port, want in zip(outputs, wanted, strict=True):
            mine = torch.from_numpy(got[port.name])
            if port == GONE:  # evicted slots are listed in any order
                mine, want = mine.sort().values, want.sort().values
            error = _difference(mine, want)
            rows.append(CheckedGraph(graph.name, port.name, past + block, error, CLOSE[dtype]))
    return max(rows, key=lambda row: (row.error, row.slots))


def _difference(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, infinite if shapes differ or a number is NaN."""
    if got.shape != want.shape:
        return float("inf")
    error = (got.double() - want.double()).abs().nan_to_num(nan=float("inf"))
    return float(error.max()) if error.numel() else 0.0
