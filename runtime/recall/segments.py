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
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = self._decode([*self._before, token])[self._skipped :]
        return piece


def breaks(pieces: Sequence[str]) -> Iterator[tuple[int, int]]:
    r"""Yield the index of each token before which a text may be cut, and the rank of that cut.

    >>> list(breaks(["Dr.", " Li", " paid", " 3", ".", "5", "!", " why?", " she", ".", "\n", "I"]))
    [(1, 0), (2, 0), (3, 0), (7, 1), (8, 1), (11, 3)]

    Args:
        pieces: the text, token by token.
    """
    text, at = "".join(pieces), [0, *accumulate(map(len, pieces))]
    fences = [match.end() for match in FENCE.finditer(text)]
    for gap in GAP.finditer(text):
        first, last = gap.span()
        index = bisect_right(at, last) - 1
        if last == len(text) or not index or at[index] < first:
            continue
        ending = text[max(0, first - 8) : first]
        sentence = SENTENCE_END.search(ending) and not SHORTENED.search(ending)
        lines = gap.group().count("\n")
        line = lines > 1 or (lines and text[last - 1] == "\n")
        if bisect_left(fences, last) % 2 or (
            text[last].islower() and (line or not ending.endswith("."))
        ):
            # A line goes on in one that is indented, or that begins with a small letter.
            yield index, CLAUSE if line or sentence else WORD
        else:
            yield index, LINE if line else SENTENCE if sentence else WORD


def cuts(pieces: Sequence[str], longest: int = LONGEST) -> Iterator[int]:
    """Yield where the passages of a text end; the last part waits for more text.

    >>> list(cuts([" word"] * 10 + [".", " Then"] + [" word"] * 120, 100))
    [11, 111]

    Args:
        pieces: the text, token by token.
        longest: tokens of a passage, at most.
    """
    cut_points, start = list(breaks(pieces)), 0
    while True:
        after = bisect_right(cut_points, (start, LINE))
        near = cut_points[after : after + longest]
        within = [(index, rank) for index, rank in near if index - start <= longest]
        ends = (index for index, rank in within if rank >= SENTENCE and index - start >= LEAST)
        end = next(ends, None)
        if end is None:
            if len(pieces) - start <= longest:
                return
            far_enough = [cut for cut in within if cut[0] - start > longest * 2 // 5] or within
            end = max(
                far_enough, key=lambda cut: (cut[1], cut[0]), default=(start + longest, WORD)
            )[0]
        yield end
        start = end


def question_start(ids: Sequence[int], first: int, stop: int, pieces: Callable[[int], str]) -> int:
    r"""Return the index of the token at which a message's question begins.

    A short message is a question as a whole. In a long one it stands at the end: the last line that
    is no closing word, or the last sentences.

    >>> question_start(range(10), 3, 8, str)
    3
    >>> texts = [" so"] * 799 + [".\n"] + ["It"] + [" was"] * 59 + ["\n"] + ["Ok"] * 5
    >>> question_start(range(866), 3, 866, texts.__getitem__)
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
    starts = [(earliest + at, rank) for at, rank in breaks([*map(pieces, ids[earliest:stop])])]
    for least in (LINE, SENTENCE):
        near = [index for index, rank in starts if rank >= least and index <= stop - SHORT]
        if near:
            return near[-1]
    return starts[0][0] if starts else earliest


def segment_length(limit: int) -> int:
    """Return the most tokens of a passage, so that it fits into the tokens to read again."""
    return max(2 * LEAST, min(LONGEST, limit - MARKED))
