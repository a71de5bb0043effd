"""Calls of tools in an answer: held back while it is streamed, and known again when they return.

What in an answer is a call, `runtime/session/tool_calls.py` says once the answer is whole.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcap.runtime.session.tool_calls import HERMES, Parsed
from kvcap.runtime.types import Message

JSON_BEGINS = re.compile(r"\s*(\[\s*)?(\{|$)")  # an answer may be a call from its first letter on
REMEMBERED = 1 << 24  # letters of answers with calls


class CallGate:
    r"""Lets through of a streamed answer what is surely text, and holds back what may be a call.

    >>> gate = CallGate()
    >>> gate.put('Wait.\n<tool_call>{"name": "add"'), gate.put("and more")
    ('Wait.', '')
    """

    def __init__(self) -> None:
        self._held = self._given = ""
        self._shut = False

    def put(self, text: str) -> str:
        """What is certain after this text."""
        self._held += text
        if self._shut or (not self._given and JSON_BEGINS.match(self._held)):
            return ""
        before, mark, _ = self._held.partition(HERMES)
        self._shut = bool(mark)
        certain = before.rstrip() if mark else before[: len(before) - _beginning(before)]
        self._held = self._held[len(certain) :]
        self._given += certain
        return certain

    def end(self, parsed: Parsed) -> str:
        """The text that was held back, now that all calls are known."""
        given, self._shut = self._given.strip(), True
        if not parsed.tool_calls:
            return self._held
        return parsed.content.removeprefix(given) if parsed.content.startswith(given) else ""


class Called(NamedTuple):
    """An answer with calls."""

    text: str  # as the model wrote it
    content: str  # without the calls
    calls: list[tuple[str, Any]]  # their names and arguments


class Remembered:
    """Answers with calls, by the id of their first call.

    A client sends a call back as OpenAI's API has it, while the conversation holds the text that
    the model wrote. So that it goes on with what is held, the text is put in the call's place; one
    that is forgotten is written anew by the chat template, and the conversation is read again.
    """

    def __init__(self, most: int = REMEMBERED) -> None:
        self._answers: OrderedDict[tuple[str, str], Called] = OrderedDict()
        self._most, self._letters = most, 0

    def put(self, owner: str, calls: Sequence[dict[str, Any]], text: str, content: str) -> None:
        """Remember the answer `text`, in which these calls were found beside `content`."""
        said = [(x["function"]["name"], json.loads(x["function"]["arguments"])) for x in calls]
        self._answers[owner, calls[0]["id"]] = Called(text, content, said)
        self._letters += len(text)
        while self._letters > self._most:
            _, gone = self._answers.popitem(last=False)
            self._letters -= len(gone.text)

    def restored(self, owner: str, message: Message) -> Message:
        """A message as it was written, if it is a remembered one and was not changed since."""
        given = message.get("tool_calls")
        found = self._answers.get((owner, given[0]["id"])) if given else None
        if found is None:
            return message
        said = [(x["function"]["name"], x["function"]["arguments"]) for x in given or ()]
        if (message["content"].strip(), said) != (found.content.strip(), found.calls):
            return message
        return {"role": message["role"], "content": found.text}


def as_calls(parsed: Parsed) -> list[dict[str, Any]]:
    """The calls as OpenAI's API has them, each with an id of its own."""
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for call in parsed.tool_calls
    ]


def _beginning(text: str) -> int:
    """How many letters at the end of `text` may begin a call, with the space before it."""
    sizes = range(min(len(HERMES), len(text)), 0, -1)
    opening = next((n for n in sizes if HERMES.startswith(text[-n:])), 0)
    return len(text) - len(text[: len(text) - opening].rstrip())
