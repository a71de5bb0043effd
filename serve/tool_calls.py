"""Calls of tools in an answer: held back while it is streamed, and sent whole at its end.

What in an answer is a call, `runtime/session/tool_calls.py` says once the answer is whole.
"""

from __future__ import annotations

import json
import re
from typing import Any

from kvcap.runtime.session.tool_calls import HERMES, Parsed

JSON_BEGINS = re.compile(r"\s*(\[\s*)?(\{|$)")  # an answer may be a call from its first letter on


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
        """Take more text, and return what of it is certain to be none of a call."""
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
        """Return the text that was held back, once all calls are known."""
        given, self._shut = self._given.strip(), True
        if not parsed.tool_calls:
            return self._held
        return parsed.content.removeprefix(given) if parsed.content.startswith(given) else ""


def as_calls(parsed: Parsed) -> list[dict[str, Any]]:
    """Return the calls as OpenAI's API has them, by the ids that the conversation has."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for call in parsed.tool_calls
    ]


def _beginning(text: str) -> int:
    """Return how many letters at the end of `text` may begin a call, with the space before it."""
    sizes = range(min(len(HERMES), len(text)), 0, -1)
    opening = next((n for n in sizes if HERMES.startswith(text[-n:])), 0)
    return len(text) - len(text[: len(text) - opening].rstrip())
