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
    """Everything that one capped layer has allocated."""

    segments: list[Segment]
    """Hold its slots: one segment, or one for every head where heads hold unequally many."""
    query_window: QueryWindow | None
    """Holds its last queries, if the policy observes more than a block may hold."""
    evicted_store: EvictedStore | None
    """Holds its evicted tokens, if a corrector keeps them."""
    rotation: Rotation | None
    """Moves its keys to other positions; None: they stay where they were read."""
    rotation_later: Rotation | None = None
    """Does so once positions that are true at first have become compact, if they will."""
    key_mean: Tensor | None = None
    """Is what its quantised keys are held without, [B, K, D] float32: the mean of its first block,
    or of those held when positions became compact; see `mean`."""
    needs_rotation: bool = False
    """Says that a slot was given up, so that tokens count elsewhere than they were read."""
    rotated_in_place: bool = False
    """Says that all keys are rotated to where they count nevertheless: see `rotate_in_place`."""
    rotated_keys: RotatedKeys | None = None
    """Keeps a copy of rotated keys between evictions; None: every token makes a copy."""

    @property
    def excess(self) -> int:
        """The most slots that a head holds above what stays."""
        return max(0, max(segment.held - segment.target_length for segment in self.segments))

    @property
    def free(self) -> int:
        """Slots that every head has for the next block."""
        return min(segment.capacity - segment.held for segment in self.segments)

    @property
    def pending_rotation(self) -> Rotation | None:
        """Rotates keys before they are used, if anything must yet."""
        return self.rotation if self.needs_rotation and not self.rotated_in_place else None

    @property
    def window_rotation(self) -> Rotation | None:
        """Rotates queries of the window, which stay as they were read, if anything must yet."""
        return self.rotation if self.needs_rotation else None

    @property
    def mean(self) -> Tensor | None:
        """Is what quantised keys are held without: nothing while they are rotated."""
        rotated = self.rotation_later is not None and self.rotation is None
        return None if rotated else self.key_mean

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, start: int, first: bool
    ) -> None:
        """Write a block into slots of fewer bits, behind those in use.

        Keys are held unrotated and without their mean; rotated where they are never moved.

        Args:
            keys: [B, K, T, D] as the model rotated them, at the positions from `start` on.
            values: [B, K, T, D].
            positions: [T] int32, what the tokens count as.
            start: the position of the first.
            first: whether they are the first that the layer reads, whose mean is kept.
        """
        keys = self._quantisable(keys, start, first)
        for segment in self.segments:
            segment.append(segment.rows_of(keys), segment.rows_of(values), positions)

    def _quantisable(self, keys: Tensor, start: int, first: bool) -> Tensor:
        """Return keys [B, K, T, D] as slots of fewer bits hold them, in float32; see `append`."""
        keys = keys.float()
        if self.rotation is not None:
            keys = self.rotation.unrotated(keys, start)
        if (mean := self.mean) is not None:
            if first:
                torch.mean(keys, dim=2, out=mean)
            keys = keys - mean[:, :, None]
        return keys

    def read_keys(self, segment: Segment) -> Tensor:
        """Return a segment's keys [b, k, held, D] where they count: a view if nothing is to do."""
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

        Brings the copy up to date. None where there is no such memory, the keys do not fit into it,
        or none of them moved.
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
        """Says whether `rotate_in_place` may take place before a token is attended to.

        Not in a dry run, whose tensors have no data to show what moved; a copy takes more memory.
        """
        keys = self.segments[0].pool.keys
        one = len(self.segments) == 1 and keys.dtype == torch.float32
        return one and type(keys) is Tensor and keys.device.type == "cpu" and not ready(keys)

    def rotate_in_place(self) -> None:
        """Rotate keys that moved where they lie to where they count, so that nobody else need.

        Those that did not move are not read. Each time rounds the others once more: for float32,
        whose rounding is lost in that of attention. A key moves down by its rank at most, however
        many tokens are read.
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
        """Move all that is held from true positions to compact ones, where it counts from now on.

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
        """Have quantised keys, which are held at true positions, held as at compact ones."""
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
        """Have keys rotated from now on, though by nothing before a slot was given up."""
        self.needs_rotation, self.rotated_in_place = self.rotation is not None, False
        if self.rotated_keys is not None:
            self.rotated_keys.count = 0

    def reset(self) -> None:
        """Forget everything; the buffers stay.

        All that a session's file holds, slots in use apart, is as in a new cache then.
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
