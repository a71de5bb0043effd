"""Results as a picture: a row per result, absolute times left, relative ones right.

Needs matplotlib, which is imported when a chart is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcap.android_bench.judge import Row, fit, key, series
from kvcap.android_bench.source import title
from kvcap.android_bench.table import WORST, label, setting, setting_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"keydiff": "#0b62a4", "tova": "#2a8a57", "h2o": "#d1590f", "snapkv": "#9b2f6f"}
OTHERS = ("#555555", "#8c6d1f", "#1f7f8c", "#6a4fb3", "#a33b3b", "#4f7a1f", "#7a7a7a", "#b3874f")
DASHES: dict[str, Any] = {"naive": (0, (1, 1.5)), "stateless": "-", "inverse_norms": (0, (5, 2)),
          "running_anchor": (0, (4, 1, 1, 1))}  # fmt: skip
MARKERS = "os^Dv"
SIZE = (11.5, 4.2)  # inches of one result
Lines = dict[tuple[object, ...], list[Row]]


def draw(results: Sequence[Row], path: Path) -> None:
    """Write judged results as a PNG.

    Raises:
        ValueError: matplotlib is not installed, or no result has a score to show.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no window, no state
    except ImportError as error:
        raise ValueError("--plot needs matplotlib; run: pip install kvcap[android]") from error
    shown = [(result, lines) for result in results if (lines := chosen(result))]
    if not shown:
        raise ValueError("--plot: no score was measured")
    figure = Figure(figsize=(SIZE[0], SIZE[1] * len(shown)), dpi=160, layout="constrained")
    blocks = figure.subfigures(len(shown), 1, squeeze=False)[:, 0]
    for block, (result, lines) in zip(blocks, shown, strict=True):
        left, right = block.subplots(1, 2)
        rows = next(iter(lines.values()))
        said = setting_name(setting(rows[0]))
        block.suptitle(f"{title(result)}\n{said}", fontsize=9, x=0.01, ha="left",
                       parse_math=False)  # fmt: skip
        _absolute(left, lines, result)
        _relative(right, lines, result)
        handles, names = left.get_legend_handles_labels()
        block.legend(handles, names, loc="outside right center", fontsize=7.5, frameon=False)
    figure.savefig(path)


def chosen(result: Row) -> Lines:
    """The series in the reference's setting with the fewest threads; any other where it failed."""
    found = series(result)
    reference = [rows for rows in found.values() if rows[0]["id"] == result["run"]["reference"]]
    rest = sorted(reference or found.values(), key=lambda rows: int(rows[0]["threads"]))
    if not rest:
        return {}
    wanted = setting(rest[0][0])
    return {name: rows for name, rows in found.items() if setting(rows[0]) == wanted}


def _styles(lines: Lines) -> list[dict[str, Any]]:
    """Of every series: a color per policy, a dash per form of KeyDiff, a marker for the rest."""
    colors, used, found = dict(COLORS), Counter[str](), []
    for rows in lines.values():
        policy, form = rows[0]["policy"], rows[0]["formulation"]
        color = colors.setdefault(policy, OTHERS[(len(colors) - len(COLORS)) % len(OTHERS)])
        dash = DASHES.get(form, "-") if policy == "keydiff" else "-"
        marker = MARKERS[used[color] % len(MARKERS)]
        found.append({"color": color, "ls": dash, "marker": marker, "ms": 4, "lw": 1.5,
                      "label": label(rows[0])})  # fmt: skip
        used[color] += 1
    return found


def _absolute(axes: Axes, lines: Lines, result: Row) -> None:
    for rows, style in zip(lines.values(), _styles(lines), strict=True):
        across = [row["n"] for row in rows]
        axes.plot(across, [row["p50_us"] for row in rows], **style)
        least, most = [row["min_us"] for row in rows], [row["p90_us"] for row in rows]
        axes.fill_between(across, least, most, color=axes.lines[-1].get_color(), alpha=0.12, lw=0)
        _fitted(axes, rows)
    copies = [(int(b["id"].rpartition("n")[2]), b["p50_us"]) for b in result["baselines"]
              if b["id"].startswith("memcpy.n") and "p50_us" in b]  # fmt: skip
    if copies:
        axes.plot(*zip(*copies, strict=True), color="black", lw=0.8, ls=":", label="copy of keys")
    axes.set_yscale("log")
    axes.set_title("median, least to 90th percentile, in µs", fontsize=8.5)
    _across(axes, lines)


def _fitted(axes: Axes, rows: list[Row]) -> None:
    """The line t0 + slope · n behind a series, where it describes it."""
    slots = [row["n"] for row in rows]
    if len(set(slots)) < 3:
        return
    line = fit(slots, [row["p50_us"] for row in rows])
    if line["worst"] <= WORST:
        up = [line["t0_us"] + line["us_per_1024"] * n / 1024 for n in slots]
        color = axes.lines[-1].get_color()
        axes.plot(slots, up, color=color, lw=4, alpha=0.25, zorder=1)


def _relative(axes: Axes, lines: Lines, result: Row) -> None:
    values = {(v["id"], v["threads"], v["provider_asked"]): v["value"]
              for v in result["derived"]["relative"]}  # fmt: skip
    for rows, style in zip(lines.values(), _styles(lines), strict=True):
        points = [(row["n"], values[key(row)]) for row in rows if key(row) in values]
        if points:
            axes.plot(*zip(*points, strict=True), **style)
    axes.axhline(1, color="black", lw=0.6)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title(f"relative to {result['run']['reference']}", fontsize=8.5)
    _across(axes, lines)


def _across(axes: Axes, lines: Lines) -> None:
    sizes = sorted({row["n"] for rows in lines.values() for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("slots held", fontsize=8)
    axes.tick_params(labelsize=7.5)
    axes.grid(alpha=0.25, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
