"""Draws results: a row per result, absolute times on the left, relative ones on the right.

If decoders were timed, a last row has their tokens per second over time.

Lines differ by marker and dash, not only by colour. A bar at each point goes from the least sample
to the 90th percentile; the point is hollow if that spread is above `WILD`. Needs matplotlib, which
is imported when a chart is drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcap.android_bench.results.judge import WILD, Row, fit, key, series, spread, timed
from kvcap.android_bench.results.source import title
from kvcap.android_bench.results.table import WORST, label, setting, setting_name, short
from kvcap.android_bench.safe_text import plain
from kvcap.export.graphs.formulations import FORMULATIONS
from kvcap.runtime.errors import how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"keydiff": "#0b62a4", "tova": "#2a8a57", "h2o": "#d1590f", "snapkv": "#9b2f6f"}
OTHERS = (  # colours of all other policies with different graphs
    "#555555", "#8c6d1f", "#1f7f8c", "#6a4fb3", "#a33b3b", "#4f7a1f", "#7a7a7a", "#b3874f",
    "#0f5f4e", "#c2185b", "#3f51b5", "#7b4a2e", "#00838f", "#9e9d24", "#5e1f1f", "#c77dba",
    "#263f5c", "#b8860b", "#4b8bd4", "#6b8e6b",
)  # fmt: skip
DASHES: tuple[Any, ...] = ((0, (1, 1.5)), "-", (0, (5, 2)), (0, (6, 1.5, 1, 1.5)))
FORMS = dict(zip(FORMULATIONS, DASHES, strict=True))  # dashes of KeyDiff's forms
MARKERS = "os^DvP*Xp<>h"
MOST = 24  # lines, and ticks, that can be distinguished
WIDTH = 36  # characters of a name in the legend
SPACING = 0.02  # octaves between the bars of two lines at one size, which stand side by side
SIZE = (11.5, 4.2)  # inches of one result
Lines = dict[tuple[object, ...], list[Row]]


def draw(results: Sequence[Row], path: Path) -> None:
    """Write judged results as a PNG.

    Raises:
        ValueError: matplotlib is not installed, or no result has a score to show.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # without pyplot: no window, no state
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib; {how_to_install('android')}") from error
    shown = [(result, lines) for result in results if (lines := chosen(result))]
    sustained = [(result, row) for result in results for row in timed(result) if row["sustained"]]
    if not shown and not sustained:
        raise ValueError("--plot: no score was measured, and no decoder")
    rows = len(shown) + bool(sustained)
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of a device's name
        size = (SIZE[0], SIZE[1] * rows)
        figure = Figure(figsize=size, dpi=160, layout="constrained")
        blocks = figure.subfigures(rows, 1, squeeze=False)[:, 0]
        if sustained:
            _sustained(blocks[-1], sustained)
        for block, (result, lines) in zip(blocks, shown, strict=False):
            left, right = block.subplots(1, 2)
            subtitle = setting_name(setting(next(iter(lines.values()))[0]))
            if (there := len(lines)) > MOST:
                lines = dict(list(lines.items())[:MOST])
                subtitle += f"; the first {MOST} of {there} lines"
            block.suptitle(
                f"{plain(title(result), 4 * WIDTH)}\n{plain(subtitle, 4 * WIDTH)}",
                fontsize=9,
                x=0.01,
                ha="left",
            )
            _absolute(left, lines, result)
            _relative(right, lines, result)
            handles, names = left.get_legend_handles_labels()
            block.legend(
                handles,
                names,
                loc="outside right center",
                fontsize=7.5,
                frameon=False,
                handlelength=3.2,
            )
        figure.savefig(path)


