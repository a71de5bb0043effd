"""Facts to remember: a key, a value, and natural sentences that state it and ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvcap.pocket import words
from kvcap.pocket.prose import capital, invented, pick


@dataclass(frozen=True)
class Fact:
    """A key with its value, which has a plain statement, question and answer in English."""

    key: str
    value: str

    @property
    def statement(self) -> str:
        """Return a sentence such as ``"The code for the blue door is 4821."``."""
        return f"{capital(self.key)} is {self.value}."

    @property
    def question(self) -> str:
        """Return a question such as ``"What is the code for the blue door?"``."""
        return f"What is {self.key}?"

    @property
    def answer(self) -> str:
        """Return the statement with "my" turned into "your"."""
        return f"{capital(self.theirs)} is {self.value}."

    @property
    def theirs(self) -> str:
        """Return the key as the assistant says it: "my locker code" becomes "your locker code"."""
        return "your " + self.key[3:] if self.key.startswith("my ") else self.key


def digits(rng: Random) -> str:
    """Return a number as text: four digits mostly, three to seven at times."""
    size = 4 if rng.random() < 0.75 else rng.randint(3, 7)
    return str(rng.randrange(10 ** (size - 1), 10**size))


def word(rng: Random) -> str:
    """Return a word fit to be a password or a name: known or invented, at times with digits."""
    if rng.random() < 0.4:
        return invented(rng)
    known = pick(rng, words.COLOURS + words.ANIMALS + words.FOODS + words.CITIES)
    return known + str(rng.randint(1, 99)) if rng.random() < 0.1 else known


def _object(rng: Random) -> str:
    noun = pick(rng, words.NOUNS)
    return f"{pick(rng, words.ADJECTIVES)} {noun}" if rng.random() < 0.85 else noun


def _thing(rng: Random) -> Fact:
    if rng.random() < 0.15:
        return Fact(f"the password for the {_object(rng)}", word(rng))
    return Fact(f"the {pick(rng, words.NUMBER_NAMES)} for the {_object(rng)}", digits(rng))


def _person(rng: Random) -> Fact:
    name = pick(rng, words.FIRST_NAMES)
    if rng.random() < 0.7:
        name += " " + pick(rng, words.LAST_NAMES)
    if rng.random() < 0.35:
        what = pick(rng, tuple(words.PERSON_WORDS))
        return Fact(f"{name}'s {what}", pick(rng, words.PERSON_WORDS[what]))
    return Fact(f"{name}'s {pick(rng, words.PERSON_NUMBERS)}", digits(rng))


def _place(rng: Random) -> Fact:
    what = pick(rng, words.NUMBER_NAMES)
    return Fact(f"the {what} of the {_object(rng)} in {pick(rng, words.CITIES)}", digits(rng))


def _own(rng: Random) -> Fact:
    if rng.random() < 0.4:
        what = pick(rng, (*words.PERSON_WORDS, "name", "last name"))
        values = {"name": words.FIRST_NAMES, "last name": words.LAST_NAMES} | words.PERSON_WORDS
        return Fact(f"my {what}", pick(rng, values[what]))
    return Fact(f"my {_object(rng)} {pick(rng, words.NUMBER_NAMES)}", digits(rng))


def _coined(rng: Random) -> Fact:
    value = digits(rng) if rng.random() < 0.7 else word(rng)
    return Fact(f"the {pick(rng, words.NUMBER_NAMES)} for {capital(invented(rng))}", value)


def _magic(rng: Random) -> Fact:
    """Return a fact in the wording of the needle-in-a-haystack tests in common use."""
    key = f"{pick(rng, words.ADJECTIVES)}-{pick(rng, words.NOUNS)}"
    return Fact(f"the special magic number for {key}", digits(rng))


KINDS: dict[str, Callable[[Random], Fact]] = {
    "thing": _thing,
    "person": _person,
    "place": _place,
    "own": _own,
    "coined": _coined,
    "magic": _magic,
}
_MIX = ("thing",) * 5 + ("person",) * 3 + ("place",) * 2 + ("own", "coined", "magic")


def facts(rng: Random, count: int, kind: str | None = None) -> list[Fact]:
    """Return ``count`` facts with distinct keys, of one of :data:`KINDS` or of all mixed."""
    by_key: dict[str, Fact] = {}
    while len(by_key) < count:
        fact = KINDS[kind or pick(rng, _MIX)](rng)
        by_key.setdefault(fact.key.lower(), fact)
    return list(by_key.values())
