"""Says how many first tokens of a conversation are never evicted by default: the attention sink.

This is the one place of that number and its rule. Every way to run a model asks here, without
PyTorch too; evaluations do not, since papers' policies pin what they say themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

SINK_TOKENS = 4  # StreamingLLM keeps as many, https://arxiv.org/abs/2309.17453
PART = 8  # sinks take at most one in so many of the slots that nothing else pins


def usual_sinks(free: int) -> int:
    """Return how many first tokens to pin where `free` slots of a head are not pinned otherwise.

    >>> [usual_sinks(free) for free in (256, 32, 31, 8, 7, 0, -5)]
    [4, 4, 3, 1, 0, 0, 0]
    """
    return max(0, min(SINK_TOKENS, free // PART))


def sinks_beside(spans: Iterable[tuple[int, int]], sinks: int, slots: int) -> int:
    """Return how many of the `sinks` stay where a user pinned `spans` and there are so few `slots`.

    >>> [sinks_beside([(2, 10)], 4, slots) for slots in (10, 9, 8, 7)]
    [4, 1, 0, 0]
    """
    pinned = list(spans)
    while sinks and sinks + sum(max(0, b - max(a, sinks)) for a, b in pinned) > slots:
        sinks -= 1
    return sinks
