"""Two cells are compared on the same samples: intervals, tests, and the table that shows them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from sweeps import made_cell as cell

from kvcap.evals.quality.paired import compare, mcnemar, newcombe
from kvcap.evals.quality.scores import UNITS
from kvcap.lab.quality.table import results

SHARE, PERPLEXITY = UNITS["share"], UNITS["perplexity"]


# Both, only the first, only the second, neither: Newcombe 1998, Table II, method 10.
@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        ((36, 12, 2, 0), 0.0569, 0.3404),
        ((36, 12, 0, 2), 0.1144, 0.3735),
        ((36, 14, 0, 0), 0.1528, 0.4167),
    ],
)
def test_newcombe_interval(table, low, high):
    assert newcombe(*table) == pytest.approx((low, high), abs=6e-5)
    both, first, second, neither = table
    assert newcombe(both, second, first, neither) == pytest.approx((-high, -low), abs=6e-5)


def test_newcombe_interval_holds_the_difference_however_few():
    for table in product(range(4), repeat=4):
        if n := sum(table):
            low, high = newcombe(*table)
            assert -1 <= low <= (table[1] - table[2]) / n <= high <= 1
            assert low < high


# R: binom.test(more, more + fewer)$p.value
@pytest.mark.parametrize(
    ("more", "fewer", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (10, 2, 0.03857), (0, 6, 0.03125), (12, 3, 0.03516)],
)
def test_mcnemar(more, fewer, p):
    assert mcnemar(more, fewer) == pytest.approx(p, abs=1e-5)


def test_scores_of_right_and_wrong_are_compared_exactly():
    first, second = (1, 1, 1, 1, 1, 0, 1, 0), (1, 0, 0, 0, 0, 0, 0, 1)
    comparison = compare(first, second, SHARE)
    assert comparison.difference == pytest.approx((6 - 2) / 8)
    assert (comparison.first_higher, comparison.second_higher, comparison.samples) == (5, 1, 8)
    assert comparison.p_value == mcnemar(5, 1)
    assert (comparison.ci_low, comparison.ci_high) == newcombe(1, 5, 1, 1)


def test_other_scores_are_compared_by_a_bootstrap():
    noise = [math.sin(i) for i in range(100)]  # of samples, far above the difference
    first, second = [x + 0.1 + 0.01 * math.cos(9 * x) for x in noise], noise
    comparison = compare(first, second, PERPLEXITY)
    assert comparison.difference == pytest.approx(math.exp(0.1), abs=0.01)
    assert 1.08 < comparison.ci_low < comparison.difference < comparison.ci_high < 1.13
    assert comparison.p_value is None
    alike = compare(second, second, SHARE)
    assert (alike.difference, alike.ci_low, alike.ci_high) == (0, 0, 0)


def test_samples_that_cannot_be_paired_are_refused():
    for first, second in (((), ()), ((1.0,), (1.0, 0.0))):
        with pytest.raises(ValueError, match="same samples"):
            compare(first, second, SHARE)


def test_a_table_compares_the_first_policy_with_the_others():
    cells = [
        cell("keydiff", 8, (1, 1, 1, 0)),
        cell("keydiff", 8, (1, 1, 0, 0), positions="true"),
        cell("keydiff", 16, (1, 1, 1, 1)),
        cell("snapkv", 8, (0, 0, 1, 0)),
        replace(cell("snapkv", 16, (0,)), scores=None),  # of an earlier version
        cell("full", None, (1, 1, 1, 1)),
    ]
    assert "against" not in results(cells)
    text = results(cells, ["keydiff", "snapkv", "full", "h2o"])
    snapkv, full = text.split("### keydiff against ")[1:]
    rows = [line.replace(" ", "").strip("|").split("|") for line in snapkv.splitlines()[2:]]
    assert rows[0][:4] == ["first", "second", "positions", "slots"]
    assert rows[2] == [
        "keydiff",
        "snapkv",
        "compact",
        "8",
        "+0.50(-0.14to+0.79)",
        "0.5",
        "4",
        "2",
        "0",
    ]
    assert len(rows[3]) == 1  # one pair has the same budget, positions and scores
    assert [line.split("|")[4].strip() for line in full.splitlines()[4:7]] == ["8", "8", "16"]
    assert "-0.25 (" in full


def test_a_table_names_ratios_of_perplexity():
    losses = [(1.0, 2.0, 1.5, 1.0), (1.1, 2.1, 1.6, 1.1)]
    cells = [
        replace(cell(p, 8, s), unit="perplexity", score=3.0)
        for p, s in zip(("keydiff", "snapkv"), losses, strict=True)
    ]
    text = results(cells, ["keydiff", "snapkv"])
    assert "lower is better" in text
    assert "| ratio (95 % interval) | samples |" in text
    assert "0.90 (0.90 to 0.90)" in text
