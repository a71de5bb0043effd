"""Between tokens and text: chat turns in, streamed text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from kvcap.runtime.chat_template import TemplateFailed, rendered
from kvcap.runtime.errors import ChatTemplateMissing

Message = dict[str, str]
MARK = "\u2402answer\u2403"  # stands for the answer that is already in the cache


def render_turn(tokenizer: Any, system: str | None, text: str, *, first: bool) -> str:
    """The text to read for a user's turn.

    A later turn is rendered after a stand-in answer and cut behind it, so that it costs the same
    however long the conversation is, and closes the answer that the cache already holds.

    Raises:
        ChatTemplateMissing: no template, or one that changes the answer it is given.
    """
    opening = [{"role": "system", "content": system}] if system else []
    turn = {"role": "user", "content": text}
    if first:
        return render(tokenizer, [*opening, turn])
    said = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
    _, found, tail = render(tokenizer, [*opening, *said, turn]).partition(MARK)
    if not found:
        raise ChatTemplateMissing(
            "this tokenizer's chat template rewrites earlier answers, so a conversation cannot be "
            "continued without reading it again; use `kvcap generate`"
        )
    return tail


def render(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The whole conversation as the model's template writes it, ready for an answer.

    Raises:
        ChatTemplateMissing: no template, or it fails: by mistake, or as it takes no such message.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ChatTemplateMissing(
            "this tokenizer has no chat template; use `kvcap generate --raw`, or a model that was "
            "made for chat"
        )
    names = {"messages": list(messages), "add_generation_prompt": True, "tools": None,
             "documents": None, **tokenizer.special_tokens_map}  # fmt: skip
    try:
        return rendered(tokenizer.get_chat_template(), names)
    except (TemplateFailed, ValueError) as error:
        raise ChatTemplateMissing(
            f"this model's chat template fails ({str(error) or type(error).__name__}); use "
            "`kvcap generate --raw`, or a model whose template works"
        ) from error


class TextStream:
    """Turns generated ids into text piece by piece, and stops at stop strings.

    Text that may be the start of a stop string is held back until it is clear that it is not.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = [s for s in stop if s]
        self._held = ""
        self.stopped = False

    def put(self, token: int) -> str:
        """Text that is certain after this token, perhaps none."""
        self._held += self._decoder.step(self._tokenizer, token) or ""
        for stop in self._stop:
            head, found, _ = self._held.partition(stop)
            if found:
                self.stopped, self._held = True, ""
                return head
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return text

    def end(self) -> str:
        """What was still held back."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
