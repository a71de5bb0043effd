"""Passages are chosen by the words of a question, among what the cache no longer holds."""

from __future__ import annotations

import itertools
from itertools import islice
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from make import SENTENCES

from kvcap.pocket.prose import filler
from kvcap.runtime.recall.recall import ENOUGH, Recall, held_shares, with_gap
from kvcap.runtime.types import KeptTokens


@pytest.fixture
def recall(tokenizer):
    return Recall(tokenizer, lambda text: encode(tokenizer, text), 256)


def encode(tokenizer, text):
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read(tokenizer, sentences=4):
    """Return the tokens of a text in which facts stand apart."""
    rest = filler(Random(0))
    parts = [f"{fact} {' '.join(islice(rest, sentences))} " for fact in SENTENCES]
    return encode(tokenizer, "".join(parts))


def test_thoughts_are_no_passages(tokenizer, recall):
    """Neither are those found that were dropped, nor what stands before and behind them cut."""
    ids = read(tokenizer)
    question = "When does the train leave for Lisbon?"
    ((start, stop), *_), *_ = recall.find(question, ids)
    recall.clear()
    recall.regions.add(
        {"dropped thoughts": [(start, stop)], "thoughts": [(len(ids) - 9, len(ids))]}
    )
    assert not recall.find(question, ids)
    spans = sorted(match.span for match in recall.store.search("harbour market gulls orchard"))
    assert all(b <= start or stop <= a for a, b in spans)
    rest = [token for i, token in enumerate(ids) if not start <= i < stop]
    kept = [KeptTokens(0, True, [np.arange(len(rest))])]
    assert not recall.find("Who keeps the key of the harbour?", ids, kept), "all else is held"


NOTHING = [KeptTokens(0, True, [np.zeros(0, int)])]


@pytest.mark.parametrize(
    ("share", "ends", "recalled"),
    [(1, 0, False), (0.9, 0, True), (0, 0, True), (0, 1, False), (1, 1, False)],
)
def test_a_held_passage_is_read_again_unless_all_is_held_or_it_is_the_newest(
    tokenizer, recall, share, ends, recalled
):
    ids = read(tokenizer)
    if ends:  # the text ends soon behind the passage
        ids = ids[: next(i for i in range(len(ids)) if "Lisbon" in tokenizer.decode(ids[:i])) + 60]
    question = encode(tokenizer, "When does the train leave for Lisbon?")
    rng = np.random.default_rng(0)
    heads = [np.flatnonzero(rng.random(len(ids)) < share) for _ in range(4)]
    kept = [KeptTokens(0, True, heads[:2]), KeptTokens(5, True, heads[2:])]
    # A window of its own that a layer keeps is no part of what the cap leaves.
    kept.append(KeptTokens(1, False, [np.arange(len(ids))] * 4))
    assert bool(recall.read_again(question, ids, kept, len(ids))) is recalled
    assert all("Lisbon" in one.text for one in recall.passages)


def test_shares_that_are_held_are_means_over_heads():
    kept = [KeptTokens(0, True, [np.array([0, 3]), np.array([3, 1])])]
    assert held_shares(kept, 5) == [0, 0.5, 1, 1, 2, 2]
    assert held_shares([], 2) == [0, 1, 2]


def test_what_is_read_again_stays_within_the_limit(tokenizer, recall):
    ids, question = read(tokenizer, 20), encode(tokenizer, "Is it harbour, market or orchard?")
    for limit in (0, 1, 20, 64, 100, 200, 1000):
        recall.limit = limit
        tokens = recall.read_again(question, ids, NOTHING, len(ids))
        assert len(tokens) <= limit
        assert bool(tokens) == (limit >= 64)
        assert [one.span for one in recall.passages] == sorted(o.span for o in recall.passages)
    assert len(recall.passages) > 1
    for wrong in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match="use a whole number, 0"):
            recall.limit = wrong


def test_unknown_tokens_are_left_out(tokenizer, recall):
    ids = read(tokenizer)
    hidden = [-1] * 30 + ids[:40] + [-1] + ids[40:] + [-1] * 5
    passages = recall.search("harbour train gulls", hidden)
    assert passages
    for one in passages:
        assert -1 not in hidden[slice(*one.span)]
        assert one.text == tokenizer.decode(hidden[slice(*one.span)])


def test_no_two_passages_overlap(tokenizer, recall):
    ids = read(tokenizer, 20)
    spans = sorted(one.span for one in recall.search("gulls orchard Lisbon", ids))
    assert len(spans) > 1
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_a_shorter_conversation_is_another_one(tokenizer, recall):
    assert recall.search("gulls roof", read(tokenizer))
    words = " ".join(islice(filler(Random(1)), 12))
    other = encode(tokenizer, f"Bread and butter are in the kitchen. {words}")
    assert not recall.search("gulls roof", other)
    assert recall.search("bread and butter", other)


