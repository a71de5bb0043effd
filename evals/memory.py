"""Measures the memory that reading a prompt takes, and compares it with the figures of a file.

Bytes of the cache follow from its layout and must agree to the byte on every machine. The
allocator's peak also depends on temporary memory of PyTorch's kernels, so it is measured on one
thread, and compared only if versions and the CPU's instruction set are those of the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from kvcap.evals.reports import grid, versions
from kvcap.policies import load_policy
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.testing.memory_meter import cpu_peak, kv_bytes

FORMAT = 1
TOLERANCE = 0.02


class BaselineUnusable(ValueError):
    """The file of figures is missing, malformed, or lacks a cell."""


@dataclass(frozen=True)
class Matrix:
    """A matrix of policies, budgets and lengths; every combination is measured."""

    model: str = "pocket"
    policies: tuple[str, ...] = ("keydiff", "snapkv", "h2o", "adakv")
    budgets: tuple[int, ...] = (64, 256)
    lengths: tuple[int, ...] = (1024, 2048)
    block_size: int = 128

    def __post_init__(self) -> None:
        """Refuse a matrix of which nothing can be measured.

        Raises:
            ValueError: there is no combination, or a number is not a whole one from 1.
        """
        if not (self.policies and self.budgets and self.lengths):
            raise ValueError("nothing to measure: give at least one policy, budget and length")
        for number in (*self.budgets, *self.lengths, self.block_size):
            if type(number) is not int or number < 1:
                raise ValueError(
                    f"budgets, lengths and the block size are whole numbers from 1, not {number!r}"
                )


@dataclass(frozen=True)
class MeasuredCell:
    """A measured cell of the matrix, in bytes."""

    policy: str
    budget: int  # slots per KV head
    length: int  # tokens of the prompt
    kv_bytes: int  # storage of the cache after the prompt
    planned_bytes: int  # storage of the cache by the plan
    peak_bytes: int  # the allocator's peak while the prompt is read, with the cache

    @property
    def key(self) -> tuple[str, int, int]:
        """Return the cell's policy, budget and length, which identify it."""
        return self.policy, self.budget, self.length

    def __str__(self) -> str:
        return f"{self.policy}, {self.budget} slots, {self.length:,} tokens"


