"""Writes cells as Markdown: a table per model, task, length, way of asking and depth.

A table has policies down and budgets across.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, product

from kvcap.evals.quality.paired import Comparison, compare
from kvcap.evals.reports import grid
from kvcap.lab.quality.cells import Cell, Setting, label
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
    """Write all `cells` as one Markdown text.

    Args:
        cells: cells in any order.
        compared: policies; below every table, the first is compared with each of the others on the
            same samples.
    """
    ordered = sorted(cells, key=lambda cell: group(cell.setting))
    parts = ["# Results", "", INTRODUCTION, "", *([PAIRED, ""] if compared[1:] else [])]
    for _, part in groupby(ordered, key=lambda cell: group(cell.setting)):
        table_cells = list(part)
        parts += _table(table_cells)
        for other in compared[1:]:
            if rows := pairs(table_cells, compared[0], other):
                heading = f"### {compared[0]} against {other}, on the same samples"
                parts += [heading, "", *paired_rows(rows), ""]
    return "\n".join(parts)


def group(s: Setting) -> tuple[str | float, ...]:
    """Return the settings that all cells of one table have in common."""
    depth = -1.0 if s.depth is None else s.depth
    read = s.task, s.data or "", s.length, s.asking, depth, s.samples, s.seed
    return s.model, s.dtype, *read, s.block_size, s.max_new_tokens or 0


def title(s: Setting) -> str:
    """Return a table's title: its task, length and model."""
    depth = "" if s.depth is None else f"depth {s.depth:g}"
    parts = [s.task, s.tokens, s.asking, depth, s.model]
    return ", ".join(part for part in parts if part)


def _table(cells: list[Cell]) -> list[str]:
    first = cells[0].setting
    columns = sorted({c.setting.budget for c in cells if c.setting.budget is not None})
    budgets: list[int | None] = [*columns]
    budgets += [None] if any(c.setting.budget is None for c in cells) else []
    by_place = {(label(c.setting), c.setting.positions, c.setting.budget): c for c in cells}
    rows = sorted({key[:2] for key in by_place})
    scores = [UNCAPPED if b is None else f"{b:,}" for b in budgets]
    return [
        f"## {title(first)}",
        "",
        f"{measured(cells)}.",
        "",
        *grid(
            ["policy", "positions", *scores, "ms per block", "extra memory"],
            [[*row, *_cells([by_place.get((*row, budget)) for budget in budgets])] for row in rows],
        ),
        "",
    ]


def pairs(cells: Iterable[Cell], first: str, second: str) -> list[tuple[Cell, Cell, Comparison]]:
    """Compare two policies in all pairs of cells with the same samples, budget and positions.

    A policy that never evicts is compared at all budgets. Cells without scores of samples are left
    out.
    """
    scored = sorted((cell for cell in cells if cell.scores), key=lambda cell: group(cell.setting))
    return [
        (a, b, compare(a.scores or (), b.scores or (), a.of))
        for _, part in groupby(scored, key=lambda cell: group(cell.setting))
        for a, b in product([*part], repeat=2)
        if (a.setting.policy, b.setting.policy) == (first, second) and _alike(a.setting, b.setting)
    ]


def paired_rows(compared: Sequence[tuple[Cell, Cell, Comparison]]) -> list[str]:
    """Return the table of compared pairs of cells, which all have one unit."""
    unit = compared[0][0].of
    header = ["first", "second", "positions", "slots"]
    header += [f"{unit.compared} (95 % interval)", *(["p"] if unit.share else [])]
    header += ["samples", "first higher", "second higher"]
    rows = [_comparison(*pair) for pair in compared]
    return grid(header, rows if unit.share else [[*row[:5], *row[6:]] for row in rows])


def _alike(a: Setting, b: Setting) -> bool:
    same = (a.budget, a.positions, a.kv_dtype) == (b.budget, b.positions, b.kv_dtype)
    return same or a.budget is None or b.budget is None


def capped(a: Cell, b: Cell) -> Setting:
    """Return the setting of the cell of a pair that has a budget, if one has."""
    return b.setting if a.setting.budget is None else a.setting


def _comparison(a: Cell, b: Cell, compared: Comparison) -> list[str]:
    setting = capped(a, b)
    sign = "+" if a.of.share else ""
    return [
        label(a.setting),
        label(b.setting),
        setting.positions,
        UNCAPPED if setting.budget is None else f"{setting.budget:,}",
        f"{compared.difference:{sign}.2f} "
        f"({compared.ci_low:{sign}.2f} to {compared.ci_high:{sign}.2f})",
        "" if compared.p_value is None else f"{compared.p_value:.2g}",
        f"{compared.samples}",
        f"{compared.first_higher}",
        f"{compared.second_higher}",
    ]


def measured(cells: Sequence[Cell]) -> str:
    """Return a sentence with a table's unit of scores, which are better, and the samples."""
    s, unit = cells[0].setting, cells[0].of
    better = "higher" if unit.higher_is_better else "lower"
    devices = " and ".join(dict.fromkeys(cell.device for cell in cells))
    limit = "" if s.max_new_tokens is None else f"; answers of up to {s.max_new_tokens:,} tokens"
    return (
        f"{unit.label[0].upper()}{unit.label[1:]}, {better} is better; {s.samples} samples, seed "
        f"{s.seed}, block {s.block_size}, {s.dtype}, {devices}{limit}"
        + ("; asked in plain text, without a chat template" if cells[0].plain else "")
        + (f"; file {s.data[:8]}" if s.data else "")
        + (_prompts_read(cells) if s.from_rows else "")
    )


def _prompts_read(cells: Sequence[Cell]) -> str:
    """Return how long the prompts were, or '' if a cell of an earlier version does not know."""
    known = [cell.prompt_tokens for cell in cells]
    ranges = [lengths for lengths in known if lengths is not None]
    if len(ranges) < len(known):
        return ""
    fewest, most = min(low for low, _ in ranges), max(high for _, high in ranges)
    return f", prompts of {'' if fewest == most else f'{fewest:,} to '}{most:,} tokens"


def describe(s: Setting) -> str:
    """Describe a cell in words, without its model."""
    depth = "" if s.depth is None else f"depth {s.depth:g}"
    budget = UNCAPPED if s.budget is None else f"{s.budget} slots"
    policy = label(s).replace(", ", " ")
    parts = (s.task, s.tokens, s.asking, depth, policy, budget, s.positions)
    return ", ".join(filter(None, parts))


def _cells(row: list[Cell | None]) -> list[str]:
    """Return a row's scores, and the policy's costs at the largest of its budgets."""
    last = [cell for cell in row if cell is not None][-1]
    ms = "" if last.scoring_ms is None else f"{last.scoring_ms['p50']:.2f}"
    extra = "" if last.extra_bytes is None else format_bytes(last.extra_bytes)
    return [*(_score(cell) for cell in row), ms, extra]


def _score(cell: Cell | None) -> str:
    return f"{cell.score:.2f} ({cell.ci_low:.2f}–{cell.ci_high:.2f})" if cell else ""
