"""What pictures show: axes, lines, legends and labels, not pixels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from sweeps import made_cell

from kvcap.evals.quality.scores import wilson
from kvcap.lab.plots import draw, needles, pareto, recall, style
from kvcap.lab.plots.groups import pooled
from kvcap.lab.quality.cells import Cell


def cell(policy: str, budget: int | None, right: int, mode: Any = "true", **more: Any) -> Cell:
    """Return a cell with 10 samples, of which some are right."""
    more = {"kv_bytes": (budget or 64) * 1024, "positions": mode, **more}
    if budget:
        more["scoring_ms"] = {"p20": 0.9, "p50": 0.1 * len(policy), "p80": 1.1}
    else:
        del more["positions"]
    return made_cell(policy, budget, (1.0,) * right + (0.0,) * (10 - right), **more)


def texts(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.texts]


def test_recall_has_a_panel_per_policy_and_lines_told_apart():
    cells = [
        cell(f"policy-{i}", b, i, m) for i in range(6) for b in (8, 16) for m in ("compact", "true")
    ]
    drawn = recall.figure([*cells, cell("full", None, 9)])
    (block,) = drawn.subfigs
    assert block.get_supxlabel() == "slots per KV head"
    assert block.get_supylabel() == "share of right answers"
    shown = [axis for axis in block.axes if axis.get_visible()]
    assert [axis.get_title() for axis in shown] == [f"policy-{i}" for i in (5, 4, 3, 2, 1, 0)]
    (legend,) = block.legends
    title = "t, 64 tokens, question-aware, m; 10 samples a point"
    assert legend.get_title().get_text() == title
    assert [text.get_text() for text in legend.get_texts()] == [
        "other policies",
        "uncapped (0.60 to 0.98)",
        "compact (band: 95 % interval)",
        "true (band: 95 % interval)",
    ]
    for axis in shown:
        compact, true = axis.lines[-2:]
        # Equal lines: the upper one is thinner, dashed and hollow, so that both are seen.
        assert list(compact.get_ydata()) == list(true.get_ydata())
        assert true.get_linewidth() < compact.get_linewidth()
        assert (true.get_marker(), compact.get_marker()) == ("s", "o")
        assert (true.get_markerfacecolor(), true.is_dashed()) == ("none", True)
        assert len(axis.collections) == 2  # a band each
        assert list(axis.get_xticks()) == [8, 16]
        assert all(label.get_fontsize() >= 8 for label in axis.get_yticklabels())


def test_recall_of_losses_says_that_less_is_better():
    cells = [
        cell(p, b, 0, unit="perplexity", score=s)
        for p, s in (("bad", 9.0), ("good", 3.0))
        for b in (8, 16)
    ]
    (block,) = recall.figure(cells).subfigs
    assert block.get_supylabel() == "perplexity (lower is better)"
    assert [axis.get_title() for axis in block.axes] == ["good", "bad"]
    assert block.axes[0].get_ylim()[1] > 9


def test_cells_of_several_depths_are_one_point_with_all_samples():
    cells = [cell("a", 8, 2, depth=0.0), cell("a", 8, 8, depth=1.0), cell("a", 8, 3)]
    both, spread = pooled(cells)
    assert (both.score, both.setting.samples, both.setting.depth) == (0.5, 20, None)
    assert (both.ci_low, both.ci_high) == wilson(10, 20)
    assert spread is cells[2]


def test_needles_are_a_map_of_depth_and_length_per_policy_and_budget():
    cells = [
        cell(p, b, round(10 * d), "compact", depth=d, length=n)
        for p in ("a", "bb")
        for b in (8, 16)
        for d in (0.0, 0.5, 1.0)
        for n in (64, 128)
    ]
    cells += [cell("full", None, 10, depth=d, length=64) for d in (0.0, 1.0)]
    (block,) = needles.figure([*cells, cell("a", 8, 3)]).subfigs
    assert block.get_suptitle() == "t, question-aware, m, 10 samples a field"
    assert (block.get_supxlabel(), block.get_supylabel()) == (
        "tokens of the text",
        "depth (0: its start)",
    )
    maps = {axis.get_title(): axis for axis in block.axes if axis.get_visible() and axis.images}
    assert set(maps) == {
        "full\nuncapped",
        "a\n8 slots, compact",
        "a\n16 slots, compact",
        "bb\n8 slots, compact",
        "bb\n16 slots, compact",
    }
    axis = maps["a\n8 slots, compact"]
    assert texts(axis) == ["0.00", "0.00", "0.50", "0.50", "1.00", "1.00"]
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["0", "0.5", "1"]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["64", "128"]
    assert texts(maps["full\nuncapped"]) == ["1.00", "1.00"]  # what was not measured is left out
    bar = next(axis for axis in block.axes if axis.get_label() == "<colorbar>")
    assert bar.get_ylabel() == "share of right answers (higher is better)"


def test_frontiers_are_labelled_where_nothing_is_covered():
    from matplotlib.text import Text

    cells = [
        cell(p, b, r, m)
        for p, r in (("a", 5), ("bb", 5), ("cccc", 9), ("d", 1))
        for b in (8, 16, 32)
        for m in ("compact", "true")
    ]
    drawn = pareto.figure([*cells, cell("full", None, 10)])
    (block,) = drawn.subfigs
    nbytes, ms = block.axes
    assert nbytes.get_xlabel() == "bytes of the KV cache"
    assert ms.get_xlabel() == "ms of eviction per block, all layers"
    assert nbytes.get_ylabel() == "share of right answers (higher is better)"
    assert "10 samples a point" in block.get_suptitle()
    assert texts(nbytes) == ["cccc 8", "full"]
    assert texts(ms) == ["a 8\na 16\na 32", "cccc 8\ncccc 16\ncccc 32"]
    (legend,) = block.legends
    assert len(legend.get_texts()) == len(legend.legend_handles) == 4 * 2 + 1 + 1
    renderer = drawn.canvas.get_renderer()
    for axis in (nbytes, ms):
        boxes = [Text.get_window_extent(text, renderer) for text in axis.texts]
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        inside = axis.get_window_extent(renderer)
        assert all(inside.x0 <= b.x0 and b.x1 <= inside.x1 for b in boxes)
        marks = [axis.transData.transform(p) for line in axis.lines for p in line.get_xydata()]
        assert not any(box.contains(*mark) for box in boxes for mark in marks)


def test_styles_are_told_apart():
    looks = [style.Style.of(i) for i in range(70)]
    assert len({(look.color, look.marker) for look in looks}) == 70
    assert all(
        a.color != b.color and a.marker != b.marker and a.dash != b.dash for a, b in pairwise(looks)
    )


def test_all_pictures_are_drawn_for_which_there_are_cells(tmp_path):
    assert draw([cell("a", 8, 3)], tmp_path) == [tmp_path / "results.png", tmp_path / "pareto.png"]
    assert draw([cell("a", 8, 3, depth=0.5)], tmp_path)[2:] == [tmp_path / "needles.png"]
    for path in tmp_path.iterdir():
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_pictures_need_budgets_depths_and_matplotlib(monkeypatch):
    with pytest.raises(ValueError, match="no cell has a budget"):
        recall.figure([cell("full", None, 9)])
    with pytest.raises(ValueError, match="no cell has a depth"):
        needles.figure([cell("a", 8, 9)])
    with pytest.raises(ValueError, match="no cells"):
        pareto.figure([])
    monkeypatch.setattr(style, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install '\.\[plot\]'"):
        style.require_matplotlib()
