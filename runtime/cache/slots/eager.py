"""Holds one layer's slots and works on them in plain PyTorch: every feature, on every device.

The truth that `RowSlots` is held to. A key is stored rotated as the model made it, to the position
behind what its head then held, with the `shift` its position has moved down since; attention
rotates a copy, so that errors never add up. Of quantised slots it reads a copy in any case.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvcap import kernels
from kvcap.kernels.choice import ready
from kvcap.policies import Eviction, Observation
from kvcap.policies.base.component import ATTENTION_VIEWS
from kvcap.policies.base.eviction import Score, Update, eager_update
from kvcap.runtime.attention.functions import attend, attend_plainly
from kvcap.runtime.cache.layer_balance import LayerBalance
from kvcap.runtime.cache.policy_guard import PolicyGuard, is_own
from kvcap.runtime.cache.pool import Segment
from kvcap.runtime.cache.slots.base import LayerMemory, SlotEngine
from kvcap.runtime.cache.slots.head_shares import SegmentEviction, divide_heads, fill_heads
from kvcap.runtime.cache.slots.policy import AttentionCall, LayerPolicy
from kvcap.runtime.cache.slots.step import AttentionStep
from kvcap.runtime.cache.step import ForwardContext, PendingBlock


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
            segment.append(segment.rows_of(keys), segment.rows_of(values), place.token_index)

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
        keys, values = self._held(length)
        out = self._over(query, keys, values, call, context)
        whole = self.SHOWS_OUTPUT and length > 1 and len(self.segments) == 1
        step = AttentionStep(
            block.place.total_tokens,
            length,
            keys,
            shown if self.policy.reads_queries else None,
            values,
            call,
            block.place.total_counter,
            out if whole and self.policy.reads_all_output else None,
        )
        if block.readers:
            block.shown = step
        else:
            self.evict(step, context)
        return out

    def again(self, query: Tensor, block: PendingBlock, call: AttentionCall) -> Tensor:
        """Attend with another layer to what `block` attended to; after the last one, evict."""
        query, step = self.positions.aligned(query, block.offsets), block.shown
        out = self._over(query, step.keys, step.values, call, block.context)
        if not block.readers:
            self.evict(step, block.context)
        return out

    def _held(self, length: int) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return keys [b, k, held, D] at their present positions, and values, of every segment.

        So many queries attend to them. None: values are read where they lie.
        """
        return self.positions.keys(self.segments, length), None

    def _over(
        self,
        query: Tensor,
        keys: list[Tensor],
        values: list[Tensor] | None,
        call: AttentionCall,
        context: ForwardContext,
    ) -> Tensor:
        """Attend with aligned queries [B, H, T, D] to all slots in use, segment by segment."""
        if len(keys) == 1:
            return self._over_segment(0, query, keys, values, call, context)
        out = None
        for i, segment in enumerate(self.segments):
            mine = call._replace(logits=segment.logits_of(call.logits))
            part = self._over_segment(i, segment.rows_of(query), keys, values, mine, context)
            out = query.new_empty(*query.shape[:3], part.shape[3]) if out is None else out
            segment.rows_of(out).copy_(part)
        assert out is not None, "a layer has segments"
        return out

    def _over_segment(
        self,
        index: int,
        query: Tensor,
        keys: list[Tensor],
        values: list[Tensor] | None,
        call: AttentionCall,
        context: ForwardContext,
    ) -> Tensor:
        """Attend to one segment with its queries and logits. [b, h, T, D]."""
        own = self.segments[index].held_views()["values"] if values is None else values[index]
        return self._attend(query, keys[index], own, call.logits, None, context.causal_bias)

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
                balance.observe(self.policy.index, observed[0], step.tokens)
            if due:
                self._evict_lowest(observed)
            if balance is not None:
                balance.after(self.policy.index, step.tokens, anew=prefers)

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
        self._evict_slots(segment, slots)

    def _update_state(self, observed: list[Observation]) -> None:
        """Bring the numbers that the policy keeps of slots up to date."""
        for segment, obs in zip(self.segments, observed, strict=True):
            for name, tensor in self.eviction.update(obs, self._update).items():
                segment.aux(name).copy_(tensor)

    def _evict_lowest(self, observed: list[Observation]) -> None:
        """Score every segment, share the layer's budget out where slots move, and evict."""
        eviction, evictions = self.eviction, list[SegmentEviction]()
        divides = eviction.heads_move and self.policy.layout.divides(observed[0].new)
        for i, (segment, obs) in enumerate(zip(self.segments, observed, strict=True)):
            if divides or segment.held > segment.target_length:
                scores, pins = eviction.score(obs, self._score), eviction.pins_of(obs)
                some = divides or obs.pinned_spans or pins != (0, 0)
                pinned = eviction.pinned(obs, pins) if some else None
                evictions.append(SegmentEviction(i, segment, obs, scores, pinned))
        if divides:
            divide_heads(evictions, self.policy)
        for one in evictions:
            if (count := one.segment.held - one.segment.target_length) > 0:
                slots = eviction.choose(one.scores, one.pinned, one.obs, count)
                self._evict_slots(one.segment, slots, one)
        if divides:
            fill_heads(self.segments, self.policy)

    def _evict_slots(
        self, segment: Segment, evicted: Tensor, one: SegmentEviction | None = None
    ) -> None:
        """Evict the slots [b, k, e] of a segment; tokens newer than those move down.

        `one` says how they were chosen; `CorrectedSlots` uses it.
        """
        self.positions.move_down(segment, evicted)
        if self.query_window is not None:
            self.query_window.move_down(segment, evicted.shape[-1])
        segment.evict(evicted)

    def _observe(self, index: int, segment: Segment, step: AttentionStep) -> Observation:
        """Show the policy one segment."""
        policy, call, views = self.policy, step.call, segment.held_views()
        mine = slice(segment.head, segment.head + segment.heads)
        return Observation(
            keys=step.keys[index],
            values=views["values"] if step.values is None else step.values[index],
            positions=views["positions"],
            num_tokens=step.tokens if step.token_counter is None else step.token_counter,
            budget=segment.target_length,
            new=step.length,
            first_head=segment.head,
            queries=None if step.queries is None else self._window(segment, step),
            attended=step.attended,
            state={name: views[name] for name in self.eviction.state} if policy.has_state else {},
            pinned_spans=(*policy.pinned_spans, *segment.first_pinned),
            regions=policy.regions.of_rows.get(segment.row, policy.regions.weighed),
            output_projection=policy.projection(call, mine) if policy.reads_projection else None,
            layer=policy.index,
            rule=segment.logits_of(call.logits),
            expansion=call.expansion,
            saliency=self.eviction.saliency,
        )

    def _window(self, segment: Segment, step: AttentionStep) -> Tensor:
        """Return the queries the policy observes [b, h, w, D], where they count."""
        count, window = self.eviction.policy.queries_observed, self.query_window
        assert step.queries is not None
        if count is None or window is None:
            return segment.rows_of(step.queries)[:, :, -(count or 0) :]
        rotation = self.positions.window_rotation
        return window.last(segment, min(count, step.tokens), rotation)
