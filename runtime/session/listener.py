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
    """A base class of objects that get an answer's tokens and may end it; this one does nothing."""

    reads_logits = False
    """Says whether it limits what is drawn or looks at logits: nobody else may draw then.

    It may become False with a token, as nothing is limited any more.
    """
    may_end = False
    """Says whether any token may end the answer: it must take each before a read begins."""
    ends = frozenset[int]()
    """Holds the tokens by which the model ends the answer, besides those of the settings."""

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return a mask of the vocabulary's first tokens that may come next; None: any may.

        Asked only if it reads logits. A token may come if it is in the masks of all listeners; a
        mask that has none of those of the listeners before is left out.
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
        """Finish, since no token follows; return why the answer ends, if that shows only here."""
        return None


class LeastTokens(Listener):
    """A listener that lets no token end an answer before it has so many.

    Args:
        least: tokens.
        ends: tokens by which the model would end it.
        vocabulary: of the model.
    """

    reads_logits = True

    def __init__(self, least: int, ends: frozenset[int], vocabulary: int) -> None:
        self._left = least
        self._mask = np.ones(vocabulary, np.bool_)
        self._mask[[end for end in ends if end < vocabulary]] = False

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return a mask without the ends, until there are tokens enough."""
        return self._mask if self._left > 0 else None

    def token(self, number: int, logits: Any) -> None:
        """Count the token."""
        self._left -= 1


class AnswerLimits(Listener):
    """A listener that ends an answer of `most` tokens, or where a full cache may not evict."""

    def __init__(self, most: int, loop: Loop) -> None:
        self._left, self._loop = most, loop
        self.may_end = loop.may_be_full

    def token(self, number: int, logits: Any) -> FinishReason | None:
        """Count the token; end the answer where none is left, or the cache has no room."""
        self._left -= 1
        if self._left <= 0:
            return "length"
        return "full" if self._loop.on_full == "stop" and not self._loop.cache.spare else None
