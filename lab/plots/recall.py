"""Draws scores over budgets: one small panel per policy, with the others behind it in grey.

More than ten lines in one panel cannot be read. Panels are ordered by their mean score, the best
first.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvcap.lab.plots.groups import groups
from kvcap.lab.plots.style import DPI, SIZES, WIDTH, require_matplotlib
from kvcap.lab.quality.cells import Cell, label
from kvcap.lab.quality.table import UNCAPPED, title

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# The second line is dashed, thinner and hollow, so that the first shows through equal ones.
STYLES: dict[str, dict[str, Any]] = {
    "compact": {"color": "#0b62a4", "lw": 2.6, "ls": "-", "marker": "o", "ms": 5},
    "auto": {"color": "#2b8a3e", "lw": 1.8, "ls": (0, (1, 1)), "marker": "^", "ms": 5},
    "true": {"color": "#d1590f", "lw": 1.2, "ls": (0, (3, 1.5)), "marker": "s", "ms": 7,
             "mfc": "none"},
}  # fmt: skip
GREY = "#cfcfcf"
COLUMNS = 4
HEIGHT = 1.6  # inches of a panel
HEADING = 1.0  # inches above and below the panels of a group
Lines = dict[tuple[str, str], list[Cell]]  # (policy, positions) -> its cells by budget


def figure(cells: Iterable[Cell]) -> Figure:
    """Draw `cells`, in a block of panels per model, task and length.

    Raises:
        ValueError: no cell has a budget.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    parts = [part for part in groups(cells) if any(cell.setting.budget for cell in part)]
    if not parts:
        raise ValueError("--plot: no cell has a budget; add a policy that evicts")
    rows = [ceil(len(_policies(_lines(part))) / COLUMNS) for part in parts]
    heights = [HEIGHT * count + HEADING for count in rows]
    drawn = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI, layout="constrained")
    blocks = drawn.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for block, part, count in zip(blocks, parts, rows, strict=True):
        _block(block, part, count)
    return drawn


def _lines(cells: list[Cell]) -> Lines:
    lines: Lines = {}
    for cell in sorted(cells, key=lambda cell: cell.setting.budget or 0):
        if cell.setting.budget is not None:
            lines.setdefault((label(cell.setting), cell.setting.positions), []).append(cell)
    return lines


def _policies(lines: Lines) -> dict[str, list[Cell]]:
    """Return the line of each policy's better mode of positions, the best policy first."""
    better: dict[str, list[Cell]] = {}
    for (policy, _), cells in sorted(lines.items(), key=lambda line: (_worst(line[1]), line[0])):
        better.setdefault(policy, cells)
    return better


def _worst(cells: list[Cell]) -> float:
    """Return the mean score as a sort key, negative if a higher score is better."""
    return fmean(-cell.score if cell.of.higher_is_better else cell.score for cell in cells)


def _block(block: SubFigure, cells: list[Cell], rows: int) -> None:
    lines = _lines(cells)
    names = _policies(lines)
    columns = min(COLUMNS, len(names))
    uncapped = [cell for cell in cells if cell.setting.budget is None]
    axes = block.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axis, policy in zip(axes, names, strict=False):
        _panel(axis, policy, lines, uncapped)
    for i, axis in enumerate(axes):
        axis.set_visible(i < len(names))
        # The last row may be incomplete, so the lowest panel of a column may be in the row above.
        axis.tick_params(labelbottom=i < len(names) <= i + columns)
    s, unit = cells[0].setting, cells[0].of
    block.supxlabel("slots per KV head", fontsize=SIZES["label"])
    better = "" if unit.higher_is_better else " (lower is better)"
    block.supylabel(f"{unit.label}{better}", fontsize=SIZES["label"])
    artists: dict[str, Artist] = {}
    for axis in axes[: len(names)]:
        artists |= {
            text: line for line, text in zip(*axis.get_legend_handles_labels(), strict=True)
        }
    block.legend(
        [*artists.values()],
        [*artists],
        loc="outside upper left",
        ncols=4,
        fontsize=SIZES["tick"],
        frameon=False,
        handlelength=3,
        borderaxespad=0.2,
        alignment="left",
        title=f"{title(s)}; {s.samples} samples a point",
        title_fontsize=SIZES["title"],
    )


def _panel(axis: Axes, policy: str, lines: Lines, uncapped: list[Cell]) -> None:
    for other, cells in _policies(lines).items():
        if other != policy:
            axis.plot(*_points(cells), color=GREY, lw=0.7, zorder=1, label="other policies")
    for cell in uncapped:
        axis.axhline(
            cell.score,
            color="black",
            lw=0.9,
            ls=(0, (1, 1)),
            zorder=2,
            label=f"{UNCAPPED} ({cell.ci_low:.2f} to {cell.ci_high:.2f})",
        )
    for mode, style in STYLES.items():
        if cells := lines.get((policy, mode), []):
            across, up = _points(cells)
            low, high = [c.ci_low for c in cells], [c.ci_high for c in cells]
            axis.fill_between(across, low, high, color=style["color"], alpha=0.13, lw=0, zorder=3)
            axis.plot(across, up, zorder=4, label=f"{mode} (band: 95 % interval)", **style)
    budgets = sorted({budget for cells in lines.values() for budget in _points(cells)[0]})
    name = policy if len(policy) < 30 else f"{policy[:28]}…"
    axis.set_title(name, fontsize=SIZES["label"], pad=3)
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets[:: ceil(len(budgets) / 5)])
    axis.set_xticks([], minor=True)
    axis.xaxis.set_major_formatter(lambda budget, _: f"{budget:.0f}")
    if all(cell.of.share for cells in lines.values() for cell in cells):
        axis.set_ylim(-0.05, 1.05)
        axis.set_yticks([0, 0.5, 1])
    axis.tick_params(labelsize=SIZES["tick"], length=2, pad=2)
    axis.spines[["top", "right"]].set_visible(False)


def _points(cells: list[Cell]) -> tuple[list[int], list[float]]:
    return [cell.setting.budget or 0 for cell in cells], [cell.score for cell in cells]
