"""Draws needle heat maps: how well facts are found, by depth and length of the text.

There is a panel per policy (down) and budget (across); in each, depth is down and length across, as
in KeyDiff, Figure 6 (arXiv:2504.15364).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

from kvcap.lab.plots.style import DPI, SIZES, WIDTH, require_matplotlib
from kvcap.lab.quality.cells import Cell, Setting, label
from kvcap.lab.quality.table import UNCAPPED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.image import AxesImage

HEADING = 1.0  # inches above and below the panels of a group
ROW = 0.2  # inches of one depth
Row = tuple[str, str]  # policy and positions
NOBODY: Row = ("", "")  # the row of an empty place of the grid


def figure(cells: Iterable[Cell]) -> Figure:
    """Draw the cells that have a depth, in a block of panels per model and task.

    Raises:
        ValueError: no cell has a depth.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    ordered = sorted((c for c in cells if c.setting.depth is not None), key=_group)
    parts = [list(part) for _, part in groupby(ordered, key=_group)]
    if not parts:
        raise ValueError("no cell has a depth; give --depths")
    heights = [HEADING + len(_panels(part)) * (0.35 + ROW * len(_depths(part))) for part in parts]
    drawn = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI, layout="constrained")
    blocks = drawn.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for block, part in zip(blocks, parts, strict=True):
        _block(block, part)
    return drawn


def _group(cell: Cell) -> tuple[str, str, str, str, int, int, int]:
    s = cell.setting
    return s.model, s.dtype, s.task, s.asking, s.samples, s.seed, s.block_size


def _row(s: Setting) -> Row:
    return label(s), "" if s.budget is None else s.positions


def _rows(cells: list[Cell], capped: bool) -> list[Row]:
    """Return the policies that are `capped` or not, the best first."""
    scores: dict[Row, list[float]] = {}
    for cell in (cell for cell in cells if (cell.setting.budget is not None) is capped):
        scores.setdefault(_row(cell.setting), []).append(cell.score)
    sign = -1 if cells[0].of.higher_is_better else 1
    return sorted(scores, key=lambda row: (sign * sum(scores[row]) / len(scores[row]), row))


def _panels(cells: list[Cell]) -> list[list[tuple[Row, int | None]]]:
    """Return rows of panels: a policy at every budget, then one that never evicts."""
    budgets = sorted({c.setting.budget for c in cells if c.setting.budget is not None})
    uncapped = _rows(cells, False)
    lines = zip_longest(_rows(cells, True), uncapped, fillvalue=NOBODY)
    return [
        [*((row, budget) for budget in budgets), *([(free, None)] if uncapped else [])]
        for row, free in lines
    ]


def _depths(cells: list[Cell]) -> list[float]:
    return sorted({c.setting.depth for c in cells if c.setting.depth is not None})


def _block(block: SubFigure, cells: list[Cell]) -> None:
    panels, depths = _panels(cells), _depths(cells)
    lengths = sorted({cell.setting.length for cell in cells})
    by_place = {
        (_row(c.setting), c.setting.budget, c.setting.depth, c.setting.length): c.score
        for c in cells
    }
    scale = (0.0, 1.0) if cells[0].of.share else (min(by_place.values()), max(by_place.values()))
    axes = block.subplots(len(panels), len(panels[0]), sharex=True, sharey=True, squeeze=False)
    drawn: AxesImage | None = None
    for across, line in zip(axes, panels, strict=True):
        for axis, (row, budget) in zip(across, line, strict=True):
            table = [[by_place.get((row, budget, d, n)) for n in lengths] for d in depths]
            if all(score is None for scores in table for score in scores):
                axis.set_visible(False)
                continue
            drawn = _panel(axis, table, scale)
            policy, positions = row
            slots = UNCAPPED if budget is None else f"{budget:,} slots, {positions}"
            axis.set_title(f"{policy}\n{slots}", fontsize=SIZES["tick"], pad=3)
            axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
            axis.set_yticks(range(len(depths)), [f"{d:g}" for d in depths])
            axis.tick_params(labelsize=SIZES["tick"], length=2, pad=2, labelleft=True)
            axis.tick_params(axis="x", rotation=45 if len(lengths) > 2 else 0, labelbottom=True)
    s = cells[0].setting
    words = (s.task, s.asking, s.model, f"{s.samples} samples a field")
    block.suptitle(", ".join(filter(None, words)), fontsize=SIZES["title"], x=0.01, ha="left")
    block.supxlabel("tokens of the text", fontsize=SIZES["label"])
    block.supylabel("depth (0: its start)", fontsize=SIZES["label"])
    assert drawn is not None
    bar = block.colorbar(drawn, ax=axes, shrink=0.9, pad=0.02, aspect=30)
    better = "higher" if cells[0].of.higher_is_better else "lower"
    bar.set_label(f"{cells[0].of.label} ({better} is better)", fontsize=SIZES["tick"])
    bar.ax.tick_params(labelsize=SIZES["tick"])


def _panel(axis: Axes, table: list[list[float | None]], scale: tuple[float, float]) -> AxesImage:
    """Draw one heat map [depths, lengths], with the score in each field, grey if not measured."""
    low, high = scale
    numbers = [[float("nan") if score is None else score for score in line] for line in table]
    axis.set_facecolor("#bbbbbb")
    image = axis.imshow(numbers, vmin=low, vmax=high, cmap="viridis", aspect="auto")
    for y, line in enumerate(table):
        for x, score in enumerate(line):
            if score is not None:
                bright = (score - low) > 0.6 * (high - low)
                color = "black" if bright else "white"
                axis.text(
                    x,
                    y,
                    f"{score:.2f}",
                    ha="center",
                    va="center",
                    color=color,
                    fontsize=SIZES["tick"] - 1,
                )
    return image
