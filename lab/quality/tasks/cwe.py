"""Asks as RULER's common words extraction: ten words of a list occur more often than others."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from kvcap.evals.quality.prompts import Sample, prompt_ids
from kvcap.evals.quality.ruler import string_match_all
from kvcap.evals.quality.text import fit_whole
from kvcap.pocket import words
from kvcap.pocket.prose import filler, invented

MAX_NEW_TOKENS = 120
PLACED = False  # words are spread over the list
COMMON = 10
OFTEN, SELDOM = 30, 3  # occurrences of a common word, and of any other
SHORT = 4096  # below so many tokens words occur less often, in the same proportion
score = string_match_all


def make(rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
    """Make a numbered list in random order; `depth` is not used."""
    often, seldom = (OFTEN, SELDOM) if length >= SHORT else (OFTEN // SELDOM, 1)
    known = sorted({word.lower() for word in (*words.NOUNS, *words.ANIMALS, *words.FOODS)})
    drawn = _distinct_words(rng, known)
    common = [next(drawn) for _ in range(COMMON)]
    order = rng.getrandbits(32)

    def write(others: list[str], prose: list[str]) -> Sample:
        entries = [word for word in common for _ in range(often)]
        entries += [word for word in others for _ in range(seldom)]
        Random(order).shuffle(entries)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))
        task = (
            "Below is a numbered list of words. In these words, some appear more often than "
            "others. Memorize the ones that appear most often."
        )
        return Sample(
            "\n".join([" ".join([*prose, task]), numbered]),
            f"Question: What are the {COMMON} most common words in the above list?",
            tuple(common),
            joint="\n",
            opening=f"The {COMMON} words that appear most often in the list are:",
        )

    def measure(others: list[str], prose: list[str]) -> int:
        return len(prompt_ids(tokenizer, write(others, prose)))

    return write(*fit_whole(measure, drawn, filler(rng), length))


def _distinct_words(rng: Random, known: list[str]) -> Iterator[str]:
    """Yield words in random order, first English, then invented; none is part of another."""
    rng.shuffle(known)
    drawn: list[str] = []
    text = " "  # all words drawn so far
    left = iter(known)
    while True:
        word = next(left, "") or invented(rng, 3, 5)
        if word not in text and not any(other in word for other in drawn):
            drawn.append(word)
            text += f"{word} "
            yield word
