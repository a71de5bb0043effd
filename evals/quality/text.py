"""Makes the text of tasks and the demo: facts nobody can guess, and filler of exact length."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from random import Random

from kvcap.pocket import words
from kvcap.pocket.facts import Fact, facts

# Short words that fill up a length, one token each in most vocabularies.
PADDING = ("so", "and", "it", "a", ".", ",")

WORD = re.compile(r"[^\W\d_]+")
KEY_WORDS = {  # words of keys, without those that all keys of a kind have
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
    by_key: dict[str, Fact] = {}
    while len(by_key) < count:
        fact = facts(rng, 1)[0]
        known = fact.key.lower() in {other.key.lower() for other in by_key.values()}
        own = fact.key.startswith("my ")
        if fact.value.isdigit() and len(fact.value) >= 4 and not own and not known:
            by_key.setdefault(fact.value, fact)
    return list(by_key.values())


def has_word(text: str, word: str) -> bool:
    """Return whether `text` has `word`, not as a part of a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def names_no_other(answer: str, fact: Fact) -> bool:
    """Return whether the sentence with a fact's value names no other key than the fact's.

    Another door, person or place, mentioned before or invented, is recognised by its words: they
    are words of keys, or have a capital letter inside the sentence.
    """
    mine = {word.lower() for word in WORD.findall(f"{fact.key} {fact.theirs}")}
    sentence = next((s for s in re.split(r"[.!?\n]", answer) if has_word(s, fact.value)), "")
    for index, word in enumerate(WORD.findall(sentence)):
        capital = index > 0 and len(word) > 1 and word[0].isupper()
        if word.lower() not in mine and (capital or word.lower() in KEY_WORDS):
            return False
    return True


def scatter(lines: Sequence[str], depths: Sequence[float], sentences: list[str]) -> list[str]:
    """Return `sentences` with every line inserted at its depth, 0 (before all) to 1 (after all)."""
    indices = [int(depth * (len(sentences) + 1)) for depth in depths]
    result = list(sentences)
    for index, line in sorted(zip(indices, lines, strict=True), reverse=True):
        result.insert(index, line)
    return result


def fit(measure: Callable[[list[str]], int], filler: Iterator[str], length: int) -> list[str]:
    """Return sentences of `filler` for which the whole prompt has exactly `length` tokens.

    `measure` counts the tokens of a prompt with given sentences. The last sentence is cut at a
    word, and short words fill a gap.

    Raises:
        ValueError: the prompt is longer even without filler, or no word fills the gap.
    """
    fitted = _fitted(measure, filler, length)
    if fitted is None:
        raise ValueError(f"no text of exactly {length} tokens was found; try {length + 1}")
    return fitted


def fit_whole(
    measure: Callable[[list[str], list[str]], int],
    items: Iterator[str],
    filler: Iterator[str],
    length: int,
) -> tuple[list[str], list[str]]:
    """Return whole items, and sentences, for which `measure(items, sentences)` is `length`.

    There are as many items as fit; sentences fill the rest, as by `fit`.

    Raises:
        ValueError: see `fit`.
    """
    chosen, _ = _most(lambda some: measure(some, []), items, length)
    while (sentences := _fitted(lambda some: measure(chosen, some), filler, length)) is None:
        if not chosen:
            raise ValueError(f"no text of exactly {length} tokens was found; try {length + 1}")
        chosen.pop()  # the gap was too small for any word
    return chosen, sentences


def _fitted(
    measure: Callable[[list[str]], int], filler: Iterator[str], length: int
) -> list[str] | None:
    """Return the result of `fit`; None if no word fills the gap."""
    sentences, beyond = _most(measure, filler, length)
    words = beyond.split(" ")
    heads = [[*sentences, *([" ".join(words[:n])] if n else [])] for n in range(len(words))]
    sentences = heads[bisect_right(heads, length, key=measure) - 1]
    while (size := measure(sentences)) < length:
        longer = [[*sentences, word] for word in PADDING]
        if (
            sentences
        ):  # if sentences are lines, a word needs fewer tokens at the end of the last one
            longer += [[*sentences[:-1], f"{sentences[-1]} {word}"] for word in PADDING]
        fitting = next((text for text in longer if size < measure(text) <= length), None)
        if fitting is None:
            return None
        sentences = fitting
    return sentences


def _most(
    measure: Callable[[list[str]], int], source: Iterator[str], length: int
) -> tuple[list[str], str]:
    """Return as many parts of `source` as fit into `length` by `measure`, and the next one."""
    taken: list[str] = []
    least = size = measure(taken)
    if least > length:
        raise ValueError(f"a length of {length} tokens is too short; {least} are needed")
    fits = 0  # a number of parts that is known to fit
    while size <= length:
        fits = len(taken)
        # The first guess of a part's tokens is high, so that few guesses overshoot.
        each = max(1.0, (size - least) / fits) if fits else 24.0
        taken += [next(source) for _ in range(max(1, int(0.9 * (length - size) / each)))]
        size = measure(taken)
    counts = range(fits, len(taken))
    most = counts[bisect_right(counts, length, key=lambda n: measure(taken[:n])) - 1]
    return taken[:most], taken[most]
