"""Segments end where sentences do, and a question is found at the end of a long message."""

from __future__ import annotations

import doctest

import pytest
from transformers import AutoTokenizer

from kvcap import pocket
from kvcap.runtime.recall import segments
from kvcap.runtime.recall.segments import (
    LONGEST,
    QUESTION,
    TextEnds,
    next_cut,
    question_start,
)

QUESTION_LINE = "\n\nWhich river did the old man of the valley cross, and in which year was it?"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(pocket.path())


def test_the_examples():
    assert doctest.testmod(segments).failed == 0


def test_every_token_is_in_one_segment_of_a_bounded_length():
    ids = [int(i % 41 == 40) for i in range(1000)]
    start, lengths = 0, []
    while (cut := next_cut(ids, start, len(ids), int)) is not None:
        lengths.append(cut - start)
        assert ids[cut - 1] or cut - start == LONGEST
        start = cut
    assert min(lengths) >= LONGEST * 2 // 5
    assert max(lengths) <= LONGEST
    assert len(ids) - start < LONGEST


def test_what_ends_with_a_token(tokenizer):
    ends = TextEnds(tokenizer)

    def last(text):
        return ends(tokenizer(text, add_special_tokens=False)["input_ids"][-1])

    assert last("It ends here.") == last("Really?") == 2
    assert last("a line\n") == 3
    assert last("in the middle") == 0
    assert ends(tokenizer.eos_token_id) == 3


def test_the_question_of_a_long_message_is_its_last_line(tokenizer):
    text = "The river is long. " * 100 + QUESTION_LINE
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = question_start(ids, 0, len(ids), TextEnds(tokenizer))
    assert tokenizer.decode(ids[start:]).strip().startswith("Which river")
    one_line = tokenizer(text.replace("\n", " "), add_special_tokens=False)["input_ids"]
    start = question_start(one_line, 0, len(one_line), TextEnds(tokenizer))
    assert len(one_line) - QUESTION <= start < len(one_line)
    assert tokenizer.decode(one_line[:start]).rstrip().endswith(".")
