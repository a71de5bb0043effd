"""Follows a model's thoughts token by token, and closes them once they reach their budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.session.detokenizer import Detokenizer
from kvcap.runtime.session.encoding import encode_with
from kvcap.runtime.session.listener import Listener
from kvcap.runtime.session.template_forms import THOUGHTS
from kvcap.runtime.types import Span

MARK_SEEN = 16  # tokens that a mark of thoughts has at most, with the space behind it
EFFORTS = {"none": 0, "minimal": 128, "low": 512, "medium": 2048, "high": 8192}
"""Holds the thinking budget of each `reasoning_effort`; with any other, thoughts have no bound."""


def mark_opened(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Return the mark by which the end of a prompt opens thoughts; "": it does not."""
    last = list(prompt)[-MARK_SEEN:]
    text = tokenizer.backend_tokenizer.decode(last, skip_special_tokens=False).rstrip()
    return next((mark for mark in THOUGHTS if text.endswith(mark)), "")


def with_marks(tokenizer: Any, ids: Sequence[int], span: Span) -> Span | None:
    """Return the span of thoughts with the mark before them and the blank text behind them.

    None: no mark closes them, so that they are what was answered; or nothing was read behind them.

    Args:
        tokenizer: of the model.
        ids: tokens that were read.
        span: thoughts among them, up to the mark that closes them.
    """
    start, stop = span

    def text(first: int, end: int) -> str:
        known = [token for token in ids[first:end] if token >= 0]
        some: str = tokenizer.backend_tokenizer.decode(known, skip_special_tokens=False)
        return some

    marks = [a for a, b in THOUGHTS.items() if b in text(max(start, stop - MARK_SEEN), stop)]
    if not marks:
        return None
    before = range(start - 1, max(0, start - MARK_SEEN) - 1, -1)
    start = next((i for i in before if text(i, start).lstrip().startswith(marks[0])), start)
    while stop < len(ids) and text(stop, stop + 1).isspace():
        stop += 1
    return (start, stop) if stop < len(ids) else None


class Thoughts(Listener):
    """A listener that finds an answer's thoughts, and closes them after `budget` tokens.

    Thoughts are closed by having the tokens of the closing mark come next, so that the model goes
    on with its answer behind them.

    Args:
        tokenizer: of the model.
        prompt: the last tokens before the answer, which may open thoughts.
        budget: tokens of thoughts, at most; None: they have no bound.
        opened: called when thoughts begin, with their first token's place in the answer.
        closed: called when they end, with the place behind them.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        budget: int | None = None,
        opened: Callable[[int], None] = lambda first: None,
        closed: Callable[[int], None] = lambda stop: None,
    ) -> None:
        self.reads_logits = budget is not None
        self._tokenizer, self._budget = tokenizer, budget
        self._opened, self._closed = opened, closed
        self._detokenizer = Detokenizer(tokenizer, prompt, special=True)
        self._text = ""  # of the answer, as much as may be part of a mark
        self._closing = ""  # the mark that ends the thoughts; "": none are open
        self._over = False  # True: no thoughts are open, and none will be
        self._tokens = self._first = 0  # of the answer; those before the thoughts' own
        self._forced = deque[int]()  # tokens that come next
        if mark := mark_opened(tokenizer, prompt):
            self._open(mark)

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return a mask with the next token that closes the thoughts, where they are too long."""
        if not self._forced:
            return None
        mask = np.zeros(self._forced[0] + 1, np.bool_)
        mask[-1] = True
        return mask

    def token(self, number: int, logits: Any) -> None:
        """Find out whether the token opens thoughts or closes them."""
        self._tokens += 1
        if self._forced and number == self._forced[0]:
            self._forced.popleft()
        self._follow(number)
        self.reads_logits = self.reads_logits and not (self._over and not self._forced)

    def _follow(self, number: int) -> None:
        if self._over:
            return
        self._text += self._detokenizer.put(number)
        if not self._closing:
            begins = self._text.lstrip()
            mark = next((mark for mark in THOUGHTS if begins.startswith(mark)), None)
            if mark is None:
                self._over = not any(mark.startswith(begins) for mark in THOUGHTS)
                return
            self._first = self._tokens
            self._text = begins.removeprefix(mark)
            self._open(mark)
        if self._closing in self._text:
            self.finish()
        elif not self._forced:
            self._text = self._text[-len(self._closing) :]
            self._bound()

    def finish(self) -> None:
        """Take open thoughts as closed, since no token of theirs follows."""
        if self._closing and not self._over:
            self._over = True
            self._closed(self._tokens)

    def _open(self, mark: str) -> None:
        self._closing = THOUGHTS[mark]
        self._opened(self._first)
        self._bound()

    def _bound(self) -> None:
        """Have the closing mark come next if the thoughts are as long as they may be."""
        if self._budget is not None and self._tokens - self._first >= self._budget:
            closing = f"\n{self._closing}\n\n"
            self._forced.extend(encode_with(self._tokenizer, closing, follows=True))
