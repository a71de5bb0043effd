"""Compares two cells on the same samples, which needs far fewer than comparing two means.

Every sample gives a difference of two scores, in which its difficulty cancels. Scores that are all
0 or 1 have an exact test and an interval for shares; others have a bootstrap over samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean

from kvcap.evals.quality.scores import Unit, bootstrap, wilson


@dataclass(frozen=True)
class Comparison:
    """The difference of two cells over their common samples."""

    difference: float  # difference of the samples' means, converted by the unit's `of_mean`
    ci_low: float  # 95 % interval
    ci_high: float
    p_value: float | None  # of no difference, exact, two-sided; None: scores are not all 0 or 1
    samples: int
    first_higher: int  # samples whose score is higher in the first cell
    second_higher: int  # samples whose score is higher in the second cell


def compare(first: Sequence[float], second: Sequence[float], unit: Unit) -> Comparison:
    """Compare the scores of two cells, sample by sample.

    Args:
        first: scores of the first cell, one per sample.
        second: scores of the second cell, for the same samples in the same order.
        unit: unit of the cells' scores. A difference of shares is a share; one of losses becomes
            the ratio of perplexities.

    Raises:
        ValueError: there are no scores, or unequally many.
    """
    if len(first) != len(second) or not first:
        raise ValueError(
            f"{len(first)} and {len(second)} samples cannot be paired; compare cells of the same "
            "samples"
        )
    pairs = list(zip(first, second, strict=True))
    more, fewer = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    p = None
    if unit.share and {*first, *second} <= {0, 1}:
        both = sum(a == b == 1 for a, b in pairs)
        low, high = newcombe(both, more, fewer, len(pairs) - both - more - fewer)
        p = mcnemar(more, fewer)
    else:
        low, high = bootstrap([a - b for a, b in pairs])
    mean, of = fmean(a - b for a, b in pairs), unit.of_mean
    return Comparison(of(mean), of(low), of(high), p, len(pairs), more, fewer)


def mcnemar(more: int, fewer: int) -> float:
    """Return the exact two-sided p-value of paired shares, a sign test on samples that differ.

    Q. McNemar, 1947, https://doi.org/10.1007/BF02295996.

    >>> mcnemar(6, 0)
    0.03125
    """
    n, least = more + fewer, min(more, fewer)
    ways = sum(comb(n, k) for k in range(least + 1))  # of 2^n outcomes
    return min(1.0, float(2 * ways / 2**n))


def newcombe(both: int, first: int, second: int, neither: int) -> tuple[float, float]:
    """Return the 95 % score interval of the difference of two paired shares.

    It is sensible even if no samples differ.

    R. G. Newcombe, 1998, method 10,
    https://doi.org/10.1002/(SICI)1097-0258(19981130)17:22<2635::AID-SIM954>3.0.CO;2-C.

    Args:
        both: samples that both cells have right.
        first: samples that only the first has right.
        second: samples that only the second has right.
        neither: samples that neither has right.
    """
    n = both + first + second + neither
    p, q = (both + first) / n, (both + second) / n
    (p_low, p_high), (q_low, q_high) = wilson(both + first, n), wilson(both + second, n)
    product = float(both * neither - first * second)
    if product > 0:  # shares are positively correlated: a correction for continuity
        product = max(product - n / 2, 0.0)
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    phi = product / sqrt(margins) if margins else 0.0

    def reach(a: float, b: float) -> float:
        return sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    return p - q - reach(p - p_low, q_high - q), p - q + reach(p_high - p, q - q_low)
