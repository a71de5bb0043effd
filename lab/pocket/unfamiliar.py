"""Text that looks like nothing a model knows, and passages of it between familiar ones.

Word salad, invented words, log lines and random characters are there so that the model learns to
find a fact in any text.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvcap.pocket import words
from kvcap.pocket.prose import capital, invented, passages, pick

SMALL = "the a of and to in it was for on with that as at by from or not but all so if then"
_LISTED = words.ADJECTIVES + words.NOUNS + words.ANIMALS + words.FOODS + words.COLOURS
_SALAD = (*_LISTED, *SMALL.split())


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
    for one in passages(rng, tuple(UNFAMILIAR.values()), unfamiliar):
        if tokens <= 0:
            return sentences
        sentences.append(one())
        tokens -= estimate(sentences[-1])
    raise AssertionError("filler never ends")
