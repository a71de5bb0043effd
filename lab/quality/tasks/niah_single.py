"""Hides one fact somewhere in a long text, and asks for it below the text."""

from __future__ import annotations

from random import Random
from typing import Any

from kvcap.evals.quality.prompts import Sample, prompt_ids
from kvcap.evals.quality.text import fit, has_word, number_facts
from kvcap.pocket.prose import filler

MAX_NEW_TOKENS = 32


def make(rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
    """Make a text that states one number once, between two of its sentences."""
    while True:
        sample = _draw(rng, tokenizer, length, depth)
        if sample.context.count(sample.answers[0]) == 1:  # filler may have the same number
            return sample


def score(sample: Sample, reply: str) -> float:
    """Return 1 if the reply has the number as a word of its own, else 0."""
    return float(has_word(reply, sample.answers[0]))


def _draw(rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
    fact = number_facts(rng, 1)[0]

    def write(sentences: list[str]) -> Sample:
        index = int(depth * (len(sentences) + 1))
        lines = [*sentences[:index], fact.statement, *sentences[index:]]
        return Sample(" ".join(lines), fact.question, (fact.value,), cue="Answer:")

    return write(fit(lambda s: len(prompt_ids(tokenizer, write(s))), filler(rng), length))
