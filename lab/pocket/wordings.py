"""Words in which the training tasks state facts and ask for them."""

from __future__ import annotations

from random import Random

from kvcap.pocket import words
from kvcap.pocket.facts import Fact, digits
from kvcap.pocket.prose import capital, pick

_STATE = (
    "{S}",
    "{S}",
    "Please remember: {s}",
    "Please remember that {s}",
    "Remember that {s}",
    "Note that {s}",
    "Remember this: {s}",
    "By the way, {s}",
    "I want you to know that {s}",
    "Do not forget: {s}",
    "Keep in mind that {s}",
    "Important: {s}",
    "For later: {s}",
    "{S} Please remember it.",
    "{S} Okay?",
    "{K}: {v}.",
)
_ASK = (
    "What is {k}?",
    "What is {k}?",
    "What is {k}?",
    "Do you remember {k}?",
    "Tell me {k}.",
    "Can you tell me {k}?",
    "Please tell me {k}.",
    "What was {k} again?",
    "{K}?",
    "I forgot {k}. What is it?",
    "Now, what is {k}?",
)
_BARE = (" Answer with the value only.", " Reply with only the value.", " Only the value, please.")


def state(rng: Random, fact: Fact) -> str:
    """State ``fact`` in one of several wordings."""
    return pick(rng, _STATE).format(
        S=fact.statement, s=f"{fact.key} is {fact.value}.", K=capital(fact.key), v=fact.value
    )


def ask(rng: Random, fact: Fact, bare: float = 0.15) -> tuple[str, str]:
    """Return a question for ``fact`` and its answer; ``bare`` is the share of value-only ones."""
    question = pick(rng, _ASK).format(k=fact.key, K=capital(fact.key))
    if rng.random() < bare:
        return question + pick(rng, _BARE), fact.value
    return question, fact.answer


def similar(rng: Random, count: int) -> list[Fact]:
    """Return ``count`` number facts whose keys share all but one or two words."""
    what = pick(rng, words.NUMBER_NAMES)
    adjective, noun = pick(rng, words.ADJECTIVES), pick(rng, words.NOUNS)
    fix = rng.randrange(3)
    keys: dict[str, None] = {}
    while len(keys) < count:
        one = adjective if fix == 0 else pick(rng, words.ADJECTIVES)
        two = noun if fix == 1 else pick(rng, words.NOUNS)
        keys[f"the {what} for the {one} {two}"] = None
    return [Fact(key, digits(rng)) for key in keys]
