"""Attention of one capped layer over its slots, and the eviction that follows it.

A key is stored rotated as the model made it, to the position behind what its head then held, with
the `shift` its position has moved down since; attention rotates a copy, or what it reads, so that
errors never add up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvcap.kernels import StoredKeys, token
from kvcap.runtime.attention.functions import (
    Rows,
    attend,
    attend_packed,
    attend_to_some,
    packs,
    takes_token,
)
from kvcap.runtime.cache.allocation import LayerStorage
from kvcap.runtime.cache.evictor import AttentionStep, Evictor
from kvcap.runtime.cache.pool import SHIFT
from kvcap.runtime.cache.step import PendingBlock


class Asked(NamedTuple):
    """What a model's attention module wants besides its queries."""

    module: nn.Module
    scaling: float
    softcap: float | None


class _HeldKeys(NamedTuple):
    """A layer's keys at the positions where they count now."""

    segments: list[Tensor]  # [b, k, held, D] of every segment
    pool: Tensor  # [slots, D] of the whole pool, where attention is packed
    stored: StoredKeys | None = None  # what rotating them told of the first segment's


class SlotAttention:
    """Attends over the slots of one layer, and has its evictor evict what is too much after."""

    def __init__(self, storage: LayerStorage, evictor: Evictor) -> None:
        self.storage, self.segments, self.evictor = storage, storage.segments, evictor
        self.rows: Rows | None = None  # where heads of unequal lengths lie, on the device
        self._offsets: tuple[tuple[int, ...], Tensor] | None = None  # the last, and their rotations

    @property
    def on_device(self) -> tuple[Any, ...]:
        """What was told the device beside the buffers, which a CUDA graph must keep alive."""
        return self.rows, self._offsets

    def align(self, x: Tensor, offsets: tuple[int, ...]) -> Tensor:
        """Move queries or keys [B, H or K, T, D] to the slots behind what their heads hold.

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

    def block(self, query: Tensor, block: PendingBlock, asked: Asked) -> Tensor:
        """Attention of an appended block, then eviction. [B, H, T, D] -> [B, H, T, D]."""
        context, evictor = block.context, self.evictor
        query = self.align(query[:, :, : block.length], block.offsets)
        if self.storage.ring is not None:
            with context.beside(query):
                self.storage.ring.append(query)
        clock = context.clock_after(block.length)
        if context.filling:
            assert clock is not None
            return self._over_all_slots(query, clock, asked)
        packed = self._packs(query, asked)
        context.make_room()  # for a copy of all keys
        keys = self._keys(packed)
        queries = [segment.rows_of(query) for segment in self.segments]
        step = AttentionStep(
            block.seen, block.length, keys.segments, queries, *asked, clock, keys.stored
        )
        has_work = evictor.looks(block.length)
        # A selection occupies few of a GPU's multiprocessors: attention hides it.
        early = has_work and context.is_waited_for
        selected = evictor.select_early(step, context.meanwhile) if early else []
        if packed:
            out = self._over_packed(query, keys.pool, asked)
        else:
            out = self._over_segments(query, queries, keys.segments, asked)
        if selected:
            context.rejoin()
            evictor.compact(selected)
        elif has_work:
            with context.beside(step):
                evictor.evict_if_due(step)
        return out

    def token(
        self,
        query: Tensor,
        angles: tuple[Tensor, Tensor],
        time: Tensor,
        block: PendingBlock,
        asked: Asked,
    ) -> Tensor | None:
        """The same of a block of one token that is yet to be rotated and appended.

        None, and nothing is done: `kernels/token.py` does not take it.
        """
        storage, evictor, (segment, *others) = self.storage, self.evictor, self.segments
        context, filling = block.context, block.context.filling
        assert block.arrived is not None
        key, value = block.arrived
        buffers = segment.with_next(whole=filling)
        if others or storage.evicted_store is not None or asked.softcap is not None:
            return None
        if any(block.offsets) or not takes_token(query, key, value, buffers):
            return None
        if context.side is not None:
            context.side.turn()
        segment.held += 1
        has_work = evictor.looks(1) and not filling
        rotation, pending = storage.pending_rotation, None
        if rotation is not None:
            pending = segment.side(SHIFT), rotation.table
        out, query, sums = token.attend(
            query, key, value, angles, time, buffers, asked.scaling, pending,
            used=context.clock if filling else None,
            early=context.side is not None,
            summed=has_work and evictor.uses_stored_keys,
        )  # fmt: skip
        if storage.ring is not None:
            with context.beside(query):
                storage.ring.append(query)
        clock = context.clock_after(1)
        if has_work:
            with context.beside((query, sums)):
                keys = segment.keys
                if evictor.rotates_keys_itself:
                    stored = StoredKeys(sums, pending)
                else:
                    stored = StoredKeys(sums, None)
                    if rotation is not None and evictor.reads_keys:
                        keys = rotation.back(keys, segment.side(SHIFT))
                step = AttentionStep(block.seen, 1, [keys], [query], *asked, clock, stored)
                evictor.evict_if_due(step)
        return out

    def _packs(self, query: Tensor, asked: Asked) -> bool:
        """Whether heads of unequal lengths are attended in one call."""
        if len(self.segments) == 1 or self.storage.evicted_store is not None:
            return False
        first = self.segments[0]
        return packs(query, first.pool.keys, first.pool.values, first.layer_heads, asked.softcap)

    def _keys(self, packed: bool) -> _HeldKeys:
        """All keys, rotated to where they count now; the whole pool's at once where `packed`."""
        segments, pool = self.segments, self.segments[0].pool
        rotation = self.storage.pending_rotation
        if rotation is None:
            return _HeldKeys([segment.keys for segment in segments], pool.keys)
        if packed:
            flat = rotation.back(pool.keys, pool.side[SHIFT])
            return _HeldKeys([segment.view(flat) for segment in segments], flat)
        if self.evictor.uses_stored_keys:
            keys, sums = rotation.back_and_sums(segments[0].keys, segments[0].side(SHIFT))
            return _HeldKeys([keys], pool.keys, StoredKeys(sums, None))
        rotated = [rotation.back(segment.keys, segment.side(SHIFT)) for segment in segments]
        return _HeldKeys(rotated, pool.keys)

    def _over_all_slots(self, query: Tensor, used: Tensor, asked: Asked) -> Tensor:
        """Attention over the first `used` [] slots, a number on the device, of one segment."""
        (segment,) = self.segments
        keys, values = (segment.whole(x) for x in (segment.pool.keys, segment.pool.values))
        return attend_to_some(query, keys, values, used, asked.scaling, asked.softcap)

    def _over_packed(self, query: Tensor, keys: Tensor, asked: Asked) -> Tensor:
        """Attention of heads of unequal lengths in one call, over the pool's `keys` [slots, D]."""
        held, last = tuple(s.held for s in self.segments), self.segments[-1]
        starts = (*(s.start for s in self.segments), last.start + last.slots)
        self.rows = Rows.of(held, starts, query.device, self.rows)
        values = last.pool.values
        return attend_packed(query, keys, values, self.rows, asked.scaling, asked.softcap)

    def _over_segments(
        self, query: Tensor, queries: list[Tensor], keys: list[Tensor], asked: Asked
    ) -> Tensor:
        """Attention segment by segment, with what evicted tokens add where they are kept."""
        store, out = self.storage.evicted_store, None
        for i, segment in enumerate(self.segments):
            if store is None:
                part = attend(queries[i], keys[i], segment.values, asked.scaling, asked.softcap)
            else:
                part = store.attend(i, segment, queries[i], keys[i], asked.scaling, asked.softcap)
            if len(self.segments) == 1:
                return part
            out = torch.empty_like(query) if out is None else out
            segment.rows_of(out).copy_(part)
        assert out is not None
        return out
