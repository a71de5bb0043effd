"""Passages are whole, and a question is found at the end of a long message."""

from __future__ import annotations

import re
from itertools import pairwise
from random import Random
from uuid import UUID

import pytest

from kvcap.pocket.prose import filler
from kvcap.runtime.recall.segments import LEAST, LONGEST, QUESTION, TextPieces, cuts, question_start

QUESTION_LINE = "\n\nWhich river did the old man of the valley cross, and in which year was it?"


def passages(tokenizer, text, longest=LONGEST):
    """Return the texts of all passages, the last one included."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [*map(TextPieces(tokenizer), ids)]
    assert "".join(pieces) == text
    bounds = [0, *cuts(pieces, longest), len(ids)]
    assert all(0 < b - a <= longest for a, b in pairwise(bounds))
    return ["".join(pieces[a:b]) for a, b in pairwise(bounds)]


@pytest.mark.parametrize("longest", [2 * LEAST, 48, LONGEST])
def test_no_passage_cuts_a_number_an_identifier_or_a_path(tokenizer, longest):
    rng, source = Random(longest), filler(Random(1))

    def word():
        number = str(rng.getrandbits(40))
        return rng.choice(
            [f"{number[:2]}.{number[2:5]}", f"run_{number[:3]}", f"/tmp/a.b/{number[:3]}", "ok?!"]
        )

    words = [part for _ in range(200) for part in (word(), next(source))]
    text = " ".join(words)
    parts = passages(tokenizer, text, longest)
    assert "".join(parts) == text
    assert [*re.findall(r"\S+", "\n".join(parts))] == text.split()


ROWS = [f"| {i} | The price of the apple is {i * 37}.50 | Mr. Lee, no. {i} |\n" for i in range(9)]
CODE = "```python\ndef f(x):\n    # First. Second.\n    y = x + 1\n\n    return y\n```\n"
WRAPPED = "The licence covers everything that\nis written here, and\n    nothing else at all.\n"
KEY = f"The identifier is {UUID(int=7 << 99)}."


@pytest.mark.parametrize(
    "parts",
    [ROWS, [CODE, WRAPPED], [WRAPPED, WRAPPED], [KEY, f" {WRAPPED}"]],
    ids=["rows", "code", "wrapped lines", "identifier"],
)
def test_a_row_a_block_of_code_and_a_sentence_are_whole(tokenizer, parts):
    assert passages(tokenizer, "".join(parts)) == parts


def test_the_question_of_a_long_message_is_its_last_line(tokenizer):
    text, pieces = "The river is long. " * 100 + QUESTION_LINE, TextPieces(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = question_start(ids, 0, len(ids), pieces)
    assert tokenizer.decode(ids[start:]).strip().startswith("Which river")
    one_line = tokenizer(text.replace("\n", " "), add_special_tokens=False)["input_ids"]
    start = question_start(one_line, 0, len(one_line), pieces)
    assert len(one_line) - QUESTION <= start < len(one_line)
    assert tokenizer.decode(one_line[:start]).rstrip().endswith(".")
