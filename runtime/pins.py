"""Tokens of the conversation that are never evicted: where they lie, and whether heads hold them.

A span is `[start, stop)` in tokens read. It is found by writing the conversation without what
follows: tokens that both begin with are what came before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from kvcap.runtime.errors import PinsTooLarge
from kvcap.runtime.text import Message

if TYPE_CHECKING:
    from kvcap.runtime.budget_cache import BudgetCache

Span = tuple[int, int]


def system_span(encode: Callable[[Sequence[Message]], list[int]], system: str) -> list[Span]:
    """The system prompt of a conversation: what its first tokens are whatever the user says."""
    opening = [{"role": "system", "content": system}]
    one, other = (encode([*opening, {"role": "user", "content": text}]) for text in ("A", "0"))
    return [(0, _shared(one, other))]


def message_spans(
    encode: Callable[[Sequence[Message]], list[int]],
    opening: Sequence[Message],
    messages: Sequence[Message],
    pinned: Collection[int],
    ids: list[int],
) -> list[Span]:
    """The `pinned` messages within `ids`, the whole conversation, with their turns' marks.

    Args:
        encode: writes messages, ready for an answer, and encodes them.
        opening: the system prompt, if there is one.
        messages: of the conversation.
        pinned: indices of user messages.
        ids: tokens of it all.
    """
    found = []
    for index in sorted(pinned):
        before = [*opening, *messages[:index]]
        start = 0
        if index:
            start = _shared(encode(before), ids)
        elif opening:
            ((_, start),) = system_span(encode, opening[0]["content"])
        stop = _shared(encode([*before, messages[index]]), ids)
        found.append((start, stop))
    return found


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens are the same."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same tokens in the fewest spans, in order.

    >>> merged([(8, 9), (2, 6), (0, 4), (5, 5)])
    [(0, 6), (8, 9)]
    """
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif start < stop:
            found.append((start, stop))
    return found


def covered(spans: Iterable[Span]) -> int:
    """Tokens that lie in any of the spans.

    >>> covered([(0, 4), (2, 6), (8, 9)])
    7
    """
    return sum(stop - start for start, stop in merged(spans))


def check_pins(cache: BudgetCache, spans: Sequence[Span], budgets: list[list[int]]) -> None:
    """Refuse spans that a head could not hold beside the policy's own pins.

    Args:
        cache: whose layers are allocated.
        spans: all that are to be pinned.
        budgets: of every segment of every layer.

    Raises:
        PinsTooLarge: naming the slots that are needed.
    """
    from kvcap.policies import Observation  # PyTorch, which not every backend has

    eviction, layout = cache.eviction, cache.layout
    if not spans or not eviction.policy.evicts:
        return
    for layer, row in zip(cache.capped_layers, budgets, strict=True):
        for segment, budget in zip(layer.segments, row, strict=True):
            # Where slots move between heads a head gets what its pins need, and one to spare.
            slots = layout.budgets[layer.index] - 1 if eviction.heads_move else budget
            seen = Observation(
                keys=segment.keys, values=segment.values, positions=segment.positions,
                seen=cache.seen, budget=slots, layer=layer.index, first_head=segment.head,
            )  # fmt: skip
            sinks, recents = eviction.pins_of(seen)
            pinned, needed = covered(spans), covered([*spans, (0, sinks)]) + recents
            if needed > slots:
                raise PinsTooLarge(
                    f"{pinned} tokens would be pinned, which needs {needed} slots in every head "
                    f"with the {needed - pinned} that policy {eviction.name!r} pins, and a head of "
                    f"layer {layer.index} has {slots}; pin less, use a larger budget, or /clear"
                )


def needed(cache: BudgetCache) -> int:
    """Slots of a head that spans and the policy's own pins take; 0 where no span is pinned."""
    if not cache.pinned_spans:
        return 0
    eviction = cache.eviction
    sinks, recents = eviction.sinks(), eviction.recents(cache.layout.budget_tokens)
    return covered([*cache.pinned_spans, (0, sinks)]) + recents
