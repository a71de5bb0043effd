"""Finds the tools that an answer calls in its text.

Models write calls in the form that they were taught. Tokenizers of transformers 5 may say which it
is (`response_template`); the common forms of others are read here. What cannot be read stays text.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvcap.runtime.types import Message, Tool

HERMES, PYTHON, MISTRAL = "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]"
NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")
DECODER = json.JSONDecoder(strict=False)  # models write line breaks within texts
ID_LETTERS, ID_LENGTH = string.ascii_letters + string.digits, 9  # Mistral's templates take no other


class ToolCall(NamedTuple):
    """A call of a tool that stands in an answer."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """Holds the `tool_call_id` of the message that has its result."""
    cut: str | None = None
    """Holds the text of the arguments so far, of a call that was cut short; None: it is whole."""

    def as_message(self) -> dict[str, Any]:
        """Return the call as a message's `tool_calls` have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "function": function} | ({"id": self.id} if self.id else {})


class Parsed(NamedTuple):
    """An answer, split into its text and the tools that it calls."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()

    def with_ids(self, answer_index: int | tuple[int, int]) -> Parsed:
        """Return the answer with an id for each call, derived from its content and its answer.

        Args:
            answer_index: the answer's place in its conversation, so that no two calls have one id;
                where several conversations have the same messages, also this one's number.
        """
        calls = [
            call._replace(id=call_id(answer_index, number, call.name, call.arguments))
            for number, call in enumerate(self.tool_calls)
        ]
        return Parsed(self.content, tuple(calls))

    @classmethod
    def of_message(cls, message: Message) -> Parsed:
        """Return the answer that `as_message` turned into this message."""
        calls = [
            ToolCall(call["function"]["name"], call["function"]["arguments"], call.get("id", ""))
            for call in message.get("tool_calls", ())
        ]
        return cls(message["content"], tuple(calls))

    def as_message(self) -> Message:
        """Return the answer as a message, as chat templates and OpenAI's API have it."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.as_message() for call in self.tool_calls]
        return message


def call_id(*of: Any) -> str:
    """Return the id of a call in the one form that every chat template takes.

    >>> call_id(1, 0, "add", {"a": 1}) == call_id(1, 0, "add", {"a": 1})
    True
    """
    digest = hashlib.blake2b(json.dumps(of, default=str).encode()).digest()
    return "".join(ID_LETTERS[byte % len(ID_LETTERS)] for byte in digest[:ID_LENGTH])


def parsed_by_template(
    tokenizer: Any, raw: str, prompt: str, tools: Sequence[Tool]
) -> Parsed | None:
    """Parse an answer by the tokenizer's own `response_template`; None if it has none, or fails.

    Args:
        tokenizer: of transformers, or another.
        raw: the answer with its special tokens.
        prompt: the end of what it answers; templates may have begun the answer there.
        tools: that the model may call.
    """
    if getattr(tokenizer, "response_template", None) is None:
        return None
    try:
        parsed = tokenizer.parse_response(raw, prefix=prompt, tools=list(tools))
        calls = [_call(entry.get("function", entry)) for entry in parsed.get("tool_calls") or ()]
        content = parsed.get("content") or ""
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None
    if None in calls or not isinstance(content, str):
        return None
    return Parsed(content, tuple(call for call in calls if call is not None))


def parsed_text(text: str, raw: str, tools: Sequence[Tool] = ()) -> Parsed:
    r"""Parse an answer that is in one of the common forms; else return its text as it is.

    >>> call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    >>> parsed_text(call, call)
    Parsed(content='', tool_calls=(ToolCall(name='add', arguments={'a': 1}, id='', cut=None),))

    Args:
        text: the answer.
        raw: the same with its special tokens, which some forms are marked by.
        tools: that the model may call. A whole answer that is JSON is a call only of one of them.
    """
    forms: tuple[tuple[str, str, Callable[[str], list[ToolCall] | None]], ...] = (
        (raw, MISTRAL, _mistral),
        (raw, PYTHON, _python),
    )
    if HERMES in raw:
        return _hermes(text if HERMES in text else raw)
    for whole, mark, read in forms:
        before, tag, after = whole.partition(mark)
        if tag and (calls := read(after)):
            content = before if text.startswith(before) else ""  # drop what has special tokens
            return Parsed(content.strip(), tuple(calls))
    names = {tool["function"]["name"] for tool in tools}
    calls = _python(text)
    if calls and all(call.name in names for call in calls):
        return Parsed("", tuple(calls))
    return Parsed(text)


