"""Draws quality against cost: bytes of the cache, and milliseconds of eviction per block.

Points on the frontier, which no other point equals or beats in both, are joined and labelled. A
policy that never evicts has no milliseconds, and is a dotted line there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING

from kvcap.lab.plots.groups import groups
from kvcap.lab.plots.labels import put_labels
from kvcap.lab.plots.style import DPI, SIZES, WIDTH, Style, require_matplotlib
from kvcap.lab.quality.cells import Cell, label
from kvcap.lab.quality.table import UNCAPPED, title
from kvcap.runtime.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

PANEL = 3.4  # inches of a panel's height
COLUMNS = 3  # columns of the legend
Label = tuple[float, float, str]  # a point (x, y) and its text


def _bytes(cell: Cell) -> float | None:
    return cell.kv_bytes


def _milliseconds(cell: Cell) -> float | None:
    return None if cell.scoring_ms is None else cell.scoring_ms["p50"]


COSTS: dict[str, Callable[[Cell], float | None]] = {
    "bytes of the KV cache": _bytes,
    "ms of eviction per block, all layers": _milliseconds,
}


def figure(cells: Iterable[Cell]) -> Figure:
    """Draw `cells`, in two panels per model, task and length.

    Raises:
        ValueError: there are no cells.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = groups(cells)
    if not parts:
        raise ValueError("there are no cells to draw")
    heights = [PANEL + 0.6 + 0.18 * ceil(len(_names(part)) / COLUMNS) for part in parts]
    whole = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(whole)  # a canvas that can measure text
    blocks = whole.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    drawn = [
        labelled
        for block, part in zip(blocks, parts, strict=True)
        for labelled in _block(block, part)
    ]
    whole.draw_without_rendering()  # everything gets its final place before labels are put
    whole.set_layout_engine("none")
    for axis, points in drawn:
        put_labels(axis, points, SIZES["tick"])
    return whole


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of points (cost, quality) that no other point beats.

    Equal points are all on the frontier.

    >>> frontier([(1, 0.5), (2, 0.4), (2, 0.9), (1, 0.5)])
    [0, 2, 3]
    """

    def beaten(a: tuple[float, float]) -> bool:
        return any(b[0] <= a[0] and b[1] >= a[1] and b != a for b in points)

    return [i for i, point in enumerate(points) if not beaten(point)]


def _names(cells: list[Cell]) -> list[tuple[str, str]]:
    """Return the lines of the legend: policy and positions."""
    return sorted({_name(cell) for cell in cells})


def _name(cell: Cell) -> tuple[str, str]:
    s = cell.setting
    return label(s), UNCAPPED if s.budget is None else s.positions


def _block(block: SubFigure, cells: list[Cell]) -> list[tuple[Axes, list[Label]]]:
    """Draw two panels; return their labels, which are placed once the layout is final."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes = block.subplots(1, len(COSTS), sharey=True)
    unit, names = cells[0].of, _names(cells)
    drawn = []
    for axis, (cost, of) in zip(axes, COSTS.items(), strict=True):
        priced = [(price, cell) for cell in cells if (price := of(cell)) is not None]
        for index, name in enumerate(names):
            _line(axis, [pair for pair in priced if _name(pair[1]) == name], name, Style.of(index))
        sign = 1 if unit.higher_is_better else -1
        best = frontier([(price, sign * cell.score) for price, cell in priced])
        steps = sorted((priced[i][0], priced[i][1].score) for i in best)
        if steps:
            across, up = zip(*steps, strict=True)
            axis.step(across, up, where="post", color="black", lw=0.8, zorder=1, label="frontier")
        for free in (cell for cell in cells if of(cell) is None):
            axis.axhline(free.score, color="black", lw=0.9, ls=(0, (1, 1)), zorder=1)
        drawn.append((axis, _labels([priced[i] for i in best])))
        axis.set_xscale("log", base=2 if of is _bytes else 10)
        if of is not _bytes:
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel(cost, fontsize=SIZES["label"])
        axis.tick_params(labelsize=SIZES["tick"], length=2, pad=2)
        axis.margins(0.1)
        if unit.share:
            axis.set_ylim(-0.05, 1.08)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].xaxis.set_major_formatter(lambda count, _: format_bytes(round(count)))
    better = "higher" if unit.higher_is_better else "lower"
    axes[0].set_ylabel(f"{unit.label} ({better} is better)", fontsize=SIZES["label"])
    n = cells[0].setting.samples
    block.suptitle(
        f"{title(cells[0].setting)}; {n} samples a point, bars: 95 % interval",
        fontsize=SIZES["title"],
        x=0.01,
        ha="left",
    )
    handles, texts = axes[0].get_legend_handles_labels()
    block.legend(
        handles,
        texts,
        loc="outside lower center",
        ncols=COLUMNS,
        fontsize=SIZES["tick"],
        frameon=False,
    )
    return drawn


def _line(
    axis: Axes, priced: list[tuple[float, Cell]], name: tuple[str, str], style: Style
) -> None:
    """Draw the points of a policy, joined in the order of budgets; hollow at true positions."""
    policy, positions = name
    ordered = sorted(priced, key=lambda pair: pair[1].setting.budget or 0)
    prices, scores = [price for price, _ in ordered], [cell.score for _, cell in ordered]
    cells = [cell for _, cell in ordered]  # rounding may put a score just outside of its interval
    reach = [[max(0.0, c.score - c.ci_low) for c in cells]]
    reach += [[max(0.0, c.ci_high - c.score) for c in cells]]
    filled = "white" if positions == "true" else style.color
    axis.errorbar(prices, scores, yerr=reach, color=style.color, ls="none", alpha=0.3, lw=0.8)
    axis.plot(prices, scores, color=style.color, ls=style.dash, alpha=0.4, lw=0.8)
    axis.plot(
        prices,
        scores,
        color=style.color,
        ls="none",
        marker=style.marker,
        ms=5,
        mfc=filled,
        label=f"{policy}, {positions}",
    )


def _labels(priced: list[tuple[float, Cell]]) -> list[Label]:
    """Return a label for every price and score that has points: their policies and budgets."""
    texts_at: dict[tuple[float, float], list[str]] = {}
    for price, cell in sorted(priced, key=lambda pair: _name(pair[1])):
        s = cell.setting
        text = label(s) if s.budget is None else f"{label(s)} {s.budget:,}"
        at = texts_at.setdefault((price, cell.score), [])
        if text not in at:
            at.append(text)
    return [(*point, "\n".join(texts)) for point, texts in texts_at.items()]
