"""Holds one layer's slots in buffers that never move: appends blocks, and fills holes in place.

Slots lie in any order; `positions` says which token each holds. Nothing else is moved or copied.
With compact positions a survivor counts one position less for every older token that goes: its key
is turned back in place, by the model's frequencies. Knows arrays, no graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.arrays import in_spans
from kvcap.runtime.backends.onnxruntime.graph import Array
from kvcap.runtime.types import Span

if TYPE_CHECKING:  # a phone's runner has no cache of kvcap's
    from kvcap.runtime.cache.regions import Regions

Int32 = NDArray[np.int32]
FAR = 1 << 32  # beyond every position
LAST = np.int32(2**31 - 1)
LEAST, MOST = -128, 127  # numbers in 8 bits


class Turns:
    """A table of rotations that turns keys and queries back, by pairs of numbers.

    Args:
        inv_freq: of the model, one for each pair.
        span: shifts that there can be, from 0 on.
        interleaved: a pair are neighbours (2i, 2i + 1); else (i, i + R/2).
    """

    def __init__(self, inv_freq: Sequence[float], span: int, interleaved: bool) -> None:
        self.table, self.interleaved = rotations(inv_freq, span), interleaved

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of the table."""
        return self.table.nbytes

    def back(self, x: Array, shift: Array) -> None:
        """Turn `x` [..., D] float32 back in place by `shift` [...], which broadcasts.

        Where the shift is 0 nothing changes, to the bit.
        """
        pairs = self.table.shape[2]
        if self.interleaved:
            a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        else:
            a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
        cos, sin = self.table[shift, 0], self.table[shift, 1]
        turned = a * cos
        turned += b * sin
        b *= cos
        b -= a * sin
        a[...] = turned


