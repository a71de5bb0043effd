"""Pictures of a sweep: scores over budgets, needles by depth, quality against what it costs.

They need matplotlib, which nothing else imports, and are drawn without pyplot: no window, no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcap.evals.quality.cells import Cell
from kvcap.evals.quality.plots import needles, pareto, recall


def draw(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Draw every picture for which there are cells; returns where they are.

    Raises:
        ValueError: there is none, or matplotlib is not installed.
    """
    wanted = {"results.png": recall, "pareto.png": pareto}
    if any(cell.setting.depth is not None for cell in cells):
        wanted["needles.png"] = needles
    for name, picture in wanted.items():
        picture.figure(cells).savefig(folder / name)
    return [folder / name for name in wanted]
