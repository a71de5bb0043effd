"""Keeps copies of the slots behind system prompts, from which conversations begin.

A copy is found only by the owner of the conversation that it was made of, so that no key can learn
from an answer, its figures or its time what another's system prompt says. Used by the scheduler's
thread alone, but for the figures.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvcap.runtime.session.engine import CacheCopy


class SharedPrompts:
    """A store of copies of caches that drops the least recently used first.

    Args:
        most: copies that are kept.
        has_room: returns whether memory for another one is left.
    """

    def __init__(self, most: int, has_room: Callable[[], bool] = lambda: True) -> None:
        self.most, self._has_room = most, has_room
        self._copies = OrderedDict[tuple[str, bytes], CacheCopy]()
        self.nbytes = 0
        """Holds the bytes of all copies."""

    def __len__(self) -> int:
        return len(self._copies)

    def of(self, owner: str) -> OwnPrompts:
        """Return the part of the store that belongs to an owner: the `Prefixes` of a session."""
        return OwnPrompts(self, owner)

    def find(self, key: tuple[str, bytes]) -> CacheCopy | None:
        """Return a copy, which is the last to go from now on."""
        if key in self._copies:
            self._copies.move_to_end(key)
        return self._copies.get(key)

    def keep(self, key: tuple[str, bytes], copied: Callable[[], CacheCopy]) -> None:
        """Keep the copy that `copied` makes, where there is a place and memory for it."""
        if self.find(key) is not None:  # of another conversation that began meanwhile
            return
        while self._copies and len(self._copies) >= self.most:
            self._forget_oldest()
        while self._copies and not self._has_room():
            self._forget_oldest()
        if self.most and self._has_room():
            self._copies[key] = copy = copied()
            self.nbytes += copy.nbytes

    def _forget_oldest(self) -> None:
        self.nbytes -= self._copies.popitem(last=False)[1].nbytes


class OwnPrompts:
    """A part of a store that has the copies of one owner."""

    def __init__(self, store: SharedPrompts, owner: str) -> None:
        self._store, self._owner = store, owner

    def find(self, key: bytes) -> CacheCopy | None:
        """Return the owner's copy of that key."""
        return self._store.find((self._owner, key))

    def keep(self, key: bytes, copied: Callable[[], CacheCopy]) -> None:
        """Keep a copy for the owner alone."""
        self._store.keep((self._owner, key), copied)
