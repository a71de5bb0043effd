"""Holds one layer's slots and works on them in plain PyTorch: every feature, on every device.

The truth that `RowSlots` is held to. A key is stored rotated as the model made it, to the position
behind what its head then held, with the `shift` its position has moved down since; attention
rotates a copy, so that errors never add up. Of quantised slots it reads a copy in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from kvcap import kernels
from kvcap.kernels.choice import ready
from kvcap.policies import Eviction, Observation
from kvcap.policies.base import evenly
from kvcap.policies.base.component import ATTENTION_VIEWS
from kvcap.policies.base.eviction import Score, Update, eager_update
from kvcap.runtime.attention.functions import attend, attend_plainly
from kvcap.runtime.cache.layer_balance import LayerBalance
from kvcap.runtime.cache.policy_guard import PolicyGuard, is_own
from kvcap.runtime.cache.pool import Segment, resize
from kvcap.runtime.cache.slots.base import LayerMemory, SlotEngine
from kvcap.runtime.cache.slots.policy import AttentionCall, LayerPolicy
from kvcap.runtime.cache.slots.step import AttentionStep
from kvcap.runtime.cache.step import ForwardContext, PendingBlock


class HeldKeys(NamedTuple):
    """A record of a layer's keys, rotated to their present positions, and of its values."""

    keys: list[Tensor]  # [b, k, held, D] of every segment
    values: list[Tensor] | None = None  # copies of them, where they are read; None: as slots lie


class Shown(NamedTuple):
    """A record of a layer's keys and step, kept until other layers that read its slots attended."""

    held: HeldKeys
    step: AttentionStep


@dataclass
class SegmentEviction:
    """A choice of slots that one segment evicts."""

    index: int
    segment: Segment
    obs: Observation
    scores: Tensor  # [b, k, held]
    pinned: Tensor | None  # bool [b, k, held]; None: none are


