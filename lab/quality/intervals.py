"""Says how certain the score of a cell is."""

from __future__ import annotations

from collections.abc import Sequence

from kvcap.evals.quality.scores import Unit, bootstrap, wilson


def interval(scores: Sequence[float], unit: Unit) -> tuple[float, float]:
    """Return the 95 % interval of a cell's score.

    It is Wilson's if each sample is right or wrong, else a bootstrap over samples.
    """
    if unit.share and all(score in (0, 1) for score in scores):
        return wilson(round(sum(scores)), len(scores))
    low, high = bootstrap(scores)
    return unit.of_mean(low), unit.of_mean(high)
