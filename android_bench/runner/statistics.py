"""Computes statistics of a cell's samples, and writes rows as CSV, as all runners do."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from kvcap.android_bench.runner.inputs import Cell

PERCENTILES = (50, 90, 95, 99)
# Every runner reads these names from the plan: fields of a cell's row, or else of the run.
COLUMNS = ("runner", "id", "policy", "formulation", "stage", "dtype", "n", "queries", "budget",
           "threads", "provider_asked", "provider_got", "status", "min_us",
           *(f"p{share}_us" for share in PERCENTILES))  # fmt: skip
FORMULA = ("=", "+", "-", "@")  # a spreadsheet computes a text that begins so


def statistics(rounds: list[list[float]]) -> dict[str, float]:
    """Return the least, percentiles, mean and standard deviation (n - 1) of all rounds' samples.

    >>> statistics([[1.0, 2.0], [3.0, 4.0]])["p50_us"]
    2.5
    """
    samples = np.concatenate([np.asarray(part, dtype=np.float64) for part in rounds])
    figures = {"min_us": float(samples.min())}
    for share, value in zip(PERCENTILES, np.percentile(samples, PERCENTILES), strict=True):
        figures[f"p{share}_us"] = float(value)
    std = samples.std(ddof=1) if len(samples) > 1 else 0.0
    return {**figures, "mean_us": float(samples.mean()), "std_us": float(std)}


def percentiles_line(row: Cell) -> str:
    """Return a line with a measured row's percentiles, for a terminal."""
    shown = ", ".join(f"p{share} {row[f'p{share}_us']:.1f}" for share in PERCENTILES)
    return f"{row['id']} ({row['provider_asked']}, {row['threads']}): {shown} µs"


def csv_text(results: Iterable[Cell], columns: Iterable[str]) -> str:
    """Write a header and a line per cell of all results; texts are quoted, null is empty."""
    names = list(columns)
    lines = [[_field(name) for name in names]]
    for result in results:
        lines += [
            [_field(row.get(name, result["run"].get(name))) for name in names]
            for row in result["cells"]
        ]
    return "".join(",".join(line) + "\n" for line in lines)


def _field(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return json.dumps(value)
    text = f"'{value}" if value.startswith(FORMULA) else value
    return '"' + text.replace('"', '""') + '"'
