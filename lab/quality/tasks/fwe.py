"""Asks as RULER's frequent words extraction: which coded words are the most frequent?"""

from __future__ import annotations

from itertools import repeat
from math import pi
from random import Random
from string import ascii_lowercase
from typing import Any

from kvcap.evals.quality.prompts import Sample, prompt_ids
from kvcap.evals.quality.ruler import string_match_all
from kvcap.evals.quality.text import fit

MAX_NEW_TOKENS = 50
PLACED = False  # words are spread over the text
QUERIED = 3
DOTS = "..."  # the most frequent word of all, which the question excludes
VOCABULARY = 50  # tokens of the text for each coded word
LEAST = 4  # least occurrences of the third most frequent word
score = string_match_all


def make(rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
    """Make coded words in random order; `depth` is not used.

    The word of rank k has the share `6 / (π k)²`; the dots have rank 1.
    """
    coded: dict[str, None] = {}
    while len(coded) < max(2 * QUERIED, length // VOCABULARY):
        coded["".join(rng.choices(ascii_lowercase, k=6))] = None
    order = rng.getrandbits(32)

    def write(count: int, dots: list[str]) -> Sample:
        entries = [w for k, w in enumerate(coded, 2) for _ in range(round(count * _share(k)))]
        entries += [DOTS] * round(count * _share(1))
        entries += dots
        Random(order).shuffle(entries)
        return Sample(
            "Read the following coded text and track the frequency of each coded word. Find the "
            f"three most frequently appeared coded words. {' '.join(entries)}",
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are "
            "the three most frequently appeared words in the above coded text?",
            tuple(coded)[:QUERIED],
            joint="\n",
            opening="According to the coded text above, the three most frequently appeared words "
            "are:",
        )

    def measure(count: int, dots: list[str]) -> int:
        return len(prompt_ids(tokenizer, write(count, dots)))

    least = count = round(LEAST / _share(1 + QUERIED))
    if (needed := measure(least, [])) > length:
        raise ValueError(f"a length of {length} tokens is too short; {needed} are needed")
    step = 1 << length.bit_length()
    while step := step >> 1:
        if measure(count + step, []) <= length:
            count += step
    return write(count, fit(lambda dots: measure(count, dots), repeat(DOTS), length))


def _share(rank: int) -> float:
    """Return the share of a rank by the zeta distribution with exponent 2; shares sum to 1."""
    return 6 / (pi * rank) ** 2
