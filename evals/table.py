"""Cells as Markdown: a table per model, task and length; policies down, budgets across."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from kvcap.evals.cells import Cell, Setting

UNCAPPED = "uncapped"


def results(cells: Iterable[Cell]) -> str:
    """All `cells` as one Markdown text."""
    ordered = sorted(cells, key=lambda cell: _group(cell.setting))
    parts = ["# Results", "Share of right answers (95 % Wilson interval).", ""]
    for _, group in groupby(ordered, key=lambda cell: _group(cell.setting)):
        parts += _table(list(group))
    return "\n".join(parts)


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, columns aligned for reading as plain text."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    aligned = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
    return [f"| {' | '.join(line)} |" for line in aligned]


def _group(s: Setting) -> tuple[str, str, str, int, int, int, int]:
    return s.model, s.dtype, s.task, s.length, s.samples, s.seed, s.block_size


def _table(cells: list[Cell]) -> list[str]:
    first = cells[0].setting
    columns = sorted({c.setting.budget for c in cells if c.setting.budget is not None})
    budgets: list[int | None] = [*columns]
    budgets += [None] if any(c.setting.budget is None for c in cells) else []
    found = {(c.setting.policy, c.setting.positions, c.setting.budget): c for c in cells}
    rows = sorted({key[:2] for key in found})
    return [
        f"## {first.task}, {first.length:,} tokens, {first.model}",
        "",
        f"{first.samples} samples, seed {first.seed}, block {first.block_size}, {first.dtype}, "
        f"{cells[0].device}.",
        "",
        *grid(
            ["policy", "positions", *(UNCAPPED if b is None else f"{b:,}" for b in budgets)],
            [[*row, *(_score(found.get((*row, budget))) for budget in budgets)] for row in rows],
        ),
        "",
    ]


def _score(cell: Cell | None) -> str:
    return f"{cell.score:.2f} ({cell.ci_low:.2f}–{cell.ci_high:.2f})" if cell else ""
