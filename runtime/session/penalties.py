"""Counts what an answer's own tokens lose in their logits, in every engine that draws tokens.

The penalties of presence and frequency are those of OpenAI's API. DRY ("don't repeat yourself", as
in llama.cpp) lowers a token that would go on with a passage as the answer went on with it before,
the more the longer that passage is: small models else circle on one sentence. Unlike llama.cpp's it
looks at the answer alone, so that nothing keeps an answer from saying what was told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

PENALTIES = ("presence_penalty", "frequency_penalty", "dry_multiplier")
"""Names the settings that say so."""
BASE = 1.75
"""Says how many times as much is taken for each further token of a passage, as in llama.cpp."""
ALLOWED = 8
"""Says how many tokens of a passage may be said again before any is lowered."""
LONGEST = 64  # tokens of a passage that count: it has long lowered the next one beyond all others


def penalises(config: Any) -> bool:
    """Return whether an answer's own tokens change which token is drawn next."""
    return any(_values(config))


def penalties(config: Any, answer: Sequence[int]) -> dict[int, float]:
    """Return what is subtracted from the logits of tokens, by their ids.

    Args:
        config: settings of generation.
        answer: the answer's tokens so far.
    """
    presence, frequency, dry = _values(config)
    by_token = dict[int, float]()
    if presence or frequency:
        by_token = {token: presence + frequency * times for token, times in Counter(answer).items()}
    if dry:
        for token, length in _continuations(answer).items():
            by_token[token] = by_token.get(token, 0.0) + dry * BASE ** (length - ALLOWED)
    return by_token


def _values(config: Any) -> tuple[float, float, float]:
    presence, frequency, dry = (getattr(config, name, None) or 0.0 for name in PENALTIES)
    return presence, frequency, dry


def _continuations(answer: Sequence[int]) -> dict[int, int]:
    """Return the tokens that followed a passage with which `answer` ends, with its longest length.

    Passages of fewer than `ALLOWED` tokens do not count.
    """
    longest, end = dict[int, int](), len(answer)
    last = answer[-ALLOWED:]
    for start in range(end - ALLOWED):
        stop = start + ALLOWED
        if answer[stop - 1] != last[-1] or answer[start:stop] != last:
            continue
        length = ALLOWED
        while length < min(stop, LONGEST) and answer[stop - 1 - length] == answer[end - 1 - length]:
            length += 1
        longest[answer[stop]] = max(length, longest.get(answer[stop], 0))
    return longest