def _sustained(block: Any, rows: list[tuple[Row, Row]]) -> None:
    """Draw the tokens per second of sustained runs over time, which show the effect of heat."""
    axes = block.subplots(1, 1)
    for index, (result, row) in enumerate(rows[:MOST]):
        windows = row["sustained"]
        ends = list(accumulate(window["seconds"] for window in windows))
        middles = [
            (end - window["seconds"] / 2) / 60 for end, window in zip(ends, windows, strict=True)
        ]
        speeds = [window["tokens"] / window["seconds"] for window in windows]
        name = f"{row['id']}, {row['threads']} thr., {short(result, row['provider_asked'])}".lstrip(
            "_"
        )
        axes.plot(
            middles,
            speeds,
            ls=DASHES[index % len(DASHES)],
            marker=MARKERS[index % 12],
            color=OTHERS[index % len(OTHERS)],
            ms=4.5,
            lw=1.4,
            label=plain(name, 2 * WIDTH),
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes of writing on", fontsize=8)
    axes.set_title("whole decoders: tokens a second", fontsize=8)
    axes.tick_params(labelsize=7.5)
    axes.grid(alpha=0.25, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    block.legend(loc="outside lower center", fontsize=7.5, frameon=False, handlelength=3.2)


def chosen(result: Row) -> Lines:
    """Return the series of the reference's setting with fewest threads, or of another if none."""
    by_name = series(result)
    reference = [rows for rows in by_name.values() if rows[0]["id"] == result["run"]["reference"]]
    rest = sorted(reference or by_name.values(), key=lambda rows: int(rows[0]["threads"]))
    if not rest:
        return {}
    reference_setting = setting(rest[0][0])
    return {name: rows for name, rows in by_name.items() if setting(rows[0]) == reference_setting}


def _styles(lines: Lines) -> list[dict[str, Any]]:
    """Return the style of every series: a colour per policy, a marker of its own, and a dash."""
    colors, styles, others = dict(COLORS), [], count(1)
    for index, rows in enumerate(lines.values()):
        policy, form = rows[0]["policy"], rows[0]["formulation"]
        color = colors.setdefault(policy, OTHERS[(len(colors) - len(COLORS)) % len(OTHERS)])
        dash = FORMS.get(form, "-") if policy == "keydiff" else DASHES[next(others) % len(DASHES)]
        # matplotlib leaves names that begin with an underscore out of the legend
        name = plain(label(rows[0]).lstrip("_"), WIDTH)
        styles.append(
            {
                "color": color,
                "ls": dash,
                "marker": MARKERS[index % len(MARKERS)],
                "ms": 4.5,
                "lw": 1.4,
                "label": name,
            }
        )
    return styles


def _absolute(axes: Axes, lines: Lines, result: Row) -> None:
    for index, (rows, style) in enumerate(zip(lines.values(), _styles(lines), strict=True)):
        beside = 2 ** (SPACING * (index - (len(lines) - 1) / 2))
        across = [row["n"] * beside for row in rows]
        medians = [row["p50_us"] for row in rows]
        axes.plot(across, medians, **style)
        bars = [
            [row["p50_us"] - row["min_us"] for row in rows],
            [row["p90_us"] - row["p50_us"] for row in rows],
        ]
        axes.errorbar(
            across, medians, bars, ls="", ecolor=style["color"], elinewidth=0.9, capsize=1.8
        )
        wild = [
            (x, row["p50_us"]) for x, row in zip(across, rows, strict=True) if spread(row) > WILD
        ]
        if wild:
            axes.plot(
                *zip(*wild, strict=True),
                ls="",
                marker=style["marker"],
                ms=4.5,
                mfc="white",
                mec=style["color"],
                zorder=3,
            )
        _fitted(axes, rows, style["color"])
    copies = [
        (int(b["id"].rpartition("n")[2]), b["p50_us"]) for b in result["baselines"] if "p50_us" in b
    ]
    if copies := [(n, us) for n, us in copies if n > 0]:
        axes.plot(*zip(*copies, strict=True), color="black", lw=0.8, ls=":", label="copy of keys")
    axes.set_yscale("log")
    _plain_ticks(axes, 10)
    axes.set_title(
        f"median in µs; bars: least to 90th percentile; hollow: beyond {WILD:g} times the least",
        fontsize=8,
    )
    _across(axes, lines)


def _fitted(axes: Axes, rows: list[Row], color: str) -> None:
    """Draw the fitted line t0 + slope · n behind a series, if its errors are small."""
    slots = [row["n"] for row in rows]
    if len(set(slots)) < 3:
        return
    line = fit(slots, [row["p50_us"] for row in rows])
    if line["worst"] <= WORST:
        up = [line["t0_us"] + line["us_per_1024"] * n / 1024 for n in slots]
        axes.plot(slots, up, color=color, lw=4, alpha=0.2, zorder=1)


def _relative(axes: Axes, lines: Lines, result: Row) -> None:
    values = {key(entry): entry["value"] for entry in result["derived"]["relative"]}
    for rows, style in zip(lines.values(), _styles(lines), strict=True):
        points = [(row["n"], values[key(row)]) for row in rows if key(row) in values]
        if points:
            axes.plot(*zip(*points, strict=True), **style)
    axes.axhline(1, color="black", lw=0.6)
    axes.set_yscale("log", base=2)
    _plain_ticks(axes, 2)
    axes.set_title(plain(f"relative to {result['run']['reference']}", 2 * WIDTH), fontsize=8)
    _across(axes, lines)


def _plain_ticks(axes: Axes, base: int) -> None:
    """Write the ticks of a logarithmic axis as plain numbers; add ticks if powers are few."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axes.get_ylim()
    few = base == 10 and high / low < 100
    axes.yaxis.set_major_locator(LogLocator(base, (1, 2, 5) if few else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _across(axes: Axes, lines: Lines) -> None:
    sizes = sorted({row["n"] for rows in lines.values() for row in rows})
    sizes = sizes[:: 1 + len(sizes) // MOST]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("slots held", fontsize=8)
    axes.tick_params(labelsize=7.5)
    axes.grid(alpha=0.25, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
