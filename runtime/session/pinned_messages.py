"""Where pinned messages lie among the tokens of a conversation.

A span is found by writing the conversation without what follows: tokens that both begin with are
what came before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvcap.runtime.types import Message, Span


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
