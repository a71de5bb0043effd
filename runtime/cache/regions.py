"""Says which parts of a conversation leave the cache before others, whatever a policy scores them.

One object of each cache, which its session changes and its layers read. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvcap.runtime.cache.pinned_slots import clipped, merged
from kvcap.runtime.types import Span

FAR = 1 << 30  # beyond every token
MOST = 16  # spans of a kind that are weighed, the newest; older ones count like any text


class Weight(NamedTuple):
    """A weight of a kind of region: below 0 it leaves before other text, above 0 after it."""

    tier: int
    share: float = 1.0  # of the budget that it has at most; the rest of it counts like any text
    newest: bool = False  # its last tokens have the share, not its first


WEIGHTS = {
    "thoughts": Weight(-2),
    "dropped thoughts": Weight(-2),  # a head keeps some if others had evicted more of them
    "repeated replies": Weight(-2),
    "tool results": Weight(-1),
    "new tool results": Weight(0),
    "open thoughts": Weight(0),
    "system prompt and tools": Weight(1, 1 / 2),
    "prompt of open thoughts": Weight(2, 1 / 4, newest=True),
}
"""Holds the weight of each kind of region; other text has none. A table of docs/thoughts.md."""
PINNED = 3
"""Holds the tier of tokens that never leave, where a sequence of a batch has pins of its own."""
MOST_WEIGHED = MOST * (1 + sum(weight.tier != 0 for weight in WEIGHTS.values()))
"""Counts the regions of a sequence that leave earlier or later than other text, at most."""
Region = tuple[int, int, int]
"""Holds the tokens [start, stop) of a conversation, and their tier."""


class Regions:
    """A list of a conversation's regions, which are tokens [start, stop) of one kind each.

    Args:
        budget: slots of a KV head.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._spans: dict[str, list[Span]] = {}
        self.weighed: tuple[Region, ...] = ()
        """Holds the regions that leave earlier or later than other text."""
        self.of_rows: dict[int, tuple[Region, ...]] = {}
        """Holds such regions by sequence, where each is a conversation of its own; else `weighed`.
        """

    @property
    def facts(self) -> dict[str, list[Span]]:
        """Return all regions by their kinds, as a session's file keeps them."""
        return {kind: list(spans) for kind, spans in self._spans.items() if spans}

    def early(self, tier: int) -> list[Span]:
        """Return the regions of a tier."""
        return [(start, stop) for start, stop, own in self.weighed if own == tier]

    @property
    def thoughts(self) -> list[Span]:
        """Return the closed thoughts, whether they were dropped or not."""
        return merged([*self.dropped, *self._spans.get("thoughts", ())])

    @property
    def dropped(self) -> list[Span]:
        """Return the thoughts that were dropped, as the chat template leaves them out."""
        return self._spans.get("dropped thoughts", [])

    @property
    def protected(self) -> list[Span]:
        """Return the regions that leave after all other text."""
        return [(start, stop) for start, stop, tier in self.weighed if tier > 0]

    def add(self, regions: Mapping[str, Iterable[Span]]) -> None:
        """Add regions by their kinds."""
        for kind, spans in regions.items():
            self._spans[kind] = merged([*self._spans.get(kind, ()), *spans])
        self._weigh()

    def set_repeated(self, replies: Iterable[Span]) -> None:
        """Have these replies leave first, and no others that were repeated before."""
        self._spans.pop("repeated replies", None)
        self.add({"repeated replies": replies})

    def age(self) -> None:
        """Count new results of tools as results from now on, since another question follows."""
        self.add({"tool results": self._spans.pop("new tool results", [])})

    def open_thoughts(self, prompt: Span, first: int) -> None:
        """Have a prompt leave last while the thoughts are open that begin with token `first`."""
        self.add({"prompt of open thoughts": [prompt], "open thoughts": [(first, FAR)]})

    def close_thoughts(self, stop: int) -> None:
        """Have open thoughts leave first, which end before token `stop`."""
        self._spans.pop("prompt of open thoughts", None)
        opened = self._spans.pop("open thoughts", [])
        self.add({"thoughts": [(first, stop) for first, _ in opened]})

    def drop_thoughts(self, spans: Iterable[Span]) -> None:
        """Note that thoughts were dropped, in these spans with the marks around them."""
        self.add({"dropped thoughts": spans})
        left = (s for s in self._spans.pop("thoughts", ()) if not within(s, self.dropped))
        self.add({"thoughts": left})

    def cut(self, seen: int) -> None:
        """Close thoughts, and remove everything behind the first `seen` tokens: it was not read."""
        self.close_thoughts(seen)
        known, self._spans = self._spans, {}
        self.add({kind: clipped(spans, seen) for kind, spans in known.items()})

    def reading(self, seen: int) -> None:
        """Weigh the newest regions of those that begin among the first `seen` tokens.

        Of a long prompt more may be known than are weighed, and those behind are not held yet.
        """
        if any(len(spans) > MOST for spans in self._spans.values()):
            self._weigh(seen)

    def _weigh(self, seen: int = FAR) -> None:
        regions = list[Region]()
        for kind, (tier, share, newest) in WEIGHTS.items():
            most = max(1, int(self._budget * share))
            known = [span for span in self._spans.get(kind, ()) if span[0] < seen]
            for start, stop in known[-MOST:] if tier else ():
                if tier > 0 and newest:
                    start = max(start, stop - most)
                elif tier > 0:
                    stop = min(stop, start + most)
                regions.append((start, stop, tier))
        self.weighed = tuple(regions)


def within(span: Span, spans: Iterable[Span]) -> bool:
    """Return whether one of the spans has all of a span.

    >>> [within(span, [(0, 4), (6, 9)]) for span in ((1, 4), (3, 7))]
    [True, False]
    """
    return any(start <= span[0] and span[1] <= stop for start, stop in spans)


def moved(regions: Iterable[Region], first: int, by: int) -> tuple[Region, ...]:
    """Return regions where tokens from `first` on are counted higher by `by`.

    >>> moved([(0, 9, 1), (20, 30, -2)], first=4, by=100)
    ((0, 109, 1), (120, 130, -2))
    """

    def at(token: int) -> int:
        return token + by if token > first else token

    return tuple([(at(start), at(stop), tier) for start, stop, tier in regions])


def tiers_of(tokens: Sequence[int], regions: Iterable[Region]) -> list[int]:
    """Return the tier of each token.

    >>> tiers_of([0, 5, 9], [(0, 4, 1), (8, 12, -2)])
    [1, 0, -2]
    """
    known = [*regions]
    return [next((tier for a, b, tier in known if a <= token < b), 0) for token in tokens]
