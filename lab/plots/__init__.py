"""Draws pictures of a sweep: scores over budgets, needles by depth, and quality against cost.

They need matplotlib, which is imported here alone, and do not use pyplot, which has global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcap.lab.plots import needles, pareto, recall
from kvcap.lab.quality.cells import Cell


def draw(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Draw every picture for which there are cells; return the written files.

    Raises:
        ValueError: there are no such cells, or matplotlib is not installed.
    """
    wanted = {"results.png": recall, "pareto.png": pareto}
    if any(cell.setting.depth is not None for cell in cells):
        wanted["needles.png"] = needles
    for name, picture in wanted.items():
        picture.figure(cells).savefig(folder / name)
    return [folder / name for name in wanted]
