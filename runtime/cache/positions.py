"""Counts where the tokens of one layer lie: at the positions they were read at, or at their ranks.

A layer has one of two objects, bound as it is allocated, and nobody asks afterwards which one.
`auto` positions exchange it once, when a block would leave the trained window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcap.kernels.choice import ready
from kvcap.runtime.cache.pool import PIECE, SHIFT, Segment
from kvcap.runtime.models.rope import Rotation


@dataclass
class RotatedKeys:
    """A copy of a layer's keys, rotated to their present positions, for as long as it answers.

    Without it every token rotates all keys anew, though none of them moves between evictions.
    """

    keys: Tensor  # [B, K, slots, D]
    count: int = 0  # slots, from the first on, whose copies are up to date


class TruePositions:
    """Positions at which tokens were read, which evictions leave as they are.

    Args:
        copy: memory for rotated keys that the layer has while its session answers.
    """

    def __init__(self, copy: RotatedKeys | None = None) -> None:
        self.copy = copy
        """Keeps a copy of rotated keys between evictions; None: every token makes a copy."""
        self.on_device: tuple[tuple[int, ...], Tensor] | None = None
        """Holds the last offsets and their rotations, which a CUDA graph must keep alive."""

    rotation: Rotation | None = None
    """Moves keys to other positions; None: they stay where they were read."""
    pending: Rotation | None = None
    """Holds the rotation to apply to keys as they are read; None: they need none."""
    moved = False
    """Says that a slot was evicted, so that tokens have other positions than they were read at."""

    @property
    def window_rotation(self) -> Rotation | None:
        """Return the rotation to apply to queries of the window; None: they need none.

        They stay stored as they were read.
        """
        return self.rotation if self.moved else None

    def aligned(self, x: Tensor, offsets: tuple[int, ...]) -> Tensor:
        """Return queries or keys [B, H or K, T, D] at the positions behind what their heads hold.

        Args:
            x: as the model rotated them.
            offsets: how far past those slots they were read.
        """
        return x

    def keys(self, segments: Sequence[Segment], queries: int = 0) -> list[Tensor]:
        """Return the keys [b, k, held, D] of segments at their present positions: views or copies.

        So many `queries` attend to them.
        """
        return [segment.keys for segment in segments]

    def move_down(self, segment: Segment, evicted: Tensor) -> None:
        """Move a segment's tokens down by the number of older ones among those evicted.

        `evicted` are slots [b, k, e] that are about to go.
        """

    def note_moved(self, moved: bool = True) -> None:
        """Have keys rotated whenever they are read, by 0 as long as no token has moved."""


class CompactPositions(TruePositions):
    """Positions by rank: the tokens that a head holds count from 0 on, in the order of the text.

    Args:
        rotation: moves keys and queries.
        copy: as in `TruePositions`.
    """

    def __init__(self, rotation: Rotation, copy: RotatedKeys | None = None) -> None:
        super().__init__(copy)
        self.rotation: Rotation = rotation
        by_kernel = ready(rotation.table)
        self._back = rotation.back if by_kernel else rotation.back_plainly  # of one device

    def aligned(self, x: Tensor, offsets: tuple[int, ...]) -> Tensor:
        """Return queries or keys [B, H or K, T, D] rotated back by their offsets."""
        if not any(offsets):
            return x
        if self.on_device is None or self.on_device[0] != offsets:
            self.on_device = offsets, self.rotation.rows(offsets)
        return self.rotation.back_by(x, self.on_device[1])

    def keys(self, segments: Sequence[Segment], queries: int = 0) -> list[Tensor]:
        """Return the keys [b, k, held, D] of segments at their present positions: views or copies.

        For a single token that attends to them they are kept rotated until the next eviction, where
        they can: on a CPU in their slots in float32, else in a session's copy.
        """
        if self.pending is not None and queries == 1:
            if self.can_rotate_in_place(segments):
                self.rotate_in_place(segments[0])
            elif self.copy is not None and segments[0].held <= self.copy.keys.shape[2]:
                return [self._from_copy(segments[0], self.copy)]
        held = [segment.held_views() for segment in segments]
        if self.pending is None:
            return [views["keys"] for views in held]
        return [self._back(views["keys"], views[SHIFT]) for views in held]

    def _from_copy(self, segment: Segment, copy: RotatedKeys) -> Tensor:
        """Bring the copy of rotated keys up to date, and return its part in use."""
        held = segment.held
        if not copy.count:
            copy.keys[:, :, :held] = self._back(segment.keys, segment.aux(SHIFT))
        elif copy.count < held:  # newer tokens have not moved yet
            copy.keys[:, :, copy.count : held] = segment.keys[:, :, copy.count :]
        copy.count = held
        return copy.keys[:, :, :held]

    def can_rotate_in_place(self, segments: Sequence[Segment]) -> bool:
        """Return whether `rotate_in_place` may run before a token is attended to.

        Not in a dry run: its tensors have no data, so that what moved is unknown. It then counts
        the memory of a copy, which is more.
        """
        keys = segments[0].pool.keys
        one = len(segments) == 1 and keys.dtype == torch.float32
        return one and type(keys) is Tensor and keys.device.type == "cpu" and not ready(keys)

    def rotate_in_place(self, segment: Segment) -> None:
        """Rotate all keys that moved to their present positions, in their slots.

        Keys that did not move are not read. Each rotation rounds a key once more, which is why only
        float32 is rotated so: its rounding is lost in that of attention. A key moves down by its
        rank at most, however many tokens are read.
        """
        mine = slice(segment.start, segment.start + segment.slots)
        keys, shift = segment.pool.keys[mine], segment.pool.aux[SHIFT][mine]
        for moved in shift.nonzero()[:, 0].split(max(32, PIECE // (8 * keys.shape[1]))):
            back = self._back(keys.index_select(0, moved), shift.index_select(0, moved))
            keys.index_copy_(0, moved, back)
        shift.zero_()
        self.pending = None

    def move_down(self, segment: Segment, evicted: Tensor) -> None:
        """Raise the shifts of a segment's slots by the number of older ones among those evicted.

        From then on keys are rotated whenever they are read.
        """
        self.note_moved()
        views = segment.held_views()
        positions, shift = views["positions"], views[SHIFT]
        gone = positions.gather(-1, evicted)
        if evicted.shape[-1] == 1:
            older = positions > gone
        else:
            gone = gone.sort(dim=-1).values
            older = torch.searchsorted(gone, positions.contiguous(), out_int32=True)
        shift.add_(older)

    def note_moved(self, moved: bool = True) -> None:
        """Have keys rotated whenever they are read, by 0 as long as no token has moved."""
        self.moved, self.pending = moved, self.rotation if moved else None
        if self.copy is not None:
            self.copy.count = 0