@dataclass(frozen=True)
class Baseline:
    """A file of measured cells that later measurements are compared with."""

    matrix: Matrix
    measured_on: dict[str, str]
    cells: tuple[MeasuredCell, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the baseline as one object of JSON."""
        return {"format": FORMAT, **asdict(self)}

    def write(self, path: Path) -> None:
        """Replace the file, whole or not at all."""
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """Read a file that `write` wrote.

        Raises:
            BaselineUnusable: the file is missing or malformed.
        """
        make = "`kvcap memory update` makes one"
        try:
            document = json.loads(path.read_text())
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']!r} rather than {FORMAT}")
            matrix = document["matrix"]
            matrix |= {k: tuple(matrix[k]) for k in ("policies", "budgets", "lengths")}
            cells = tuple(_figures(row) for row in document["cells"])
            return cls(Matrix(**matrix), dict(document["measured_on"]), cells)
        except FileNotFoundError as error:
            raise BaselineUnusable(f"there is no baseline {path}; {make}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BaselineUnusable(f"{path} is no baseline ({error!r}); {make}") from error


def _figures(row: Any) -> MeasuredCell:
    cell = MeasuredCell(**row)
    for field in fields(MeasuredCell):
        kind = str if field.name == "policy" else int
        value = getattr(cell, field.name)
        if type(value) is not kind or (isinstance(value, int) and value < 1):
            raise ValueError(f"{field.name} is {value!r}")
    return cell


def measure(matrix: Matrix, on_cell: Callable[[MeasuredCell], None] | None = None) -> Baseline:
    """Measure every cell on one thread of a CPU."""
    runtime = Runtime.from_pretrained(matrix.model, device="cpu", block_size=matrix.block_size)
    threads, cells = torch.get_num_threads(), []
    torch.set_num_threads(1)  # kernels allocate buffers per thread
    try:
        for policy in matrix.policies:
            for budget in matrix.budgets:
                for length in matrix.lengths:
                    cells.append(_measure(runtime.model, policy, budget, length, matrix.block_size))
                    if on_cell is not None:
                        on_cell(cells[-1])
    finally:
        torch.set_num_threads(threads)
    on = {**versions(), "cpu": torch.backends.cpu.get_cpu_capability()}
    del on["kvcap"], on["python"]  # kvcap is under test, and Python allocates no tensors
    return Baseline(matrix, on, tuple(cells))


def _measure(model: Any, policy: str, budget: int, length: int, block: int) -> MeasuredCell:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)

    def read() -> BudgetCache:
        cache = BudgetCache(model.config, budget, block, load_policy(policy))
        BlockLoop(model, cache).prefill(ids)
        return cache

    with torch.inference_mode():
        read()  # in their first call, kernels allocate memory that they keep
    took = cpu_peak(read)
    planned = sum(took.result.layout.nbytes(1, model.dtype).values())
    return MeasuredCell(policy, budget, length, kv_bytes(took.result), planned, took.peak_bytes)


def regressions(
    now: Baseline, before: Baseline, tolerance: float = TOLERANCE
) -> tuple[list[str], str]:
    """Return a line for each figure that grew, and the reason if peaks were not compared, or ''.

    Args:
        now: the new figures.
        before: the baseline.
        tolerance: share by which a peak may grow.

    Raises:
        BaselineUnusable: the baseline lacks a cell, or has other settings.
    """
    for name in ("model", "block_size"):
        if getattr(now.matrix, name) != getattr(before.matrix, name):
            raise BaselineUnusable(
                f"the baseline's {name} is {getattr(before.matrix, name)!r}, not "
                f"{getattr(now.matrix, name)!r}; make another with `kvcap memory update`"
            )
    other = {k: v for k, v in before.measured_on.items() if now.measured_on.get(k) != v}
    why = ", ".join(
        f"{k} {v} in the baseline, {now.measured_on.get(k)} here" for k, v in other.items()
    )
    known, grown = {cell.key: cell for cell in before.cells}, list[str]()
    for cell in now.cells:
        if cell.key not in known:
            raise BaselineUnusable(f"the baseline lacks {cell}; `kvcap memory update` adds it")
        grown += _grown(cell, known[cell.key], None if other else tolerance)
    return grown, why


def _grown(cell: MeasuredCell, was: MeasuredCell, tolerance: float | None) -> list[str]:
    grown = []
    for name, now, before in (
        ("KV bytes", cell.kv_bytes, was.kv_bytes),
        ("planned bytes", cell.planned_bytes, was.planned_bytes),
    ):
        if now != before:
            grown.append(f"{cell}: {name} {now:,}, baseline {before:,} ({now - before:+,})")
    if cell.kv_bytes != cell.planned_bytes:
        grown.append(f"{cell}: KV bytes {cell.kv_bytes:,}, planned {cell.planned_bytes:,}")
    if tolerance is not None and cell.peak_bytes > was.peak_bytes * (1 + tolerance):
        share = cell.peak_bytes / was.peak_bytes - 1
        grown.append(
            f"{cell}: peak {cell.peak_bytes:,}, baseline {was.peak_bytes:,} "
            f"({cell.peak_bytes - was.peak_bytes:+,}, {share:+.1%}, allowed {tolerance:+.1%})"
        )
    return grown


def table(cells: Sequence[MeasuredCell], before: Baseline | None = None) -> str:
    """Return the figures as a Markdown table, with the baseline's peaks if there is one."""
    known = {cell.key: cell for cell in before.cells} if before else {}
    header = ["policy", "slots", "tokens", "KV bytes", "planned", "peak", "peak before"]
    rows = [
        [
            c.policy,
            *(f"{n:,}" for n in (c.budget, c.length, c.kv_bytes, c.planned_bytes)),
            f"{c.peak_bytes:,}",
            f"{known[c.key].peak_bytes:,}" if c.key in known else "",
        ]
        for c in cells
    ]
    return "\n".join(
        grid(header if known else header[:-1], rows if known else [r[:-1] for r in rows])
    )
