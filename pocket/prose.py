"""Endless filler: familiar template sentences in several registers, and unfamiliar text.

Unfamiliar text (word salad, invented words, log lines, random characters) is there so that the
model learns to find a fact in text that looks like nothing it knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random

from kvcap.pocket import words

FAMILIAR = tuple(words.TEMPLATES)
_SLOT = re.compile(r"\{(\w+)\}")
_Parts = tuple[str | tuple[str, ...], ...]


def _compile(template: str) -> _Parts:
    """Split a template into literal strings and the word lists of its slots."""
    pieces = _SLOT.split(template)
    return tuple(words.SLOTS[p] if i % 2 else p for i, p in enumerate(pieces))


_COMPILED: dict[str, tuple[_Parts, ...]] = {
    style: tuple(_compile(t) for t in templates) for style, templates in words.TEMPLATES.items()
}


def pick(rng: Random, options: tuple[str, ...]) -> str:
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


_SALAD = words.ADJECTIVES + words.NOUNS + words.ANIMALS + words.FOODS + words.COLOURS + words.SMALL


def _salad(rng: Random) -> str:
    return capital(" ".join(pick(rng, _SALAD) for _ in range(rng.randint(4, 16)))) + "."


def _invented_sentence(rng: Random) -> str:
    return capital(" ".join(invented(rng, 1, 4) for _ in range(rng.randint(3, 9)))) + "."


def _log_line(rng: Random) -> str:
    name, level = pick(rng, words.NOUNS), pick(rng, ("INFO", "WARN", "ERROR", "debug"))
    stamp = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return pick(
        rng,
        (
            f"[{stamp}] {level} {name}_{rng.randint(0, 99)}: {pick(rng, words.ADJECTIVES)} = "
            f"{rng.randint(0, 9999)}\n",
            f"def {invented(rng)}({name}, x): return {name} + x * {rng.randint(0, 99)}\n",
            f'{{"{name}": {rng.random():.3f}, "{invented(rng)}": "{pick(rng, words.FOODS)}"}}\n',
            f"<p>{pick(rng, words.NOUNS)} {rng.randint(1, 500)}/{rng.randint(1, 500)}</p>\n",
        ),
    )


def _noise(rng: Random) -> str:
    if rng.random() < 0.7:
        return "".join(chr(rng.randint(32, 126)) for _ in range(rng.randint(5, 40)))
    start = rng.choice((0xA1, 0x391, 0x410, 0x3042, 0x4E00, 0x1F600))
    return "".join(chr(start + int(rng.random() * 60)) for _ in range(rng.randint(3, 20)))


UNFAMILIAR: dict[str, Callable[[Random], str]] = {
    "salad": _salad,
    "invented": _invented_sentence,
    "log": _log_line,
    "noise": _noise,
}


def passages(rng: Random, unfamiliar: float = 0.0) -> Iterator[Callable[[], str]]:
    """Yield makers of single sentences, the register changing every 3 to 30 sentences.

    ``unfamiliar`` is the share of passages in one of the :data:`UNFAMILIAR` styles.
    """
    while True:
        if rng.random() < unfamiliar:
            make = UNFAMILIAR[pick(rng, tuple(UNFAMILIAR))]

            def one(make: Callable[[Random], str] = make) -> str:
                return make(rng)

        else:
            style = pick(rng, FAMILIAR)

            def one(style: str = style) -> str:  # type: ignore[misc]
                return sentence(rng, style)

        for _ in range(rng.randint(3, 30)):
            yield one


def filler(rng: Random, unfamiliar: float = 0.0) -> Iterator[str]:
    """Yield filler sentences without end; no sentence states a :class:`~.facts.Fact`."""
    for one in passages(rng, unfamiliar):
        yield one()


def estimate(text: str) -> int:
    """Estimate how many pocket tokens ``text`` takes, without a tokenizer.

    Familiar English has about 5 characters a token; text with few spaces, digits or letters
    beyond ASCII has fewer.
    """
    dense = sum(not (c.islower() or c == " ") for c in text)
    return int((len(text) - dense) / 5 + dense) + 1 if text.isascii() else len(text.encode())


def passage(rng: Random, tokens: int, unfamiliar: float = 0.0) -> list[str]:
    """Return filler sentences of about ``tokens`` tokens in all."""
    sentences: list[str] = []
    for text in filler(rng, unfamiliar):
        if tokens <= 0:
            return sentences
        sentences.append(text)
        tokens -= estimate(text)
    raise AssertionError("filler never ends")
