"""Separates the concerns of an answer: its text, log probabilities, a form that it fits, limits.

Each is a listener. Whoever makes an answer chooses them once, and gives all of them every token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.session.engine import Loop
from kvcap.runtime.session.stats import FinishReason


class Listener:
    """A concern of an answer that takes its tokens and may end it; this one does nothing."""

    reads_logits = False
    """True where it limits what is drawn, or looks at logits: nobody else may draw tokens then."""
    may_end = False
    """True where it may end the answer behind any token: no read can begin before it took that."""
    ends = frozenset[int]()
    """Tokens by which the model ends the answer, besides those of the settings."""

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return which of the vocabulary's first tokens may come next; None: any may.

        Asked where it reads logits; of an answer's listeners only one may say so.
        """
        return None

    def token(self, number: int, logits: Any) -> FinishReason | None:
        """Take the next token; return why the answer ends behind it, or None.

        Args:
            number: the token; one by which the model ends the answer is never given.
            logits: [1, V], from which it was drawn, if any listener reads them.
        """
        return None

    def finish(self) -> FinishReason | None:
        """Take it that no token follows; return the reason, if it shows only here."""
        return None


class AnswerLimits(Listener):
    """A listener that ends an answer of `most` tokens, and where its cache is to be full."""

    def __init__(self, most: int, loop: Loop) -> None:
        self._left, self._loop = most, loop
        self.may_end = loop.may_be_full

    def token(self, number: int, logits: Any) -> FinishReason | None:
        """Count the token; it is the last one where none is left, or the cache has no room."""
        self._left -= 1
        if self._left <= 0:
            return "length"
        return "full" if self._loop.on_full == "stop" and not self._loop.cache.spare else None
