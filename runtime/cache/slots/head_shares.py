"""Shares a layer's slots out among its heads anew, where a head budget moves them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from kvcap.policies import Observation
from kvcap.policies.base import evenly
from kvcap.runtime.cache.pool import Segment, has_data, resize
from kvcap.runtime.cache.slots.policy import LayerPolicy


@dataclass
class SegmentEviction:
    """A choice of slots that one segment evicts."""

    index: int
    segment: Segment
    obs: Observation
    scores: Tensor  # [b, k, held]
    pinned: Tensor | None  # bool [b, k, held]; None: none are


def divide_heads(evictions: Sequence[SegmentEviction], policy: LayerPolicy) -> None:
    """Set the slots that every head keeps, by the scores of all; of one segment a head."""
    budget, heads = policy.eviction.head_budget, policy.layout.shape.kv_heads
    assert budget is not None

    def rows(numbers: Iterable[Tensor | None]) -> Tensor:
        each = [x[0, 0] for x in numbers if x is not None]
        padded: Tensor = nn.utils.rnn.pad_sequence(each, batch_first=True)
        return padded.view(-1, heads, padded.shape[1])

    scores = rows(one.scores for one in evictions)
    pinned = rows(x.pinned for x in evictions)
    positions = rows(x.obs.positions for x in evictions)
    lengths = torch.tensor([one.segment.held for one in evictions])
    lengths = lengths.view(-1, heads).to(scores.device, non_blocking=True)
    average = policy.layout.budgets[policy.index]
    with suppress(DataDependentOutputException):  # of a dry run, in which slots stay in place
        split = budget.split(scores, pinned, positions, lengths, average).flatten()
        if has_data(split):
            for one, kept in zip(evictions, split.tolist(), strict=True):
                one.segment.target_length = one.obs.budget = kept


def fill_heads(segments: Sequence[Segment], policy: LayerPolicy) -> None:
    """Give heads the budgets that they keep, and the slots that are left evenly."""
    heads, average = policy.layout.shape.kv_heads, policy.layout.budgets[policy.index]
    budgets = list[int]()
    for first in range(0, len(segments), heads):
        kept = [segment.target_length for segment in segments[first : first + heads]]
        spare = heads * average - sum(kept)
        budgets += [slots + evenly(spare, heads, i) for i, slots in enumerate(kept)]
    if budgets != [segment.budget for segment in segments]:
        resize(segments, budgets)
