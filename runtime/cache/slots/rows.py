"""Holds one layer's slots as rows that Triton kernels read where they lie, all in one launch each.

A row is a KV head of a sequence. Where each lies, how many slots it has in use and how many it may
have are numbers on the device (`RowTable`): equal heads are equal rows, a cache that fills has rows
below their targets, a batch has more rows. So one CUDA graph serves whatever rows hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcap import kernels
from kvcap.kernels import StoredKeys, append, decode, token
from kvcap.kernels import rows as row_kernels
from kvcap.kernels.arguments import Pins
from kvcap.kernels.choice import ready
from kvcap.kernels.division import Division
from kvcap.policies import Observation, Policy
from kvcap.policies.base import RowRanges
from kvcap.runtime.attention.functions import attend_rows, takes_token
from kvcap.runtime.cache.layer_balance import LayerBalance, Shares
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.cache.pool import SHIFT, SlotPool
from kvcap.runtime.cache.row_table import LayerRowPass, LayerScores, RowPass
from kvcap.runtime.cache.slots.base import LayerMemory, SlotEngine
from kvcap.runtime.cache.slots.policy import AttentionCall, LayerPolicy
from kvcap.runtime.cache.step import PendingBlock
from kvcap.runtime.models.rope import Rotation


def covers(layout: CacheLayout, evict_every: int, pool: SlotPool) -> bool:
    """Return whether kernels cover all that a cache does with the slots of a pool.

    Args:
        layout: of the cache.
        evict_every: in generation, evict every so many tokens.
        pool: of the cache's first layer.
    """
    shape, eviction, moving = layout.shape, layout.eviction, row_kernels.moving(pool.named())
    plain = layout.one_shape and evict_every <= 1 and eviction.corrector is None
    known = all(numbers.by_kernels for numbers in layout.slot_format.types)
    if not plain or not known or not ready(pool.keys):
        return False
    if layout.pooled:
        scored = kernels.covers_layers(eviction, shape.heads // shape.kv_heads)
    else:
        scored = kernels.covers_rows(eviction)
    keys = pool.keys.new_empty(1, pool.size, dtype=pool.dtype)  # as attention reads them
    query = keys[None].expand(shape.heads, 32, -1)[None]
    attended = decode.covers(query, keys, keys, shape.kv_heads)
    return scored and attended and row_kernels.covers(moving)


@dataclass(frozen=True)
class RowStep:
    """A record of what attention saw of a block in one layer, for the policy to look at."""

    tokens: int  # read so far, the block's included
    length: int  # of the block
    rows: LayerRowPass
    query: Tensor  # [B, H, T, D], where the tokens count
    keys: Tensor  # [slots, D], the pool's, or a copy, where the tokens count
    values: Tensor  # [slots, D] likewise
    shown: RowRanges  # where rows lie among these keys and values
    new_values: Tensor  # [B, K, T, D], the block's
    call: AttentionCall
    token_counter: Tensor | None = None  # `tokens` on the device [], inside a CUDA graph
    stored: StoredKeys | None = None  # what attention found out about the keys


class RowSlots(SlotEngine):
    """An engine that works on a layer's slots, all of its rows at once.

    Args:
        memory: of the layer.
        policy: of the layer.
        balance: of the layers, if slots move between them.
    """

    def __init__(
        self,
        memory: LayerMemory,
        policy: LayerPolicy,
        balance: LayerBalance | None = None,
    ) -> None:
        super().__init__(memory, policy, balance)
        self.pool = self.segments[0].pool
        self.moving = row_kernels.moving(self.pool.named())
        """Holds all that moves with a slot, as kernels take it."""
        self._each_head: list[tuple[Policy, Tensor]] = self._policies_of_heads()

    @property
    def on_device(self) -> Any:
        """Return small tensors besides the buffers that a CUDA graph must keep alive."""
        return self._each_head

    # Append

    def append(self, block: PendingBlock, keys: Tensor, values: Tensor) -> None:
        """Write a block's keys and values [B, K, T, D] into the slots behind those in use."""
        self._rows_of(block)
        block.new_values = self._write(keys, values, block)
        for segment in self.segments:
            segment.held += block.length

    def _write(self, keys: Tensor, values: Tensor, block: PendingBlock) -> Tensor:
        """Write a block; return its values as slots hold them."""
        keys, token_index = self._aligned(keys, block), block.place.token_index
        append.append(keys, values, token_index, self.moving, block.rows.before)
        return values

    def _rows_of(self, block: PendingBlock) -> LayerRowPass:
        """Find where the rows lie to which a block is appended."""
        rows = block.context.rows
        assert rows is not None, "the cache begins a pass with them"
        alone = block.context.blocks == 1
        mine = block.rows = rows.of(self.policy.index, block.length, alone)
        return mine

    def _aligned(self, x: Tensor, block: PendingBlock) -> Tensor:
        """Rotate queries or keys [B, H or K, T, D] to the positions behind what their rows hold."""
        rotation, rows = self.positions.rotation, block.rows
        if rotation is None or rows.read_at is None:
            return x
        x = self._at_read_at(x, rows, rotation)
        (batch, heads, length), count = x.shape[:3], len(rows.before.lengths)
        if block.turn is None:  # of the block, how far behind each row
            block.turn = rows.read_at[:, None] - rows.before.lengths.view(batch, -1)  # [B, K]
        past = block.turn[..., None].expand(-1, -1, heads * batch // count)  # [B, K, G]
        return rotation.back(x, past.reshape(batch, heads, 1).expand(-1, -1, length))

    def _at_read_at(self, x: Tensor, rows: LayerRowPass, rotation: Rotation) -> Tensor:
        """Rotate queries or keys [B, H or K, T, D] to the positions that `rows.read_at` says."""
        past = rows.whole.past
        return rotation.back_by(x, rotation.rows((past,))) if past else x

    # Attend

    def attend(self, query: Tensor, block: PendingBlock, call: AttentionCall) -> Tensor:
        """Attend with an appended block, then evict. [B, H, T, D] -> [B, H, T, D]."""
        context, rows = block.context, block.rows
        query = self._aligned(query[:, :, : block.length], block)
        if self.query_window is not None:
            with context.run_async_if_last(query):
                self.query_window.append(query, rows.whole.count)
        context.make_room()  # for a copy of all keys
        keys, values, shown = self._held_keys(rows)
        if context.runs_attention_async:  # which reads what evictions leave as it is
            pool = ((keys, self.pool.keys), (values, self.pool.values))
            keys, values = (x.clone() if x is its else x for x, its in pool)
        with context.run_async_unless_last((query, keys, values)):
            out = attend_rows(query, keys, values, shown, call.logits)
        assert block.new_values is not None
        step = RowStep(
            block.place.total_tokens,
            block.length,
            rows,
            query,
            keys,
            values,
            shown,
            block.new_values,
            call,
            block.place.total_counter,
        )
        with context.run_async_if_last(step):
            self.evict(step)
        self._end(block)
        return out

    def _held_keys(
        self, rows: LayerRowPass, values: bool = True
    ) -> tuple[Tensor, Tensor, RowRanges]:
        """Return keys at their present positions and values, [slots, D], and where rows lie there.

        In the pool, or in a copy where other layers share it, then of values only if asked.
        """
        pool, positions = self.pool, self.positions
        # What is captured before any eviction serves after that, too.
        rotation = positions.rotation if rows.whole.always else positions.pending
        if rows.copies is None:
            keys = pool.keys
            if rotation is not None:
                keys = rotation.back(keys[None, None], pool.aux[SHIFT][None, None])[0, 0]
            return keys, pool.values, rows.shown
        turn: dict[str, Any] = {}
        if rotation is not None:
            turn = {
                "shift": pool.aux[SHIFT],
                "table": rotation.table,
                "interleaved": rotation.interleaved,
            }
        keys = row_kernels.copied(pool.keys, rows.shown, **turn)
        copy = row_kernels.copied(pool.values, rows.shown) if values else keys
        return keys, copy, rows.shown._replace(starts=rows.copies)

    # A single token

    def token(
        self,
        query: Tensor,
        angles: tuple[Tensor, Tensor],
        block: PendingBlock,
        call: AttentionCall,
    ) -> Tensor | None:
        """Append and attend to a token that is not rotated yet, by one kernel, then evict.

        None, with nothing changed, where the kernel does not cover it.
        """
        assert block.arrived is not None
        (key, value), context = block.arrived, block.context
        if not call.logits.linear or call.logits.sinks is not None:
            return None
        policy, buffers = self.policy, self.moving
        rotation, rows = self.positions.rotation, self._rows_of(block)
        turned = rotation is not None
        if not takes_token(query, key, value, buffers, rows.before, turned=turned):
            return None
        if context.stream is not None:
            context.stream.next_layer()
        for segment in self.segments:
            segment.held += 1
        turn = None if rotation is None else (self.pool.aux[SHIFT], rotation.table)
        out, query, sums = token.attend(
            query,
            key,
            value,
            angles,
            block.place.token_index,
            buffers,
            call.logits.scale,
            turn,
            summed=policy.rotates_keys_itself,
            rows=rows.before,
            read_at=rows.read_at if turned else None,
        )
        with context.run_async_if_last((query, value, rows, sums)):
            if self.query_window is not None:
                self.query_window.append(query)
            keys, values, shown, stored = self.pool.keys, self.pool.values, rows.after, None
            if policy.rotates_keys_itself:
                turn = turn and (turn[0].expand(*key.shape[:2], -1), turn[1])
                stored = StoredKeys(sums, turn)
            elif policy.reads_keys:
                keys, values, shown = self._held_keys(rows, policy.reads_values)
            self.evict(
                RowStep(
                    block.place.total_tokens,
                    1,
                    rows,
                    query,
                    keys,
                    values,
                    shown,
                    value,
                    call,
                    block.place.total_counter,
                    stored,
                )
            )
        self._end(block)
        return out

    # Evict

    def evict(self, step: RowStep) -> None:
        """Update the policy's state and evict what rows hold above their targets.

        Layers that share slots are only scored here, and evict after the pass, all together; see
        `evict_together`.
        """
        rows = step.rows
        if self.balance is not None and step.length > 1:
            self._await_other_layers(step, self.balance)
            return
        due = rows.whole.always or self.excess > 0
        if due or self.policy.has_state:
            obs = self._observe(step)
            for component in self.eviction.components:
                kernels.update_rows(component, obs, step.new_values, rows.before.lengths)
            if due:
                self._evict_lowest(obs, step)
        if not due:
            rows.held.copy_(rows.after.lengths)

    def _await_other_layers(self, step: RowStep, balance: LayerBalance) -> None:
        """Score a block and keep the scores until all layers evict."""
        obs = self._observe(step)
        scores = _weighed(self._score(obs, step.stored), obs, step.rows.whole)
        preference = kernels.preference(balance.budget, obs)
        waiting = LayerScores(scores, preference, step.length, obs.num_tokens)
        step.rows.whole.waiting.append(waiting)

    def _evict_lowest(self, obs: Observation, step: RowStep) -> None:
        """Evict the lowest slots that rows hold above their targets.

        Where heads share slots out anew, the device alone knows how many each has; the host reads
        it after the pass, see `RowTable.agreed`.
        """
        rows, scores = step.rows, self._score(obs, step.stored)
        pins = Pins(obs.num_tokens, obs.pinned_spans)
        division = None
        if self.policy.layout.divides(step.length):
            division = self._divide(scores, pins, obs, rows)
        rescorer = self.eviction.rescorer
        scores = kernels.rescore(rescorer, scores, pins, obs, rows.targets, rows.pins)
        scores = _weighed(scores, obs, rows.whole)
        shift = None if self.positions.rotation is None else self.pool.aux[SHIFT]
        newer = None if self.query_window is None else self.query_window.shift
        moved = row_kernels.Pool(self.moving, shift, rows.after, rows.pins, rows.targets)
        if step.length == 1 and self.excess <= 1 and division is None:
            row_kernels.evict_one(scores, pins, moved, rows.held, newer)
        else:
            starts = None if division is None else division.starts
            row_kernels.evict(scores, pins, moved, rows.held, newer, starts)
        for segment in self.segments:
            segment.held = min(segment.held, segment.target_length)
        if division is not None:
            rows.whole.table.divide(self.policy.index, division.starts, division.budgets)
        self.positions.note_moved()

    def _end(self, block: PendingBlock) -> None:
        """End the pass, after the last layer's last block."""
        last = self.policy.index == len(self.policy.layout.budgets) - 1
        if last and not block.context.is_waited_for:
            rows = block.rows.whole
            if rows.waiting:
                block.context.join()
                evict_together(rows)
            if block.context.token_counter is None:  # of a graph the host counts what is replayed
                rows.finish(block.place.total_tokens, block.length)

    def _policies_of_heads(self) -> list[tuple[Policy, Tensor]]:
        """Upload which heads have which policy [K], where they have budgets of their own."""
        budget, heads = self.eviction.head_budget, self.policy.layout.shape.kv_heads
        if budget is None:
            return []
        placed = [self.policy.placed(segment) for segment in self.segments[:heads]]
        mine = [budget.policy_of(head, self.eviction.policy) for head in placed]
        device = self.pool.keys.device
        return [
            (policy, torch.tensor([type(x) is type(policy) for x in mine], device=device))
            for policy in {type(policy): policy for policy in mine}.values()
        ]

    def _score(self, obs: Observation, stored: StoredKeys | None) -> Tensor:
        """Score all rows [B, K, longest], by policies of their own where heads have some."""
        if not self._each_head:
            return kernels.score_rows(self.eviction.policy, obs, stored)
        (first, _), *others = self._each_head
        scores = kernels.score_rows(first, obs)
        for policy, whose in others:
            scores = torch.where(whose[:, None], kernels.score_rows(policy, obs), scores)
        return scores

    def _divide(self, scores: Tensor, pins: Pins, obs: Observation, rows: LayerRowPass) -> Division:
        """Share the layer's slots out among its heads, if any is to evict some.

        On the device alone, which evicts down to `rows.targets` then.
        """
        layout, budget = self.policy.layout, self.eviction.head_budget
        assert budget is not None
        average = layout.budgets[self.policy.index]
        division = kernels.divide(
            budget,
            scores,
            obs.positions,
            pins,
            rows.after,
            rows.pins,
            rows.targets,
            average,
            layout.block_size,
        )
        rows.targets.copy_(division.kept)
        return division

    def _observe(self, step: RowStep) -> Observation:
        """Show the policy all rows, a block's tokens included."""
        policy, rows = self.policy, step.rows
        heads, batch = policy.layout.shape.kv_heads, len(step.query)
        queries, count = step.query, self.eviction.policy.queries_observed
        always = rows.whole.always
        if count is not None and count > 1 and self.query_window is not None:
            count = count if always else min(count, step.tokens)
            positions = self.positions
            rotation = positions.rotation if always else positions.window_rotation
            queries = self.query_window.last(None, count, rotation)
        elif count == 1:
            last = rows.whole.count  # fillers are behind the block's tokens
            queries = (
                queries[:, :, -1:] if last is None else queries.index_select(2, last[None] - 1)
            )
        return Observation(
            keys=step.keys[None, None].expand(batch, heads, -1, -1),
            values=step.values[None, None].expand(batch, heads, -1, -1),
            positions=row_kernels.padded(self.pool.positions, rows.after, batch, positions=True),
            num_tokens=step.tokens if step.token_counter is None else step.token_counter,
            budget=self.segments[0].target_length,
            new=step.length,
            queries=queries,
            state={name: self.pool.aux[name] for name in self.eviction.state},
            pinned_spans=tuple(policy.pinned_spans),
            rows=rows.after._replace(starts=step.shown.starts),
            output_projection=policy.projection(step.call) if policy.reads_projection else None,
            layer=policy.index,
            rule=step.call.logits,
            expansion=step.call.expansion,
            saliency=self.eviction.saliency,
        )


def _weighed(scores: Tensor, obs: Observation, rows: RowPass) -> Tensor:
    """Weigh regions and mark pinned spans by scores [B, K, longest]."""
    if rows.regions is not None:
        scores = row_kernels.weigh(scores, obs.positions, rows.regions)
    return Pins(obs.num_tokens, obs.pinned_spans).mark(scores, obs.positions)


def evict_together(rows: RowPass) -> None:
    """Evict the slots of all layers, which share a pool, and move slots between them in one go.

    By numbers of the device alone, after a block that all layers have read.
    """
    table, waiting, engines = rows.table, rows.waiting, rows.table.engines
    first, count = engines[0], table.count
    balance, pool = first.balance, first.pool
    assert balance is not None
    preferences = torch.stack([layer.preference for layer in waiting])  # [L]
    scores = torch.stack([layer.scores for layer in waiting])  # [L, B, K, longest]
    scores, block = scores.view(1, -1, scores.shape[-1]), first.policy.layout.block_size
    before, lengths = table.starts, rows.after(waiting[0].length)[:, 0]
    slots = (before[:, 1] - before[:, 0]).long()
    had = Shares(slots - block, table.targets[:, 0].long())
    seen = torch.as_tensor(waiting[-1].seen, device=slots.device)
    kept, shares = balance.after_block(table.preferences, preferences, lengths.long(), had, seen)

    def each(numbers: Tensor) -> Tensor:
        """Return each row's layer's number [L·B·K] int32, from one a layer [L]."""
        return numbers.int()[:, None].expand(-1, count).flatten()

    begin, ends = before[0, :1], each(shares.budgets + block).cumsum(0)
    starts = torch.cat((begin, begin + ends)).int()
    placed = RowRanges(before[:, :-1].flatten(), each(lengths), rows.most)
    shift = pool.aux.get(SHIFT)
    moved = row_kernels.Pool(first.moving, shift, placed, table.pins.flatten(0, 1), each(kept))
    left, spans = torch.empty_like(placed.lengths), tuple(first.policy.pinned_spans)
    pins = Pins(seen, spans)
    row_kernels.evict(scores, pins, moved, left, None, starts)
    for engine, gone in zip(engines, (lengths - kept).int().unbind(), strict=True):
        if engine.query_window is not None:
            engine.query_window.shift.add_(gone)
        engine.positions.note_moved()
    table.share_out(starts, left, shares.targets, preferences)
