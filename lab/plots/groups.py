"""Sorts cells into the parts of a picture, and pools cells of several depths into one point."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from kvcap.evals.quality.scores import cell_score
from kvcap.lab.quality.cells import Cell
from kvcap.lab.quality.intervals import interval
from kvcap.lab.quality.table import group


def groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Group cells by table, and pool those that differ only in depth."""
    ordered = sorted(pooled(cells), key=lambda cell: group(cell.setting))
    return [list(part) for _, part in groupby(ordered, key=lambda cell: group(cell.setting))]


def pooled(cells: Iterable[Cell]) -> list[Cell]:
    """Join cells that differ only in depth into one cell with all their samples."""
    alike: dict[object, list[Cell]] = {}
    for cell in cells:
        key = replace(cell.setting, depth=None), cell.setting.depth is None
        alike.setdefault(key, []).append(cell)
    return [_pool(several) for several in alike.values()]


def _pool(cells: list[Cell]) -> Cell:
    first, scores = cells[0], [score for cell in cells for score in cell.scores or ()]
    if first.setting.depth is None or not scores:
        return first
    low, high = interval(scores, first.of)
    setting = replace(first.setting, depth=None, samples=len(scores))
    return replace(
        first,
        setting=setting,
        score=cell_score(scores, first.of),
        ci_low=low,
        ci_high=high,
        scores=tuple(scores),
    )
