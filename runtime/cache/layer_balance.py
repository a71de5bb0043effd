"""Moves slots between layers while blocks arrive, inside one pool that never grows.

A layer that should shrink does so when it evicts next, and only then can another take its slots.
While an answer is written layers keep what they hold, if nearly all slots are in use.
"""

from __future__ import annotations

from kvcap.policies.base import LayerBudget, apportion
from kvcap.runtime.cache.pool import Segment, resize

EMPTY = 1 / 16  # of all slots, at most, where layers keep what they hold


class LayerBalance:
    """Collects how many slots layers should have, and moves slots between them.

    Args:
        budget: says what the layers should have by their preferences.
        average: slots per KV head and layer (`N`).
        layers: how many there are.
        pinned: slots that pins take in a head.
    """

    def __init__(self, budget: LayerBudget, average: int, layers: int, pinned: int) -> None:
        self.budget, self.average, self.pinned = budget, average, pinned
        self.preferences: list[float | None] = [None] * layers
        self.segments: list[Segment] = []  # of all layers, one each
        self.floor = 0  # slots that no layer goes below, where tokens of the text are pinned

    def prefer(self, index: int, preference: float, seen: int) -> None:
        """Note a layer's preference; from now on it evicts down to the slots it should have."""
        self.preferences[index] = preference
        if (wanted := self._wanted(seen)) is not None:
            segment = self.segments[index]
            segment.target_length = min(segment.budget, wanted[index])

    def rebalance(self, seen: int) -> None:
        """After a block of all layers, give those that want more what others no longer hold.

        Where little is empty, each is to have what it holds until the next block says what it
        wants: tokens that are generated tell nothing, and change the lengths of no layer then.
        """
        wanted = self._wanted(seen)
        if wanted is None:
            return
        # The rest lies in a block's slots. No layer has fewer slots than the floor before, either.
        held = [max(self.floor, min(s.held, s.budget)) for s in self.segments]
        shares = [max(0, w - h) for w, h in zip(wanted, held, strict=True)]
        more = apportion(shares, self.average * len(held) - sum(held))
        resize(self.segments, [h + extra for h, extra in zip(held, more, strict=True)])
        keeps = self.keeps
        for segment, slots in zip(self.segments, wanted, strict=True):
            segment.target_length = max(1, min(segment.budget, segment.held if keeps else slots))

    @property
    def settled(self) -> bool:
        """Whether every layer holds what it should, so that nothing is to be moved."""
        return self.keeps and all(s.held == s.target_length for s in self.segments)

    @property
    def keeps(self) -> bool:
        """Whether so few slots are empty that layers keep what they hold during an answer."""
        empty = sum(max(0, s.budget - s.held) for s in self.segments)
        return empty <= EMPTY * self.average * len(self.segments)

    def reset(self) -> None:
        """Forget what was preferred."""
        self.preferences, self.floor = [None] * len(self.preferences), 0

    def _wanted(self, seen: int) -> list[int] | None:
        """Slots of every layer by today's preferences, once all are known and there is need."""
        known = [p for p in self.preferences if p is not None]
        if len(known) < len(self.preferences) or seen <= self.average:
            return None  # while everything fits everywhere, nobody gives anything up
        most = [min(len(known) * self.average, seen)] * len(known)
        return self.budget.resplit(known, self.average, most, max(self.pinned, self.floor))
