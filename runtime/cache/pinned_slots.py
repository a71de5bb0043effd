"""Counts the slots that pinned tokens take, and refuses pins that a head cannot hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvcap.runtime.errors import PinsTooLarge
from kvcap.runtime.types import Span
from kvcap.sinks import sinks_beside

if TYPE_CHECKING:  # the backend of ONNX Runtime counts pins without PyTorch
    from kvcap.runtime.cache.layout import CacheLayout


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the fewest spans that have the same tokens, in order.

    >>> merged([(8, 9), (2, 6), (0, 4), (5, 5)])
    [(0, 6), (8, 9)]
    """
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        elif start < stop:
            joined.append((start, stop))
    return joined


def clipped(spans: Iterable[Span], seen: int) -> list[Span]:
    """Return the spans as far as they lie among the first `seen` tokens.

    >>> clipped([(0, 4), (2, 9), (7, 8)], 5)
    [(0, 4), (2, 5)]
    """
    return [(start, min(stop, seen)) for start, stop in spans if start < seen]


def covered(spans: Iterable[Span]) -> int:
    """Count the tokens that lie in any of the spans.

    >>> covered([(0, 4), (2, 6), (8, 9)])
    7
    """
    return sum(stop - start for start, stop in merged(spans))


def check_pins(
    layout: CacheLayout, spans: Sequence[Span], seen: int, budgets: Sequence[Sequence[int]]
) -> None:
    """Refuse spans that a head could not hold beside the policy's own pins.

    Args:
        layout: sizes of the cache.
        spans: all that are to be pinned.
        seen: tokens read so far.
        budgets: slots of every segment of every capped layer: one of all KV heads, or one of each,
            sequence by sequence.

    Raises:
        PinsTooLarge: naming the slots that are needed.
    """
    from torch import empty  # which not every backend has

    from kvcap.policies import Observation

    eviction = layout.eviction
    if not spans or not eviction.policy.evicts:
        return
    kv_heads = layout.shape.kv_heads
    for layer, row in enumerate(budgets):
        for index, budget in enumerate(row):
            # Where slots move between heads a head gets what its pins need, and one to spare.
            slots = layout.budgets[layer] - 1 if eviction.heads_move else budget
            none = empty(1, max(1, kv_heads // len(row)), 0)  # pins depend on no tensor
            observed = Observation(
                keys=none,
                values=none,
                positions=none,
                num_tokens=seen,
                budget=slots,
                layer=layer,
                first_head=index % kv_heads,
                pinned_spans=tuple(spans),
            )
            sinks, recents = eviction.pins_of(observed)
            check_slots(spans, sinks, recents, slots, eviction.name, layer)


def check_slots(
    spans: Sequence[Span], sinks: int, recents: int, slots: int, policy: str, layer: int
) -> None:
    """Refuse spans that a head of `slots` cannot hold beside the policy's sinks and recents.

    Raises:
        PinsTooLarge: naming the slots that are needed.
    """
    pinned, needed = covered(spans), covered([*spans, (0, sinks)]) + recents
    if spans and needed > slots:
        raise PinsTooLarge(
            f"{pinned} tokens would be pinned, which needs {needed} slots in every head with the "
            f"{needed - pinned} that policy {policy!r} pins, and a head of layer {layer} has "
            f"{slots}; pin less, use a larger budget, or begin a new conversation (in chat: "
            "/clear)"
        )


def slots_needed(layout: CacheLayout, spans: Sequence[Span]) -> int:
    """Return the slots of a head that spans and the policy's pins take; 0 if there is no span."""
    if not spans:
        return 0
    eviction, budget = layout.eviction, layout.budget_tokens
    sinks, recents = eviction.sinks(), eviction.recents(budget)
    if eviction.sinks_yield:
        sinks = max(eviction.policy.sinks_pinned(), sinks_beside(spans, sinks, budget - recents))
    return covered([*spans, (0, sinks)]) + recents
