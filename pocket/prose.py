"""Endless filler: template sentences in several registers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import TypeVar

from kvcap.pocket import words

FAMILIAR = tuple(words.TEMPLATES)
_SLOT = re.compile(r"\{(\w+)\}")
Option = TypeVar("Option")
_Parts = tuple[str | tuple[str, ...], ...]


def _compile(template: str) -> _Parts:
    """Split a template into literal strings and the word lists of its slots."""
    pieces = _SLOT.split(template)
    return tuple(words.SLOTS[p] if i % 2 else p for i, p in enumerate(pieces))


_COMPILED: dict[str, tuple[_Parts, ...]] = {
    style: tuple(_compile(t) for t in templates) for style, templates in words.TEMPLATES.items()
}


def pick(rng: Random, options: Sequence[Option]) -> Option:
    """Return one of ``options``; several times faster than ``rng.choice`` and as even."""
    return options[int(rng.random() * len(options))]


def capital(text: str) -> str:
    """Return ``text`` with its first letter in upper case and the rest untouched."""
    return text[:1].upper() + text[1:]


def listing(items: list[str]) -> str:
    """Join ``items`` as English does: ``"a, b and c"``."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def sentence(rng: Random, style: str) -> str:
    """Return one sentence of a familiar register such as ``"story"`` or ``"weather"``."""
    templates = _COMPILED[style]
    parts = templates[int(rng.random() * len(templates))]
    return capital("".join(p if isinstance(p, str) else pick(rng, p) for p in parts))


def invented(rng: Random, low: int = 2, high: int = 4) -> str:
    """Return a made-up lower-case word of ``low`` to ``high`` syllables."""
    return "".join(pick(rng, words.SYLLABLES) for _ in range(rng.randint(low, high)))


def passages(
    rng: Random, others: Sequence[Callable[[Random], str]] = (), share: float = 0.0
) -> Iterator[Callable[[], str]]:
    """Yield makers of single sentences, the register changing every 3 to 30 sentences.

    Args:
        rng: draws them.
        others: makers of text in no familiar register.
        share: of passages that are by one of them.
    """
    while True:
        other = rng.random() < share
        make = pick(rng, others) if other else partial(sentence, style=pick(rng, FAMILIAR))
        for _ in range(rng.randint(3, 30)):
            yield partial(make, rng)


def filler(rng: Random) -> Iterator[str]:
    """Yield filler sentences without end; no sentence states a :class:`~.facts.Fact`."""
    for one in passages(rng):
        yield one()
