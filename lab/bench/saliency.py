"""Draws OBCache's Figure 2: which scores find tokens whose eviction moves the next output most.

The oracle is the true eviction error: how far the attention output of the next token moves when one
token alone is evicted. Scores use the last `window` queries of the text before it. `recall` is the
share of the oracle's first `budget` tokens among the score's first `budget`, per KV head. `exact`
is the eviction error summed over the window, which OBCache approximates. Reads `lengths` (the
first), `budgets`, `repeats` (texts).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.lab.captured import pocket_layers, removal_error, until
from kvcap.policies import Observation, load_policy

DEFAULTS = {"lengths": (1024,), "budgets": (10, 51, 102, 256), "repeats": 8}
MODES = ("value", "key", "joint")
SCORES = ("attention", *MODES, "exact")
WINDOWS = (1, 8, 32, None)  # None: all queries of the text
COLUMNS = ("budget", "share", "window", *SCORES)


def run(options: BenchmarkOptions) -> Result:
    """Return the mean recall over texts, layers and KV heads."""
    tokens = options.lengths[0]
    cases = list(product(options.budgets, WINDOWS))
    sums = {case: torch.zeros(len(SCORES)) for case in cases}
    for layers in pocket_layers(options.repeats, tokens + 1):
        for whole, window in product(layers, WINDOWS):
            truth, by_score = oracle(whole, tokens), scores(until(whole, tokens, window))
            for budget in options.budgets:
                recalls = [recall(score, truth, budget) for score in by_score.values()]
                sums[budget, window] += torch.tensor(recalls) / len(layers)
    rows = [_row(*case, sums[case] / options.repeats, tokens) for case in cases]
    return Result("saliency", COLUMNS, rows, {"tokens": tokens, "texts": options.repeats})


def oracle(whole: Observation, tokens: int) -> Tensor:
    """Return the squared change [B, K, tokens] of the output after `tokens` if one of them goes."""
    return removal_error(until(whole, tokens + 1, 1)).sum((2, 3))[..., :tokens]


def scores(obs: Observation) -> dict[str, Tensor]:
    """Return every score summed over the window and the query group, [B, K, n] by name."""
    sums = {"attention": obs.attention}
    for mode in MODES:
        saliency = load_policy("h2o+obcache", mode=mode).saliency
        assert saliency is not None
        sums[mode] = saliency.weigh(obs)
    sums["exact"] = removal_error(obs)
    return {name: score.sum((2, 3)) for name, score in sums.items()}


def recall(score: Tensor, truth: Tensor, count: int) -> float:
    """Return the share of the first `count` of `truth` [B, K, n] among those of `score`."""
    marks = [torch.zeros_like(x).scatter(-1, x.topk(count).indices, 1.0) for x in (score, truth)]
    return float((marks[0] * marks[1]).sum(-1).mean() / count)


def _row(budget: int, window: int | None, recalls: Tensor, tokens: int) -> dict[str, Any]:
    return {
        "budget": budget,
        "share": round(budget / tokens, 3),
        "window": "all" if window is None else window,
        **dict(zip(SCORES, recalls.tolist(), strict=True)),
    }
