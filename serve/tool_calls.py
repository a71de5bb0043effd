"""Calls of tools in an answer: held back while it is streamed, and sent whole at its end.

What in an answer is a call, `runtime/session/tool_calls.py` says once the answer is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from kvcap.runtime.session.tool_calls import HERMES, Parsed, ToolCall
from kvcap.serve.thoughts import without_thoughts

JSON_BEGINS = re.compile(r"\s*(\[\s*)?(\{|$)")  # an answer may be a call from its first letter on

CUT = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(?:,\s*("arguments"\s*:\s*))?')


class CallGate:
    r"""Passes on the part of a streamed answer that is surely text, and holds back a possible call.

    >>> gate = CallGate()
    >>> gate.put('Wait.\n<tool_call>{"name": "add"'), gate.put("and more")
    ('Wait.', '')
    """

    def __init__(self) -> None:
        self._held = self._given = ""
        self._shut = False

    def put(self, text: str) -> str:
        """Take more text, and return the part that is certainly no call."""
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
        sent, self._shut = self._given.strip(), True
        if not parsed.tool_calls:
            return self._held if parsed.content else ""
        return parsed.content.removeprefix(sent) if parsed.content.startswith(sent) else ""


def cut_call(parsed: Parsed, answer_index: tuple[int, int]) -> Parsed:
    """Return an answer that must call a tool, and was cut short, as the call that it begins.

    Its arguments are the text so far. No text is left, and no call before its name is whole.

    >>> parsed = cut_call(Parsed('{"name": "add", "arguments": {"a": 1'), (1, 0))
    >>> parsed.content, [(call.name, call.cut) for call in parsed.tool_calls]
    ('', [('add', '{"a": 1')])

    Args:
        parsed: the answer; one that has calls stays.
        answer_index: as for `Parsed.with_ids`.
    """
    if parsed.tool_calls:
        return parsed
    text = without_thoughts(parsed.content)
    if (match := CUT.match(text)) is None:
        return Parsed("")
    call = ToolCall(json.loads(match[1]), {}, cut=text[match.end() :] if match[2] else "")
    return Parsed("", (call,)).with_ids(answer_index)


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of OpenAI's call; if it was cut short, only the complete ones."""
    text = call["function"]["arguments"]
    arguments = from_json(text, allow_partial=True) if text.strip() else {}
    return arguments if isinstance(arguments, dict) else {}


def as_calls(parsed: Parsed) -> list[dict[str, Any]]:
    """Return the calls as OpenAI's API has them, by the ids that the conversation has."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False)
                if call.cut is None
                else call.cut,
            },
        }
        for call in parsed.tool_calls
    ]


def _beginning(text: str) -> int:
    """Return how many letters at the end of `text` may begin a call, with the space before it."""
    sizes = range(min(len(HERMES), len(text)), 0, -1)
    opening = next((n for n in sizes if HERMES.startswith(text[-n:])), 0)
    return len(text) - len(text[: len(text) - opening].rstrip())
