"""Tests DropKV's Table 16 and Theorem 1: the cheapest tokens one by one, and the cheapest set.

Pools of 20 tokens are drawn from those with little attention, and some of each are evicted. DropKV
evicts those with the smallest costs; trying every subset finds the best set. `ratio` is the change
of attention's output by DropKV's set divided by that of the best, `F(Ĵ) / F(J*)`; over a window,
`F²` is summed. Theorem 1 bounds it by `1 / (c (1 - ε) (1 - kε))`, where `c` is the pool's cone
constant. If a set `J` is evicted, attention without it is renormalised, and the output moves by
`Σ_J p_i (a - v_i) / (1 - Σ_J p_i)` (Lemma 1). Letters: `R` pools, `m` tokens of a pool, `w`
queries. Reads `lengths` (the first), `repeats` (texts; each gives a pool per layer and query head).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import percentiles
from kvcap.lab.captured import pocket_layers, until
from kvcap.policies import Observation, load_policy

DEFAULTS = {"lengths": (1024,), "repeats": 4}
WINDOWS = (1, 8)  # queries: the theorem's single one, and DropKV's window
EVICTED = (10, 18)  # how many of a pool's 20 tokens are evicted, as in Table 16
MINIMUM = 64  # least tokens of a text, so that half of its candidates hold a pool
SIZE = 20  # tokens of a pool
SPARED = 8  # the newest tokens, DropKV's window, are never evicted
NEEDED = 0.1  # share of the other tokens, those of most attention, that are no candidates
LEAST = 1e-15  # attention whose square is still above 0 in float32, with room for the values
CHUNK = 1024  # subsets tried at once
WHAT = ("pools", "window", "evicted", "records")
COLUMNS = (*WHAT, "ratio", "worst", "attention", "cone", "bound", "holds")


def run(options: BenchmarkOptions) -> Result:
    """Return a row for each kind of pools, window and number evicted.

    The column `attention` is the ratio if tokens are evicted by attention alone.
    """
    rows: list[dict[str, Any]] = []
    tokens = options.lengths[0]
    if tokens < MINIMUM:
        raise ValueError(f"--lengths: {tokens} tokens are too few, give {MINIMUM} or more")
    drawn: dict[tuple[str, int], list[Pools]] = {}
    wide: list[Tensor] = []  # cone constants of all candidates
    for i, layers in enumerate(pocket_layers(options.repeats, tokens)):
        end = Random(f"proxy/{i}").randrange(tokens // 2, tokens) + 1
        for (j, whole), window in product(enumerate(layers), WINDOWS):
            by_kind, residuals = draw(until(whole, end, window), seed=i * len(layers) + j)
            for name, pools in by_kind.items():
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
    changes = [chosen(pools, score, count).sqrt() for score in (pools.cost, pools.attention)]
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
        "cone": "",  # the theorem holds for one query
        "bound": "",
        "holds": "",
    }
    if window == 1:
        constant, most = cone(pools.residuals[:, 0]), pools.weights.amax((1, 2))
        bound = 1 / (constant * (1 - most) * (1 - count * most))
        applies = (constant > 0) & (count * most < 1)  # the theorem's conditions
        row["cone"] = percentiles(constant.tolist())
        row["bound"] = percentiles(bound[applies].tolist())
        row["holds"] = float((ratio <= bound * (1 + 1e-9))[applies].double().mean())
    return row


def chosen(pools: Pools, score: Tensor, count: int) -> Tensor:
    """Return the squared change [R] if the `count` lowest of `score` [R, m] are evicted."""
    lowest = score.topk(count, largest=False).indices
    subset = torch.zeros_like(score).scatter(-1, lowest, 1.0)  # [R, m]
    return torch.cat(
        [squared_change(pools.row(i), subset[i : i + 1])[0] for i in range(len(subset))]
    )


class Pools(NamedTuple):
    """A batch of pools in float64, as the best set's change may be far smaller than its parts."""

    weights: Tensor  # p, [R, w, m]
    residuals: Tensor  # a - v, [R, w, m, D]
    cost: Tensor  # DropKV's costs, [R, m]
    attention: Tensor  # mean over the window, [R, m]

    def row(self, i: int) -> Pools:
        """Return one pool."""
        return Pools(*(part[i : i + 1] for part in self))

    def heads(self, chosen: Tensor) -> Pools:
        """Return the pools of some query heads, by index [R']."""
        return Pools(*(part[chosen] for part in self))

    def noticed(self) -> Pools:
        """Return the pools with attention above `LEAST`; below, all costs are 0 in float32."""
        seen = self.weights.amin((1, 2)) > LEAST
        return Pools(*(part[seen] for part in self))


