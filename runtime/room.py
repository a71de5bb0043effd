"""Where nothing may be evicted: what does not fit is refused before any of it is read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from kvcap.runtime.engine import OnFull
from kvcap.runtime.errors import MemoryCapExceeded

MOST = 1000  # times as many slots as are needed are looked at


class Room(NamedTuple):
    """Tokens of a cache, per KV head and layer."""

    held: int
    spare: int  # that fit before any head must evict
    budget: int  # slots, as the user gave them
    least: Callable[[int], int]  # those of the smallest head under such a budget

    @property
    def emptied(self) -> Room:
        """Of the same cache, once it is empty."""
        return self._replace(held=0, spare=self.least(self.budget))

    def check(self, tokens: int, answer: int, on_full: OnFull, never: str | None) -> None:
        """Refuse what does not fit.

        Args:
            tokens: to be read next.
            answer: to be written after them, at most; only for the advice.
            on_full: see `Session.on_full`.
            never: the policy's name, if it evicts nothing whatever `on_full` is.

        Raises:
            MemoryCapExceeded: naming a budget in which the answer ends by itself.
        """
        if tokens <= self.spare or (on_full == "evict" and never is None):
            return
        if never is not None:
            why, advice = f"policy {never!r} never evicts", "choose a policy that evicts"
        else:
            why = f"nothing may be evicted (on-full is {on_full!r})"
            advice = "set on-full to 'evict'"
        if enough := self._enough(self.held + tokens + answer):
            also = f", which holds an answer of {answer:,} tokens too," if answer else ""
            advice = f"raise the budget to {enough:,}{also} or {advice}"
        raise MemoryCapExceeded(
            f"{why}: {self.held:,} of {self.budget:,} slots are in use and {tokens:,} more "
            f"token{'s were' if tokens > 1 else ' was'} to be read; {advice}"
        )

    def _enough(self, needed: int) -> int | None:
        """A budget in which every head holds so many tokens, if there is one."""
        found = range(needed, needed * MOST)
        place = bisect_left(found, needed, key=self.least)
        return found[place] if place < len(found) else None  # some heads never get more
