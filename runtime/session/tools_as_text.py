"""Tells a model of tools in plain messages, for chat templates that write none.

The form is that of Hermes and Qwen, which `tool_calls.py` reads: the tools stand in the system
prompt, calls in the answer's text, and results in the user's turn. llama.cpp does likewise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvcap.runtime.session.tool_calls import HERMES
from kvcap.runtime.types import Message, Tool

CLOSES = "</tool_call>"


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Tool], *, in_system: bool
) -> list[Message]:
    r"""Return messages in which tools, their calls and their results are texts.

    >>> result = {"role": "tool", "content": "2"}
    >>> with_tools_as_text([result, {"role": "user", "content": "Thanks."}], (), in_system=True)
    [{'role': 'user', 'content': '<tool_response>\n2\n</tool_response>\n\nThanks.'}]

    Args:
        messages: that the template gets otherwise.
        tools: that the model may call.
        in_system: the template writes a message of the system; else the first message has them.
    """
    texts, before = list[Message](), ""
    for message in messages:
        text = _as_text(message)
        if before == "tool" and text["role"] == "user":  # one turn, as some want turns to alternate
            text = {**text, "content": f"{texts.pop()['content']}\n\n{text['content']}"}
        texts.append(text)
        before = message["role"]
    if not tools:
        return texts
    if not texts or (in_system and texts[0]["role"] != "system"):
        return [{"role": "system", "content": _list_of(tools)}, *texts]
    first, *others = texts
    parts = (first["content"], _list_of(tools))
    content = "\n\n".join(parts if first["role"] == "system" else parts[::-1])
    return [{**first, "content": content}, *others]


def _as_text(message: Message) -> Message:
    """Return a message with its calls, or its tool result, written into its text."""
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    if not (calls := message.get("tool_calls")):
        return message
    written = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    texts = [message["content"], *(f"{HERMES}\n{call}\n{CLOSES}" for call in written)]
    return {"role": message["role"], "content": "\n".join(filter(None, texts))}


def _list_of(tools: Sequence[Tool]) -> str:
    """Return the text that tells a model of its tools."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"# Tools\n\nYou may call one or more of these functions:\n<tools>\n{listed}\n</tools>\n\n"
        "To call one, write a JSON object with its name and arguments:\n"
        f'{HERMES}\n{{"name": NAME, "arguments": {{...}}}}\n{CLOSES}'
    )
