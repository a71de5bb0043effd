"""Cuts tokens where lines and sentences end: what was read, into segments of about 48 tokens.

Two segments that follow each other are a passage, so that every sentence stands whole in one of
them. Knows a tokenizer and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

LONGEST, LEAST = 60, 16  # tokens of a segment, at most, and where few tokens may be read again
MARKED = 16  # tokens around a passage that is read again
QUESTION, SHORT = 128, 6  # tokens of a question, at most, and of a closing word
STOPS = (".", "!", "?", "…", "。", "！", "？", "؟", "।", "።")
CLOSERS = "\"'”’»)]}*_ "


class TextEnds:
    """Says of a token what may end with it: a line (3), a sentence (2), a word (1) or none (0).

    It knows every token after its first use.

    Args:
        tokenizer: whose `backend_tokenizer` decodes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, int] = {}

    def __call__(self, token: int) -> int:
        """Return 3, 2, 1 or 0."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._rank(token)
        return found

    def _rank(self, token: int) -> int:
        backend = self._tokenizer.backend_tokenizer
        text: str = backend.decode([token], skip_special_tokens=False)
        special = text != "" and not backend.decode([token], skip_special_tokens=True)
        if special or "\n" in text:
            return 3
        if text.rstrip(CLOSERS).endswith(STOPS):
            return 2
        # A number or a name may be spread over several tokens.
        return int(not text[-1:].isalnum())


def segment_length(limit: int) -> int:
    """Return the most tokens of a segment, so that a passage fits into the tokens to read again."""
    return max(LEAST, min(LONGEST, (limit - MARKED) // 2))


def next_cut(
    ids: Sequence[int], start: int, stop: int, ends: Callable[[int], int], longest: int = LONGEST
) -> int | None:
    """Return where the segment ends that begins at `start`; None if it needs more than is read.

    Where a line ends in its last three fifths, there it is cut, else where a sentence does, or a
    word.

    >>> next_cut([0] * 40 + [3] + [0] * 40, 0, 81, int)
    41
    >>> next_cut([0] * 81, 0, 81, int), next_cut([0] * 50, 0, 50, int)
    (60, None)

    Args:
        ids: tokens that were read.
        start: the segment's first.
        stop: the first token that is no part of it.
        ends: what may end with a token, as `TextEnds` says it.
        longest: tokens, at most.
    """
    if start + longest > stop:
        return None
    places = range(start + longest, start + longest * 2 // 5, -1)
    return max(places, key=lambda place: ends(ids[place - 1]))


def question_start(ids: Sequence[int], first: int, stop: int, ends: Callable[[int], int]) -> int:
    """Return where the question of a message begins, in front of which text is read again.

    A short message is a question as a whole. In a long one it stands at the end: the last line that
    is no closing word, or the last sentences.

    >>> question_start([0] * 10, 3, 8, int), question_start([0] * 900, 3, 900, int)
    (3, 772)
    >>> question_start([0] * 799 + [3] + [0] * 60 + [3] + [0] * 5, 3, 866, int)
    800

    Args:
        ids: tokens of the message, and of what the chat template writes around it.
        first: the first one of its text.
        stop: the first one behind its text.
        ends: what may end with a token, as `TextEnds` says it.
    """
    earliest = stop - QUESTION
    if first >= earliest:
        return first
    for rank in (3, 2):
        for place in range(stop - SHORT, earliest, -1):
            if ends(ids[place - 1]) >= rank:
                return place
    return earliest
