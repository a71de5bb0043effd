"""DropKV's Table 16 and Theorem 1: the cheapest tokens one by one against the cheapest set.

From the tokens that attention needs least, pools of 20 are drawn, of which some are to be evicted.
DropKV takes those with the smallest costs; trying every subset finds the best. `ratio` is between
the changes of attention's output that the two make, `F(Ĵ) / F(J*)`; over a window, `F²` is summed.
Theorem 1 bounds it by `1 / (c (1 - ε) (1 - kε))`, where `c` is the cone constant of the pool.
Reads `lengths` (the first), `repeats` (texts; each gives a pool per layer and query head).
"""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvcap.evals.bench import Options, Result
from kvcap.evals.captured import pocket_layers, until
from kvcap.evals.measure import percentiles
from kvcap.evals.pools import Pools, cone, draw, optimum, squared_change

DEFAULTS = {"lengths": (1024,), "repeats": 4}
WINDOWS = (1, 8)  # queries: the theorem's one, and DropKV's window
EVICTED = (10, 18)  # of the 20 tokens of a pool, as in Table 16
MINIMUM = 64  # a half must hold a pool, the spared tokens and those that are no candidates
WHAT = ("pools", "window", "evicted", "records")
COLUMNS = (*WHAT, "ratio", "worst", "attention", "cone", "bound", "holds")


def run(options: Options) -> Result:
    """A row per way to draw pools, window and number evicted; `attention` evicts by `A` alone."""
    rows: list[dict[str, Any]] = []
    tokens = options.lengths[0]
    if tokens < MINIMUM:
        raise ValueError(f"lengths: {tokens} tokens are too few, give {MINIMUM} or more")
    drawn: dict[tuple[str, int], list[Pools]] = {}
    wide: list[Tensor] = []  # cone constants of all candidates
    for i, layers in enumerate(pocket_layers(options.repeats, tokens)):
        place = Random(f"proxy/{i}").randrange(tokens // 2, tokens) + 1
        for (j, whole), window in product(enumerate(layers), WINDOWS):
            found, residuals = draw(until(whole, place, window), seed=i * len(layers) + j)
            for name, pools in found.items():
                drawn.setdefault((name, window), []).append(pools.noticed())
            if window == 1:
                wide.append(cone(residuals, 300))
    for (name, window), parts in drawn.items():
        pools = Pools(*(torch.cat(part) for part in zip(*parts, strict=True)))
        rows += [_row(name, window, count, pools) for count in EVICTED]
    constants = torch.cat(wide)
    derived = {
        "tokens": tokens,
        "records": len(constants),
        "candidates_cone": percentiles(constants.tolist()),
        "candidates_cone_positive": float((constants > 0).double().mean()),
    }
    return Result("proxy", COLUMNS, rows, derived)


def _row(name: str, window: int, count: int, pools: Pools) -> dict[str, Any]:
    best = optimum(pools, count).sqrt()
    changes = [_chosen(pools, score, count).sqrt() for score in (pools.cost, pools.attention)]
    ratio, attention = changes[0] / best, changes[1] / best
    row: dict[str, Any] = {
        "pools": name,
        "window": window,
        "records": len(ratio),
        "evicted": count,
        "ratio": percentiles(ratio.tolist()),
        "worst": float(ratio.max()),
        "squared": percentiles(ratio.square().tolist()),
        "attention": percentiles(attention.tolist()),
        "cone": "",  # the theorem is about one query
        "bound": "",
        "holds": "",
    }
    if window == 1:
        constant, most = cone(pools.residuals[:, 0]), pools.weights.amax((1, 2))
        bound = 1 / (constant * (1 - most) * (1 - count * most))
        said = (constant > 0) & (count * most < 1)  # elsewhere the theorem says nothing
        row["cone"] = percentiles(constant.tolist())
        row["bound"] = percentiles(bound[said].tolist())
        row["holds"] = float((ratio <= bound * (1 + 1e-9))[said].double().mean())
    return row


def _chosen(pools: Pools, score: Tensor, count: int) -> Tensor:
    """Squared change where the `count` lowest of `score` [R, m] are evicted. [R]."""
    lowest = score.topk(count, largest=False).indices
    subset = torch.zeros_like(score).scatter(-1, lowest, 1.0)  # [R, m]
    return torch.cat(
        [squared_change(pools.row(i), subset[i : i + 1])[0] for i in range(len(subset))]
    )
