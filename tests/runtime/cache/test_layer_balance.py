"""Slots move between layers with blocks, and stay where they are while an answer is written."""

from __future__ import annotations

import pytest
import torch
from conftest import small_policy, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcap
from kvcap.policies.budgets.cake import CakeBudget
from kvcap.runtime.backends.pytorch import cuda_graphs
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.layer_balance import LayerBalance, Shares
from kvcap.runtime.cache.pool import Segment, SlotPool


def balanced(held: list[int], preferences: list[float], average: int = 64) -> LayerBalance:
    """Layers that hold so much, after a block that told what they prefer."""
    block = 16
    pool = SlotPool(len(held) * (average + block), 2, torch.float32)
    balance = LayerBalance(CakeBudget(floor=0), average, len(held), 0)
    starts = range(0, pool.keys.shape[0], average + block)
    balance.segments = [Segment(pool, start, average, block) for start in starts]
    balance.preferences = list(preferences)
    for segment, slots in zip(balance.segments, held, strict=True):
        segment.held = slots
    balance.rebalance(seen=10_000)
    return balance


def test_where_little_is_empty_each_layer_is_to_have_what_it_holds() -> None:
    """Though one should shrink and another would have more."""
    balance = balanced([64, 52], [1.0, 3.0])  # 12 of 128 slots are empty
    assert not balance.keeps
    assert [s.target_length for s in balance.segments] == [33, 64]
    balance = balanced([64, 56], [1.0, 3.0])  # 8 are: 1/16
    assert balance.keeps
    assert balance.is_balanced
    assert [s.target_length for s in balance.segments] == [64, 56]
    assert sum(s.budget for s in balance.segments) == 128
    # The next block says again what it wants.
    balance.prefer(0, 1.0, 10_016)
    assert balance.segments[0].target_length == 33
    assert not balance.is_balanced


def test_tokens_fill_what_is_empty_until_it_is_little() -> None:
    balance = balanced([33, 64], [1.0, 3.0])
    targets = []
    while not balance.is_balanced:
        balance.segments[1].held += 1  # a token each; the first holds what it should
        balance.rebalance(seen=10_001)
        targets.append([s.target_length for s in balance.segments])
    assert targets == [[33, 95]] * 22 + [[33, 87]]


def wanted(
    floor: float, preferences: list[float], budget: int, seen: int, pinned: int
) -> list[int]:
    """Slots that layers should have, for which the host and the device have one answer."""
    balance = LayerBalance(CakeBudget(floor=floor), budget, len(preferences), pinned)
    balance.preferences = list(preferences)
    slots = balance._wanted(seen)
    assert slots is not None
    on_device = balance._wanted_on_device(
        torch.tensor([preferences[::-1], preferences]), torch.tensor(seen)
    )
    # Where the host's floating-point numbers cannot tell remainders apart another may get a slot.
    assert max(abs(a - b) for a, b in zip(on_device[1].tolist(), slots, strict=True)) <= 1
    assert sum(slots) == on_device[0].sum() == on_device[1].sum()
    return slots


# The device counts in whole numbers, of which the smallest share must be one.
@settings(max_examples=60, deadline=None)
@given(
    preferences=st.lists(st.just(0.0) | st.floats(1, 2.0**36, width=32), min_size=1, max_size=30),
    budget=st.integers(1, 300),
    pinned=st.integers(0, 320),
    floor=st.sampled_from([0.0, 0.1, 0.25, 1.0]),
    more=st.integers(1, 9000),
)
def test_every_slot_is_shared_out_within_limits(
    preferences: list[float], budget: int, pinned: int, floor: float, more: int
) -> None:
    seen = budget + more
    split = wanted(floor, preferences, budget, seen, pinned)
    assert sum(split) == budget * len(preferences)
    least = min(budget, max(floor * budget, pinned + 1))
    assert all(least <= slots <= max(seen, budget) for slots in split)


def test_slots_are_shared_out_in_proportion_above_the_floor() -> None:
    many = 10**6
    assert wanted(0.25, [1.0, 2.0, 5.0], 100, many, 0) == [25 + 28, 25 + 56, 25 + 141]
    assert wanted(0, [0.0, 0.0, 9.0], 100, many, 0) == [1, 1, 298]
    assert wanted(0.25, [0.0, 0.0, 0.0], 100, many, 8) == [100, 100, 100]
    assert wanted(1, [1.0, 2.0, 5.0], 100, many, 0) == [100, 100, 100]
    # What one layer cannot fill goes to the others, in proportion.
    assert wanted(0, [1.0, 2.0, 97.0], 100, 160, 0) == [47, 93, 160]


@settings(max_examples=60, deadline=None)
@given(
    held=st.lists(st.integers(1, 64), min_size=2, max_size=5),
    seed=st.integers(0, 999),
    floor=st.sampled_from([0, 9]),
    untold=st.booleans(),
    seen=st.sampled_from([60, 10_000]),
)
def test_layers_that_evict_together_keep_what_they_would_one_by_one(
    held: list[int], seed: int, floor: int, untold: bool, seen: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    layers, old, new = len(held), *(torch.rand(2, len(held), generator=g) ** 3)
    balance = balanced(held, old.tolist())
    balance.floor = floor
    if untold:
        old[-1], balance.preferences[-1] = float("nan"), None
    segments = balance.segments
    slots = torch.tensor([s.held + 16 for s in segments])
    had = [[s.budget for s in segments], [s.target_length for s in segments]]
    kept, shares = balance.after_block(
        old, new, slots, Shares(*torch.tensor(had)), torch.tensor(seen)
    )
    for i, segment in enumerate(segments):  # as the evictor does
        balance.prefer(i, float(new[i]), seen)
        segment.held = min(segment.held + 16, segment.target_length)
    assert [s.held for s in segments] == kept.tolist()
    assert balance.rebalance(seen) == (seen > 64)
    assert [s.budget for s in segments] == shares.budgets.tolist()
    assert [s.target_length for s in segments] == shares.targets.tolist()
    assert sum(s.budget for s in segments) == 64 * layers


@pytest.mark.parametrize("positions", ["compact", "true"])
def test_no_layer_grows_or_shrinks_in_an_answer(positions: str) -> None:
    model = tiny_model("llama", num_hidden_layers=3, vocab_size=220)
    ids = 3 + torch.randint(210, (1, 260), generator=torch.Generator().manual_seed(4))
    eviction = small_policy("cake", model.config)
    cache = kvcap.BudgetCache(model.config, 48, 8, eviction, positions=positions)
    loop = BlockLoop(model, cache, graphs=False)
    loop.prefill(ids[:, :200])
    assert cache.balance is not None
    for i in range(200, 205):  # fill what the last block left empty
        loop.read(ids[:, i : i + 1])
    assert cache.balance.is_balanced
    held = [layer.held for layer in cache.capped_layers]
    assert len(set(held)) > 1
    for i in range(205, 230):
        loop.read(ids[:, i : i + 1])
        assert [layer.held for layer in cache.capped_layers] == held
        assert cuda_graphs.is_full(cache)
    loop.prefill(ids[:, 230:])
    assert [layer.held for layer in cache.capped_layers] != held
    assert sum(s.budget for s in cache.balance.segments) == 3 * 48
