"""Attention of one capped layer over its slots, and what the policy then does with them.

A key is stored exactly as the model made it, with the `shift` its position has moved down since;
attention rotates a copy, or what it reads, so that errors never add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvcap.kernels import token
from kvcap.runtime.attention.functions import (
    Rows,
    attend,
    attend_packed,
    attend_to_some,
    attend_with_lse,
    causal,
    packs,
    takes_token,
)
from kvcap.runtime.cache.evictor import SHIFT, Evictor, Seen
from kvcap.runtime.cache.step import Pass
from kvcap.runtime.models.rope import Rotation


@dataclass
class Block:
    """The newest tokens of a layer."""

    length: int = 0
    seen: int = 0  # tokens read, these included
    offset: int = 0  # how far past the cache's positions they were rotated
    residual: list[int] = field(default_factory=list)  # and past each segment's own tokens


class Asked(NamedTuple):
    """What a model's attention module wants besides its queries."""

    module: nn.Module
    scaling: float
    softcap: float | None


class _Placed(NamedTuple):
    """A layer's tensors at the positions where they count."""

    queries: list[Tensor]  # of every segment
    keys: list[Tensor]  # likewise
    pool: Tensor  # keys of the whole pool
    sums: Tensor | None = None  # of the first segment's keys, as in `Observation`


