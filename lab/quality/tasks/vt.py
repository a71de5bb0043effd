"""Asks as RULER's variable tracking: five variables in noise, each a copy of the one before."""

from __future__ import annotations

from itertools import cycle, pairwise
from random import Random
from string import ascii_uppercase
from typing import Any

from kvcap.evals.quality.prompts import Sample, prompt_ids
from kvcap.evals.quality.ruler import NOISE, string_match_all
from kvcap.evals.quality.text import fit, scatter

MAX_NEW_TOKENS = 30
PLACED = False  # the variables are spread over the text
HOPS = 4
score = string_match_all


def make(rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
    """Make one chain, with its links in order at random places; `depth` is not used."""
    value = str(rng.randrange(10**4, 10**5))
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(rng.choices(ascii_uppercase, k=5))] = None
    chain = list(names)
    lines = [f"VAR {chain[0]} = {value}"]
    lines += [f"VAR {copy} = VAR {name}" for name, copy in pairwise(chain)]
    depths = sorted(rng.random() for _ in lines)

    def write(sentences: list[str]) -> Sample:
        text = "\n".join(scatter(lines, depths, sentences))
        return Sample(
            "Memorize and track the variable assignments hidden in the following text.\n\n" + text,
            f"Question: Find all variables that are assigned the value {value} in the text above.",
            tuple(chain),
            joint="\n",
            opening=f"In the text above, {len(chain)} variables are assigned the value {value}, "
            "they are:",
        )

    return write(fit(lambda s: len(prompt_ids(tokenizer, write(s))), cycle(NOISE), length))