def schema_of_call(tools: Sequence[Tool], answer: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON schema of one call of one of these tools, as `parsed_text` reads it.

    An answer that must call a tool is held to it. A tool without parameters takes none.

    Args:
        tools: that may be called.
        answer: the schema of what the answer may be instead; None: it must call a tool.
    """
    calls = list[dict[str, Any]]()
    for number, tool in enumerate(tools):
        function, pointer = tool["function"], f"#/anyOf/{number}/properties/arguments"
        schema = function.get("parameters")
        none = {"properties": {}, "additionalProperties": False}
        parameters = none if schema is None else _placed(schema, pointer)
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": {"type": "object", **parameters},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    if answer is not None:
        calls.append(_placed(answer, f"#/anyOf/{len(calls)}"))
    return {"anyOf": calls}


def _placed(schema: Any, pointer: str) -> Any:
    """Return a schema with references to its own root rewritten to start at `pointer`."""
    if isinstance(schema, list):
        return [_placed(part, pointer) for part in schema]
    if not isinstance(schema, dict):
        return schema
    placed = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and value.startswith("#"):
            placed[name] = pointer + value[1:]
        else:
            placed[name] = value if name in ("const", "enum") else _placed(value, pointer)
    return placed


def _hermes(text: str) -> Parsed:
    """Parse calls in JSON between tags; an answer that was cut short may lack the last tag."""
    before, *parts = text.split(HERMES)
    kept, calls = [before.strip()], list[ToolCall]()
    for part in parts:
        body, _, after = part.partition("</tool_call>")
        more = _calls(body)
        if more is None:
            kept.append(f"{HERMES}{part}".strip())
        else:
            calls += more
            kept.append(after.strip())
    return Parsed("\n".join(filter(None, kept)), tuple(calls))


def _python(text: str) -> list[ToolCall] | None:
    """Parse Llama 3's form: JSON objects with semicolons between them, or a list of objects."""
    calls_read = list[ToolCall]()
    for value, rest in _values(text, ";"):
        calls = [_call(entry) for entry in (value if isinstance(value, list) else [value])]
        if None in calls:
            return None
        calls_read += [call for call in calls if call is not None]
        if rest and not rest.startswith(("<|eom_id|>", "<|eot_id|>")):
            return None
    return calls_read or None


def _mistral(text: str) -> list[ToolCall] | None:
    """Parse Mistral's form: a list of JSON objects, or for each call a name and its arguments."""
    calls_read = list[ToolCall]()
    for part in text.split(MISTRAL):
        if named := NAMED.match(part):
            values = [value for value, _ in _values(part[named.end() :], "")]
            if len(values) != 1 or not isinstance(values[0], dict):
                return None
            calls_read.append(ToolCall(named[1], values[0]))
        elif (calls := _calls(part)) is not None:
            calls_read += calls
        else:
            return None
    return calls_read


def _calls(text: str) -> list[ToolCall] | None:
    """Parse a call in JSON, or a list of calls; None where it is something else."""
    values = list(_values(text, ""))
    if len(values) != 1:
        return None
    value = values[0][0]
    calls = [_call(entry) for entry in (value if isinstance(value, list) else [value])]
    return None if None in calls else [call for call in calls if call is not None]


def _values(text: str, between: str) -> Iterator[tuple[Any, str]]:
    """Yield the JSON values that a text begins with, each with the text up to `between`."""
    rest = text.strip()
    while rest:
        try:
            value, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            yield None, rest
            return
        rest = rest[end:].strip()
        if not between or not rest.startswith(between):
            yield value, rest
            return
        rest = rest[len(between) :].strip()
        yield value, ""


def _call(value: Any) -> ToolCall | None:
    """Return the call that a JSON object describes; None if it describes none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return None
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None