class EagerSlots(SlotEngine):
    """An engine that works on a layer's slots, one segment after the other.

    Slots hold keys and values in the model's own type; engines of other formats derive from it.

    Args:
        memory: of the layer.
        policy: of the layer.
        evict_every: in generation, evict every so many tokens.
        balance: of the layers, if slots move between them.
    """

    def __init__(
        self,
        memory: LayerMemory,
        policy: LayerPolicy,
        evict_every: int = 1,
        balance: LayerBalance | None = None,
    ) -> None:
        super().__init__(memory, policy, balance)
        self.evict_every = evict_every
        by_kernels, score, update = ready(self.segments[0].pool.keys), None, eager_update
        if not all(map(is_own, self.eviction.components)):
            guard = PolicyGuard(self.eviction)
            score, update = guard.score, guard.update
        elif by_kernels:
            score, update = kernels.score, kernels.update
        # What computes scores, new state and attention: chosen once, as the device stays.
        self._score: Score | None = score
        self._update: Update = update
        self._attend = attend if by_kernels else attend_plainly

    SHOWS_OUTPUT = True
    """Says that attention reads slots as they are, so that a policy may look at its output."""

    @property
    def on_device(self) -> Any:
        """Return small tensors besides the buffers that a CUDA graph must keep alive."""
        return self.positions.on_device

    # Append

    def append(self, block: PendingBlock, keys: Tensor, values: Tensor) -> None:
        """Write a block's keys and values [B, K, T, D] into the slots behind those in use."""
        place, positions = block.place, self.positions
        block.offsets = tuple([place.read_at - segment.held for segment in self.segments])
        keys = positions.aligned(keys, block.offsets)
        for segment in self.segments:
            segment.append(segment.rows_of(keys), segment.rows_of(values), place.times)

    # Attend

    def attend(
        self, query: Tensor, block: PendingBlock, call: AttentionCall, shown: Tensor | None = None
    ) -> Tensor:
        """Attend with an appended block, then evict. [B, H, T, D] -> [B, H, T, D].

        Where other layers read these slots, the block keeps what they are to attend to, and the
        last of them evicts.

        Args:
            query: [B, H, T, D], as the model rotated them.
            block: the block.
            call: of the layer.
            shown: the queries that the policy observes; by default those of the block.
        """
        context, length, positions = block.context, block.length, self.positions
        query = positions.aligned(query[:, :, :length], block.offsets)
        shown = query if shown is None else positions.aligned(shown, block.offsets)
        if self.query_window is not None:
            with context.run_async_if_last(shown):
                self.query_window.append(shown)
        context.make_room()  # for a copy of all keys
        held = self._held_keys(length)
        out = self._over(query, held, call, context)
        whole = self.SHOWS_OUTPUT and length > 1 and len(self.segments) == 1
        step = AttentionStep(
            block.place.total_tokens,
            length,
            held.keys,
            shown if self.policy.reads_queries else None,
            held.values,
            call,
            block.place.total_counter,
            out if whole and self.policy.reads_all_output else None,
        )
        if block.readers:
            block.shown = Shown(held, step)
        else:
            self.evict(step, context)
        return out

    def again(self, query: Tensor, block: PendingBlock, call: AttentionCall) -> Tensor:
        """Attend with another layer to what `block` attended to; after the last one, evict."""
        query = self.positions.aligned(query, block.offsets)
        out = self._over(query, block.shown.held, call, block.context)
        if not block.readers:
            self.evict(block.shown.step, block.context)
        return out

    def _held_keys(self, length: int) -> HeldKeys:
        """Return all keys, rotated to where they count, for so many queries."""
        return HeldKeys(self.positions.keys(self.segments, length))

    def _over(
        self, query: Tensor, held: HeldKeys, call: AttentionCall, context: ForwardContext
    ) -> Tensor:
        """Attend with aligned queries [B, H, T, D] to all slots in use, segment by segment."""
        if len(self.segments) == 1:
            return self._over_segment(0, query, held, call, context)
        out = None
        for i, segment in enumerate(self.segments):
            mine = call._replace(logits=segment.logits_of(call.logits))
            part = self._over_segment(i, segment.rows_of(query), held, mine, context)
            out = query.new_empty(*query.shape[:3], part.shape[3]) if out is None else out
            segment.rows_of(out).copy_(part)
        assert out is not None, "a layer has segments"
        return out

    def _over_segment(
        self,
        index: int,
        query: Tensor,
        held: HeldKeys,
        call: AttentionCall,
        context: ForwardContext,
    ) -> Tensor:
        """Attend to one segment with its queries and logits. [b, h, T, D]."""
        keys, values = held.keys[index], self.segments[index].held_views()["values"]
        return self._attend(query, keys, values, call.logits, None, context.causal_bias)

    # Evict

    def evict(self, step: AttentionStep, context: ForwardContext) -> None:
        """Update the policy's state, and evict down to the budget: at once, or every few tokens.

        In a CUDA graph that is done beside what follows.
        """
        excess = max([segment.held - segment.target_length for segment in self.segments])
        due, balance = excess >= (1 if step.length > 1 else self.evict_every), self.balance
        prefers = balance is not None and step.length > 1
        if not (due or prefers or self.policy.has_state):
            return
        with context.run_async_if_last(step):
            observed = [self._observe(i, segment, step) for i, segment in enumerate(self.segments)]
            if self.policy.has_state:
                self._update_state(observed)
            if balance is not None and prefers:
                self._prefer(balance, observed[0], step)
            if due:
                self._evict_lowest(observed)
            # Tokens that are generated change nothing about what layers want.
            last = self.policy.index == len(self.policy.layout.budgets) - 1
            if balance is not None and last and (prefers or not balance.is_balanced):
                balance.rebalance(step.tokens)

    def _prefer(self, balance: LayerBalance, obs: Observation, step: AttentionStep) -> None:
        """Note the layer's preference for slots; in a dry run there is none."""
        with suppress(DataDependentOutputException):
            preference = kernels.preference(balance.budget, obs)
            if not _has_no_data(preference):
                balance.prefer(self.policy.index, float(preference), step.tokens)

    def shrink_to_budget(self, segment: Segment, step: AttentionStep) -> None:
        """Evict one head's slots down to `segment.target_length`, without queries.

        By the policy's scores where those need none, else the oldest that nothing pins.
        """
        eviction = self.eviction
        obs = self._observe(0, segment, step)
        pinned = eviction.pinned(obs)
        blind = eviction.observes & (ATTENTION_VIEWS | {"output_projection"})
        if blind or not eviction.policy.scores_heads_alone:
            eviction = Eviction(eviction.policy)  # no rescorer, which may look at queries too
            scores = segment.positions.float()
        else:
            scores = eviction.score(obs, self._score)
        slots = eviction.choose(scores, pinned, obs, segment.held - segment.target_length)
        self._give_up(segment, slots)

    def _update_state(self, observed: list[Observation]) -> None:
        """Bring the numbers that the policy keeps of slots up to date."""
        for segment, obs in zip(self.segments, observed, strict=True):
            for name, tensor in self.eviction.update(obs, self._update).items():
                segment.aux(name).copy_(tensor)

    def _evict_lowest(self, observed: list[Observation]) -> None:
        """Score every segment, share the layer's budget out where slots move, and evict."""
        eviction, found = self.eviction, list[SegmentEviction]()
        divides = eviction.heads_move and self.policy.layout.divides(observed[0].new)
        for i, (segment, obs) in enumerate(zip(self.segments, observed, strict=True)):
            if divides or segment.held > segment.target_length:
                scores, pins = eviction.score(obs, self._score), eviction.pins_of(obs)
                some = divides or obs.pinned_spans or pins != (0, 0)
                pinned = eviction.pinned(obs, pins) if some else None
                found.append(SegmentEviction(i, segment, obs, scores, pinned))
        if divides:
            for one, kept in zip(found, self._split(found), strict=True):
                one.segment.target_length = one.obs.budget = kept
        for one in found:
            if (count := one.segment.held - one.segment.target_length) > 0:
                slots = eviction.choose(one.scores, one.pinned, one.obs, count)
                self._give_up(one.segment, slots, one)
        if eviction.heads_move:
            shares = self._filled([segment.target_length for segment in self.segments])
            if shares != [segment.budget for segment in self.segments]:
                resize(self.segments, shares)

    def _give_up(
        self, segment: Segment, evicted: Tensor, one: SegmentEviction | None = None
    ) -> None:
        """Evict the slots [b, k, e] of a segment; tokens newer than those move down.

        `one` says how they were chosen; `CorrectedSlots` uses it.
        """
        self.positions.move_down(segment, evicted)
        if self.query_window is not None:
            self.query_window.move_down(segment, evicted.shape[-1])
        segment.evict(evicted)

    def _split(self, evictions: Sequence[SegmentEviction]) -> list[int]:
        """Return the slots that every head keeps, sequence by sequence; of one segment a head."""
        budget, heads = self.eviction.head_budget, self.policy.layout.shape.kv_heads
        assert budget is not None

        def rows(numbers: Iterable[Tensor | None]) -> Tensor:
            each = [x[0, 0] for x in numbers if x is not None]
            padded: Tensor = nn.utils.rnn.pad_sequence(each, batch_first=True)
            return padded.view(-1, heads, padded.shape[1])

        scores = rows(one.scores for one in evictions)
        pinned, places = rows(x.pinned for x in evictions), rows(x.obs.positions for x in evictions)
        lengths = torch.tensor([one.segment.held for one in evictions])
        lengths = lengths.view(-1, heads).to(scores.device, non_blocking=True)
        average = self.policy.layout.budgets[self.policy.index]
        kept = [one.segment.target_length for one in evictions]
        with suppress(DataDependentOutputException):
            split = budget.split(scores, pinned, places, lengths, average).flatten()
            if not _has_no_data(split):
                kept = split.tolist()
        return kept

    def _filled(self, kept: list[int]) -> list[int]:
        """Return budgets that share all slots, where heads hold fewer than these."""
        heads, found = self.policy.layout.shape.kv_heads, list[int]()
        for first in range(0, len(kept), heads):
            mine = kept[first : first + heads]
            spare = heads * self.policy.layout.budgets[self.policy.index] - sum(mine)
            found += [slots + evenly(spare, heads, i) for i, slots in enumerate(mine)]
        return found

    def _observe(
        self, index: int, segment: Segment, step: AttentionStep, values: Tensor | None = None
    ) -> Observation:
        """Show the policy one segment, with `values` other than those that attention read."""
        policy, views, spans = self.policy, segment.held_views(), tuple(self.policy.pinned_spans)
        if segment.first_pinned:
            spans = (*spans, (0, segment.first_pinned))
        common = policy.common(step.call)
        if values is None:
            values = views["values"] if step.values is None else step.values[index]
        if (projection := common["output_projection"]) is not None:
            mine = slice(segment.head, segment.head + segment.heads)
            common["output_projection"] = projection[mine]
        common["rule"] = segment.logits_of(step.call.logits)
        return Observation(
            keys=step.keys[index],
            values=values,
            positions=views["positions"],
            num_tokens=step.tokens if step.token_counter is None else step.token_counter,
            budget=segment.target_length,
            new=step.length,
            first_head=segment.head,
            queries=None if step.queries is None else self._window(segment, step),
            attended=step.attended,
            state={name: views[name] for name in self.eviction.state} if policy.has_state else {},
            pinned_spans=spans,
            **common,
        )

    def _window(self, segment: Segment, step: AttentionStep) -> Tensor:
        """Return the queries the policy observes [b, h, w, D], where they count."""
        count, window = self.eviction.policy.queries_observed, self.query_window
        assert step.queries is not None
        if count is None or window is None:
            return segment.rows_of(step.queries)[:, :, -(count or 0) :]
        rotation = self.positions.window_rotation
        return window.last(segment, min(count, step.tokens), rotation)


def _has_no_data(x: Tensor) -> bool:
    """Return whether a tensor is one of a dry run, in which slots stay in place."""
    return type(x) is not Tensor
