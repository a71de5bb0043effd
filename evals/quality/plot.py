"""Draws recall over budget: one small panel per policy, with the others behind it in grey.

A line per policy in one set of axes cannot be told apart beyond ten; a panel each can. Panels are
ordered by their mean recall. Needs matplotlib, which nothing else imports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import groupby
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from kvcap.evals.quality.cells import Cell
from kvcap.evals.quality.table import group, label, title

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

# Color and width; the second is thinner, so that equal lines show both.
STYLES = {"compact": ("#0b62a4", 2.4), "auto": ("#2b8a3e", 1.7), "true": ("#d1590f", 1.0)}
GREY = "#d2d2d2"
COLUMNS = 5
PANEL = (2.05, 1.65)  # inches
LEAST = 6.4  # inches of title and legend side by side
HEADING = 0.85  # inches above and below the panels of a group
Lines = dict[tuple[str, str], list[Cell]]  # (policy, positions) -> its cells by budget


def require_matplotlib() -> None:
    """Refuse early: a sweep takes hours, and its picture comes last.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; run: pip install kvcap[plot]")


def plot(cells: Iterable[Cell], path: Path) -> None:
    """Write `cells` as a PNG; a block of panels per model, task and length.

    Raises:
        ValueError: no cell has a budget.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    ordered = sorted(cells, key=lambda cell: group(cell.setting))
    parts = [list(part) for _, part in groupby(ordered, key=lambda cell: group(cell.setting))]
    parts = [part for part in parts if any(cell.setting.budget for cell in part)]
    if not parts:
        raise ValueError("--plot: no cell has a budget; add a policy that evicts")
    rows = [ceil(len(_policies(_lines(part))) / COLUMNS) for part in parts]
    columns = min(COLUMNS, max(len(_policies(_lines(part))) for part in parts))
    heights = [PANEL[1] * count + HEADING for count in rows]
    width = max(PANEL[0] * columns, LEAST) + 0.4
    figure = Figure(figsize=(width, sum(heights)), dpi=160, layout="constrained")
    blocks = figure.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for block, part, count in zip(blocks, parts, rows, strict=True):
        _block(block, part, count, columns)
    figure.savefig(path)


def _lines(cells: list[Cell]) -> Lines:
    found: Lines = {}
    for cell in sorted(cells, key=lambda cell: cell.setting.budget or 0):
        if cell.setting.budget is not None:
            found.setdefault((label(cell.setting), cell.setting.positions), []).append(cell)
    return found


def _policies(lines: Lines) -> dict[str, list[Cell]]:
    """The better line of every policy's positions, the best policy first."""
    better: dict[str, list[Cell]] = {}
    for (policy, _), cells in sorted(lines.items(), key=lambda line: (-_mean(line[1]), line[0])):
        better.setdefault(policy, cells)
    return better


def _mean(cells: list[Cell]) -> float:
    return fmean(cell.score for cell in cells)


def _block(block: SubFigure, cells: list[Cell], rows: int, columns: int) -> None:
    lines = _lines(cells)
    uncapped = [cell.score for cell in cells if cell.setting.budget is None]
    axes = block.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    names = _policies(lines)
    for axis, policy in zip(axes, names, strict=False):
        _panel(axis, policy, lines, uncapped)
    for i, axis in enumerate(axes):
        axis.set_visible(i < len(names))
        # The lowest panel of a column is not always in the last row.
        axis.tick_params(labelbottom=i < len(names) <= i + columns)
    block.suptitle(title(cells[0].setting), fontsize=9, x=0.01, ha="left")
    block.supxlabel("slots per KV head", fontsize=8)
    block.supylabel("share of right answers", fontsize=8)
    found: dict[str, Artist] = {}
    for axis in axes[: len(names)]:
        found |= {text: line for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    block.legend([*found.values()], [*found], loc="upper right", ncols=4, fontsize=7, frameon=False)


def _panel(axis: Axes, policy: str, lines: Lines, uncapped: Sequence[float]) -> None:
    for other, cells in _policies(lines).items():
        if other != policy:
            axis.plot(*_points(cells), color=GREY, lw=0.6, zorder=1, label="other policies")
    for score in uncapped:
        axis.axhline(score, color="black", lw=0.8, ls="--", zorder=2, label="uncapped")
    for mode, (color, width) in STYLES.items():
        if cells := lines.get((policy, mode), []):
            across, up = _points(cells)
            low, high = [c.ci_low for c in cells], [c.ci_high for c in cells]
            axis.fill_between(across, low, high, color=color, alpha=0.13, lw=0, zorder=3)
            (line,) = axis.plot(across, up, color=color, lw=width, zorder=4, label=mode)
            line.set(marker="o", markersize=2 * width)
    budgets = sorted({budget for cells in lines.values() for budget in _points(cells)[0]})
    axis.set_title(policy if len(policy) < 36 else f"{policy[:34]}…", fontsize=8, pad=3)
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets[:: ceil(len(budgets) / 5)])
    axis.set_xticks([], minor=True)
    axis.xaxis.set_major_formatter(lambda budget, _: f"{budget:.0f}")
    axis.set_ylim(-0.04, 1.04)
    axis.set_yticks([0, 0.5, 1])
    axis.tick_params(labelsize=6.5, length=2, pad=2)
    axis.spines[["top", "right"]].set_visible(False)


def _points(cells: list[Cell]) -> tuple[list[int], list[float]]:
    return [cell.setting.budget or 0 for cell in cells], [cell.score for cell in cells]
