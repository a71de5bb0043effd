"""Writes cells as Markdown: a table per model, task, length, way of asking and depth.

Policies down, budgets across.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from kvcap.evals.quality.cells import Cell, Setting
from kvcap.evals.reports import grid
from kvcap.runtime.units import format_bytes

UNCAPPED = "uncapped"
INTRODUCTION = (
    "Scores (95 % interval: Wilson's where every sample is right or wrong, else a bootstrap over "
    "samples). Question-aware: the question is read with the text. Context-only: it is read after "
    "the text was evicted down to the budget. At the largest budget: the milliseconds that "
    "eviction takes per block, all layers together (median), and the memory that the policy needs "
    "beyond keys, values and positions."
)


def results(cells: Iterable[Cell]) -> str:
    """All `cells` as one Markdown text."""
    ordered = sorted(cells, key=lambda cell: group(cell.setting))
    parts = ["# Results", "", INTRODUCTION, ""]
    for _, part in groupby(ordered, key=lambda cell: group(cell.setting)):
        parts += _table(list(part))
    return "\n".join(parts)


def group(s: Setting) -> tuple[str | float, ...]:
    """What cells of one table have in common."""
    depth = -1.0 if s.depth is None else s.depth
    read = s.task, s.data or "", s.length, s.asked, depth, s.samples, s.seed
    return s.model, s.dtype, *read, s.block_size, s.max_new_tokens or 0


def title(s: Setting) -> str:
    """What a table is about."""
    depth = "" if s.depth is None else f"depth {s.depth:g}"
    parts = [s.task, f"{s.length:,} tokens", s.asked, depth, s.model]
    return ", ".join(part for part in parts if part)


def _table(cells: list[Cell]) -> list[str]:
    first = cells[0].setting
    columns = sorted({c.setting.budget for c in cells if c.setting.budget is not None})
    budgets: list[int | None] = [*columns]
    budgets += [None] if any(c.setting.budget is None for c in cells) else []
    found = {(label(c.setting), c.setting.positions, c.setting.budget): c for c in cells}
    rows = sorted({key[:2] for key in found})
    scores = [UNCAPPED if b is None else f"{b:,}" for b in budgets]
    return [
        f"## {title(first)}",
        "",
        f"{_measured(cells[0])}; {first.samples} samples, seed {first.seed}, block "
        f"{first.block_size}, {first.dtype}, {cells[0].device}{_given(first)}.",
        "",
        *grid(
            ["policy", "positions", *scores, "ms per block", "extra memory"],
            [[*row, *_cells([found.get((*row, budget)) for budget in budgets])] for row in rows],
        ),
        "",
    ]


def _given(s: Setting) -> str:
    """What else of a setting is not the task's own, for the line above a table."""
    limit = "" if s.max_new_tokens is None else f"; answers of up to {s.max_new_tokens:,} tokens"
    return limit + (f"; file {s.data[:8]}" if s.data else "")


def _measured(cell: Cell) -> str:
    """What the scores of a table are, and which are better."""
    label = cell.of.label
    better = "higher" if cell.of.higher_is_better else "lower"
    return f"{label[0].upper()}{label[1:]}, {better} is better"


def label(s: Setting) -> str:
    """The policy, the options it was given, and what slots hold if not the model's numbers."""
    given = [*(f"{name}={value}" for name, value in s.options), *([s.slots] if s.slots else [])]
    return ", ".join([s.policy, *given])


def _cells(row: list[Cell | None]) -> list[str]:
    """A row's scores, and what the policy costs at the largest of its budgets."""
    last = [cell for cell in row if cell is not None][-1]
    ms = "" if last.scoring_ms is None else f"{last.scoring_ms['p50']:.2f}"
    extra = "" if last.extra_bytes is None else format_bytes(last.extra_bytes)
    return [*(_score(cell) for cell in row), ms, extra]


def _score(cell: Cell | None) -> str:
    return f"{cell.score:.2f} ({cell.ci_low:.2f}–{cell.ci_high:.2f})" if cell else ""
