"""Chooses among a tokenizer's chat templates, and finds the form in which one takes messages.

A tokenizer may have several by name: `default`, `tool_use` and others. Templates of models that
also see images (Idefics 3, LLaVA-NeXT, SmolVLM) walk through a list of parts, and of a plain text
they write nothing. A short conversation with a marker as its text shows which form a template
reads. Knows no tokenizer: it is handed what renders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from kvcap.runtime.errors import ChatTemplateMissing
from kvcap.runtime.session.chat_template import TemplateFailed
from kvcap.runtime.session.tool_calls import ID_LENGTH, ID_LETTERS, call_id
from kvcap.runtime.types import Message

MARKER = "7301946258"  # digits, which no filter of a template changes: upper, trim, tojson
CALL = {"type": "function", "id": "a1b2c3d4e", "function": {"name": "f", "arguments": {}}}

DEFAULT, TOOL_USE = "default", "tool_use"  # as transformers calls them

THOUGHTS = {
    "<think>": "</think>",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "[THINK]": "[/THINK]",
}
"""Holds the marks between which models think: the closing one, by the opening one."""

Write = Callable[[Sequence[Message]], str]
"""Names a function that renders messages, and raises `TemplateFailed` where the template fails."""


def template_for(
    templates: str | Mapping[str, str], *, tools: bool, name: str | None = None
) -> str:
    """Return the chat template that transformers would take of a tokenizer's; if it has one, that.

    Args:
        templates: the tokenizer's `chat_template`: one, or several by name.
        tools: that the model may call are given.
        name: of the template to take; None: that follows from `tools`.

    Raises:
        ChatTemplateMissing: there is none of that name, or none is the default.
    """
    if name is not None:
        by_name = {} if isinstance(templates, str) else templates
        if not isinstance(name, str) or name not in by_name:  # clients give any JSON
            names = ", ".join(sorted(by_name)) or "one chat template, without a name"
            raise ChatTemplateMissing(f"there is no chat template {name!r}; there is: {names}")
        return by_name[name]
    if isinstance(templates, str):
        return templates
    for name in (*([TOOL_USE] if tools else []), DEFAULT):
        if name in templates:
            return templates[name]
    if len(templates) == 1:
        return next(iter(templates.values()))
    raise ChatTemplateMissing(
        f"this tokenizer has the chat templates {', '.join(sorted(templates))}, and none is the "
        f"{DEFAULT!r}; {_advice(templates)}"
    )


def without_default(templates: str | Mapping[str, str] | None) -> str | None:
    """Return a notice if a model has named chat templates but no default one; else None."""
    if templates is None or isinstance(templates, str) or DEFAULT in templates:
        return None
    names = sorted(templates)
    if len(names) == 1:
        return f"the chat template {names[0]!r} is taken, as this tokenizer has no other"
    return (
        f"this tokenizer has the chat templates {', '.join(names)}, and none is the {DEFAULT!r}: "
        f"{_advice(templates)}"
    )


def _advice(templates: Mapping[str, str]) -> str:
    advice = "name one by the template option chat_template"
    if TOOL_USE in templates:
        return f"only requests with tools are answered, by {TOOL_USE!r}; give tools, or {advice}"
    return advice


def as_taken(template: str, write: Write, messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each content in the form that the template reads for its role.

    Args:
        template: in Jinja; what is found out about it is remembered.
        write: renders messages by it.
        messages: whose contents are texts.

    Raises:
        ChatTemplateMissing: it writes a user's text in neither form.
    """
    if not _users_parts(template, write):
        return list(messages)
    return [
        {**message, "content": _parts(message["content"])}
        if _parts_of_role(template, write, message["role"])
        else message
        for message in messages
    ]


def with_thoughts_closed(text: str) -> str:
    r"""Return a prompt with closed thoughts, if the template opened them at its end.

    >>> with_thoughts_closed("<|assistant|><think>")
    '<|assistant|><think>\n\n</think>\n\n'
    """
    opened = text.rstrip()
    for opening, closing in THOUGHTS.items():
        if opened.endswith(opening):
            return f"{opened}\n\n{closing}\n\n"
    return text


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with ids of calls in the one form that all templates take.

    An id of nine letters and digits stays. Any other is replaced, in the call and in its result
    alike; a call without an id gets one, and a result without one gets that of the next call.
    """
    renamed, unanswered = list[Message](), deque[str]()
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            calls = [
                {**call, "id": _short(call.get("id") or f"{index}.{number}")}
                for number, call in enumerate(message["tool_calls"])
            ]
            message = {**message, "tool_calls": calls}
            unanswered = deque(call["id"] for call in calls)
        elif message["role"] == "tool":
            own = message.get("tool_call_id")
            following = unanswered.popleft() if unanswered else f"{index}"
            message = {**message, "tool_call_id": _short(own or following)}
        renamed.append(message)
    return renamed


def _short(id: str) -> str:
    return id if len(id) == ID_LENGTH and set(id) <= set(ID_LETTERS) else call_id(id)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@lru_cache(maxsize=16)
def _reads_parts(template: str) -> dict[str, bool]:
    """Return a template's cache: for each role, whether it reads contents as lists of parts."""
    return {}


def _users_parts(template: str, write: Write) -> bool:
    """Return whether the template reads a list of parts from a user, and no plain text.

    A template that fails on both is given texts: the real conversation then says why it fails.
    """
    abilities = _reads_parts(template)
    if "user" not in abilities:
        text = _marker_in(write, [{"role": "user", "content": MARKER}])
        parts = not text and _marker_in(write, [{"role": "user", "content": _parts(MARKER)}])
        if text is None and not parts:
            return False
        if not text and not parts:
            raise ChatTemplateMissing(
                "this model's chat template leaves out what the user says, given as a text or as "
                "a list of parts; give another by --chat-template, or use a model whose template "
                "works"
            )
        abilities["user"] = bool(parts)
    return abilities["user"]


def _parts_of_role(template: str, write: Write, role: str) -> bool:
    """Return whether a template that reads a user's parts also reads another role's."""
    abilities = _reads_parts(template)
    if role not in abilities:
        question: Message = {"role": "user", "content": _parts(".")}
        called = {"role": "assistant", "content": _parts(""), "tool_calls": [CALL]}
        before: list[Message] = {"system": [], "tool": [question, called]}.get(role, [question])
        after: list[Message] = [] if role == "tool" else [question]

        # As a text first: of a list, a template that takes texts writes Python's own form.
        for content in (MARKER, _parts(MARKER)):
            message: Message = {"role": role, "content": content}
            if role == "tool":
                message |= {"tool_call_id": CALL["id"], "name": "f"}
            if _marker_in(write, [*before, message, *after]):
                abilities[role] = content != MARKER
                break
        else:  # it may fail, or leave the text out, for want of an option
            return True
    return abilities[role]


def _marker_in(write: Write, messages: Sequence[Message]) -> bool | None:
    """Return whether the text that the template writes has the marker; None: the template fails."""
    try:
        return MARKER in write(messages)
    except TemplateFailed:
        return None
