"""Compares two policies sample by sample, in the cells of one folder or of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from kvcap.evals.quality.paired import Comparison
from kvcap.lab.quality.cells import Cell, label
from kvcap.lab.quality.table import PAIRED, capped, group, measured, paired_rows, pairs, title
from kvcap.lab.report.ranking import check_same_samples

# Settings that the two cells of a comparison have in common.
BOTH = (
    "model",
    "dtype",
    "task",
    "data",
    "length",
    "question",
    "depth",
    "block_size",
    "max_new_tokens",
    "seed",
    "positions",
    "budget",
    "kv_dtype",
)


def comparison(cells: Sequence[Cell], first: str, second: str) -> list[dict[str, Any]]:
    """Compare two policies on the same samples; return an object for each pair of cells, for JSON.

    Raises:
        ValueError: a policy has no cells, no pair has the same samples, budget and positions, or a
            table's cells were measured on different samples.
    """
    compared = _require_pairs(cells, first, second)
    return [
        {
            **{name: value for name, value in asdict(capped(a, b)).items() if name in BOTH},
            "first": label(a.setting),
            "second": label(b.setting),
            "unit": a.unit,
            "compared": a.of.compared,
            **asdict(result),
        }
        for a, b, result in compared
    ]


def comparison_text(cells: Sequence[Cell], first: str, second: str) -> str:
    """Write `comparison` as Markdown: a table per model, task, length, way of asking and depth.

    Raises:
        ValueError: see `comparison`.
    """
    compared = _require_pairs(cells, first, second)
    parts = [f"# {first} against {second}", "", PAIRED, ""]
    for _, part in groupby(compared, key=lambda pair: group(pair[0].setting)):
        rows = list(part)
        a = rows[0][0]
        parts += [f"## {title(a.setting)}", "", f"{measured([a])}.", "", *paired_rows(rows), ""]
    return "\n".join(parts)


def _require_pairs(
    cells: Sequence[Cell], first: str, second: str
) -> list[tuple[Cell, Cell, Comparison]]:
    known = sorted({cell.setting.policy for cell in cells})
    for policy in (first, second):
        if policy not in known:
            raise ValueError(f"--compare: there are no cells of {policy!r}; of {', '.join(known)}")
    check_same_samples(cell for cell in cells if cell.setting.policy in (first, second))
    compared = pairs(cells, first, second)
    if not compared:
        raise ValueError(
            f"--compare: no cells of {first} and {second} have the same model, task, budget and "
            "positions, and the scores of their samples; run one kvcap eval with both"
        )

    def sort_key(pair: tuple[Cell, Cell, Comparison]) -> tuple[Any, ...]:
        setting = capped(*pair[:2])
        return group(setting), setting.positions, setting.budget or 0

    return sorted(compared, key=sort_key)
