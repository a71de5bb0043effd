"""Makes small sweeps of a model, and cells as if they were measured."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kvcap.evals.quality.scores import UNITS, cell_score
from kvcap.lab.quality.cells import Cell, Setting
from kvcap.lab.quality.intervals import interval
from kvcap.lab.quality.sweep import Sweep

OF_SETTING = {field.name for field in fields(Setting)}


def small_sweep(model: Path | str, **changes: Any) -> Sweep:
    """Return a sweep of five cells on a CPU, of keydiff and the uncapped model."""
    given: dict[str, Any] = {
        "policies": ("keydiff", "full"), "budgets": (24, 48), "lengths": (96,), "samples": 2,
        "positions": ("compact", "true"), "block_size": 16, "batch_size": 2, "device": "cpu",
    }  # fmt: skip
    return Sweep(model=str(model), **{**given, **changes})


def made_cell(policy: str, budget: int | None, scores: tuple[float, ...], **changes: Any) -> Cell:
    """Return a cell with these scores of its samples; changes are of its setting, or of itself."""
    mode = "true" if budget is None else changes.pop("positions", "compact")
    setting = Setting("m", "float32", "t", 64, policy, mode, budget, len(scores), 0, 16)
    given = {name: changes.pop(name) for name in [*changes] if name in OF_SETTING}
    unit = changes.setdefault("unit", "share")
    low, high = interval(scores, UNITS[unit])
    score = cell_score(scores, UNITS[unit])
    cell = Cell(replace(setting, **given), score, low, high, 0, 0.0, "cpu", {}, scores=scores)
    return replace(cell, **changes)
