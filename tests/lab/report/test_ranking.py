"""Policies are ranked by their means, and those that the best cannot be told from are named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from sweeps import made_cell as cell

from kvcap.lab.report.ranking import (
    check_same_samples,
    differ,
    mean_of,
    mean_ranks,
    overview,
    ranked,
    tables,
    tied_with_best,
)

RIGHT, WRONG = (1.0,) * 20, (0.0,) * 20
HALF = (1.0, 0.0) * 10


def test_the_mean_of_cells_is_taken_sample_by_sample():
    mean = mean_of([cell("a", 8, RIGHT), cell("a", 16, HALF)])
    assert mean.scores == (1.0, 0.5) * 10
    assert mean.score == 0.75
    assert 0.6 < mean.ci_low < 0.75 < mean.ci_high < 0.9
    losses = [cell("a", b, (loss,) * 4, unit="perplexity") for b, loss in ((8, 1.0), (16, 3.0))]
    assert mean_of(losses).score == pytest.approx(math.exp(2.0))  # as of one longer text
    old = mean_of([replace(losses[0], scores=None), losses[1]])
    assert old.score == pytest.approx((math.exp(1) + math.exp(3)) / 2)
    assert old.scores is None


def test_rows_are_sorted_by_their_mean_and_those_with_gaps_come_last():
    rows = ranked({
        "b": [cell("b", 8, HALF), cell("b", 16, HALF)],
        "a": [cell("a", 8, HALF), cell("a", 16, RIGHT)],
        "gap": [None, cell("gap", 16, RIGHT)],
        "none": [None, None],
    })  # fmt: skip
    assert [row.name for row in rows] == ["a", "b", "gap", "none"]
    assert [row.whole for row in rows] == [True, True, False, False]
    losses = {
        name: [cell(name, 8, (loss,) * 4, unit="perplexity")]
        for name, loss in (("worse", 2.0), ("better", 1.0))
    }
    assert [row.name for row in ranked(losses)] == ["better", "worse"]


def test_what_the_best_cannot_be_told_from():
    near = (0.0, 0.0, 0.0, 0.0, 0.0, *RIGHT[5:])
    column = [cell("a", 8, near), None, cell("b", 8, RIGHT), cell("c", 8, near[::-1])]
    assert tied_with_best(column) == {0, 2, 3}  # p = 0.0625 of five that differ
    assert tied_with_best([*column, cell("d", 8, (0.0,) * 6 + RIGHT[6:])]) == {0, 2, 3}
    assert tied_with_best([None]) == set()


def test_perplexities_differ_by_the_interval_of_their_ratio():
    noise = tuple(3 + math.sin(i) for i in range(40))
    best = cell("a", 8, noise, unit="perplexity")
    worse = cell("b", 8, tuple(x + 0.02 + 0.01 * math.cos(7 * x) for x in noise), unit="perplexity")
    alike = cell("c", 8, tuple(x + 0.02 * math.cos(9 * x) for x in noise), unit="perplexity")
    assert worse.ci_low < best.score < worse.ci_high  # two intervals would not tell
    assert differ(best, worse)
    assert not differ(best, alike)
    assert tied_with_best([worse, best, alike]) == {1, 2}


def test_cells_without_scores_of_samples_are_told_apart_by_their_intervals():
    right, half, wrong = (
        replace(cell("a", 8, scores), scores=None) for scores in (RIGHT, HALF, WRONG)
    )
    assert differ(right, half)
    assert not differ(replace(half, ci_high=0.9), right)
    assert tied_with_best([half, right, wrong]) == {1}


def test_tables_have_budgets_across_and_an_overview_of_their_means():
    cells = [
        cell(p, b, s, length=n, positions=mode)
        for p, s in (("a", HALF), ("b", RIGHT))
        for b in (8, 16)
        for n in (64, 128)
        for mode in ("true", "compact")
    ]
    cells += [cell("full", None, RIGHT, length=n) for n in (64, 128)]
    ranked = tables(cells[1:])  # a lacks 8 slots at 64 tokens and true positions
    assert [(t.length, t.positions) for t in ranked] == [
        (64, "compact"),
        (64, "true"),
        (128, "compact"),
        (128, "true"),
    ]
    assert {t.budgets for t in ranked} == {(8, 16)}
    assert [name for name, _ in ranked[0].uncapped] == ["full"]
    assert [row.name for row in ranked[0].rows] == ["b", "a"]
    b, a = overview(ranked)
    assert (b.name, b.whole) == ("b", True)
    assert (a.name, a.whole) == ("a", False)
    assert [cell is None for cell in a.cells] == [False, True, False, False]
    (alone,) = tables([cell("full", None, RIGHT)])
    assert (alone.positions, alone.budgets, alone.rows) == ("true", (), ())


def test_cells_of_other_samples_are_refused():
    one = cell("a", 8, RIGHT)
    check_same_samples([one, cell("b", 8, RIGHT), cell("b", 8, HALF, depth=0.5, seed=3)])
    for changed in ({"seed": 1}, {"samples": 10}):
        with pytest.raises(ValueError, match=r"20 samples of seed 0 and .* are different prompts"):
            check_same_samples([one, cell("b", 16, RIGHT, **changed)])


def test_ranks_are_shared_by_equal_scores_and_averaged_over_tasks():
    lost = (("a", 2.0), ("b", 1.0), ("c", 3.0))
    cells = [cell(name, 8, (loss,) * 4, unit="perplexity", task="flow") for name, loss in lost]
    cells += [cell("a", 8, RIGHT), cell("b", 8, RIGHT, recall=3), cell("c", 8, WRONG)]
    cells += [cell("d", 8, RIGHT), cell("full", None, RIGHT)]  # one lacks a cell, one no cap
    assert mean_ranks(cells) == {"b": 1.25, "a": 1.75, "c": 3.0}