def test_spans_move_around_a_gap():
    spans = [(0, 4), (2, 9), (5, 6), (6, 8)]
    lengths = sum(b - a for a, b in spans)
    moved = with_gap(spans, 5, 10)
    assert moved == [(0, 4), (2, 5), (15, 16), (15, 19), (16, 18)]
    assert sum(b - a for a, b in moved) == lengths


KEYS = ("red-fox", "old-tent", "tiny-bus", "cold-gate")
VALUES = ("7214906", "3.14.159", "/srv/a.b/c_1", "5a1f0c9e-77d2-4b6e-9a53-0c1d2e3f4a5b")


def chat(tokenizer, *messages):
    """Return the tokens of messages of the user, each one answered, up to the next message."""
    turns = [
        {"role": r, "content": c}
        for m in messages
        for r, c in (("user", m), ("assistant", "I see."))
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False) + "<|user|>"
    return encode(tokenizer, text)


@pytest.mark.parametrize("number_of_keys", ["one key", "four keys"])
def test_four_facts_come_together_and_whole_if_one_was_evicted(tokenizer, recall, number_of_keys):
    keys = KEYS[:1] * 4 if number_of_keys == "one key" else KEYS
    facts = [f"The value of {key} is: {value}." for key, value in zip(keys, VALUES, strict=True)]
    rest = filler(Random(2))
    ids = chat(tokenizer, *(f"{' '.join(islice(rest, 12))} {fact} {next(rest)}" for fact in facts))
    question = encode(tokenizer, f"What are the values of {', '.join(dict.fromkeys(keys))}?")
    recall.limit = 200
    start = encode(tokenizer, "<|user|>").pop()
    last = max(index for index, token in enumerate(ids[:-1]) if token == start)
    held = [KeptTokens(0, True, [np.arange(last, len(ids))])]  # of one fact of four
    tokens = recall.read_again(question, ids, held, len(ids))
    assert [one.text.strip() for one in recall.passages] == facts  # in order, the newest last
    assert "\n...\n".join(facts) in tokenizer.decode(tokens)
    # So they do if only half of a question's words find them, and its meaning finds no others.
    recall._meaning = lambda: SimpleNamespace(likeness=lambda _, texts: np.zeros(len(texts)))
    longer = (
        f"What are all values of {', '.join(dict.fromkeys(keys))} that someone mentioned above?"
    )
    passages = recall.find(longer, ids)
    assert sorted(one.text.strip() for one in passages) == sorted(facts)
    assert passages[0].score < ENOUGH


def test_of_facts_that_contradict_each_other_the_newest_come_first_and_stand_last(
    tokenizer, recall
):
    facts = [f"The value of red-fox is: {number}." for number in (14, 25, 36, 47)]
    rest = filler(Random(5))
    ids = chat(tokenizer, *(f"{' '.join(islice(rest, 9))} {fact} {next(rest)}" for fact in facts))
    recall.limit = 64
    recall.read_again(encode(tokenizer, "What is the value of red-fox?"), ids, NOTHING, len(ids))
    texts = [one.text.strip() for one in recall.passages]
    assert 0 < len(texts) < len(facts)
    assert texts == facts[-len(texts) :]


@pytest.mark.parametrize(
    ("message", "asks"),
    [
        ("Where does the harbour master keep the key?", True),
        ("Tell me where the harbour master keeps the key.", True),
        ("The lighthouse keeper sold her old boat to a friend.", False),
        ("Thank you, that is all.", False),
        ("Why is that?", False),
        ("The harbour master keeps the key under a stone.", False),  # which would be an echo
    ],
)
def test_a_message_that_asks_nothing_brings_nothing(tokenizer, recall, message, asks):
    rest = filler(Random(4))
    ids = chat(tokenizer, *(f"{fact} {' '.join(islice(rest, 12))}" for fact in SENTENCES))
    assert bool(recall.read_again(encode(tokenizer, message), ids, NOTHING, len(ids))) == asks


def test_a_question_that_follows_is_of_the_subject_of_the_one_before(tokenizer, recall):
    rest = filler(Random(3))
    fact = f"Zelda lives in Quito. Zelda works as a nurse. {' '.join(islice(rest, 40))}"
    ids = chat(tokenizer, fact, "Where does Zelda live?")
    recall.read_again(encode(tokenizer, "And her job?"), ids, NOTHING, len(ids))
    assert "nurse" in "".join(one.text for one in recall.passages)
    recall.read_again(encode(tokenizer, "And her job?"), chat(tokenizer, fact), NOTHING, 0)
    assert not recall.passages
