"""States a fact in each turn of a long conversation, and asks for one of them in the last turn.

Every message of the user states a number among sentences about other things. The facts that are not
of the question are distractors of the same form.
"""

from __future__ import annotations

from random import Random
from typing import Any

from kvcap.evals.quality.prompts import Sample, prompt_ids
from kvcap.evals.quality.text import fit, has_word, number_facts
from kvcap.pocket.prose import filler

MAX_NEW_TOKENS = 32
TURNS, TURN = 40, 64  # most turns, and about the least tokens of a turn
REPLY = "I see."


def make(rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
    """Make a conversation in which the fact of the question stands at a depth."""
    turns = max(2, min(TURNS, length // TURN))
    while True:
        facts = number_facts(rng, turns)
        target = facts[min(turns - 1, int(depth * turns))]

        def write(sentences: list[str], facts: Any = facts, target: Any = target) -> Sample:
            before: list[tuple[str, str]] = []
            for index, fact in enumerate(facts):
                rest = sentences[index::turns]
                middle = len(rest) // 2
                message = " ".join([*rest[:middle], fact.statement, *rest[middle:]])
                before += [("user", message), ("assistant", REPLY)]
            return Sample("", target.question, (target.value,), joint="", before=tuple(before))

        sample = write(fit(lambda s: len(prompt_ids(tokenizer, write(s))), filler(rng), length))
        before = " ".join(text for _, text in sample.before)
        if before.count(target.value) == 1:  # another sentence may have the same number
            return sample


def score(sample: Sample, reply: str) -> float:
    """Return 1 if the reply has the number as a word of its own, else 0."""
    return float(has_word(reply, sample.answers[0]))
