"""Between tokens and text: chat turns in, streamed text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from kvcap.runtime.errors import ChatTemplateMissing, EmptyPrompt, MessagesInvalid
from kvcap.runtime.session.chat_template import TemplateFailed, rendered
from kvcap.runtime.types import Message

MARK = "\u2402answer\u2403"  # stands for the answer that is already in the cache


def opening(system: str | None) -> list[Message]:
    """What a conversation begins with."""
    return [{"role": "system", "content": system}] if system else []


def render_turn(tokenizer: Any, system: str | None, messages: Sequence[Message]) -> str:
    """The text to read for what is said after an answer that the cache holds.

    It is rendered after a stand-in answer and cut behind it, so that it costs the same however
    long the conversation is, and closes the answer.

    Raises:
        ChatTemplateMissing: no template, or one that changes the answer it is given.
    """
    said = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
    _, found, tail = render(tokenizer, [*opening(system), *said, *messages]).partition(MARK)
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
            "this tokenizer has no chat template; continue a text with `kvcap generate --raw` (in "
            "Python: session.complete), or use a model that was made for chat"
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


ROLES = ("system", "user", "assistant")


def messages_of(said: Any) -> list[Message]:
    """What `Session.send` is given, as messages: a system prompt first, if any, a user's last.

    Raises:
        MessagesInvalid: neither a text nor such messages, naming the first that is wrong.
        EmptyPrompt: there is nothing to answer.
    """
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    elif not isinstance(said, (list, tuple)):
        raise MessagesInvalid(
            f"a {type(said).__name__} was given; give a text, or a list of messages such as "
            "{'role': 'user', 'content': 'Hello!'}"
        )
    if not said:
        raise EmptyPrompt("there are no messages; give at least one of the user")
    found = [_message(index, one) for index, one in enumerate(said)]
    if found[-1]["role"] != "user":
        raise MessagesInvalid(
            f"the last message is of the {found[-1]['role']}; it must be of the user, who is to be "
            "answered"
        )
    if not found[-1]["content"].strip():
        raise EmptyPrompt("the message is empty; write something to answer")
    return found


def _message(index: int, given: Any) -> Message:
    """One message, copied."""
    if not isinstance(given, dict):
        raise MessagesInvalid(
            f"message {index} is a {type(given).__name__}; give a dictionary with 'role' and "
            "'content'"
        )
    for key in ("role", "content"):
        if key not in given:
            raise MessagesInvalid(f"message {index} has no {key!r}; give 'role' and 'content'")
    if others := [key for key in given if key not in ("role", "content") and given[key]]:
        raise MessagesInvalid(
            f"message {index} has {others[0]!r}, which is not read; leave it out and say it in "
            "'content'"
        )
    role, content = given["role"], given["content"]
    if role not in ROLES:
        raise MessagesInvalid(f"message {index} has role {role!r}; use {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise MessagesInvalid(
            f"the content of message {index} is a {type(content).__name__}; give its text"
        )
    if role == "system" and index:
        raise MessagesInvalid(
            f"message {index} is of the system; a system prompt can only be the first message"
        )
    return {"role": role, "content": content}
