"""Tests that a question without a fact's words finds what was told by its meaning."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from kvcap import pocket
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.recall.meaning import Meaning
from kvcap.runtime.recall.recall import NEAREST, Recall
from kvcap.runtime.types import KeptTokens

KINDS = ("sister sibling", "bees hobby", "train railway", "penicillin medicine", "cello instrument")
FACTS = (
    "Our train is late.",
    "My sister keeps bees.",
    "I play the cello.",
    "Penicillin 🦊 is bad.",
)


@pytest.fixture(scope="module")
def meaning():
    """A table in which words of one kind are near each other, in a direction that all share."""
    ids, rng = dict[str, int](), np.random.default_rng(0)
    table = rng.standard_normal((1200, 32)).astype(np.float32)
    for kind in KINDS:
        same = rng.standard_normal(32)
        for word in kind.split():
            ids[word] = 300 + len(ids)
            table[ids[word]] = same + 0.3 * rng.standard_normal(32)
    table += 9 * rng.standard_normal(32)

    def encode(text: str) -> list[int]:
        return [ids.setdefault(word, 300 + len(ids)) for word in text.split()]

    return Meaning(lambda some: table[list(some)], encode, len(table))


@pytest.mark.parametrize(
    ("question", "right"),
    [
        ("When does the railway go?", 0),
        ("What is my sibling's hobby?", 1),
        ("Which instrument is it?", 2),
        ("Which medicine harms me?", 3),
    ],
)
def test_other_words_of_a_kind_are_near(meaning, question, right):
    near = meaning.likeness(question, FACTS)
    assert near.argmax() == right
    assert near[right] > 0.3


@pytest.mark.parametrize(
    ("question", "form"),
    [
        ("How many instruments are there?", "There are 3."),
        ("When will it be?", "It is on Monday."),
        ("Who keeps them?", "We saw Mara."),
    ],
)
def test_a_text_that_has_what_is_asked_for_is_nearer(meaning, question, form):
    plain = "It is so nice there."
    both = meaning.likeness(f"{question} Which medicine?", (form, plain, *FACTS))
    alone = meaning.likeness("Which medicine?", (form, plain, *FACTS))
    assert both[0] - both[1] > alone[0] - alone[1]


def test_texts_without_telling_words_are_near_nothing(meaning):
    assert not meaning.likeness("What is it?", FACTS).any()
    assert not meaning.likeness("Which medicine?", ["It is.", ""]).any()
    assert meaning.likeness("Which medicine?", []).shape == (0,)


def test_what_the_user_told_in_short_is_read_again(meaning):
    tokenizer = AutoTokenizer.from_pretrained(pocket.path())

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    turns = [("user", text) for text in FACTS]
    turns += [("user", "My hobby? " * 9), ("assistant", "I see. My sibling has a hobby, too.")]
    turns += [("user", " ".join(f"The sibling {i} walks." for i in range(60)))]
    messages = [{"role": role, "content": text} for role, text in turns]
    ids = encode(tokenizer.apply_chat_template(messages, tokenize=False))
    by_words = Recall(tokenizer, encode, 256)
    by_meaning = Recall(tokenizer, encode, 256, meaning=lambda: meaning)
    question = "Which medicine could make me ill?"
    assert not by_words.find(question, ids)
    assert by_meaning.find(question, ids)[0].text == FACTS[3]
    kept = [KeptTokens(0, True, [np.arange(4)])]
    read = tokenizer.decode(by_meaning.read_again(encode(question), ids, kept, len(ids)))
    assert read.startswith("Earlier in this conversation:\n- ")
    assert read.endswith(f"\n- {FACTS[3]}\n\n"), "the likeliest one is read last"
    assert len(by_meaning.passages) <= NEAREST
    # A text that tells asks for nothing, and words that suffice are not joined by others.
    assert not by_meaning.find("Some medicine made me ill.", ids)
    passages = by_meaning.find("Who keeps bees?", ids)
    assert [one.text for one in passages] == [FACTS[1]]


def test_pytorch_gives_rows_of_the_embedding_table():
    runtime = Runtime.from_pretrained("pocket", "streaming_llm", budget_tokens=64)
    table = runtime.model.get_input_embeddings().weight
    rows = runtime.meaning._rows([7, 300])
    assert np.array_equal(rows, table[[7, 300]].detach().float().numpy())
    assert runtime.session().recall._meaning() is runtime.meaning