def rotations(inv_freq: Sequence[float], span: int) -> NDArray[np.float32]:
    """Return the cosines and sines of all positions below `span`, [span, 2, R/2], from float64."""
    angles = np.arange(span, dtype=np.float64)[:, None] * np.array(inv_freq, np.float64)
    return np.stack((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)


def _oldest(positions: Array, inside: Array, count: int) -> Array:
    """Return the slots [K, count] of the oldest tokens of each head that are `inside`."""
    order: Array = np.argsort(np.where(inside, positions, LAST), axis=1, kind="stable")
    return order[:, :count]


class LayerSlots:
    """A layer's slots, which take in blocks and give up what is evicted.

    Args:
        buffers: `keys` and `values` [1, K, slots, D], `positions` [1, K, slots] and what a policy
            keeps of every slot; `queries` [1, H, w, D], the last ones, for policies with a window.
            Where keys are float16 or int8, `arrived` [1, K, slots, D] and `shifts` [1, K, slots]:
            each key as it was written, and how far it is turned back since. It is turned from there
            every time, so that no rounding adds up.
        budget: slots of a head that stay.
        turns: of its keys, where they count by their rank.
        scales: of keys and values in int8, [2, K, 1, D]; None: they are floats.
    """

    def __init__(
        self,
        buffers: Mapping[str, Array],
        budget: int,
        turns: Turns | None,
        scales: Array | None = None,
    ) -> None:
        self.buffers, self.budget, self.turns, self.held = buffers, budget, turns, 0
        self.scales = scales
        self.moving = [x[0] for name, x in buffers.items() if name != "queries"]  # with their slot
        own = {"keys", "values", "positions", "queries", "arrived", "shifts"}
        self.state = [name for name in buffers if name not in own]

    @property
    def capacity(self) -> int:
        """Return the slots of a head."""
        return int(self.buffers["positions"].shape[2])

    def views(self, held: int, seen: int) -> dict[str, Array]:
        """Return views of all buffers by name, with `held` slots in use after `seen` tokens."""
        by_name = {name: x[:, :, :held] for name, x in self.buffers.items()}
        if (window := self.buffers.get("queries")) is not None:
            by_name["queries"] = last_in(window, min(seen, window.shape[2]))
        return by_name

    def positions(self, seen: int) -> Int32:
        """Return the positions of the kept tokens, [K, held], ascending."""
        return np.sort(self.buffers["positions"][0, :, : self.held], axis=1)

    def append(self, seen: int, length: int, made: Mapping[str, Array]) -> None:
        """Take in a block after `seen` tokens, whose keys and values lie behind the slots in use.

        Args:
            seen: tokens before it.
            length: its tokens.
            made: state that they have from the start [1, K, T], 0 where none is given; `queries`
                [1, H, T, D], the block's.
        """
        start, stop = self.held, self.held + length
        self.buffers["positions"][:, :, start:stop] = np.arange(seen, seen + length)
        for name in self.state:
            self.buffers[name][:, :, start:stop] = made.get(name, 0)
        if "arrived" in self.buffers:
            self.buffers["arrived"][:, :, start:stop] = self.buffers["keys"][:, :, start:stop]
            self.buffers["shifts"][:, :, start:stop] = 0
        if "queries" in self.buffers:
            window, queries = self.buffers["queries"], made["queries"]
            new = min(window.shape[2], length)
            window[:, :, : window.shape[2] - new] = window[:, :, new:].copy()
            last_in(window, new)[...] = last_in(queries, new)
        self.held = stop

    def evict(self, gone: Array) -> None:
        """Evict the slots `gone` [K, count], each head's its own; `held` falls by as many.

        Survivors behind the new `held` move into the holes before it.
        """
        self._remove(gone)
        if self.turns is not None and "queries" in self.buffers:
            # They are newer than all that goes, or pinned with their tokens.
            self.turns.back(self.buffers["queries"], np.array(gone.shape[1]))

    def drop(self, inside: Array, count: int, seen: int) -> None:
        """Evict the `count` oldest slots of each head that are `inside` [K, held].

        Of `seen` tokens some that are older stay, and so do their queries where they are.
        """
        positions = self.buffers["positions"][0, :, : self.held]
        gone = _oldest(positions, inside, count)
        left = np.take_along_axis(positions, gone, axis=1)  # [K, count]
        self._remove(gone)
        if self.turns is not None and "queries" in self.buffers:
            queries = self.buffers["queries"]
            tokens = np.arange(seen - queries.shape[2], seen)
            older = (left[:, None] < tokens[:, None]).sum(axis=2)  # [K, w]
            self.turns.back(queries, older.repeat(queries.shape[1] // len(older), axis=0))

    def within(self, spans: Sequence[Span]) -> Array:
        """Return which slots in use hold a token of these spans. Bool [K, held]."""
        return in_spans(self.buffers["positions"][0, :, : self.held], spans)

    def _remove(self, gone: Array) -> None:
        """Evict slots as `evict` does; queries stay where they are."""
        kept = self.held - gone.shape[1]
        shift = None if self.turns is None else self._older(gone)
        # A head has as many holes before `kept` as survivors behind it: both are listed by heads.
        heads, at = np.nonzero(gone < kept)
        holes = gone[heads, at]
        stays = np.ones(gone.shape, bool)
        tail, at = np.nonzero(gone >= kept)
        stays[tail, gone[tail, at] - kept] = False
        sources = kept + np.nonzero(stays)[1]
        for x in (*self.moving, *([] if shift is None else [shift])):
            x[heads, holes] = x[heads, sources]
        self.held = kept
        if self.turns is None or shift is None:
            return
        if "arrived" in self.buffers:
            self._turn_again(shift[:, :kept])
        else:
            for key, by in zip(self.buffers["keys"][0], shift, strict=True):
                self.turns.back(key[:kept], by[:kept])

    def evict_early(self, regions: Regions, pins: Sequence[Span], most: int) -> None:
        """Evict up to `most` slots of regions that leave before other text, from each head.

        The oldest go first. `pins` are tokens that stay whatever region they are in.
        """
        for tier in (-2, -1):
            if not (spans := regions.early(tier)):
                continue
            inside = self.within(spans) & ~self.within(pins)  # [K, held]
            count = min(most, int(inside.sum(axis=1).min()))
            if count:
                positions = self.buffers["positions"][0, :, : self.held]
                self.evict(_oldest(positions, inside, count))
                most -= count

    def _turn_again(self, shift: Array) -> None:
        """Turn keys [K, kept] back by `shift` more, starting from how they were written."""
        assert self.turns is not None
        shifts, kept = self.buffers["shifts"][0], shift.shape[1]
        shifts[:, :kept] += shift
        scales = [None] * len(shifts) if self.scales is None else self.scales[0]
        heads = zip(
            self.buffers["keys"][0], self.buffers["arrived"][0], shifts, scales, strict=True
        )
        for key, arrived, by, scale in heads:
            turned = arrived[:kept].astype(np.float32)
            if scale is not None:
                turned *= scale
            self.turns.back(turned, by[:kept])
            if scale is not None:
                turned /= scale
                np.clip(np.rint(turned, out=turned), LEAST, MOST, out=turned)
            key[:kept] = turned

    def _older(self, gone: Array) -> Array:
        """Return how many evicted slots hold an older token than each slot in use. [K, held]."""
        positions = self.buffers["positions"][0, :, : self.held].astype(np.int64)
        positions += np.arange(len(gone))[:, None] * FAR  # one list, head by head
        left = np.sort(np.take_along_axis(positions, gone, axis=1), axis=1)
        counts = np.searchsorted(left.ravel(), positions.ravel()).reshape(positions.shape)
        older: Array = counts - np.arange(len(gone))[:, None] * gone.shape[1]
        return older


class WindowSlots:
    """A layer's last tokens, in the order in which they were read, as a sliding window sees them.

    Args:
        buffers: `keys` and `values` [1, K, slots, D].
        budget: tokens that stay: all that the window's next token can see.
        scales: of keys and values in int8, [2, K, 1, D]; None: they are floats.
    """

    def __init__(
        self, buffers: Mapping[str, Array], budget: int, scales: Array | None = None
    ) -> None:
        self.buffers, self.budget, self.scales, self.held = buffers, budget, scales, 0

    @property
    def capacity(self) -> int:
        """Return the slots of a head."""
        return int(self.buffers["keys"].shape[2])

    def views(self, held: int, seen: int) -> dict[str, Array]:
        """Return views of all buffers by name, with `held` slots in use after `seen` tokens."""
        return {name: x[:, :, :held] for name, x in self.buffers.items()}

    def append(self, seen: int, length: int, made: Mapping[str, Array]) -> None:
        """Take in a block, whose keys and values lie behind the slots in use."""
        self.held += length

    def slide(self, least: int) -> None:
        """Move the last tokens to the front, where at least so many older ones are to go."""
        start = self.held - self.budget
        if start < least:
            return
        for x in self.buffers.values():
            for head in x[0]:
                head[: self.budget] = head[start : self.held]
        self.held = self.budget

    def positions(self, seen: int) -> Int32:
        """Return the positions of the tokens after `seen` of them, [K, held], ascending."""
        row = np.arange(seen - self.held, seen, dtype=np.int32)
        return np.broadcast_to(row, (self.buffers["keys"].shape[1], self.held))


def last_in(x: Array, count: int) -> Array:
    """Return the last `count` of axis 2, as a view."""
    return x[:, :, x.shape[2] - count :]
