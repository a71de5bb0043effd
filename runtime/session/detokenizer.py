"""Turns tokens into text one by one: letters once they are whole, and U+FFFD for broken ones.

The pieces joined are what the tokenizer's own decoder writes for all the tokens, but for one case.
Tokenizers with a token for every byte (Llama 2's, Gemma's) decode a run of such tokens as a whole:
if any of its bytes is broken they write a U+FFFD for each of them, whole letters too. Here a letter
is given as soon as it is whole, so it stays, and each broken part of a letter is one U+FFFD, as
byte-level tokenizers (GPT-2's) and Python decode it. Knows no model.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

LOST = "\ufffd"  # decoders write it for bytes that are no letter
# A token's text may depend on those before it: the space that a text begins with may be left out,
# and the bytes of a letter may be spread over four tokens.
WINDOW = 4


class Detokenizer:
    """A text that grows token by token.

    Args:
        tokenizer: whose `backend_tokenizer` decodes.
        before: tokens of the text that it goes on from, perhaps only the last ones; below 0 are
            unknown ones.
        special: whether special tokens are text, too; else they are left out.
    """

    def __init__(
        self, tokenizer: Any, before: Sequence[int] = (), *, special: bool = False
    ) -> None:
        self._backend, self._special = tokenizer.backend_tokenizer, special
        self._bytes = byte_tokens(self._backend)
        self._letter = codecs.getincrementaldecoder("utf-8")("replace")
        self._window = self._last(before)  # the last tokens that are text
        self._text = self._decode(self._window)
        self._held = 0  # letters at the end of that text which are not given: a U+FFFD, or none

    @property
    def begins(self) -> bool:
        """Return whether the text is empty so far: a decoder may leave out a leading space."""
        return not self._window

    def put(self, token: int) -> str:
        """Return the text that is certain after this token; it may be empty."""
        if self._is_left_out(token):
            return ""
        if (byte := self._bytes.get(token)) is not None:
            piece = self._letter.decode(byte)
        else:
            text, start = self._decode([*self._window, token]), len(self._text) - self._held
            # It may be the beginning of a letter, unless single bytes have tokens of their own.
            self._held = int(text.endswith(LOST) and len(text) > start and not self._bytes)
            piece = self._letter.decode(b"", final=True) + text[start : len(text) - self._held]
        self._window = [*self._window, token][-WINDOW:]
        self._text = self._decode(self._window)
        return piece

    def end(self) -> str:
        """Return the rest of the text: a U+FFFD for a letter that was not completed."""
        held, self._held = self._held, 0
        return self._letter.decode(b"", final=True) + LOST * held

    def _last(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens that are text, as many as the next one's text may depend on."""
        ids = list[int]()
        for token in reversed(tokens):
            if token < 0 or len(ids) == WINDOW:
                break
            if not self._is_left_out(token):
                ids.append(token)
        return ids[::-1]

    def _is_left_out(self, token: int) -> bool:
        """Return whether a token is special and left out of the text."""
        return not self._decode([token]) and not self._special and bool(self._decode([token], True))

    def _decode(self, tokens: list[int], special: bool = False) -> str:
        text: str = self._backend.decode(tokens, not (special or self._special))
        return text


def byte_tokens(backend: Any) -> Mapping[int, bytes]:
    """Return the tokens that stand for one byte each, where a tokenizer has such tokens."""
    a = backend.token_to_id("<0x41>")
    if a is None or backend.decode([a]) != "A":  # they are names like any other
        return {}
    named = {backend.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
    return {token: byte for token, byte in named.items() if token is not None}
