"""Holds one layer's slots and works on them in plain PyTorch: every feature, on every device.

The truth that `RowSlots` is held to. A key is stored rotated as the model made it, to the position
behind what its head then held, with the `shift` its position has moved down since; attention
rotates a copy, so that errors never add up. Of quantised slots it reads a copy in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from kvcap import kernels
from kvcap.kernels.choice import ready
from kvcap.policies import Eviction, Observation
from kvcap.policies.base import evenly
from kvcap.policies.base.component import ATTENTION_VIEWS
from kvcap.policies.base.eviction import Score
from kvcap.runtime.attention.functions import adds_masks, attend, attend_weighing
from kvcap.runtime.attention.latents import absorbed, attend_absorbed, attend_expanded
from kvcap.runtime.cache.layer_balance import LayerBalance
from kvcap.runtime.cache.policy_guard import PolicyGuard, is_own
from kvcap.runtime.cache.pool import Segment, resize
from kvcap.runtime.cache.slots.policy import AttentionCall, LayerPolicy
from kvcap.runtime.cache.slots.step import AttentionStep
from kvcap.runtime.cache.step import ForwardContext, PendingBlock
from kvcap.runtime.cache.storage import LayerStorage


class HeldKeys(NamedTuple):
    """A record of a layer's keys, rotated to their present positions, and of its values."""

    keys: list[Tensor]  # [b, k, held, D] of every segment
    values: list[Tensor] | None  # likewise; None: they are weighed where they lie


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

    @property
    def count(self) -> int:
        """Return how many slots of each head go."""
        return self.segment.held - self.segment.target_length


