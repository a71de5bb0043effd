"""Writes cells as Markdown: a table per model, task, length, way of asking and depth.

Policies down, budgets across.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from kvcap.evals.quality.cells import Cell, Setting
from kvcap.evals.quality.paired import compare
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
PAIRED = (
    "Two policies on the same samples: by how much the first is above the second, with Newcombe's "
    "interval for paired shares and the p-value of McNemar's exact test where every sample is "
    "right or wrong, else with a bootstrap over samples; and how many samples have a higher score "
    "with the first, and with the second."
)


def results(cells: Iterable[Cell], compared: Sequence[str] = ()) -> str:
    """All `cells` as one Markdown text.

    Args:
        cells: in any order.
        compared: policies; below every table, the first is compared with each of the others on the
            same samples.
    """
    ordered = sorted(cells, key=lambda cell: group(cell.setting))
    parts = ["# Results", "", INTRODUCTION, "", *([PAIRED, ""] if compared[1:] else [])]
    for _, part in groupby(ordered, key=lambda cell: group(cell.setting)):
        found = list(part)
        parts += _table(found)
        for other in compared[1:]:
            parts += _paired(found, compared[0], other)
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


def _paired(cells: list[Cell], first: str, second: str) -> list[str]:
    """Compares two policies at equal budgets and positions; one that never evicts suits all."""
    rows = [
        _comparison(a, b)
        for a in cells
        for b in cells
        if (a.setting.policy, b.setting.policy) == (first, second) and _alike(a.setting, b.setting)
        if a.scores and b.scores
    ]
    if not rows:
        return []
    share = cells[0].of.share
    header = ["first", "second", "positions", "slots"]
    header += [f"{cells[0].of.compared} (95 % interval)", *(["p"] if share else [])]
    header += ["samples", "first higher", "second higher"]
    rows = rows if share else [[*row[:5], *row[6:]] for row in rows]
    return [f"### {first} against {second}, on the same samples", "", *grid(header, rows), ""]


def _alike(a: Setting, b: Setting) -> bool:
    same = (a.budget, a.positions, a.kv_dtype) == (b.budget, b.positions, b.kv_dtype)
    return same or a.budget is None or b.budget is None


def _comparison(a: Cell, b: Cell) -> list[str]:
    assert a.scores is not None, "only cells with the scores of samples are paired"
    assert b.scores is not None
    found = compare(a.scores, b.scores, a.of)
    capped = b.setting if a.setting.budget is None else a.setting
    sign = "+" if a.of.share else ""
    return [
        label(a.setting),
        label(b.setting),
        capped.positions,
        UNCAPPED if capped.budget is None else f"{capped.budget:,}",
        f"{found.difference:{sign}.2f} ({found.ci_low:{sign}.2f} to {found.ci_high:{sign}.2f})",
        "" if found.p_value is None else f"{found.p_value:.2g}",
        f"{found.samples}",
        f"{found.first_higher}",
        f"{found.second_higher}",
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


def describe(s: Setting) -> str:
    """A cell in words, without its model."""
    given = [*(f"{name}={value}" for name, value in s.options), *([s.slots] if s.slots else [])]
    depth = "" if s.depth is None else f"depth {s.depth:g}"
    budget = UNCAPPED if s.budget is None else f"{s.budget} slots"
    policy = " ".join([s.policy, *given])
    parts = (s.task, f"{s.length:,} tokens", s.asked, depth, policy, budget, s.positions)
    return ", ".join(filter(None, parts))


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
