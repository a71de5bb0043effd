"""Holds everything that one capped layer has allocated, and reads its keys where they count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcap.kernels.choice import ready
from kvcap.runtime.cache.evicted_store import EvictedStore
from kvcap.runtime.cache.pool import PIECE, SHIFT, Segment
from kvcap.runtime.cache.query_window import QueryWindow
from kvcap.runtime.models.rope import Rotation


@dataclass
class RotatedKeys:
    """A copy of a layer's keys, rotated to their present positions, for as long as it answers.

    Without it every token rotates all keys anew, though none of them moves between evictions.
    """

    keys: Tensor  # [B, K, slots, D]
    count: int = 0  # slots, from the first on, whose copies are up to date


@dataclass
class LayerStorage:
    """A record of everything that one capped layer has allocated."""

    segments: list[Segment]
    """Holds its slots: one segment, or one for every head where heads hold unequally many."""
    query_window: QueryWindow | None
    """Holds its last queries, if the policy observes more than a block may hold."""
    evicted_store: EvictedStore | None
    """Holds its evicted tokens, if a corrector keeps them."""
    rotation: Rotation | None
    """Moves its keys to other positions; None: they stay where they were read."""
    rotation_later: Rotation | None = None
    """Holds the rotation to use once 'auto' positions become compact; None: they do not."""
    key_mean: Tensor | None = None
    """Holds the vectors [B, K, D] float32 that are subtracted from keys before quantisation.

    They are the mean of its first block, or of the keys held when positions became compact; see
    `mean`."""
    needs_rotation: bool = False
    """Says that a slot was evicted, so that tokens have other positions than they were read at."""
    rotated_in_place: bool = False
    """Says that all keys are rotated to their present positions; see `rotate_in_place`."""
    rotated_keys: RotatedKeys | None = None
    """Keeps a copy of rotated keys between evictions; None: every token makes a copy."""

    @property
    def excess(self) -> int:
        """Return by how many slots the fullest head exceeds the number that an eviction leaves."""
        return max(0, max(segment.held - segment.target_length for segment in self.segments))

    @property
    def free(self) -> int:
        """Return the free slots that every head has for the next block."""
        return min(segment.capacity - segment.held for segment in self.segments)

    @property
    def pending_rotation(self) -> Rotation | None:
        """Return the rotation to apply to keys as they are read; None: they need none."""
        return self.rotation if self.needs_rotation and not self.rotated_in_place else None

    @property
    def window_rotation(self) -> Rotation | None:
        """Return the rotation to apply to queries of the window; None: they need none.

        They stay stored as they were read.
        """
        return self.rotation if self.needs_rotation else None

    @property
    def mean(self) -> Tensor | None:
        """Return the mean that quantised keys are held without; None while they are rotated."""
        rotated = self.rotation_later is not None and self.rotation is None
        return None if rotated else self.key_mean

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, start: int, first: bool
    ) -> None:
        """Write a block into quantised slots, behind those in use.

        Keys are held unrotated and without their mean; where they are never moved, rotated.

        Args:
            keys: [B, K, T, D] as the model rotated them, at the positions from `start` on.
            values: [B, K, T, D].
            positions: [T] int32, the tokens' places in the conversation.
            start: the position of the first token.
            first: whether the layer has read nothing before; their mean is kept then.
        """
        keys = self._quantisable(keys, start, first)
        for segment in self.segments:
            segment.append(segment.rows_of(keys), segment.rows_of(values), positions)

    def _quantisable(self, keys: Tensor, start: int, first: bool) -> Tensor:
        """Return keys [B, K, T, D] as they are quantised, in float32; see `append`."""
        keys = keys.float()
        if self.rotation is not None:
            keys = self.rotation.unrotated(keys, start)
        if (mean := self.mean) is not None:
            if first:
                torch.mean(keys, dim=2, out=mean)
            keys = keys - mean[:, :, None]
        return keys

    def read_keys(self, segment: Segment) -> Tensor:
        """Return a segment's keys [b, k, held, D] at their present positions: a view or a copy."""
        rotation, pool, slots = self.pending_rotation, segment.pool, segment.held
        if not pool.format.quantised:
            return (
                segment.keys
                if rotation is None
                else rotation.back(segment.keys, segment.aux(SHIFT))
            )
        whole = segment.named(0, slots)
        parts, rotation = pool.format.parts("key", whole), self.rotation
        mean = None if self.mean is None else segment.rows_of(self.mean)
        assert pool.format.keys is not None, "all formats of fewer bits quantise keys"
        found, ranks = segment.empty(slots), whole[SHIFT].neg() if rotation else None
        for piece in segment.pieces(slots):
            out = found[piece]
            keys = out if ranks is None else torch.empty_like(out)
            those = {name: x[piece] for name, x in parts.items()}
            pool.format.keys.dequantise(those, keys, None if mean is None else mean[piece[:2]])
            if rotation is not None and ranks is not None:
                rotation.on(keys, ranks[piece], out)
        return found.to(pool.read_dtype)

    def read_rotated(self, segment: Segment) -> Tensor | None:
        """Return a segment's keys [b, k, held, D] at their present positions from `rotated_keys`.

        It brings the copy up to date. None where there is no such memory, the keys do not fit into
        it, or none of them moved.
        """
        copy, rotation, held = self.rotated_keys, self.pending_rotation, segment.held
        if copy is None or rotation is None or held > copy.keys.shape[2]:
            return None
        if not copy.count:
            copy.keys[:, :, :held] = rotation.back(segment.keys, segment.aux(SHIFT))
        elif copy.count < held:  # newer tokens have not moved yet
            copy.keys[:, :, copy.count : held] = segment.keys[:, :, copy.count :]
        copy.count = held
        return copy.keys[:, :, :held]

    @property
    def can_rotate_in_place(self) -> bool:
        """Return whether `rotate_in_place` may run before a token is attended to.

        Not in a dry run: its tensors have no data, so that what moved is unknown. It then counts
        the memory of a copy, which is more.
        """
        keys = self.segments[0].pool.keys
        one = len(self.segments) == 1 and keys.dtype == torch.float32
        return one and type(keys) is Tensor and keys.device.type == "cpu" and not ready(keys)

    def rotate_in_place(self) -> None:
        """Rotate all keys that moved to their present positions, in their slots.

        Keys that did not move are not read. Each rotation rounds a key once more, which is why only
        float32 is rotated so: its rounding is lost in that of attention. A key moves down by its
        rank at most, however many tokens are read.
        """
        (segment,), rotation = self.segments, self.pending_rotation
        assert rotation is not None
        mine = slice(segment.start, segment.start + segment.slots)
        keys, shift = segment.pool.keys[mine], segment.pool.aux[SHIFT][mine]
        for moved in shift.nonzero()[:, 0].split(max(32, PIECE // (8 * keys.shape[1]))):
            back = rotation.back(keys.index_select(0, moved), shift.index_select(0, moved))
            keys.index_copy_(0, moved, back)
        shift.zero_()
        self.rotated_in_place = True

    def become_compact(self, seen: int) -> None:
        """Move all that is held from true positions to compact ones.

        Every key is rotated once, by the difference, to its rank in its head. That is done head by
        head, so that it takes less memory than a block does. Quantised keys are quantised anew.

        Args:
            seen: tokens read.
        """
        rotation = self.rotation_later
        if rotation is None:
            return
        for segment in self.segments:
            if segment.pool.format.quantised:
                self._unrotate(segment, rotation)
            else:
                for row in segment.each_row():
                    keys, positions = segment.keys[row], segment.positions[row]
                    keys.copy_(rotation.moved(keys, ranks(positions) - positions))
                segment.aux(SHIFT).zero_()
            if self.query_window is not None:
                self.query_window.become_compact(segment, seen - segment.held, rotation)
        if self.evicted_store is not None:
            self.evicted_store.become_compact(self.segments, rotation)
        self.rotation, self.needs_rotation = rotation, False

    def _unrotate(self, segment: Segment, rotation: Rotation) -> None:
        """Quantise keys anew, from true positions to unrotated ones without their mean."""
        whole, found = segment.named(0, segment.held), self.read_keys(segment)
        numbers = segment.pool.format.keys
        assert numbers is not None, "all formats of fewer bits quantise keys"
        assert self.key_mean is not None, "and those that are unrotated have a mean"
        means = segment.rows_of(self.key_mean)
        for row in segment.each_row():
            positions = segment.positions[row]
            keys = rotation.moved(found[row].float(), -positions)
            means[row].copy_(keys.mean(0))
            for part, x in numbers.quantise(keys - means[row]).items():
                whole[f"key_{part}" if part else "keys"][row].copy_(x)
            whole[SHIFT][row].copy_(-ranks(positions))

    def enable_rotation(self) -> None:
        """Have keys rotated whenever they are read, by 0 as long as no token has moved."""
        self.needs_rotation, self.rotated_in_place = self.rotation is not None, False
        if self.rotated_keys is not None:
            self.rotated_keys.count = 0

    def reset(self) -> None:
        """Forget all tokens; the buffers stay allocated.

        All that a session's file saves besides slots is as in a new cache then.
        """
        for segment in self.segments:
            segment.held = 0
        if self.query_window is not None:
            self.query_window.reset()
        if self.key_mean is not None:
            self.key_mean.zero_()
        if self.evicted_store is not None:
            self.evicted_store.reset()
        self.needs_rotation = self.rotated_in_place = False
        if self.rotated_keys is not None:
            self.rotated_keys.count = 0
        if self.rotation_later is not None:
            self.rotation = None
            if self.evicted_store is not None:
                self.evicted_store.rotation = None


def ranks(positions: Tensor) -> Tensor:
    """Return how many held tokens of a head are older than each, by places in the text [n]."""
    return positions.argsort().argsort().to(torch.int32)