def draw(seen: Observation, seed: int) -> tuple[dict[str, Pools], Tensor]:
    """Draw pools of one layer by the ways of Table 16, each with a pool per query head.

    Returns:
        The pools by the way they were drawn, and the residuals [H, n', D] of all candidates for
        the last query.
    """
    seen = _by_query_head(seen)
    policy = load_policy("dropkv", kernel=1).policy  # without pooling and pins
    last = seen.positions.shape[-1] - SPARED
    cost = policy.score(seen)[0, :, :last].double()  # [H, n]
    p = seen.attention[0, :, 0, :, :last].double()  # [H, w, n]
    mean = p.mean(1)
    candidates = mean.topk(last - int(NEEDED * last), largest=False).indices  # [H, n']
    cost, mean = cost.gather(-1, candidates), mean.gather(-1, candidates)
    chance = torch.rand(mean.shape, generator=torch.Generator().manual_seed(seed))
    ranks = [x.argsort(-1).argsort(-1) for x in (cost, mean)]
    keys = {
        "random": chance,
        "least attention": mean,
        "near the median": (ranks[0] - mean.shape[-1] // 2).abs(),
        "ranks disagree": -(ranks[0] - ranks[1]).abs(),
    }
    pools = {}
    for name, key in keys.items():
        index = key.topk(SIZE, largest=False).indices  # [H, m]
        token_index = candidates.gather(-1, index)
        residuals = _residuals(seen, token_index)
        weights = p.gather(-1, token_index[:, None].expand(-1, p.shape[1], -1))
        pools[name] = Pools(weights, residuals, cost.gather(-1, index), mean.gather(-1, index))
    return pools, _residuals(seen, candidates)[:, -1]


def squared_change(pools: Pools, subsets: Tensor) -> Tensor:
    """Return `F²` summed over the window [S, R], for sets as rows of 0 and 1 [S, m]."""
    scaled = pools.weights[..., None] * pools.residuals  # [R, w, m, D]
    gram = torch.matmul(scaled, scaled.mT)  # [R, w, m, m]
    i, j = torch.triu_indices(*gram.shape[-2:])
    # |Σ_J x_i|² is a sum over pairs of J: one matrix product for all sets, pools and queries.
    pairs = subsets[:, i] * subsets[:, j] * torch.where(i == j, 1.0, 2.0)  # [S, m(m+1)/2]
    moved = pairs @ gram[..., i, j].flatten(0, 1).T  # [S, R·w]
    left = 1 - subsets @ pools.weights.flatten(0, 1).T
    change: Tensor = moved.clamp(min=0) / left.square()
    summed: Tensor = change.unflatten(1, pools.weights.shape[:2]).sum(-1)
    return summed


def optimum(pools: Pools, count: int) -> Tensor:
    """Return the least `F²` [R] of all sets of `count` tokens."""
    size = pools.weights.shape[-1]
    sets = torch.from_numpy(
        np.fromiter(combinations(range(size), count), np.dtype((np.int64, count)))
    )  # [C, count]
    best = torch.full(pools.weights.shape[:1], torch.inf, dtype=torch.float64)
    for part in sets.split(CHUNK):
        subsets = torch.zeros(len(part), size, dtype=torch.float64).scatter(1, part, 1.0)
        best = torch.minimum(best, squared_change(pools, subsets).amin(0))
    return best


def cone(residuals: Tensor, steps: int = 2000) -> Tensor:
    """Return `c* = max_u min_i u·r_i / ‖r_i‖` [R], |u| = 1; it is above 0 if one cone holds all.

    The best u is the point nearest to 0 of the hull of the unit residuals [R, m, D]. It is
    approached by moving weight from the farthest point to the nearest (Mitchell, Demyanov and
    Malozemov 1974). Every u gives a lower bound; the largest is returned, and is exact if above 0.
    """
    unit = torch.nn.functional.normalize(residuals.double(), dim=-1)
    share = torch.full(unit.shape[:2], 1 / unit.shape[1], dtype=torch.float64)  # [R, m]
    point = unit.mean(1)  # [R, D]
    best = torch.full(unit.shape[:1], -1.0, dtype=torch.float64)
    for _ in range(steps):
        along = torch.matmul(unit, point[..., None])[..., 0]  # [R, m]
        low, near = along.min(-1)
        best = torch.maximum(best, low / point.norm(dim=-1).clamp(min=1e-12))
        far = along.masked_fill(share <= 0, -torch.inf).argmax(-1)
        rows = torch.arange(len(unit))
        line = unit[rows, far] - unit[rows, near]  # [R, D]
        step = (point * line).sum(-1) / line.square().sum(-1).clamp(min=1e-24)
        step = torch.minimum(step.clamp(min=0), share[rows, far])
        share[rows, far] -= step
        share[rows, near] += step
        point = point - step[:, None] * line
    return best


def _by_query_head(seen: Observation) -> Observation:
    """Return the observation with keys and values repeated for every query head."""
    groups = seen.groups
    parts = {
        name: getattr(seen, name).repeat_interleave(groups, 1)
        for name in ("keys", "values", "positions")
    }
    return replace(seen, **parts, output_projection=None)


def _residuals(seen: Observation, token_index: Tensor) -> Tensor:
    """Return `a_t - v_j` [H, w, m, D] of the tokens `token_index` [H, m]."""
    values = seen.values[0].double()  # [H, n, D]
    chosen = values.gather(1, token_index[..., None].expand(-1, -1, values.shape[-1]))
    output = seen.output[0, :, 0].double()  # [H, w, D]
    return output[:, :, None] - chosen[:, None]
