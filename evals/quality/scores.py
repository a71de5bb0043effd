"""Computes a cell's score from those of its samples, with its unit and its 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np

Z = NormalDist().inv_cdf(0.975)  # two-sided 95 %
RESAMPLES = 4000  # resamples of the bootstrap
AT_ONCE = 1 << 20  # values drawn at once, to bound the memory
SEED = 0  # seed of the bootstrap, so that equal scores have equal intervals


def _as_it_is(mean: float) -> float:
    return mean


@dataclass(frozen=True)
class Unit:
    """The unit of a cell's score."""

    label: str  # name for tables and axes
    higher_is_better: bool = True
    share: bool = True  # whether scores go from 0 to 1
    of_mean: Callable[[float], float] = _as_it_is  # makes the score of the samples' mean; monotonic
    compared: str = "difference"  # name of `of_mean` of a difference of two means


UNITS = {
    "share": Unit("share of right answers"),
    "score": Unit("mean score"),
    "f1": Unit("mean F1"),
    "rouge_l": Unit("mean ROUGE-L"),
    "similarity": Unit("mean edit similarity"),
    # A sample's score is its mean loss per token, in nats.
    "perplexity": Unit(
        "perplexity", higher_is_better=False, share=False, of_mean=math.exp, compared="ratio"
    ),
}


def cell_score(scores: Sequence[float], unit: Unit) -> float:
    """Return the score of a cell whose samples have these scores."""
    return unit.of_mean(fmean(scores))


def wilson(right: int, samples: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share, which is sensible at 0 and 1 and for few samples.

    E. B. Wilson, 1927, https://doi.org/10.1080/01621459.1927.10502953.
    """
    share, square = right / samples, Z * Z / samples
    middle = share + square / 2
    half = (square * (share * (1 - share) + square / 4)) ** 0.5
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def bootstrap(
    values: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean, by resampling with replacement.

    B. Efron, 1979, https://doi.org/10.1214/aos/1176344552. For few values it is too narrow.

    Args:
        values: values of the samples.
        weights: weights of the samples in the mean; equal by default.
    """
    rng, given = np.random.default_rng(SEED), np.asarray(values, dtype=np.float64)
    heavy = np.ones_like(given) if weights is None else np.asarray(weights, dtype=np.float64)
    means, together = [], max(1, AT_ONCE // len(given))
    for first in range(0, RESAMPLES, together):
        count = min(together, RESAMPLES - first)
        chosen = rng.integers(len(given), size=(count, len(given)))
        means.append((heavy * given)[chosen].sum(axis=1) / heavy[chosen].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)
