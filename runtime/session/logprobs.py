"""Notes the log probabilities of an answer's tokens, with the text of each token.

They are of the model's own distribution, as OpenAI's API gives them: temperature, penalties, a JSON
schema and the other settings change what is drawn, not what is noted. Knows no conversation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcap.runtime.session.detokenizer import LOST, byte_tokens
from kvcap.runtime.session.engine import TokenSampler
from kvcap.runtime.session.listener import Listener

LEAST = -9999.0  # stands for a probability of 0, of which JSON has no logarithm


class Logprob(NamedTuple):
    """A token with the probability that it had."""

    token: int
    text: str
    bytes: bytes
    """Holds the token's bytes; `text` has no letter for them if a letter spans several tokens."""
    logprob: float | None
    """Holds the natural logarithm of its probability; None: no token was before it."""
    top: tuple[Logprob, ...] = ()
    """Holds the likeliest tokens in the place of a token that was drawn, the likeliest first."""

    def without_last(self, letters: int) -> Logprob:
        """Return the token without the last `letters` of its text."""
        cut = self.text[max(0, len(self.text) - letters) :]
        data = self.bytes[: max(0, len(self.bytes) - len(cut.encode()))]
        return self._replace(text=self.text[: len(self.text) - len(cut)], bytes=data)

    def as_dict(self) -> dict[str, Any]:
        """Return the token as OpenAI's API writes it."""
        return {**self._alone(), "top_logprobs": [token._alone() for token in self.top]}

    def _alone(self) -> dict[str, Any]:
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.bytes)}


class TokenTexts:
    """A table that gives the text and bytes of single tokens, as they stand within a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        # Some decoders leave out a leading space, so each token is decoded behind another one.
        self._before = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._start = len(self._decode(self._before))
        self._bytes, self._letters = byte_tokens(self._tokenizer), _byte_letters()

    def noted(self, likely: Sequence[tuple[int, float | None]], *, begins: bool = False) -> Logprob:
        """Return the first of the likely tokens as a `Logprob`, with the others in its `top`.

        Args:
            likely: tokens with their log probabilities.
            begins: whether a text begins with them, so that none is before.
        """
        first, *top = [self._one(token, logprob, begins) for token, logprob in likely]
        return first._replace(top=tuple(top))

    def _one(self, token: int, logprob: float | None, begins: bool) -> Logprob:
        if begins:
            text = self._decode([token])
        else:
            text = self._decode([*self._before, token])[self._start :]
        data = self._data(token) if LOST in text else text.encode()
        return Logprob(token, text, data, None if logprob is None else max(logprob, LEAST))

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def _data(self, token: int) -> bytes:
        """Return the bytes of a token that is a part of a letter."""
        if token in self._bytes:
            return self._bytes[token]
        piece = self._tokenizer.id_to_token(token) or ""
        return bytes(self._letters[x] for x in piece if x in self._letters)


class Logprobs(Listener):
    """A listener that notes how likely tokens were, each once the end of its text is given.

    Until then it waits, as its text may be a stop string's beginning.

    Args:
        noted: which they join then.
        sampler: knows the log probabilities.
        top: so many of the likeliest tokens are noted with each.
        texts: of single tokens.
        stream: the `TextStream` of the answer, a listener before this one.
    """

    reads_logits = True

    def __init__(
        self, noted: list[Logprob], sampler: TokenSampler, top: int, texts: TokenTexts, stream: Any
    ) -> None:
        self._noted, self._waiting = noted, deque[tuple[int, int, Logprob]]()
        self._sampler, self._top, self._texts, self._stream = sampler, top, texts, stream
        self._begins, self._start = stream.begins, stream.decoded

    def token(self, number: int, logits: Any) -> None:
        """Queue the token, and note queued tokens whose text was already streamed."""
        stream, likely = self._stream, self._sampler.logprobs(logits, number, self._top)
        logprob = self._texts.noted(likely, begins=self._begins)
        self._waiting.append((self._start, max(self._start + 1, stream.decoded), logprob))
        self._begins, self._start = stream.begins, stream.decoded
        self.note(stream.given)

    def finish(self) -> None:
        """Note all tokens that still wait, but none behind a stop string."""
        self.note(math.inf if self._stream.stopped is None else self._stream.given)

    def note(self, letters: float) -> None:
        """Note the tokens that lie within the first `letters` of the text, which were given.

        Of an answer that was stopped no more will be given: a token in which a stop string begins
        is noted with the text before that, and its bytes.
        """
        stopped = self._stream.stopped is not None
        while self._waiting:
            start, end, logprob = self._waiting[0]
            if not (start < letters if stopped else end <= letters):
                return
            if end > letters:
                logprob = logprob.without_last(int(end - letters))
            self._noted.append(logprob)
            self._waiting.popleft()


def _byte_letters() -> dict[str, int]:
    """Return the byte for each letter that byte-level tokenizers (GPT-2's) write in its place."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    plain += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(others)}
