"""Holds one layer's slots of 8 or 4 bits, and reads a copy of them in plain PyTorch.

A copy is in float32 on a CPU, which computes with that, else in the model's type.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvcap.kernels.choice import ready
from kvcap.policies import Observation
from kvcap.runtime.attention.functions import attend_weighing
from kvcap.runtime.cache.pool import SHIFT, Segment
from kvcap.runtime.cache.slots.base import SlotEngine, ranks
from kvcap.runtime.cache.slots.eager import EagerSlots
from kvcap.runtime.cache.slots.policy import AttentionCall
from kvcap.runtime.cache.slots.step import AttentionStep
from kvcap.runtime.cache.step import ForwardContext, PendingBlock
from kvcap.runtime.models.rope import Rotation


class QuantisedKeys(SlotEngine):
    """A layer's slots that hold keys unrotated and without their mean; if never moved, rotated."""

    def quantisable(self, keys: Tensor, start: int, first: bool) -> Tensor:
        """Return a block's keys [B, K, T, D] as they are quantised, in float32.

        Args:
            keys: as the model rotated them, at the positions from `start` on.
            start: the position of the first token.
            first: whether the layer has read nothing before; their mean is kept then.
        """
        keys = keys.float()
        if self.positions.rotation is not None:
            keys = self.positions.rotation.unrotated(keys, start)
        if (mean := self.mean) is not None:
            if first:
                torch.mean(keys, dim=2, out=mean)
            keys = keys - mean[:, :, None]
        return keys

    def read_keys(self, segment: Segment) -> Tensor:
        """Return a copy of a segment's keys [b, k, held, D] at their present positions."""
        pool, slots, rotation = segment.pool, segment.held, self.positions.rotation
        whole = segment.held_views()
        parts = pool.format.parts("key", whole)
        mean = None if self.mean is None else segment.rows_of(self.mean)
        assert pool.format.keys is not None, "all formats of fewer bits quantise keys"
        copy, ranks = segment.empty(slots), whole[SHIFT].neg() if rotation else None
        for piece in segment.pieces(slots):
            out = copy[piece]
            keys = out if ranks is None else torch.empty_like(out)
            part = {name: x[piece] for name, x in parts.items()}
            pool.format.keys.dequantise(part, keys, None if mean is None else mean[piece[:2]])
            if rotation is not None and ranks is not None:
                rotation.on(keys, ranks[piece], out)
        return copy.to(pool.read_dtype)

    def _move(self, segment: Segment, rotation: Rotation) -> None:
        """Quantise keys anew, from true positions to unrotated ones without their mean."""
        whole, copy = segment.held_views(), self.read_keys(segment)
        numbers = segment.pool.format.keys
        assert numbers is not None, "all formats of fewer bits quantise keys"
        assert self.key_mean is not None, "and those that are unrotated have a mean"
        means = segment.rows_of(self.key_mean)
        for row in segment.each_row():
            positions = segment.positions[row]
            keys = rotation.moved(copy[row].float(), -positions)
            means[row].copy_(keys.mean(0))
            for part, x in numbers.quantise(keys - means[row]).items():
                whole[f"key_{part}" if part else "keys"][row].copy_(x)
            whole[SHIFT][row].copy_(-ranks(positions))

    def reset(self) -> None:
        """Forget all tokens and their mean; the buffers stay allocated."""
        super().reset()
        if self.key_mean is not None:
            self.key_mean.zero_()


class QuantisedSlots(QuantisedKeys, EagerSlots):
    """An engine that works on a layer's quantised slots, one segment after the other."""

    SHOWS_OUTPUT = False

    def append(self, block: PendingBlock, keys: Tensor, values: Tensor) -> None:
        """Quantise a block's keys and values [B, K, T, D] into the slots behind those in use."""
        place = block.place
        block.offsets = tuple([place.read_at - segment.held for segment in self.segments])
        keys = self.quantisable(keys, place.read_at, not place.seen)
        count = torch.arange(block.length, dtype=torch.int32, device=keys.device)
        for segment in self.segments:
            numbers = segment.pool.format.written(segment.rows_of(keys), segment.rows_of(values))
            ranks = count + segment.held
            segment.append(**numbers, positions=place.token_index, **{SHIFT: -ranks})

    def _held(self, length: int) -> tuple[list[Tensor], list[Tensor] | None]:
        keys = [self.read_keys(segment) for segment in self.segments]
        # Values are weighed where they lie by a CPU's single token, and never copied.
        weighs = length == 1 and not ready(self.segments[0].pool.keys)
        return keys, None if weighs else [read_values(segment) for segment in self.segments]

    def _over_segment(
        self,
        index: int,
        query: Tensor,
        keys: list[Tensor],
        values: list[Tensor] | None,
        call: AttentionCall,
        context: ForwardContext,
    ) -> Tensor:
        same = query.to(keys[index].dtype)
        if values is None:
            weigh = partial(weigh_values, self.segments[index])
            return attend_weighing(same, keys[index], weigh, call.logits).to(query.dtype)
        out = super()._over_segment(index, same, keys, values, call, context)
        return out.to(query.dtype)

    def _observe(self, index: int, segment: Segment, step: AttentionStep) -> Observation:
        if step.values is None:  # values that nobody reads are left empty
            values = read_values(segment) if self.policy.reads_values else segment.empty(0)
            step = replace(step, values=[values] * len(self.segments))
        return super()._observe(index, segment, step)


def read_values(segment: Segment) -> Tensor:
    """Return a copy of a segment's quantised values [b, k, held, D]."""
    pool, slots = segment.pool, segment.held
    parts = pool.format.parts("value", segment.held_views())
    out, numbers = segment.empty(slots), pool.format.values
    assert numbers is not None, "all formats of fewer bits quantise values"
    for piece in segment.pieces(slots):
        numbers.dequantise({name: x[piece] for name, x in parts.items()}, out[piece], None)
    return out.to(pool.read_dtype)


def weigh_values(segment: Segment, weights: Tensor) -> Tensor:
    """Sum a segment's quantised values by weights [b, k, r, held] to [b, k, r, D] float32.

    It goes piece by piece, so that there is never a copy of all values.
    """
    parts = segment.pool.format.parts("value", segment.held_views())
    out, numbers = weights.new_zeros(*weights.shape[:3], segment.pool.size), segment.pool.format
    assert numbers.values is not None, "all formats of fewer bits quantise values"
    for piece in segment.pieces(segment.held):
        b, k, n = piece
        part = {name: x[piece] for name, x in parts.items()}
        out[b, k] += numbers.values.weigh(part, weights[b, k, :, n])
    return out
