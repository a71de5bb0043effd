"""Makes the text of tasks and the demo: facts nobody can guess, and filler of an exact length."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random

from kvcap.pocket import words
from kvcap.pocket.corpus import Fact, facts

# Short words to reach a length with, one token each in most vocabularies.
PADDING = ("so", "and", "it", "a", ".", ",")

WORD = re.compile(r"[^\W\d_]+")
KEY_WORDS = {  # that keys are made of, without those that say no more than that it is one
    word.lower()
    for phrase in (
        *words.ADJECTIVES, *words.NOUNS, *words.FIRST_NAMES, *words.LAST_NAMES, *words.CITIES,
        *words.NUMBER_NAMES, *words.PERSON_NUMBERS,
    )
    for word in WORD.findall(phrase)
} - {"code", "number"}  # fmt: skip


def number_facts(rng: Random, count: int) -> list[Fact]:
    """`count` facts with distinct keys and distinct numbers, none of them about the speaker."""
    found: dict[str, Fact] = {}
    while len(found) < count:
        fact = facts(rng, 1)[0]
        known = fact.key.lower() in {other.key.lower() for other in found.values()}
        own = fact.key.startswith("my ")
        if fact.value.isdigit() and len(fact.value) >= 4 and not own and not known:
            found.setdefault(fact.value, fact)
    return list(found.values())


def has_word(text: str, word: str) -> bool:
    """Whether `word` stands in `text`, not as a part of a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def names_no_other(answer: str, fact: Fact) -> bool:
    """Whether the sentence with a fact's value speaks of nothing but the fact's key.

    Another door, person or place, told before or made up, has words of its own: from the lists
    that keys are made of, or with a capital letter inside the sentence.
    """
    mine = {word.lower() for word in WORD.findall(f"{fact.key} {fact.theirs}")}
    sentence = next((s for s in re.split(r"[.!?\n]", answer) if has_word(s, fact.value)), "")
    for place, word in enumerate(WORD.findall(sentence)):
        capital = place > 0 and len(word) > 1 and word[0].isupper()
        if word.lower() not in mine and (capital or word.lower() in KEY_WORDS):
            return False
    return True


def fit(measure: Callable[[list[str]], int], filler: Iterator[str], length: int) -> list[str]:
    """Sentences for which `measure`, the tokens of the whole prompt, is exactly `length`.

    The last sentence is cut at a word, and short words follow where that leaves a gap.

    Raises:
        ValueError: the prompt is longer without any filler, or no word closes the gap.
    """
    least = measure([])
    if least > length:
        raise ValueError(f"a length of {length} tokens is too short; {least} are needed")
    sentences: list[str] = []
    while (short := length - measure(sentences)) > 0:
        sentences += [next(filler) for _ in range(max(1, short // 24))]
    while measure(sentences) > length:
        head, _, _ = sentences.pop().rpartition(" ")
        sentences += [head] if head else []
    while (size := measure(sentences)) < length:
        longer = ([*sentences, word] for word in PADDING)
        found = next((text for text in longer if size < measure(text) <= length), None)
        if found is None:
            raise ValueError(f"no text of exactly {length} tokens was found; try {length + 1}")
        sentences = found
    return sentences
