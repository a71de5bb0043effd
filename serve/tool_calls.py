"""Calls of tools in a model's answer: found in its text, and known again in the next request.

Models that were trained to call tools write each call as JSON between `<tool_call>` and
`</tool_call>` (Hermes, Qwen 2.5 and 3), or there as `<function=NAME>` with a `<parameter=KEY>` each
(Qwen 3.5, Qwen 3 Coder). Text that is no such call stays text: nothing of an answer is lost.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcap.runtime.types import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
REMEMBERED = 1 << 24  # letters of answers with calls


class Call(NamedTuple):
    """A tool that the model wants called."""

    id: str
    name: str
    arguments: str  # JSON text of an object

    @property
    def as_dict(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class CallReader:
    r"""Tells text and calls apart while an answer is written.

    >>> reader = CallReader(())
    >>> reader.put('Wait.\n<tool_call>{"name": "add", "argu')
    ['Wait.']
    >>> [call] = reader.put('ments": {"a": 1}}</tool_call>')
    >>> call.name, call.arguments
    ('add', '{"a": 1}')
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }
        self._held = ""
        self._called = False

    def put(self, text: str) -> list[str | Call]:
        """What is certain after this text: texts and calls, in their order."""
        self._held += text
        found: list[str | Call] = []
        while True:
            before, opened, rest = self._held.partition(OPEN)
            if not opened:
                kept = len(before) - _beginning(before)
                found += [before[:kept]] if kept else []
                self._held = before[kept:]
                return found
            body, closed, after = rest.partition(CLOSE)
            call = self._call(body) if closed else None
            if closed and call is None:
                found.append(before + opened + body + closed)
                self._held = after
                continue
            if said := before.rstrip():
                found.append(said)
            if call is None:
                self._held = self._held[len(said) :]
                return found
            found.append(call)
            self._held, self._called = after, True

    def end(self) -> list[str | Call]:
        """What was still held back and became no call; spaces behind a call are left out."""
        text, self._held = self._held, ""
        return [] if not text or (self._called and text.isspace()) else [text]

    def _call(self, body: str) -> Call | None:
        """The call that a body says; None: it is none."""
        name: Any
        arguments: Any
        if function := FUNCTION.fullmatch(body):
            name = function[1].strip()
            typed = self._parameters.get(name, {}).get("properties") or {}
            arguments = {
                key: _typed(text, typed.get(key)) for key, text in PARAMETER.findall(function[2])
            }
        else:
            try:
                said = json.loads(body)
                name = said["name"]
                arguments = said.get("arguments", said.get("parameters", {}))
                if isinstance(arguments, str):
                    arguments = json.loads(arguments)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                return None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False)
        return Call(f"call_{secrets.token_hex(12)}", name, written)


class Remembered:
    """The text in which calls were written, by their ids.

    A client sends a call back as OpenAI's API has it, while the conversation holds the text that
    the model wrote. So that it goes on with what is held, the text is put in the call's place; one
    that is forgotten is written anew by the chat template, and the conversation is read again.
    """

    def __init__(self, most: int = REMEMBERED) -> None:
        self._texts: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._most, self._letters = most, 0

    def put(self, owner: str, calls: Sequence[Call], text: str) -> None:
        """Remember the answer `text`, in which all of these calls were found."""
        self._texts[owner, calls[0].id] = text
        self._letters += len(text)
        while self._letters > self._most:
            _, gone = self._texts.popitem(last=False)
            self._letters -= len(gone)

    def restored(self, owner: str, message: Message, reader: CallReader) -> Message:
        """A message as it was written, if it is a remembered one and was not changed since."""
        given: Any = message.get("tool_calls")
        if not given or (text := self._texts.get((owner, given[0]["id"]))) is None:
            return message
        found = [*reader.put(text), *reader.end()]
        calls = [(x.name, json.loads(x.arguments)) for x in found if isinstance(x, Call)]
        same = calls == [(x["function"]["name"], x["function"]["arguments"]) for x in given]
        said = "".join(x for x in found if isinstance(x, str))
        if not same or said.strip() != message["content"].strip():
            return message
        return {"role": message["role"], "content": text}


def _typed(text: str, schema: Any) -> Any:
    """A parameter's value: text, unless its schema says that it is something else."""
    if isinstance(schema, dict) and schema.get("type") not in (None, "string"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
    return text


def _beginning(text: str) -> int:
    """How many letters at the end of `text` may begin a call, with the space before it."""
    sizes = range(min(len(OPEN), len(text)), 0, -1)
    opening = next((n for n in sizes if OPEN.startswith(text[-n:])), 0)
    return len(text) - len(text[: len(text) - opening].rstrip())
