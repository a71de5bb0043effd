"""Slots that a segment gives up by kernels: at once, or chosen first and moved later.

Kernels can where every slot that goes is the lowest of its head. Knows a segment and what was
observed of it, no cache and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvcap import kernels
from kvcap.kernels import evict
from kvcap.policies import Eviction, Observation
from kvcap.runtime.cache.pool import Segment


@dataclass
class Due:
    """What a segment is to give up.

    Args:
        segment: as it was observed.
        seen: of it.
        count: slots of each head.
        eviction: chooses them.
        shift: how far the segment's keys have moved, if they are moved.
        newer: likewise of tokens that are newer than all that go, if such are kept.
    """

    segment: Segment
    seen: Observation
    count: int
    eviction: Eviction
    shift: Tensor | None
    newer: Tensor | None
    _choice: evict.Choice | None = None

    @property
    def covered(self) -> bool:
        """Whether kernels can do it."""
        spans, buffers = self.seen.pinned_spans, self.segment.buffers()
        return evict.covers(self.seen.positions, self.count, spans, buffers)

    def scores(self) -> Tensor:
        """Worth of every slot [B, K, n], not made finite."""
        return self.eviction.score(self.seen, kernels.score, finite=False)

    def choose(self, scores: Tensor) -> None:
        """Say which go, more than one of each head; they stay until `settle`."""
        self._choice = evict.choose(
            scores, self.seen.positions, self.count, self._pins, self.shift, self.newer
        )

    def settle(self) -> None:
        """Give up what was chosen."""
        assert self._choice is not None, "choose first"
        evict.move(self._choice, self.seen.positions, self.segment.buffers())
        self.segment.held -= self.count

    def give_up(self) -> None:
        """Score, choose and settle."""
        evict.give_up(
            self.scores(), self.seen.positions, self.count, self._pins,
            self.shift, self.segment.buffers(), self.newer,
        )  # fmt: skip
        self.segment.held -= self.count

    @property
    def _pins(self) -> evict.Pins:
        seen = self.seen
        return evict.Pins(*self.eviction.pins_of(seen), seen.num_tokens, seen.pinned_spans)
