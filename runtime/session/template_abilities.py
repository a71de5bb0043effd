"""Finds out whether a chat template writes tools, calls, results, a system prompt, thoughts.

Short conversations with a marker show it. What a template was asked once is remembered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from kvcap.runtime.session.chat_template import TemplateFailed, render_template
from kvcap.runtime.session.template_forms import CALL, MARKER, THOUGHTS, as_taken
from kvcap.runtime.types import Message

USER: Message = {"role": "user", "content": "."}
SYSTEM: Message = {"role": "system", "content": MARKER}
TOOL = {
    "type": "function",
    "function": {
        "name": MARKER,
        "description": ".",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{**CALL, "function": {"name": MARKER, "arguments": {}}}],
}
RESULT: Message = {"role": "tool", "content": MARKER, "tool_call_id": CALL["id"], "name": MARKER}
THOUGHT: Message = {"role": "assistant", "content": ".", "reasoning_content": MARKER,
                    "thinking": MARKER}  # fmt: skip
EFFORTS: tuple[dict[str, Any], ...] = ({"enable_thinking": True, "reasoning_effort": "low"},
           {"enable_thinking": False, "reasoning_effort": "high"})  # fmt: skip


class Abilities(NamedTuple):
    """A record of the parts of a conversation that a chat template writes."""

    tools: bool  # that the model may call
    calls: bool  # and what they returned
    system: bool  # a message of the system
    thinking: bool  # what the model thinks, or whether it is to
    forgets: bool  # it leaves the thoughts of earlier answers out


@lru_cache(maxsize=64)
def abilities(template: str, names: str) -> Abilities:
    """Return the parts of a conversation that a template writes.

    Args:
        template: in Jinja.
        names: that it gets besides, such as its special tokens, as a JSON object.

    Raises:
        ChatTemplateMissing: it does not write what the user says.
    """

    def text(messages: Sequence[Message], prompt: bool = True, **more: Any) -> str:
        """Return the text that the template writes; '' if it fails."""

        def write(some: Sequence[Message]) -> str:
            usual = {"tools": None, "documents": None, "add_generation_prompt": prompt}
            return render_template(
                template, {**usual, **json.loads(names), **more, "messages": list(some)}
            )

        try:
            return write(as_taken(template, write, messages))
        except TemplateFailed:
            return ""

    opened = text([USER])
    called, marks = [USER, CALLED], text([USER, CALLED]).count(MARKER)
    return Abilities(
        tools=any(
            MARKER in text(some, tools=[TOOL])
            for some in ([USER], [{**SYSTEM, "content": "."}, USER])
        ),
        calls=0 < marks < text([*called, RESULT]).count(MARKER),
        system=MARKER in text([SYSTEM, USER]),
        thinking=opened.rstrip().endswith(tuple(THOUGHTS))
        or len({text([USER], **effort) for effort in EFFORTS}) > 1
        or MARKER in text([USER, THOUGHT], prompt=False),
        forgets=any(
            (later := text([USER, {**USER, "role": "assistant", "content": thought}, USER]))
            and MARKER not in later
            for thought in (f"{a}\n{MARKER}\n{b}\n\n." for a, b in THOUGHTS.items())
        ),
    )