class EagerSlots:
    """An engine that works on a layer's slots, one segment after the other.

    Args:
        storage: of the layer.
        policy: of the layer.
        evict_every: in generation, evict every so many tokens.
        balance: of the layers, if slots move between them.
    """

    def __init__(
        self,
        storage: LayerStorage,
        policy: LayerPolicy,
        evict_every: int = 1,
        balance: LayerBalance | None = None,
    ) -> None:
        self.storage, self.segments, self.policy = storage, storage.segments, policy
        self.evict_every, self.balance = evict_every, balance
        self.eviction = policy.eviction
        trusted = all(map(is_own, self.eviction.components))
        self._guard = None if trusted else PolicyGuard(self.eviction)
        pool, store = storage.segments[0].pool, storage.evicted_store
        self._quantised = pool.format.quantised
        latent = policy.layout.shape.latent
        plain = store is None and latent is None and not self._quantised
        # What the policy would work out by itself, where slots are read as they are by equal heads.
        self._shows_output = plain and policy.reads_all_output

    @property
    def on_device(self) -> Any:
        """Return small tensors besides the buffers that a CUDA graph must keep alive."""
        return self.storage.positions.on_device

    def due(self, length: int) -> bool:
        """Return whether slots go after a block of `length`: at once, or every few tokens."""
        return self.storage.excess >= (1 if length > 1 else self.evict_every)

    # Append

    def append(self, block: PendingBlock, keys: Tensor, values: Tensor) -> None:
        """Write a block's keys and values [B, K, T, D] into the slots behind those in use."""
        place, positions = block.place, self.storage.positions
        block.offsets = positions.offsets(place.read_at, self.segments)
        if self._quantised:
            self.storage.append(keys, values, place.times, place.read_at, not place.seen)
            return
        keys = positions.aligned(keys, block.offsets)
        for segment in self.segments:
            segment.append(segment.rows_of(keys), segment.rows_of(values), place.times)

    # Attend

    def attend(self, query: Tensor, block: PendingBlock, call: AttentionCall) -> Tensor:
        """Attend with an appended block, then evict. [B, H, T, D] -> [B, H, T, D].

        Over slots that hold latents [B, H, T, r + nope] -> [B, H, T, v]: queries are taken to the
        latents, or the slots are expanded for them, whichever costs less. Where other layers read
        these slots, the block keeps what they are to attend to, and the last of them evicts.
        """
        context, length = block.context, block.length
        query = asked = self.storage.positions.aligned(query[:, :, :length], block.offsets)
        if call.expansion is not None:
            expands = self._expands(length)
            if not expands or self.policy.reads_queries:
                query = absorbed(query, call.expansion)
            asked = asked if expands else query
        if self.storage.query_window is not None:
            with context.run_async_if_last(query):
                self.storage.query_window.append(query)
        context.make_room()  # for a copy of all keys
        held = self._held_keys(length)
        step = AttentionStep(
            block.place.total_tokens,
            length,
            held.keys,
            [s.rows_of(query) for s in self.segments],
            held.values,
            call,
            block.place.total_counter,
        )
        out = self._over(asked, held, call, context)
        if self._shows_output and length > 1 and len(self.segments) == 1:
            step = replace(step, attended=out)
        if block.readers:
            block.shown = Shown(held, step)
        else:
            self._evict_beside(step, context)
        return out

    def again(self, query: Tensor, block: PendingBlock, call: AttentionCall) -> Tensor:
        """Attend with another layer to what `block` attended to; after the last one, evict.

        The policy sees the queries of the layer whose slots these are, and no others.

        Args:
            query: [B, H, T', D], of the last T' tokens of the block: Gemma 4 leaves out those whose
                logits nobody asked for.
            block: whose own layer has attended.
            call: of the other layer.
        """
        query = self.storage.positions.aligned(query, block.offsets)
        out = self._over(query, block.shown.held, call, block.context)
        if not block.readers:
            self._evict_beside(block.shown.step, block.context)
        return out

    def _expands(self, tokens: int) -> bool:
        """Return whether slots that hold latents are expanded for so many queries."""
        layout = self.policy.layout
        latent, slots = layout.shape.latent, layout.budget_tokens + layout.block_size
        return latent is not None and latent.expands(tokens, slots)

    def _held_keys(self, length: int) -> HeldKeys:
        """Return all keys, rotated to where they count, and all values."""
        storage, segments, pool = self.storage, self.segments, self.segments[0].pool
        # Quantised values are weighed where they lie by a CPU's single token, and never copied.
        weighs = self._quantised and length == 1 and not ready(pool.keys)
        values = None if weighs else [segment.read_values() for segment in segments]
        if length == 1 and not self._quantised:
            return HeldKeys(storage.positions.keys_of_token(segments), values)
        return HeldKeys([storage.read_keys(segment) for segment in segments], values)

    def _over(
        self, query: Tensor, held: HeldKeys, call: AttentionCall, context: ForwardContext
    ) -> Tensor:
        """Attend with aligned queries [B, H, T, D] to all slots in use, segment by segment."""
        parts = [
            self._over_segment(i, segment, segment.rows_of(query), held, call, context)
            for i, segment in enumerate(self.segments)
        ]
        if len(parts) == 1:
            return parts[0]
        out = query.new_empty(*query.shape[:3], parts[0].shape[3])
        for segment, part in zip(self.segments, parts, strict=True):
            segment.rows_of(out).copy_(part)
        return out

    def _over_segment(
        self,
        index: int,
        segment: Segment,
        query: Tensor,
        held: HeldKeys,
        call: AttentionCall,
        context: ForwardContext,
    ) -> Tensor:
        """Attend to one segment, with what evicted tokens add where they are kept. [b, h, T, D]."""
        keys, scaling, softcap = held.keys[index], call.scaling, call.softcap
        sinks = segment.query_heads_of(call.sinks)
        if call.expansion is not None:
            over = attend_expanded if self._expands(query.shape[2]) else attend_absorbed
            return over(query, keys, call.expansion, scaling, softcap)
        if self.storage.evicted_store is not None:
            return self.storage.evicted_store.attend(
                index, segment, query, keys, scaling, softcap, sinks
            )[0]
        asked = query.to(keys.dtype)  # quantised slots are read in another
        if held.values is None:
            weigh = segment.weigh_values
            return attend_weighing(asked, keys, weigh, scaling, softcap, sinks).to(query.dtype)
        mask = None
        if adds_masks(asked, softcap, sinks):
            mask = context.causal_bias(asked.shape[2], keys.shape[2], asked)
        return attend(asked, keys, held.values[index], scaling, softcap, mask, sinks).to(
            query.dtype
        )

    # A single token

    def token(self, *_: Any) -> None:
        """Change nothing and return None: a token is read as any block is."""

    # Evict

    def _evict_beside(self, step: AttentionStep, context: ForwardContext) -> None:
        """Evict after attention, in a CUDA graph beside what follows it, if anything is to do."""
        due = self.due(step.length)
        if due or self.policy.has_state or (self.balance is not None and step.length > 1):
            with context.run_async_if_last(step):
                self.evict(step, due)

    def evict(self, step: AttentionStep, due: bool) -> None:
        """Update the policy's state and, if that is `due`, evict down to the budget."""
        observed = [self._observe(i, segment, step) for i, segment in enumerate(self.segments)]
        self._update_state(observed)
        balance = self.balance
        if balance is not None and step.length > 1:
            self._prefer(balance, observed[0], step)
        if due:
            self._give_up_all(self._evictions(observed))
        # Tokens that are generated change nothing about what layers want.
        last = self.policy.index == len(self.policy.layout.budgets) - 1
        if balance is not None and last and (step.length > 1 or not balance.is_balanced):
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
            scores = eviction.score(obs, self._score_by())
        slots = eviction.choose(scores, pinned, obs, segment.held - segment.target_length)
        self._give_up(segment, slots)

    def _update_state(self, observed: list[Observation]) -> None:
        """Bring the numbers that the policy keeps of slots up to date."""
        if not self.policy.has_state:
            return
        update = kernels.update if self._guard is None else self._guard.update
        for segment, obs in zip(self.segments, observed, strict=True):
            for name, tensor in self.eviction.update(obs, update).items():
                segment.aux(name).copy_(tensor)

    def _evictions(self, observed: list[Observation]) -> list[SegmentEviction]:
        """Score every segment, and share the layer's budget out where slots move."""
        divides, score = self.policy.layout.divides(observed[0].new), self._score_by()
        found = []
        for i, (segment, obs) in enumerate(zip(self.segments, observed, strict=True)):
            if divides or segment.held > segment.target_length:
                scores = self.eviction.score(obs, score)
                pins = divides or self.eviction.pins_any(obs)
                pinned = self.eviction.pinned(obs) if pins else None
                found.append(SegmentEviction(i, segment, obs, scores, pinned))
        if divides:
            for one, kept in zip(found, self._split(found), strict=True):
                one.segment.target_length = one.obs.budget = kept
        return [one for one in found if one.count > 0]

    def _score_by(self) -> Score:
        """Return what scores slots: kernels and policies themselves, if they are kvcap's own."""
        return kernels.score if self._guard is None else self._guard.score

    def _give_up_all(self, evictions: Sequence[SegmentEviction]) -> None:
        """Select and give up slots of every segment, and move boundaries where heads' slots do."""
        store = self.storage.evicted_store
        for one in evictions:
            slots = self.eviction.choose(one.scores, one.pinned, one.obs, one.count)
            take = (
                None
                if store is None
                else partial(store.take, one.index, one.segment, slots, one.scores, one.obs)
            )
            self._give_up(one.segment, slots, take)
        if self.eviction.heads_move:
            shares = self._filled([segment.target_length for segment in self.segments])
            if shares != [segment.budget for segment in self.segments]:
                resize(self.segments, shares)

    def _give_up(self, segment: Segment, evicted: Tensor, take: Any = None) -> None:
        """Evict the slots [b, k, e] of a segment; tokens newer than those move down.

        `take` is called when shifts have grown and nothing has moved yet.
        """
        storage = self.storage
        storage.positions.move_down(segment, evicted)
        if take is not None:
            take()
        storage.positions.note_moved()
        if storage.query_window is not None:
            storage.query_window.move_down(segment, evicted.shape[-1])
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

    def _observe(self, index: int, segment: Segment, step: AttentionStep) -> Observation:
        """Show the policy one segment."""
        policy, spans = self.policy, tuple(self.policy.pinned_spans)
        if segment.first_pinned:
            spans = (*spans, (0, segment.first_pinned))
        projection = policy.projection(step.call.module)
        if projection is not None:
            projection = projection[segment.head : segment.head + segment.heads]
        return Observation(
            keys=step.keys[index],
            values=self._values(segment) if step.values is None else step.values[index],
            positions=segment.positions,
            num_tokens=step.tokens if step.token_counter is None else step.token_counter,
            budget=segment.target_length,
            new=step.length,
            first_head=segment.head,
            queries=self._window(index, segment, step),
            sinks=segment.query_heads_of(step.call.sinks),
            attended=step.attended,
            state={name: segment.aux(name) for name in self.eviction.state},
            output_projection=projection,
            pinned_spans=spans,
            **policy.common(step.call),
        )

    def _window(self, index: int, segment: Segment, step: AttentionStep) -> Tensor | None:
        """Return the queries the policy observes [b, h, w, D], where they count, or None."""
        count = self.eviction.policy.queries_observed
        if count == 0 or step.queries is None:
            return None
        if count is None:
            return step.queries[index]
        if self.storage.query_window is None:
            return step.queries[index][:, :, -count:]
        count = min(count, step.tokens)
        return self.storage.query_window.last(
            segment, count, self.storage.positions.window_rotation
        )

    def _values(self, segment: Segment) -> Tensor:
        """Return a segment's values [b, k, held, D]; none of quantised ones that nobody reads."""
        if self._quantised and not self.policy.reads_values:
            return segment.empty(0)
        return segment.read_values()


def _has_no_data(x: Tensor) -> bool:
    """Return whether a tensor is one of a dry run, in which slots stay in place."""
    return type(x) is not Tensor
