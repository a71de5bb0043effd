"""Asks for a passkey, a number that the text tells the reader to remember.

A. Mohtashami, M. Jaggi, 2023, arXiv 2305.16300, but with prose around it. OBCache's form of it, in
RULER's wording, is `niah_single_2`.
"""

from __future__ import annotations

from random import Random
from typing import Any

from kvcap.evals.quality.prompts import Sample, prompt_ids
from kvcap.evals.quality.ruler import distinct, string_match_all
from kvcap.evals.quality.text import fit, scatter
from kvcap.pocket.prose import filler

MAX_NEW_TOKENS = 32
score = string_match_all


def make(rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
    """Make a text that states a number of seven digits twice, in two sentences at `depth`."""
    key = distinct(rng)("number")
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."

    def write(sentences: list[str]) -> Sample:
        text = " ".join(scatter([needle], [depth], sentences))
        return Sample(
            "There is a pass key hidden in the following text. Find it and memorize it. I will "
            f"quiz you about it afterwards.\n\n{text}",
            "What is the pass key?",
            (key,),
            opening="The pass key is",
        )

    return write(fit(lambda s: len(prompt_ids(tokenizer, write(s))), filler(rng), length))
