"""Computes attention of one capped layer over its slots, and starts the eviction that follows.

A key is stored rotated as the model made it, to the position behind what its head then held, with
the `shift` its position has moved down since; attention rotates a copy, or what it reads, so that
errors never add up. Of slots of fewer bits it reads a copy in any case, see `LayerStorage`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from kvcap.kernels import StoredKeys, quantised_token, token
from kvcap.kernels import rows as row_kernels
from kvcap.kernels.choice import ready
from kvcap.policies.base import Expansion, Rows
from kvcap.runtime.attention.functions import (
    PlacedRows,
    adds_masks,
    attend,
    attend_packed,
    attend_to_some,
    attend_weighing,
    attend_with_lse,
    packs,
    takes_quantised_token,
    takes_slots,
    takes_token,
)
from kvcap.runtime.attention.latents import absorbed, attend_absorbed, attend_expanded
from kvcap.runtime.cache.allocation import LayerStorage
from kvcap.runtime.cache.evictor import AttentionStep, Evictor
from kvcap.runtime.cache.pool import SHIFT
from kvcap.runtime.cache.row_table import LayerRows
from kvcap.runtime.cache.step import ForwardContext, PendingBlock


class AttentionCall(NamedTuple):
    """The arguments of an attention call besides queries, keys and values."""

    module: nn.Module
    scaling: float
    softcap: float | None
    sinks: Tensor | None = None  # [H], the sink logits of a model that has them
    expansion: Expansion | None = None  # of slots that hold latents


class _HeldKeys(NamedTuple):
    """A layer's keys at the positions where they count now, and its values."""

    segments: list[Tensor]  # [b, k, held, D] of every segment
    values: list[Tensor] | None  # [b, k, held, D] of every segment; None: see `_weighs`
    pool: Tensor  # keys [slots, D] of the whole pool, where attention is packed
    stored: StoredKeys | None = None  # what rotating them told of the first segment's


class _Shown(NamedTuple):
    """What a layer attended to, until other layers have, too."""

    keys: _HeldKeys
    packed: bool
    step: AttentionStep


