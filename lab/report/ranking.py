"""Ranks policies by cells on the same samples, and finds those that tie with the best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from kvcap.evals.quality.paired import compare
from kvcap.evals.quality.scores import cell_score
from kvcap.lab.quality.cells import Cell, Setting, label
from kvcap.lab.quality.intervals import interval

LEVEL = 0.05  # level of significance of a difference of two policies


@dataclass(frozen=True)
class RankedPolicy:
    """A policy's row of a ranking: its cells in the table's columns, and their mean."""

    name: str
    cells: tuple[Cell | None, ...]
    mean: Cell | None  # mean of the cells that exist
    whole: bool  # whether all cells exist

    @classmethod
    def of(cls, name: str, cells: Sequence[Cell | None]) -> RankedPolicy:
        """Return the row of a policy with these cells; None stands for one not measured."""
        there = [cell for cell in cells if cell is not None]
        return cls(name, tuple(cells), mean_of(there) if there else None, len(there) == len(cells))


@dataclass(frozen=True)
class RankingTable:
    """A table that ranks policies on the prompts of one task and length, in one position mode."""

    length: int  # tokens of a prompt
    positions: str
    budgets: tuple[int, ...]  # the columns
    uncapped: tuple[tuple[str, Cell], ...]  # policies that never evict
    rows: tuple[RankedPolicy, ...]  # policies that evict, the best first


def tables(cells: Iterable[Cell]) -> list[RankingTable]:
    """Return tables of cells that differ only in length, positions, budget and policy.

    They are sorted by length, then by position mode.
    """
    lengths: dict[int, list[Cell]] = {}
    for cell in cells:
        lengths.setdefault(cell.setting.length, []).append(cell)
    return [
        _table(length, mode, lengths[length])
        for length in sorted(lengths)
        for mode in sorted({c.setting.positions for c in lengths[length] if c.setting.budget})
        or ["true"]
    ]


def _table(length: int, mode: str, cells: Sequence[Cell]) -> RankingTable:
    free = tuple(sorted((label(c.setting), c) for c in cells if c.setting.budget is None))
    capped = [c for c in cells if c.setting.budget is not None and c.setting.positions == mode]
    budgets = tuple(sorted({c.setting.budget or 0 for c in capped}))
    by_place = {(label(c.setting), c.setting.budget): c for c in capped}
    names = dict.fromkeys(name for name, _ in by_place)
    rows = ranked({name: [by_place.get((name, budget)) for budget in budgets] for name in names})
    return RankingTable(length, mode, budgets, free, tuple(rows))


def overview(ranked_tables: Sequence[RankingTable]) -> list[RankedPolicy]:
    """Rank policies by their means in several tables, each of which becomes a column."""
    means = [{row.name: row.mean for row in table.rows if row.whole} for table in ranked_tables]
    names = dict.fromkeys(row.name for table in ranked_tables for row in table.rows)
    return ranked({name: [mean.get(name) for mean in means] for name in names})


def ranked(columns: Mapping[str, Sequence[Cell | None]]) -> list[RankedPolicy]:
    """Return rows sorted by mean, the best first; rows that lack a cell come last.

    Args:
        columns: for each name, a cell or None for every column.
    """

    def sort_key(row: RankedPolicy) -> tuple[bool, float, str]:
        if row.mean is None:
            return True, float("inf"), row.name
        sign = -1 if row.mean.of.higher_is_better else 1
        return not row.whole, sign * row.mean.score, row.name

    return sorted((RankedPolicy.of(*given) for given in columns.items()), key=sort_key)


def mean_of(cells: Sequence[Cell]) -> Cell:
    """Return the mean of cells as one cell, in which each sample's score is its mean over them.

    If scores of samples were not kept, or cells have different numbers of them, the cells' scores
    and the ends of their intervals are averaged, which makes the interval rather too wide.
    """
    first, unit = cells[0], cells[0].of
    kept = [cell.scores for cell in cells if cell.scores]
    if len(kept) == len(cells) and len({len(scores) for scores in kept}) == 1:
        scores = tuple(map(fmean, zip(*kept, strict=True)))
        low, high = interval(scores, unit)
        return replace(
            first, score=cell_score(scores, unit), ci_low=low, ci_high=high, scores=scores
        )
    return replace(
        first,
        score=fmean(cell.score for cell in cells),
        ci_low=fmean(cell.ci_low for cell in cells),
        ci_high=fmean(cell.ci_high for cell in cells),
        scores=None,
    )


def mean_ranks(cells: Iterable[Cell]) -> dict[str, float]:
    """Return the mean rank of each capped policy over models, tasks, lengths and budgets.

    The best has rank 1, and equal scores share the mean of their ranks. Recall and types of slots
    are no part of a policy's name here. Policies that lack a cell that others have are left out.
    """
    groups: dict[Any, dict[str, float]] = {}
    for cell in cells:
        s = cell.setting
        if s.budget is not None:
            name = label(replace(s, recall=0, kv_dtype=None))
            score = -cell.score if cell.of.higher_is_better else cell.score
            scores = groups.setdefault((s.model, s.task, s.length, s.budget, s.positions), {})
            scores[name] = score
    names = dict.fromkeys(name for scores in groups.values() for name in scores)
    whole = [name for name in names if all(name in scores for scores in groups.values())]
    ranks = {
        name: fmean(
            sum((scores[o] < scores[name]) + (scores[o] == scores[name]) / 2 for o in whole) + 0.5
            for scores in groups.values()
        )
        for name in whole
    }
    return dict(sorted(ranks.items(), key=lambda pair: pair[1]))


def tied_with_best(column: Sequence[Cell | None]) -> set[int]:
    """Return the indices of a column's best cell and of those that do not differ from it."""
    present = {index: cell for index, cell in enumerate(column) if cell is not None}
    if not present:
        return set()
    best = max(present.values(), key=lambda c: c.score if c.of.higher_is_better else -c.score)
    return {index for index, cell in present.items() if cell is best or not differ(best, cell)}


def differ(a: Cell, b: Cell) -> bool:
    """Return whether two cells differ significantly, at the level of 5 %.

    If every sample is right or wrong, McNemar's exact test decides; else, whether the interval of
    the difference excludes no difference. Cells without scores of samples differ if their intervals
    do not overlap.
    """
    if not (a.scores and b.scores):
        return a.ci_low > b.ci_high or b.ci_low > a.ci_high
    comparison = compare(a.scores, b.scores, a.of)
    if comparison.p_value is not None:
        return comparison.p_value < LEVEL
    return not comparison.ci_low <= a.of.of_mean(0.0) <= comparison.ci_high


def check_same_samples(cells: Iterable[Cell]) -> None:
    """Refuse cells of one table that were measured on different samples.

    Raises:
        ValueError: naming two such cells.
    """
    seen: dict[Setting, Setting] = {}
    for s in (cell.setting for cell in cells):
        key = replace(
            s,
            policy="",
            positions="true",
            budget=None,
            options=(),
            kv_dtype=None,
            samples=0,
            seed=0,
        )
        other = seen.setdefault(key, s)
        if (other.samples, other.seed) != (s.samples, s.seed):
            raise ValueError(
                f"{s.model}, {s.task}, {s.length:,} tokens: {other.samples} samples of seed "
                f"{other.seed} and {s.samples} of seed {s.seed} are different prompts, on which "
                "policies cannot be compared; give sweeps of the same --samples and --seed"
            )
