"""Where nothing may be evicted: what does not fit is refused before any of it is read."""

from __future__ import annotations

from typing import NamedTuple

from kvcap.runtime.engine import OnFull
from kvcap.runtime.errors import MemoryCapExceeded


class Room(NamedTuple):
    """Tokens of a cache, per KV head and layer."""

    held: int
    spare: int  # that fit before any head must evict
    least: int  # that the smallest head holds
    budget: int  # slots, as the user gave them

    @property
    def emptied(self) -> Room:
        """Of the same cache, once it is empty."""
        return self._replace(held=0, spare=self.least)

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
        # Where heads have unequal budgets, the smallest of them grows with the whole.
        needed = -(-(self.held + tokens + answer) * self.budget // self.least)
        if never is not None:
            why, advice = f"policy {never!r} never evicts", "choose a policy that evicts"
        else:
            why = f"nothing may be evicted (on-full is {on_full!r})"
            advice = "set on-full to 'evict'"
        also = f", which holds an answer of {answer:,} tokens too," if answer else ""
        raise MemoryCapExceeded(
            f"{why}: {self.held:,} of {self.budget:,} slots are in use and {tokens:,} more "
            f"token{'s were' if tokens > 1 else ' was'} to be read; raise the budget to "
            f"{needed:,}{also} or {advice}"
        )