class SlotAttention:
    """Computes one layer's attention over its slots, and starts the eviction that follows."""

    def __init__(self, storage: LayerStorage, evictor: Evictor) -> None:
        self.storage, self.segments, self.evictor = storage, storage.segments, evictor
        self.rows: PlacedRows | None = None  # where heads of unequal lengths lie, on the device
        self._offsets: tuple[tuple[int, ...], Tensor] | None = None  # the last, and their rotations

    @property
    def on_device(self) -> tuple[Any, ...]:
        """Small tensors on the device besides the buffers, which a CUDA graph must keep alive."""
        return self.rows, self._offsets

    def align(self, x: Tensor, offsets: tuple[int, ...]) -> Tensor:
        """Rotate queries or keys [B, H or K, T, D] to the positions behind what their heads hold.

        Args:
            x: as the model rotated them.
            offsets: how far past those slots they were read, as in `PendingBlock`.
        """
        rotation = self.storage.rotation
        if rotation is None or not any(offsets):
            return x
        if self._offsets is None or self._offsets[0] != offsets:
            self._offsets = offsets, rotation.rows(offsets)
        return rotation.back_by(x, self._offsets[1])

    def align_rows(self, x: Tensor, block: PendingBlock) -> Tensor:
        """`align` where kernels read how many slots unequal rows hold."""
        rotation, rows = self.storage.rotation, block.rows
        assert rows is not None
        if rotation is None or rows.read_at is None:
            return x
        (batch, heads, length), count = x.shape[:3], len(rows.before.lengths)
        if block.turn is None:  # of the block, how far behind each row
            block.turn = rows.read_at[:, None] - rows.before.lengths.view(batch, -1)  # [B, K]
        past = block.turn[..., None].expand(-1, -1, heads * batch // count)  # [B, K, G]
        return rotation.back(x, past.reshape(batch, heads, 1).expand(-1, -1, length))

    def _keys_of_rows(self, rows: LayerRows, values: bool) -> tuple[Tensor, Tensor, Rows]:
        """A layer's keys at today's positions, and its values if asked, [slots, D] both.

        And where its rows lie among these, with all that attention reads: in its pool, or in a copy
        where others share that.
        """
        pool, storage = self.segments[0].pool, self.storage
        # What is captured before any slot was given up serves after that, too.
        rotation = storage.rotation if rows.always else storage.pending_rotation
        if rows.copies is None:
            if rotation is None:
                return pool.keys, pool.values, rows.shown
            keys = rotation.back(pool.keys[None, None], pool.aux[SHIFT][None, None])[0, 0]
            return keys, pool.values, rows.shown
        turn: dict[str, Any] = {}
        if rotation is not None:
            turn = {"shift": pool.aux[SHIFT], "table": rotation.table,
                    "interleaved": rotation.interleaved}  # fmt: skip
        keys = row_kernels.copied(pool.keys, rows.shown, **turn)
        copy = row_kernels.copied(pool.values, rows.shown) if values else keys
        return keys, copy, rows.shown._replace(starts=rows.copies)

    def _rows(self, query: Tensor, block: PendingBlock, call: AttentionCall) -> Tensor:
        """`block` over unequal rows, by kernels that read where they lie."""
        context, evictor, rows, storage = block.context, self.evictor, block.rows, self.storage
        assert rows is not None
        query = self.align_rows(query[:, :, : block.length], block)
        if storage.query_window is not None:
            with context.run_async_if_last(query):
                count = None if context.rows is None else context.rows.count
                storage.query_window.append(query, count)
        context.make_room()  # for a copy of all keys
        keys, values, placed = self._keys_of_rows(rows, values=True)
        given = call.scaling, call.softcap, call.sinks
        out = attend_packed(query, keys, values, placed, *given)
        counter = context.token_counter_after(block.length)
        step = AttentionStep(
            block.total_tokens, block.length, [keys], [query], *call, counter, values=[values],
            rows=rows, new_values=block.new_values,
        )  # fmt: skip
        with context.run_async_if_last(step):
            evictor.evict_rows(step)
        return out

    def block(self, query: Tensor, block: PendingBlock, call: AttentionCall) -> Tensor:
        """Attention of an appended block, then eviction. [B, H, T, D] -> [B, H, T, D].

        Over slots that hold latents [B, H, T, r + nope] -> [B, H, T, v]: queries are taken to the
        latents, or the slots are expanded for them, whichever costs less.

        Where other layers read these slots, the block keeps what they are to attend to, and the
        last of them evicts; see `again`.
        """
        context, evictor = block.context, self.evictor
        if block.rows is not None:
            return self._rows(query, block, call)
        query = self.align(query[:, :, : block.length], block.offsets)
        own: Tensor | None = None  # queries of slots that are expanded
        if call.expansion is not None:
            own = query if self._expands(block.length) else None
            if own is None or evictor.reads_queries:
                query = absorbed(query, call.expansion)
        if self.storage.query_window is not None:
            with context.run_async_if_last(query):
                self.storage.query_window.append(query)
        counter = context.token_counter_after(block.length)
        if context.filling:
            assert counter is not None
            if self._tells_output(block.length, call):
                out = self._over_all_slots(query, counter, call)
                self._fill(query, block.new_values, block, call, out)
                return out
            self._fill(query, block.new_values, block, call)
            return self._over_all_slots(query, counter, call)
        packed = self._packs(query, call)
        context.make_room()  # for a copy of all keys
        if block.length == 1 and self.storage.pending_rotation is not None and self.storage.settles:
            self.storage.settle()
        keys = self._keys(packed, block.length)
        queries = [segment.rows_of(query) for segment in self.segments]
        total, length = block.total_tokens, block.length
        step = AttentionStep(
            total, length, keys.segments, queries, *call, counter, keys.stored, values=keys.values
        )
        has_work = evictor.has_work(block.length)
        told = has_work and not packed and self._tells_output(length, call)
        # A selection occupies few of a GPU's multiprocessors: attention hides it.
        early = has_work and context.is_waited_for and not told
        selected = evictor.select_early(step, context.run_urgently) if early else []
        asked = has_work and length > 1 and not selected and evictor.uses_lse
        out, lse = self._over(query if own is None else own, keys, packed, call, context, asked)
        if lse is not None or told:
            step = replace(step, lse=lse, attended=out if told else None)
        if block.readers:
            block.shown = _Shown(keys, packed, step)
        elif selected:
            context.rejoin()
            evictor.compact(selected)
        elif has_work:
            with context.run_async_if_last(step):
                evictor.evict_if_due(step)
        return out

    def _tells_output(self, length: int, call: AttentionCall) -> bool:
        """Whether the policy is told what attention gives a block of `length`.

        It is what the policy would work out, where slots are read as they are by equal heads.
        """
        storage = self.storage
        plain = storage.evicted_store is None and call.expansion is None
        plain = plain and len(self.segments) == 1 and not self.segments[0].pool.format.quantised
        return plain and length > 1 and self.evictor.reads_all_output

    def _fill(
        self,
        query: Tensor,
        values: Tensor | None,
        block: PendingBlock,
        call: AttentionCall,
        attended: Tensor | None = None,
    ) -> None:
        """Update the policy's state by the queries and values of a block that only fills slots.

        And by what attention gave it, if that is told.
        """
        context, used = block.context, block.context.token_counter
        counter, pool = context.token_counter_after(block.length), self.segments[0].pool
        assert used is not None
        step = AttentionStep(
            block.total_tokens, block.length, [pool.keys], [query], *call, counter,
            new_values=values, attended=attended,
        )  # fmt: skip
        with context.run_async_if_last(step):
            self.evictor.fill(step, used)

    def again(self, query: Tensor, block: PendingBlock, call: AttentionCall) -> Tensor:
        """Attention of another layer over what `block` attended to; after the last one, eviction.

        The policy sees the queries of the layer whose slots these are, and no others.

        Args:
            query: [B, H, T', D], of the last T' tokens of the block: Gemma 4 leaves out those whose
                logits nobody asked for.
            block: whose own layer has attended.
            call: of the other layer.
        """
        keys, packed, step = block.shown
        query = self.align(query, block.offsets)
        out, _ = self._over(query, keys, packed, call, block.context)
        if not block.readers and self.evictor.has_work(block.length):
            self.evictor.evict_if_due(step)
        return out

    def token(
        self,
        query: Tensor,
        angles: tuple[Tensor, Tensor],
        time: Tensor,
        block: PendingBlock,
        call: AttentionCall,
    ) -> Tensor | None:
        """`block` of a single token that is neither rotated nor appended yet, by one kernel.

        Returns None, with nothing changed, where neither `kernels/token.py` nor
        `kernels/quantised_token.py` covers it.
        """
        if block.rows is not None:
            return self._token_of_rows(query, angles, time, block, call)
        storage, evictor, (segment, *others) = self.storage, self.evictor, self.segments
        context, filling = block.context, block.context.filling
        assert block.arrived is not None
        key, value = block.arrived
        if others or storage.evicted_store is not None:
            return None
        if call.softcap is not None or call.sinks is not None or any(block.offsets):
            return None
        kernel = self._token_kernel(query, key, value, filling)
        if kernel is None:
            return None
        if context.stream is not None:
            context.stream.next_layer()
        segment.held += 1
        has_work = evictor.has_work(1) and not filling
        out, query, sums = kernel(
            query, key, value, angles, time, scaling=call.scaling,
            used=context.token_counter if filling else None,
            summed=has_work and evictor.uses_stored_keys,
        )  # fmt: skip
        if storage.query_window is not None:
            with context.run_async_if_last(query):
                storage.query_window.append(query)
        counter = context.token_counter_after(1)
        if filling:
            self._fill(query, value, block, call)
        if has_work:
            with context.run_async_if_last((query, sums)):
                keys, values, stored = self._keys_after_token(sums)
                total = block.total_tokens
                step = AttentionStep(
                    total, 1, [keys], [query], *call, counter, stored, values=values
                )
                evictor.evict_if_due(step)
        return out

    def _token_kernel(
        self, query: Tensor, key: Tensor, value: Tensor, filling: bool
    ) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]] | None:
        """The kernel that rotates, appends and attends to a token, and knows where its slot is.

        None: none covers it. Arguments as of `token`; while slots are `filling` the device knows
        how many are in use.
        """
        storage, (segment,) = self.storage, self.segments
        if segment.pool.format.quantised:
            slots = segment.named(0, segment.capacity if filling else segment.held + 1)
            table = None if storage.rotation is None else storage.rotation.table
            if table is not None and len(table) < slots["positions"].shape[2]:
                return None
            if not takes_quantised_token(query, key, value, slots):
                return None
            return partial(quantised_token.attend, slots=slots, mean=storage.mean, table=table)
        buffers, rotation = segment.append_views(whole=filling), storage.pending_rotation
        if not takes_token(query, key, value, buffers, turned=rotation is not None):
            return None
        turn = None if rotation is None else (segment.aux(SHIFT), rotation.table)
        return partial(token.attend, buffers=buffers, turn=turn)

    def _keys_after_token(
        self, sums: Tensor | None
    ) -> tuple[Tensor, list[Tensor] | None, StoredKeys]:
        """A layer's keys as the policy is to see them, its values likewise, and what is known.

        Args:
            sums: of the keys, if the kernel of a token left them.
        """
        storage, evictor, (segment,) = self.storage, self.evictor, self.segments
        rotation, keys = storage.pending_rotation, segment.keys
        if segment.pool.format.quantised:
            if evictor.rotates_keys_itself:
                return keys, [keys], StoredKeys(sums, None, storage.quantised_keys(segment))
            if evictor.reads_keys:
                keys = storage.read_keys(segment)
            # Who reads no values still asks for their shape.
            values = segment.read_values() if evictor.reads_values else keys
            return keys, [values], StoredKeys(sums, None)
        if rotation is None:
            return keys, None, StoredKeys(sums, None)
        if evictor.rotates_keys_itself:
            return keys, None, StoredKeys(sums, (segment.aux(SHIFT), rotation.table))
        if evictor.reads_keys:
            keys = rotation.back(keys, segment.aux(SHIFT))
        return keys, None, StoredKeys(sums, None)

    def _token_of_rows(
        self,
        query: Tensor,
        angles: tuple[Tensor, Tensor],
        time: Tensor,
        block: PendingBlock,
        call: AttentionCall,
    ) -> Tensor | None:
        """`token` over unequal rows."""
        storage, rows, context = self.storage, block.rows, block.context
        assert rows is not None
        assert block.arrived is not None
        (key, value), pool = block.arrived, self.segments[0].pool
        buffers = pool.buffers()
        if call.softcap is not None or call.sinks is not None:
            return None
        rotation, pending, evictor = storage.rotation, None, self.evictor
        if not takes_token(query, key, value, buffers, rows.before, turned=rotation is not None):
            return None
        if context.stream is not None:
            context.stream.next_layer()
        for segment in self.segments:
            segment.held += 1
        if rotation is not None:
            pending = pool.aux[SHIFT], rotation.table
        out, query, sums = token.attend(
            query, key, value, angles, time, buffers, call.scaling, pending,
            summed=evictor.rotates_rows_itself, rows=rows.before,
            read_at=None if rotation is None else rows.read_at,
        )  # fmt: skip
        with context.run_async_if_last((query, value, rows, sums)):
            if storage.query_window is not None:
                storage.query_window.append(query)
            keys, values, stored = pool.keys, pool.values, None
            if evictor.rotates_rows_itself:
                turned = pending and (pending[0].expand(*key.shape[:2], -1), pending[1])
                stored = StoredKeys(sums, turned)
            elif evictor.reads_keys:
                keys, values, _ = self._keys_of_rows(rows, evictor.reads_values)
            counter = context.token_counter_after(1)
            step = AttentionStep(
                block.total_tokens, 1, [keys], [query], *call, counter, stored, values=[values],
                rows=rows, new_values=value,
            )  # fmt: skip
            evictor.evict_rows(step)
        return out

    def _expands(self, tokens: int) -> bool:
        """Whether slots that hold latents are expanded for so many queries."""
        layout = self.evictor.layout
        latent, slots = layout.shape.latent, layout.budget_tokens + layout.block_size
        return latent is not None and latent.expands(tokens, slots)

    def _packs(self, query: Tensor, call: AttentionCall) -> bool:
        """Whether heads of unequal lengths are attended in one call."""
        if len(self.segments) == 1 or self.storage.evicted_store is not None:
            return False
        if call.expansion is not None:
            return False
        first = self.segments[0]
        if first.pool.format.quantised:
            return False
        keys, values, heads = first.pool.keys, first.pool.values, first.layer_heads
        return packs(query, keys, values, heads, call.softcap, call.sinks)

    def _weighs(self, length: int) -> bool:
        """Whether quantised values are read as they are weighed, and never copied."""
        pool = self.segments[0].pool
        return pool.format.quantised and length == 1 and not ready(pool.keys)

    def _keys(self, packed: bool, length: int) -> _HeldKeys:
        """All keys, rotated to where they count now; the whole pool's at once where `packed`."""
        segments, pool = self.segments, self.segments[0].pool
        rotation = self.storage.pending_rotation
        weighs = self._weighs(length)
        values = None if weighs else [segment.read_values() for segment in segments]
        if rotation is not None and packed:
            flat = rotation.back(pool.keys, pool.aux[SHIFT])
            return _HeldKeys([segment.view(flat) for segment in segments], values, flat)
        if length == 1 and (lent := self.storage.read_lent(segments[0])) is not None:
            told = StoredKeys(None, None) if self.evictor.uses_stored_keys else None
            return _HeldKeys([lent], values, pool.keys, told)
        if rotation is not None and self.evictor.uses_stored_keys and not pool.format.quantised:
            keys, sums = rotation.back_and_sums(segments[0].keys, segments[0].aux(SHIFT))
            return _HeldKeys([keys], values, pool.keys, StoredKeys(sums, None))
        found = [self.storage.read_keys(segment) for segment in segments]
        return _HeldKeys(found, values, pool.keys)

    def _over_all_slots(self, query: Tensor, used: Tensor, call: AttentionCall) -> Tensor:
        """Attention over the first `used` [] slots, a number on the device, of one segment."""
        (segment,) = self.segments
        pool, slots = segment.pool, segment.capacity
        if pool.format.quantised:
            keys, values = self.storage.read_keys(segment, slots), segment.read_values(slots)
        else:
            keys, values = segment.whole(pool.keys), segment.whole(pool.values)
        given = (call.scaling, call.softcap, call.sinks)
        out = attend_to_some(query.to(keys.dtype), keys, values, used, *given)
        return out.to(query.dtype)

    def _over_packed(self, query: Tensor, keys: Tensor, call: AttentionCall) -> Tensor:
        """Attention of heads of unequal lengths in one call, over the pool's `keys` [slots, D]."""
        held, last = tuple(s.held for s in self.segments), self.segments[-1]
        starts = (*(s.start for s in self.segments), last.start + last.slots)
        self.rows = PlacedRows.of(held, starts, query.device, self.rows)
        values, given = last.pool.values, (call.scaling, call.softcap, call.sinks)
        return attend_packed(query, keys, values, self.rows.told, *given)

    def _over(
        self,
        query: Tensor,
        keys: _HeldKeys,
        packed: bool,
        call: AttentionCall,
        context: ForwardContext,
        asked: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of aligned queries [B, H, T, D] over all slots in use.

        And, if it is `asked` for and a kernel tells it, the log-sum-exp of the logits [B, H, T].
        """
        if packed:
            return self._over_packed(query, keys.pool, call), None
        return self._over_segments(query, keys, call, context, asked)

    def _over_segments(
        self,
        query: Tensor,
        held: _HeldKeys,
        call: AttentionCall,
        context: ForwardContext,
        asked: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention segment by segment, with what evicted tokens add where they are kept."""
        store, out = self.storage.evicted_store, None
        asked = asked and len(self.segments) == 1 and call.sinks is None
        scaling, softcap = call.scaling, call.softcap
        keys, values = held.segments, held.values
        for i, segment in enumerate(self.segments):
            mine, sinks = segment.rows_of(query), segment.query_heads_of(call.sinks)
            lse: Tensor | None = None
            if call.expansion is not None:
                expands = self._expands(query.shape[2])
                over = attend_expanded if expands else attend_absorbed
                part = over(mine, keys[i], call.expansion, scaling, softcap)
            elif values is None:
                part = attend_weighing(
                    mine.to(keys[i].dtype), keys[i], segment.weigh_values, scaling, softcap, sinks
                ).to(query.dtype)
            elif store is None:
                mine = mine.to(keys[i].dtype)  # of slots of fewer bits it may be another
                given = mine, keys[i], values[i], scaling, softcap
                if asked and takes_slots(*given[:3]):
                    part, lse = attend_with_lse(*given, own=True)
                else:
                    mask = None
                    if adds_masks(mine, softcap, sinks):
                        mask = context.causal_bias(mine.shape[2], keys[i].shape[2], mine)
                    part = attend(*given, mask, sinks)
                part = part.to(query.dtype)
            else:
                part, lse = store.attend(i, segment, mine, keys[i], scaling, softcap, sinks)
            if len(self.segments) == 1:
                return part, lse if asked else None
            if out is None:
                out = query.new_empty(*query.shape[:3], part.shape[3])
            segment.rows_of(out).copy_(part)
        assert out is not None
        return out, None
