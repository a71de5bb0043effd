"""Makes RULER's needles and haystacks, and scores replies, for all tasks of its families.

C.-P. Hsieh et al., 2024, arXiv 2404.06654; lengths of answers and scores are those of
https://github.com/NVIDIA/RULER (scripts/data/synthetic/constants.py, scripts/eval/synthetic). In
contrast to RULER, text is generated, and prompts have no solved example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from random import Random
from statistics import fmean
from typing import Any, Literal
from uuid import UUID

from kvcap.evals.quality.prompts import Sample, prompt_ids
from kvcap.evals.quality.text import fit, fit_whole, scatter
from kvcap.pocket import words
from kvcap.pocket.prose import filler, listing, pick

Values = Literal["number", "word", "uuid"]
NEEDLE = "One of the special magic {}s for {} is: {}."
# The haystack of passkey retrieval (A. Mohtashami, M. Jaggi, 2023, arXiv 2305.16300).
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)


def string_match_all(sample: Sample, reply: str) -> float:
    """Return the share of the answers that the reply has, in any case."""
    return fmean(float(answer.lower() in reply.lower()) for answer in sample.answers)


@dataclass(frozen=True)
class Needles:
    """A task of finding needles, sentences that give keys their values, in a haystack.

    Args:
        values: kind of the values, which the question asks for.
        keys: kind of the keys.
        haystack: the text around them: sentences that repeat, prose, or other needles.
        queried: keys that a question asks for.
        each: values of a key.
        others: further keys in the text that no question asks for, with one value each.
    """

    values: Values = "number"
    keys: Values = "word"
    haystack: Literal["noise", "prose", "needles"] = "prose"
    queried: int = 1
    each: int = 1
    others: int = 0

    def make(self, rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
        """Make a text with all needles; several answers are spread evenly from `depth` on."""
        draw = distinct(rng)
        queried = [draw(self.keys) for _ in range(self.queried)]
        facts = [(key, draw(self.values)) for key in queried for _ in range(self.each)]
        answers = tuple(value for _, value in facts)
        # The first depth is not taken modulo 1, so that 1 is the end and not the start.
        depths = [(depth + i / len(facts)) % 1 if i else depth for i in range(len(facts))]
        rng.shuffle(depths)
        for _ in range(self.others):
            facts.append((draw(self.keys), draw(self.values)))
            depths.append(rng.random())
        needles = [NEEDLE.format(self.values, *pair) for pair in facts]
        what, many = self.values, len(answers) > 1
        plural, are = ("s", "are") if many else ("", "is")
        every = " all" if self.each > 1 else ""
        named = f"the special magic {what}{plural} for {listing(queried)} mentioned in the provided"

        def write(sentences: list[str], prose: list[str]) -> Sample:
            lines = [*prose, *scatter(needles, depths, sentences)]
            text = (" " if self.haystack == "prose" else "\n").join(lines)
            return Sample(
                f"Some special magic {what}s are hidden within the following text. Make sure to "
                f"memorize it. I will quiz you about the {what}s afterwards.\n{text}",
                f"What {are}{every} {named} text?",
                answers,
                joint="\n",
                opening=f"T{named[1:]} text {are}",
            )

        def measure(sentences: list[str], prose: list[str]) -> int:
            return len(prompt_ids(tokenizer, write(sentences, prose)))

        if self.haystack == "needles":
            hay = iter(lambda: NEEDLE.format(what, draw(self.keys), draw(what)), "")
            return write(*fit_whole(measure, hay, filler(rng), length))
        around = filler(rng) if self.haystack == "prose" else cycle(NOISE)
        return write(fit(lambda sentences: measure(sentences, []), around, length), [])


def distinct(rng: Random) -> Callable[[Values], str]:
    """Return a function that draws magic words, seven-digit numbers and UUIDs, none twice."""
    drawn = set[str]()

    def draw(kind: Values) -> str:
        while True:
            value = _magic(rng, kind, len(drawn))
            if value not in drawn:
                drawn.add(value)
                return value

    return draw


def _magic(rng: Random, kind: Values, drawn: int) -> str:
    if kind == "number":
        return str(rng.randrange(10**6, 10**7))
    if kind == "uuid":
        return str(UUID(int=rng.getrandbits(128), version=4))
    first = [pick(rng, words.ADJECTIVES)] if drawn > 2000 else []  # pairs of words run out
    return "-".join([*first, pick(rng, words.ADJECTIVES), pick(rng, words.NOUNS)])
