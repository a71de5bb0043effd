"""Heads and layers that hold unequally many tokens: nothing padded, exact, of fixed bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from reference import NAME, STEPS, Setting, run_reference

import kvcap
from kvcap.policies import Eviction, load_policy
from kvcap.policies.base import LayerBudget
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.pool import Segment, SlotPool, resize

SNAPKV = {"window": 4, "kernel": 3, "pool": "avg"}


@given(
    rows=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    block=st.integers(1, 4),
    seed=st.integers(0, 10_000),
)
def test_moving_boundaries_loses_and_mixes_nothing(rows, block, seed):
    """Any budgets, again and again: every row still holds its own tokens, whole."""
    g = torch.Generator().manual_seed(seed)
    budgets = [int(torch.randint(1, 9, (1,), generator=g)) for _ in rows]
    pool = SlotPool(
        sum(n * (b + block) for n, b in zip(rows, budgets, strict=True)),
        2,
        torch.float32,
        aux={"mass": torch.float32},
    )
    segments, start = [], 0
    for n, budget in zip(rows, budgets, strict=True):
        segments.append(Segment(pool, start, budget, block, heads=n))
        start += segments[-1].slots
    nbytes, pointer = pool.nbytes, pool.keys.data_ptr()
    for number, segment in enumerate(segments):
        held = int(torch.randint(0, segment.capacity + 1, (1,), generator=g))
        heads = torch.arange(segment.heads)[None, :, None, None]
        stamp = 100 * number + 10_000 * heads + torch.arange(held)[None, None, :, None]
        stamp = stamp.expand(1, -1, -1, 2).float()
        segment.append(stamp, -stamp, torch.arange(held, dtype=torch.int32))
        segment.aux("mass").copy_(stamp[..., 0] * 2)
    for _ in range(4):
        expected = [s.keys[..., 0].sort(-1).values.tolist() for s in segments]
        # A random sharing of what there is, above what each needs.
        needs = [max(0, s.held - block) for s in segments]
        free = sum(n * (s.budget - need) for n, s, need in zip(rows, segments, needs, strict=True))
        for i in torch.randperm(len(rows), generator=g).tolist():
            extra = int(torch.randint(0, free // rows[i] + 1, (1,), generator=g))
            needs[i] += extra
            free -= extra * rows[i]
        if free:  # what is left over must go to a row that it divides into
            ones = [i for i, n in enumerate(rows) if free % n == 0]
            if not ones:
                continue
            needs[ones[0]] += free // rows[ones[0]]
        resize(segments, needs)
        assert [s.keys[..., 0].sort(-1).values.tolist() for s in segments] == expected
        for segment in segments:
            assert torch.equal(segment.values[..., 0], -segment.keys[..., 0])
            assert torch.equal(segment.aux("mass"), segment.keys[..., 0] * 2)
        assert (pool.nbytes, pool.keys.data_ptr()) == (nbytes, pointer)


@dataclass(frozen=True)
class Swing(LayerBudget):
    """Layers take turns: now one wants three quarters of all slots, now the other."""

    observes = frozenset({"attention"})
    moves = True

    def preference(self, obs: Any) -> torch.Tensor:
        first = (obs.num_tokens // 40) % 2 == 0
        return torch.tensor(3.0 if first == (obs.layer == 0) else 1.0)

    def least(self, budget: int, pinned: int) -> int:
        return 0


@pytest.mark.parametrize("positions", ["compact", "true", "auto"])
def test_slots_that_move_between_layers(positions):
    """The pool never grows, every layer gets what it wants, and what is kept is what should be."""
    model, budget, block = tiny_model("llama", max_position_embeddings=31), 12, 3
    parts = {"layer_budget": Swing(), "sink_tokens": 0}
    eviction = Eviction(load_policy("snapkv", **SNAPKV).policy, **parts)
    cache = kvcap.BudgetCache(model.config, budget, block, eviction, positions=positions)
    plan = kvcap.MemoryPlan.of(
        model.config,
        policy=eviction,
        budget_tokens=budget,
        block_size=block,
        dtype=torch.float32,
        positions=positions,
    )
    cache.allocate(1, torch.float32, "cpu")
    loop = BlockLoop(model, cache)
    ids = 3 + torch.randperm(90, generator=torch.Generator().manual_seed(1))[None]
    ids = ids[:, :54]  # 18 blocks
    held, logits = [], []
    for part in [*ids.split(block, 1), *STEPS]:
        logits.append(loop.read(part))
        held.append([layer.held for layer in cache.layers])
        assert sum(held[-1]) <= 2 * budget
        assert cache.nbytes == plan.cache_bytes
    assert [18, 6] in held
    assert [6, 18] in held
    seen = [0, 0]

    def replay(layer: int, *_: Any) -> list[int]:
        seen[layer] += 1
        return [held[seen[layer] - 1][layer]] * 2

    start = [[0, 0]] * 2
    setting = Setting("snapkv", budget, positions, SNAPKV, start, split=replay, trained=31)
    reference, expected = run_reference(tiny_model("llama", NAME), ids, block, setting)
    for layer in range(2):
        (segment,) = cache.layers[layer].segments
        assert [sorted(x.tolist()) for x in segment.positions[0]] == reference.kept(layer)
    torch.testing.assert_close(torch.cat(logits), expected, rtol=2e-4, atol=2e-4)
