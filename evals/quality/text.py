"""Makes the text of tasks and the demo: facts nobody can guess, and filler of an exact length."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from random import Random

from kvcap.pocket import words
from kvcap.pocket.corpus import Fact, facts

# Short words to reach a length with, one token each in most vocabularies.
PADDING = ("so", "and", "it", "a", ".", ",")

WORD = re.compile(r"[^\W\d_]+")
KEY_WORDS = {  # that keys are made of, without those that say no more than that it is one
    word.lower()
    for phrase in (
        *words.ADJECTIVES,
        *words.NOUNS,
        *words.FIRST_NAMES,
        *words.LAST_NAMES,
        *words.CITIES,
        *words.NUMBER_NAMES,
        *words.PERSON_NUMBERS,
    )
    for word in WORD.findall(phrase)
} - {"code", "number"}


def number_facts(rng: Random, count: int) -> list[Fact]:
    """Make `count` facts with distinct keys and distinct numbers, none about the speaker."""
    found: dict[str, Fact] = {}
    while len(found) < count:
        fact = facts(rng, 1)[0]
        known = fact.key.lower() in {other.key.lower() for other in found.values()}
        own = fact.key.startswith("my ")
        if fact.value.isdigit() and len(fact.value) >= 4 and not own and not known:
            found.setdefault(fact.value, fact)
    return list(found.values())


def has_word(text: str, word: str) -> bool:
    """Return whether `word` stands in `text`, not as a part of a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def names_no_other(answer: str, fact: Fact) -> bool:
    """Return whether the sentence with a fact's value speaks of nothing but the fact's key.

    Another door, person or place, said before or made up, has words of its own: from the lists
    that keys are made of, or with a capital letter inside the sentence.
    """
    mine = {word.lower() for word in WORD.findall(f"{fact.key} {fact.theirs}")}
    sentence = next((s for s in re.split(r"[.!?\n]", answer) if has_word(s, fact.value)), "")
    for place, word in enumerate(WORD.findall(sentence)):
        capital = place > 0 and len(word) > 1 and word[0].isupper()
        if word.lower() not in mine and (capital or word.lower() in KEY_WORDS):
            return False
    return True


def scatter(lines: Sequence[str], depths: Sequence[float], sentences: list[str]) -> list[str]:
    """Put every line at its depth between `sentences`, 0 (before all) to 1 (behind all)."""
    places = [int(depth * (len(sentences) + 1)) for depth in depths]
    found = list(sentences)
    for place, line in sorted(zip(places, lines, strict=True), reverse=True):
        found.insert(place, line)
    return found


def fit(measure: Callable[[list[str]], int], filler: Iterator[str], length: int) -> list[str]:
    """Return sentences for which `measure`, the tokens of the whole prompt, is exactly `length`.

    The last sentence is cut at a word, and short words follow where that leaves a gap.

    Raises:
        ValueError: the prompt is longer without any filler, or no word closes the gap.
    """
    found = _fitted(measure, filler, length)
    if found is None:
        raise ValueError(f"no text of exactly {length} tokens was found; try {length + 1}")
    return found


def fit_whole(
    measure: Callable[[list[str], list[str]], int],
    items: Iterator[str],
    filler: Iterator[str],
    length: int,
) -> tuple[list[str], list[str]]:
    """Return whole items, and sentences, for which `measure(items, sentences)` is `length`.

    The items come as near as they can; sentences, fitted as by `fit`, close the gap.

    Raises:
        ValueError: as `fit`.
    """
    found, _ = _most(lambda some: measure(some, []), items, length)
    while (sentences := _fitted(lambda some: measure(found, some), filler, length)) is None:
        if not found:
            raise ValueError(f"no text of exactly {length} tokens was found; try {length + 1}")
        found.pop()  # the gap is too small for any word
    return found, sentences


def _fitted(
    measure: Callable[[list[str]], int], filler: Iterator[str], length: int
) -> list[str] | None:
    """Return what `fit` gives; None where no word closes the gap."""
    sentences, beyond = _most(measure, filler, length)
    words = beyond.split(" ")
    heads = [[*sentences, *([" ".join(words[:n])] if n else [])] for n in range(len(words))]
    sentences = heads[bisect_right(heads, length, key=measure) - 1]
    while (size := measure(sentences)) < length:
        longer = [[*sentences, word] for word in PADDING]
        if sentences:  # where sentences are lines, a word costs less at the end of the last one
            longer += [[*sentences[:-1], f"{sentences[-1]} {word}"] for word in PADDING]
        found = next((text for text in longer if size < measure(text) <= length), None)
        if found is None:
            return None
        sentences = found
    return sentences


def _most(
    measure: Callable[[list[str]], int], source: Iterator[str], length: int
) -> tuple[list[str], str]:
    """Return as many parts of `source` as fit into `length` by `measure`, and the first beyond."""
    found: list[str] = []
    least = size = measure(found)
    if least > length:
        raise ValueError(f"a length of {length} tokens is too short; {least} are needed")
    fits = 0  # parts of which there is room for all
    while size <= length:
        fits = len(found)
        # The first guess is low, so that few guesses overshoot.
        each = max(1.0, (size - least) / fits) if fits else 24.0
        found += [next(source) for _ in range(max(1, int(0.9 * (length - size) / each)))]
        size = measure(found)
    counts = range(fits, len(found))
    most = counts[bisect_right(counts, length, key=lambda n: measure(found[:n])) - 1]
    return found[:most], found[most]
