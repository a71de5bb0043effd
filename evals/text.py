"""Text that tasks and the demo are made of: facts nobody can guess, filler of an exact length."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random

from kvcap.pocket.corpus import Fact, facts

# Short words to reach a length with, one token each in most vocabularies.
PADDING = ("so", "and", "it", "a", ".", ",")


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