class LayerAttention:
    """Of the layer whose slots `evictor` has."""

    def __init__(self, evictor: Evictor) -> None:
        self.evictor, self.segments = evictor, evictor.segments
        self.rows: Rows | None = None  # where they lie, on the device

    def block(self, query: Tensor, block: Block, asked: Asked, current: Pass) -> Tensor:
        """Attention of a block that was appended, then eviction. [B, H, T, D] -> [B, H, T, D]."""
        segments, evictor, ring = self.segments, self.evictor, self.evictor.ring
        query = query[:, :, : block.length]
        if block.offset:
            assert evictor.rotation is not None
            query = evictor.rotation.back_by(query, block.offset)
        if ring is not None:
            with current.beside(query):
                ring.append(query)
                for segment, residual in zip(segments, block.residual, strict=True):
                    if residual:
                        ring.moved(segment, residual, block.length)
        tokens = current.clock_after(block.length)
        if current.filling:
            assert tokens is not None
            (segment,) = segments
            keys, values = (segment.whole(x) for x in (segment.pool.keys, segment.pool.values))
            return attend_to_some(query, keys, values, tokens, asked.scaling, asked.softcap)
        packed = len(segments) > 1 and evictor.calibration is None
        if packed:
            pool = segments[0].pool
            packed = packs(query, pool.keys, pool.values, segments[0].layer_heads, asked.softcap)
        current.make_room()  # for a copy of all keys
        placed = self._at_positions(query, block, packed)
        seen, looks = self._seen(block, asked, placed, tokens), evictor.looks(block.length)
        # A choice occupies few of a GPU's multiprocessors: attention hides it.
        early = looks and current.is_waited_for
        decided = evictor.decide(seen, current.meanwhile) if early else []
        if packed:
            together = torch.cat(placed.queries, dim=1).view_as(query)
            held, last = tuple(s.held for s in segments), segments[-1]
            starts = (*(s.start for s in segments), last.start + last.slots)
            self.rows = Rows.of(held, starts, query.device, self.rows)
            values = last.pool.values
            out = attend_packed(
                together, placed.pool, values, self.rows, asked.scaling, asked.softcap
            )
        elif len(segments) == 1:
            out = self._attend(0, placed, asked)
        else:
            out = torch.empty_like(query)
            for i, segment in enumerate(segments):
                segment.rows_of(out).copy_(self._attend(i, placed, asked))
        if decided:
            current.rejoin()
            evictor.settle(decided)
        elif looks:
            with current.beside(seen):
                evictor.look(seen)
        return out

    def token(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        angles: tuple[Tensor, Tensor],
        time: Tensor,
        block: Block,
        asked: Asked,
        current: Pass,
    ) -> Tensor | None:
        """The same of one token [B, K, 1, D] that is yet to be rotated and appended.

        None, and nothing is done: `kernels/token.py` does not take it.
        """
        segment, evictor, filling = self.segments[0], self.evictor, current.filling
        buffers = segment.with_next(whole=filling)
        if len(self.segments) > 1 or evictor.calibration is not None or asked.softcap is not None:
            return None
        if block.offset or any(block.residual):
            return None
        if not takes_token(query, key, value, buffers):
            return None
        if current.side is not None:
            current.side.turn()
        segment.held += 1
        looks = evictor.looks(1) and not filling
        rotation = self._moved_by()
        turn = None if rotation is None else (segment.side(SHIFT), rotation.table)
        out, query, sums = token.attend(
            query, key, value, angles, time, buffers, asked.scaling, turn,
            used=current.clock if filling else None,
            early=current.side is not None,
            summed=looks and evictor.reads_sums,
        )  # fmt: skip
        if evictor.ring is not None:
            with current.beside(query):
                evictor.ring.append(query)
        tokens = current.clock_after(1)
        if looks:
            with current.beside((query, sums)):
                keys, turn = segment.keys, None
                if rotation is not None:
                    shift = segment.side(SHIFT)
                    if evictor.turns_keys:
                        turn = shift, rotation.table
                    elif evictor.reads_keys:
                        keys = rotation.back(keys, shift)
                placed = _Placed([query], [keys], segment.pool.keys, sums)
                evictor.look(self._seen(block, asked, placed, tokens, turn))
        return out

    def _seen(
        self,
        block: Block,
        asked: Asked,
        placed: _Placed,
        clock: Tensor | None,
        turn: tuple[Tensor, Tensor] | None = None,
    ) -> Seen:
        return Seen(
            block.seen, block.length, placed.keys, placed.queries, asked.scaling, asked.softcap,
            asked.module, clock, placed.sums, turn,
        )  # fmt: skip

    def _moved_by(self) -> Rotation | None:
        """What keys are rotated by, if any has moved."""
        return self.evictor.rotation if self.evictor.moved else None

    def _at_positions(self, query: Tensor, block: Block, packed: bool) -> _Placed:
        """Queries and keys of every segment, rotated to where they count now.

        The whole pool's at once where attention is `packed`.
        """
        segments, pool = self.segments, self.segments[0].pool
        queries = [segment.rows_of(query) for segment in segments]
        rotation = self._moved_by()
        if rotation is None:
            return _Placed(queries, [segment.keys for segment in segments], pool.keys)
        for i, residual in enumerate(block.residual):
            if residual:
                queries[i] = rotation.back_by(queries[i], residual)
        if packed:
            flat = rotation.back(pool.keys, pool.side[SHIFT])
            return _Placed(queries, [segment.view(flat) for segment in segments], flat)
        if self.evictor.reads_sums:
            keys, sums = rotation.back_and_sums(segments[0].keys, segments[0].side(SHIFT))
            return _Placed(queries, [keys], pool.keys, sums)
        turned = [rotation.back(segment.keys, segment.side(SHIFT)) for segment in segments]
        return _Placed(queries, turned, pool.keys)

    def _attend(self, index: int, placed: _Placed, asked: Asked) -> Tensor:
        """Attention of a segment's queries over what it holds, corrected where the policy does."""
        segment, calibration = self.segments[index], self.evictor.calibration
        query, keys, (_, scaling, softcap) = placed.queries[index], placed.keys[index], asked
        if calibration is None:
            return attend(query, keys, segment.values, scaling, softcap)
        mask = causal(query.shape[2], segment.held, query.device)
        out, lse = attend_with_lse(query, keys, segment.values, scaling, softcap, mask)
        rotation = self.evictor.rotation
        return calibration.correct(index, segment, query, out, lse, rotation, scaling, softcap)
