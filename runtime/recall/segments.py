"""Cuts tokens into passages that are whole: sentences, lines, rows of a table, blocks of code.

Nothing is cut that has no space in it, such as a number, an identifier or a path, unless it alone
is longer than a passage may be. Knows a tokenizer and no model.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

LONGEST, LEAST = 120, 8  # tokens of a passage, at most; sentences of fewer join the next one
MARKED = 30  # tokens around a passage that is read again
QUESTION, SHORT = 128, 6  # tokens of a question, at most, and of a closing word
WORD, CLAUSE, SENTENCE, LINE = range(4)  # what may end between two tokens
CLOSERS = "\"'”’»)]}*_"
SENTENCE_END = re.compile(rf"[.!?…。！？؟।॥][{re.escape(CLOSERS)}]*\Z")
SHORTENED = re.compile(
    r"(?<!\w)(?:Mrs?|Ms|Dr|Prof|St|Nos?|Nr|Fig|Sec|no|vs|etc|al|cf|ca|[^\W\d_])\.\Z"
)
# Some scripts have no space behind a sentence.
GAP = re.compile(r"\s+|(?<=[。！？])(?=[^\s」』”’）。！？])|(?<=[。！？][」』”’）])(?=\S)")
FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)  # begins or ends a block of code


class TextPieces:
    """Gives the text of each token as it stands within a text; special tokens have none.

    It knows every token after its first use.

    Args:
        tokenizer: whose `backend_tokenizer` encodes and decodes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode: Callable[[list[int]], str] = tokenizer.backend_tokenizer.decode
        # Alone, the first token of a text loses its space with tokenizers such as Llama 2's.
        self._before: list[int] = tokenizer.backend_tokenizer.encode(
            "a", add_special_tokens=False
        ).ids
        self._skipped = len(self._decode(self._before))
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """Return the token's text."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._decode([*self._before, token])[self._skipped :]
        return found


def breaks(pieces: Sequence[str]) -> Iterator[tuple[int, int]]:
    r"""Yield where a text may be cut, and what ends there; each is decided by the word behind it.

    >>> list(breaks(["Dr.", " Li", " paid", " 3", ".", "5", "!", " why?", " she", ".", "\n", "I"]))
    [(1, 0), (2, 0), (3, 0), (7, 1), (8, 1), (11, 3)]

    Args:
        pieces: the text, token by token.
    """
    text, at = "".join(pieces), [0, *accumulate(map(len, pieces))]
    fences = [found.end() for found in FENCE.finditer(text)]
    for gap in GAP.finditer(text):
        first, last = gap.span()
        place = bisect_right(at, last) - 1
        if last == len(text) or not place or at[place] < first:
            continue
        ending = text[max(0, first - 8) : first]
        sentence = SENTENCE_END.search(ending) and not SHORTENED.search(ending)
        lines = gap.group().count("\n")
        line = lines > 1 or (lines and text[last - 1] == "\n")
        if bisect_left(fences, last) % 2 or (
            text[last].islower() and (line or not ending.endswith("."))
        ):
            # A line goes on in one that is indented, or that begins with a small letter.
            yield place, CLAUSE if line or sentence else WORD
        else:
            yield place, LINE if line else SENTENCE if sentence else WORD


def cuts(pieces: Sequence[str], longest: int = LONGEST) -> Iterator[int]:
    """Yield where the passages of a text end; what is left needs more text, or is its end.

    >>> list(cuts([" word"] * 10 + [".", " Then"] + [" word"] * 120, 100))
    [11, 111]

    Args:
        pieces: the text, token by token.
        longest: tokens of a passage, at most.
    """
    places, start = list(breaks(pieces)), 0
    while True:
        after = bisect_right(places, (start, LINE))
        near = places[after : after + longest]
        within = [(place, rank) for place, rank in near if place - start <= longest]
        ends = (place for place, rank in within if rank >= SENTENCE and place - start >= LEAST)
        end = next(ends, None)
        if end is None:
            if len(pieces) - start <= longest:
                return
            late = [one for one in within if one[0] - start > longest * 2 // 5] or within
            end = max(late, key=lambda one: (one[1], one[0]), default=(start + longest, WORD))[0]
        yield end
        start = end


def question_start(ids: Sequence[int], first: int, stop: int, pieces: Callable[[int], str]) -> int:
    r"""Return where the question of a message begins, in front of which text is read again.

    A short message is a question as a whole. In a long one it stands at the end: the last line that
    is no closing word, or the last sentences.

    >>> question_start(range(10), 3, 8, str)
    3
    >>> said = [" so"] * 799 + [".\n"] + ["It"] + [" was"] * 59 + ["\n"] + ["Ok"] * 5
    >>> question_start(range(866), 3, 866, said.__getitem__)
    800

    Args:
        ids: tokens of the message, and of what the chat template writes around it.
        first: the first one of its text.
        stop: the first one behind its text.
        pieces: gives the text of a token.
    """
    earliest = stop - QUESTION
    if first >= earliest:
        return first
    found = [(earliest + at, rank) for at, rank in breaks([*map(pieces, ids[earliest:stop])])]
    for least in (LINE, SENTENCE):
        places = [place for place, rank in found if rank >= least and place <= stop - SHORT]
        if places:
            return places[-1]
    return found[0][0] if found else earliest


def segment_length(limit: int) -> int:
    """Return the most tokens of a passage, so that it fits into the tokens to read again."""
    return max(2 * LEAST, min(LONGEST, limit - MARKED))
