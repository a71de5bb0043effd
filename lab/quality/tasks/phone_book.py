"""Asks for the number of one name in a list of names and numbers (KeyDiff, Table 17)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from string import ascii_uppercase
from typing import Any

from kvcap.evals.quality.prompts import Sample, prompt_ids
from kvcap.evals.quality.text import fit_whole, has_word, scatter
from kvcap.pocket import words
from kvcap.pocket.facts import Fact
from kvcap.pocket.prose import filler, pick

MAX_NEW_TOKENS = 32


def make(rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
    """Make a list with the requested entry at `depth`."""
    book = _entries(rng)
    entry = next(book)
    fact = Fact(f"{entry.key}'s phone number", entry.value)

    def write(entries: list[str], prose: list[str]) -> Sample:
        lines = scatter([_line(entry)], [depth], entries)
        return Sample(
            "\n".join([" ".join([*prose, "Here is a phone book."]), *lines]),
            fact.question,
            (fact.value,),
            cue="Answer:",
        )

    def measure(entries: list[str], prose: list[str]) -> int:
        return len(prompt_ids(tokenizer, write(entries, prose)))

    return write(*fit_whole(measure, map(_line, book), filler(rng), length))


def score(sample: Sample, reply: str) -> float:
    """Return 1 if the reply has the number as a word of its own, else 0."""
    return float(has_word(reply, sample.answers[0]))


def _line(entry: Fact) -> str:
    return f"{entry.key}: {entry.value}"


def _entries(rng: Random) -> Iterator[Fact]:
    """Yield distinct names with distinct numbers of seven digits."""
    names, numbers = set[str](), set[str]()
    while True:
        # Pairs of first and last names run out; with initials there are enough.
        initial = f" {rng.choice(ascii_uppercase)}." if len(names) > 2000 else ""
        name = f"{pick(rng, words.FIRST_NAMES)}{initial} {pick(rng, words.LAST_NAMES)}"
        number = str(rng.randrange(10**6, 10**7))
        if name not in names and number not in numbers:
            names.add(name)
            numbers.add(number)
            yield Fact(name, number)
