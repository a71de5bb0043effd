"""Makes random observations, and computes attention by the plain formula with Python loops."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from kvcap.policies import Observation, policies
from kvcap.policies.base import Logits

PARTS = {cls for recipe in policies().values() for cls in recipe.parts.values()}
STATE = {name: dtype for cls in PARTS for name, dtype in cls.state.items()}


def observe(
    n: int = 23,
    *,
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    size: int = 8,
    window: int = 5,
    budget: int = 10,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    gaps: bool = True,
) -> Observation:
    """Make an observation of random slots in random order, with gaps as after evictions."""
    g = torch.Generator().manual_seed(seed)
    shape = (batch, kv_heads, n, size)
    times = torch.stack(
        [
            torch.cat(
                (torch.randperm(2 * n, generator=g)[: n - window], 2 * n + torch.arange(window))
            )
            if gaps
            else torch.arange(n)
            for _ in range(batch * kv_heads)
        ]
    )
    order = torch.stack([torch.randperm(n, generator=g) for _ in range(batch * kv_heads)])
    return Observation(
        keys=torch.randn(shape, generator=g).to(dtype),
        values=torch.randn(shape, generator=g).to(dtype),
        positions=times.gather(1, order).view(batch, kv_heads, n).int(),
        num_tokens=2 * n + window if gaps else n,
        budget=budget,
        queries=torch.randn(batch, kv_heads * group, window, size, generator=g).to(dtype),
        rule=Logits(size**-0.5),
        state={name: torch.zeros(batch, kv_heads, n, dtype=STATE[name]) for name in STATE},
    )


def attention_by_loops(obs: Observation) -> Tensor:
    """Return attention [B, K, G, w, n] by Python loops and math.exp."""
    batch, kv_heads, n, _ = obs.keys.shape
    group, w = obs.groups, obs.queries.shape[2]
    out = torch.zeros(batch, kv_heads, group, w, n, dtype=torch.float64)
    for b in range(batch):
        for h in range(kv_heads * group):
            for t in range(w):
                now = obs.num_tokens - w + t
                k = h // group
                z = [
                    float(obs.queries[b, h, t].double() @ obs.keys[b, k, j].double())
                    * obs.rule.scale
                    if obs.positions[b, k, j] <= now
                    else -math.inf
                    for j in range(n)
                ]
                exps = [math.exp(x - max(z)) for x in z]
                out[b, k, h % group, t] = torch.tensor(exps) / sum(exps)
    return out


def pooled(scores: Tensor, obs: Observation, window: int, kernel: int, pool: str) -> Tensor:
    """Pool in time by sorting, the window left out: scores [B, K, n] or [B, K, G, n]."""
    out, positions = scores.clone(), obs.positions
    for b, k in ((b, k) for b in range(scores.shape[0]) for k in range(scores.shape[1])):
        older = [j for j in range(scores.shape[-1]) if positions[b, k, j] < obs.num_tokens - window]
        order = sorted(older, key=lambda j: positions[b, k, j])
        for rank, slot in enumerate(order):
            near = scores[b, k][..., order[max(0, rank - kernel // 2) : rank + kernel // 2 + 1]]
            out[b, k][..., slot] = near.amax(-1) if pool == "max" else near.mean(-1)
    return out


def grouped(scores: Tensor, group: str) -> Tensor:
    """Reduce the query heads [B, K, G, n] of each KV head to one number."""
    return {"mean": scores.mean(2), "sum": scores.sum(2), "max": scores.amax(2)}[group]


def in_time_order(obs: Observation) -> Observation:
    """Give slots the positions 0 to n - 1, which all heads share."""
    positions = torch.arange(obs.positions.shape[-1], dtype=torch.int32)
    return replace(obs, positions=positions.expand_as(obs.positions).contiguous())


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)


def newer_than_some_queries() -> Observation:
    """Make an observation with more queries than slots, of which some queries do not see all."""
    obs, g = observe(6, window=3, seed=4), torch.Generator().manual_seed(5)
    positions = torch.tensor([0, 3, 9, 10, 12, 14])
    order = torch.stack([torch.randperm(6, generator=g) for _ in range(4)]).view(2, 2, 6)
    queries = torch.randn(2, 4, 9, 8, generator=g)
    return replace(obs, positions=positions[order].int(), queries=queries)
