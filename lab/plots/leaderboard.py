"""Draws scores over budgets for the page that ranks policies: lengths down, position modes across.

Only a few policies have a line, so that lines can be distinguished: well-known ones, and the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcap.lab.plots.style import DPI, SIZES, WIDTH, Style, require_matplotlib
from kvcap.lab.quality.cells import Cell
from kvcap.lab.quality.table import UNCAPPED
from kvcap.lab.report.ranking import RankedPolicy, RankingTable, overview

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALWAYS = ("keydiff", "keydiff-window", "streaming_llm")  # policies that always have a line
LINES = 7  # most lines besides the uncapped ones
PANEL, HEADING = 2.4, 1.2  # inches of a panel's height, and above and below all panels
SPACING = 1.05  # factor between the points of neighbouring lines, whose intervals must not overlap
COLUMNS, LETTERS = 4, 100  # most columns of the legend, and most letters of all columns


def drawn_rows(rows: Sequence[RankedPolicy]) -> list[str]:
    """Return the policies that have a line, the best first.

    Args:
        rows: rows of all policies, the best first.
    """
    always = [row.name for row in rows if row.name in ALWAYS]
    best = [row.name for row in rows if row.name not in ALWAYS][: LINES - len(always)]
    return [row.name for row in rows if row.name in {*always, *best}]


def figure(tables: Sequence[RankingTable], heading: str) -> Figure:
    """Draw one section of the page, a panel per table.

    Raises:
        ValueError: no table has a policy with a budget, or matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    names = drawn_rows(overview(tables))
    if not names:
        raise ValueError(f"--plot: {heading}: no cell has a budget; add a policy that evicts")
    lengths = sorted({table.length for table in tables})
    modes = sorted({table.positions for table in tables if table.rows})
    size = WIDTH, PANEL * len(lengths) + HEADING
    drawn = Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = drawn.subplots(len(lengths), len(modes), sharex=True, sharey=True, squeeze=False)
    by_place = {(table.length, table.positions): table for table in tables}
    for length, across in zip(lengths, axes, strict=True):
        for mode, axis in zip(modes, across, strict=True):
            if (length, mode) not in by_place:
                axis.set_visible(False)
                continue
            _panel(axis, by_place[length, mode], names)
            axis.set_title(f"{length:,} tokens, {mode}", fontsize=SIZES["label"], pad=4)
    unit = _unit_cell(tables).of
    better = "higher" if unit.higher_is_better else "lower"
    drawn.supylabel(f"{unit.label} ({better} is better)", fontsize=SIZES["label"])
    for axis in axes[-1]:
        axis.set_xlabel("slots per KV head", fontsize=SIZES["label"])
    drawn.suptitle(
        f"{heading}; {_unit_cell(tables).setting.samples} samples a point",
        fontsize=SIZES["title"],
        x=0.01,
        ha="left",
    )
    legend = {
        text: line
        for axis in axes.flat
        for line, text in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    order = sorted(legend, key=lambda text: names.index(text) if text in names else len(names))
    columns = max(1, min(COLUMNS, LETTERS // max(map(len, order), default=1)))
    drawn.legend(
        [legend[text] for text in order],
        order,
        loc="outside lower center",
        ncols=columns,
        fontsize=SIZES["tick"],
        frameon=False,
        handlelength=3.5,
        title="the best mean first; bars and band: 95 % intervals",
        title_fontsize=SIZES["tick"],
    )
    return drawn


def _unit_cell(tables: Sequence[RankingTable]) -> Cell:
    """Return any cell, as all have the same unit and number of samples."""
    return next(c for t in tables for row in t.rows for c in row.cells if c is not None)


def _panel(axis: Axes, table: RankingTable, names: Sequence[str]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for name, cell in table.uncapped:
        axis.axhspan(cell.ci_low, cell.ci_high, color="black", alpha=0.06, lw=0, zorder=1)
        axis.axhline(
            cell.score, color="black", lw=1, ls=(0, (1, 1)), zorder=2, label=f"{name} ({UNCAPPED})"
        )
    rows = {row.name: row for row in table.rows}
    for index, name in enumerate(names):
        if name in rows:
            _line(axis, rows[name], table.budgets, index, len(names))
    axis.set_xscale("log", base=2)
    axis.set_xticks(table.budgets, [f"{budget:,}" for budget in table.budgets])
    axis.set_xticks([], minor=True)
    unit = _unit_cell([table]).of
    if unit.share:
        axis.set_ylim(-0.04, 1.04)
    elif _reach(table, names) > 10:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda score, _: f"{score:,g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(axis="y", color="#e4e4e4", lw=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=SIZES["tick"], length=2, pad=2, labelbottom=True, labelleft=True)
    axis.spines[["top", "right"]].set_visible(False)


def _line(axis: Axes, row: RankedPolicy, budgets: Sequence[int], index: int, lines: int) -> None:
    shift, style = SPACING ** (index - (lines - 1) / 2), Style.of(index)
    there = [(budget * shift, c) for budget, c in zip(budgets, row.cells, strict=True) if c]
    across, cells = [x for x, _ in there], [cell for _, cell in there]
    # Rounding may put a score just outside of its interval.
    reach = [[max(0.0, c.score - c.ci_low) for c in cells]]
    reach += [[max(0.0, c.ci_high - c.score) for c in cells]]
    axis.errorbar(
        across,
        [cell.score for cell in cells],
        yerr=reach,
        color=style.color,
        ls=style.dash,
        marker=style.marker,
        ms=4.5,
        lw=1.4,
        elinewidth=0.9,
        capsize=2,
        zorder=3,
        label=row.name,
    )


def _reach(table: RankingTable, names: Sequence[str]) -> float:
    """Return the highest score divided by the least, over the lines that are drawn."""
    scores = [c.score for row in table.rows if row.name in names for c in row.cells if c]
    return max(scores) / max(min(scores), 1e-9)
