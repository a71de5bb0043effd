"""Checks messages, writes them by the chat template, and finds them among the tokens.

A pinned message is found by writing the conversation again without what follows it: the tokens that
both begin with are those up to its end.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from kvcap.runtime.errors import ChatTemplateMissing, EmptyPrompt, MessagesInvalid
from kvcap.runtime.session.chat_template import TemplateFailed, render_template
from kvcap.runtime.session.encoding import check_letters
from kvcap.runtime.session.template_abilities import Abilities, abilities
from kvcap.runtime.session.template_forms import (
    MARKER,
    Write,
    as_taken,
    template_for,
    with_short_ids,
)
from kvcap.runtime.session.tool_calls import HERMES
from kvcap.runtime.session.tools_as_text import with_tools_as_text
from kvcap.runtime.types import Message, Span, Tool

ROLES = ("system", "user", "assistant", "tool")
ALSO = {
    "system": ("name",), "user": ("name",), "assistant": ("tool_calls",),
    "tool": ("tool_call_id", "name"),
}  # fmt: skip
"""Says what a message of a role may have besides its `role` and `content`."""
MAY_BE_LEFT_OUT = {
    "tool": (
        "what a tool returned, {!r}; give the assistant's message with its 'tool_calls' "
        "before it, or say the result in a message of the user"
    ),
    "system": (
        "what the system says behind the first message, {!r}; say it in the first message, or in "
        "one of the user"
    ),
}
"""Says of roles that some chat templates do not write what is left out, and what to do."""
SHOWN = 40  # letters of a message, in an error about it
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
MARK = "\u2402answer\u2403"  # stands for the answer that is already in the cache
MARK_BEGUN = "\u2402begun\u2403"  # stands for the beginning of the next answer


def checked_messages(sent: Any) -> list[Message]:
    """Return the messages given to `Session.send`, checked.

    One of the user, a tool or the system comes last.

    Raises:
        MessagesInvalid: neither a text nor such messages, naming the first that is wrong.
        EmptyPrompt: there is nothing to answer.
    """
    if isinstance(sent, str):
        sent = [{"role": "user", "content": sent}]
    elif not isinstance(sent, (list, tuple)):
        raise MessagesInvalid(
            f"a {type(sent).__name__} was given; give a text, or a list of messages such as "
            "{'role': 'user', 'content': 'Hello!'}"
        )
    if not sent:
        raise EmptyPrompt("there are no messages; give at least one of the user")
    messages = [_checked_message(index, message) for index, message in enumerate(sent)]
    if messages[-1]["role"] == "assistant":
        raise MessagesInvalid(
            "the last message is of the assistant; it must be of the user, who is to be answered, "
            "of a tool or of the system"
        )
    if messages[-1]["role"] != "tool" and not messages[-1]["content"].strip():
        raise EmptyPrompt("the message is empty; write something to answer")
    return messages


def _checked_message(index: int, entry: Any) -> Message:
    """Return a copy of one message, if it is one."""
    if not isinstance(entry, dict):
        raise MessagesInvalid(
            f"message {index} is a {type(entry).__name__}; give a dictionary with 'role' and "
            "'content'"
        )
    called = entry.get("tool_calls") and entry.get("role") == "assistant"
    for key in ("role", "content"):
        if key not in entry and not (called and key == "content"):
            raise MessagesInvalid(f"message {index} has no {key!r}; give 'role' and 'content'")
    role, content = entry["role"], entry.get("content")
    if role not in ROLES:
        raise MessagesInvalid(f"message {index} has role {role!r}; use {', '.join(ROLES)}")
    also = ALSO.get(role, ())
    if others := [k for k in entry if k not in ("role", "content", *also) and entry[k]]:
        raise MessagesInvalid(
            f"message {index} has {others[0]!r}, which is not read; leave it out and say it in "
            "'content'"
        )
    if content is None and called:
        content = ""
    if not isinstance(content, str):
        raise MessagesInvalid(
            f"the content of message {index} is a {type(content).__name__}; give its text"
        )
    check_letters(content)
    message: Message = {"role": role, "content": content}
    for key in also:
        if not (value := entry.get(key)):
            continue
        if key == "tool_calls":
            value = _checked_calls(index, value)
        elif not isinstance(value, str):
            raise MessagesInvalid(f"message {index} has {key} {value!r}; give a text")
        message[key] = value
    return message


def _checked_calls(index: int, entries: Any) -> list[dict[str, Any]]:
    """Return a copy of a message's calls, with arguments in dictionaries as templates take them."""
    calls = []
    for entry in entries if isinstance(entries, (list, tuple)) else [entries]:
        function = entry.get("function") if isinstance(entry, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        try:
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            arguments = json.loads(json.dumps(arguments))
        except (ValueError, TypeError, RecursionError):
            arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise MessagesInvalid(
                f"message {index} has tool_calls that cannot be read; give a list such as "
                "[{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}]"
            )
        call: dict[str, Any] = {
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        if entry.get("id"):
            call["id"] = str(entry["id"])
        calls.append(call)
    return calls


def checked_tools(entries: Any) -> list[Tool]:
    """Return copies of the tools that a model may call, checked.

    Raises:
        MessagesInvalid: they are no such tools, naming the first that is wrong.
    """
    try:
        tools = json.loads(json.dumps(entries, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise MessagesInvalid(f"the tools are no JSON ({error})") from error
    names = list[Any]()
    for index, tool in enumerate(tools if isinstance(tools, list) else [None]):
        function = tool.get("function") if isinstance(tool, dict) else None
        names.append(function.get("name") if isinstance(function, dict) else None)
        if not isinstance(names[-1], str):
            raise MessagesInvalid(
                f"tool {index} is none; give a list of such as {{'type': 'function', 'function': "
                "{'name': 'add', 'description': '...', 'parameters': a JSON schema}}"
            )
    return list(tools)


def system_message(system: str | None) -> list[Message]:
    """Return the message of a system prompt, if there is one."""
    return [{"role": "system", "content": system}] if system else []


@dataclass(frozen=True)
class ChatWriter:
    """A writer that turns messages into text by a tokenizer's chat template."""

    tokenizer: Any
    tools: Sequence[Tool] = ()
    """Lists the tools that the model may call, for which another template may be taken."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Holds further names that the template gets; `chat_template` names one of several."""

    def render(self, messages: Sequence[Message], *, prompt: bool = True, begin: str = "") -> str:
        """Return the conversation as the chat template writes it.

        Args:
            messages: all of them.
            prompt: whether the opening of an answer follows.
            begin: the text that this answer begins with.

        Raises:
            ChatTemplateMissing: there is no template, it fails on these messages, or leaves out
                what the user says.
        """
        if begin:
            begun: Message = {"role": "assistant", "content": MARK_BEGUN}
            before, mark, _ = self.render([*messages, begun], prompt=False).rpartition(MARK_BEGUN)
            if not mark:
                raise ChatTemplateMissing(
                    "this model's chat template rewrites answers, so none can be continued; let "
                    "the last message be of the user"
                )
            return before + begin
        writer = self
        if self.tools or any(x["role"] == "tool" or x.get("tool_calls") for x in messages):
            can = self.abilities
            if not (can.tools or (can.calls and not self.tools)):
                messages = with_tools_as_text(messages, self.tools, in_system=can.system)
                writer = replace(self, tools=())
        template, write = writer._plain(prompt=prompt)
        taken = as_taken(template, write, messages)
        try:
            return write(taken)
        except TemplateFailed as error:
            numbered = with_short_ids(taken)
            if numbered != taken:  # Mistral's templates refuse the ids of other servers
                with contextlib.suppress(TemplateFailed):
                    return write(numbered)
            raise ChatTemplateMissing(
                f"this model's chat template fails ({str(error) or type(error).__name__}); give "
                "another by --chat-template, or use a model whose template works"
            ) from error

    def taken(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in the form that the chat template reads; see `template_forms`.

        Raises:
            ChatTemplateMissing: there is no template, or it leaves out what the user says.
        """
        return as_taken(*self._plain(), messages)

    def _plain(self, *, prompt: bool = True) -> tuple[str, Write]:
        """Return the chat template, and a function that renders messages by it as they are."""
        template, further = self._template
        tools = list(self.tools) or None
        names = {"add_generation_prompt": prompt, "tools": tools, "documents": None, **further}
        return template, lambda some: render_template(template, {"messages": list(some), **names})

    @property
    def _template(self) -> tuple[str, dict[str, Any]]:
        """Return the chat template, and the names it gets besides messages and tools.

        Raises:
            ChatTemplateMissing: there is none.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ChatTemplateMissing(
                "this tokenizer has no chat template; give one by --chat-template FILE or NAME, "
                "such as chatml, continue a text (`kvcap generate --raw`, in Python "
                "session.complete, of a server /v1/completions), or use a model that was made for "
                "chat"
            )
        further = dict(self.options)
        name = further.pop("chat_template", None)
        template = template_for(self.tokenizer.chat_template, tools=bool(self.tools), name=name)
        return template, {**self.tokenizer.special_tokens_map, **further}

    @property
    def abilities(self) -> Abilities:
        """Return the abilities of the chat template.

        Raises:
            ChatTemplateMissing: there is no template, or it does not write what the user says.
        """
        template, further = self._template
        return abilities(template, json.dumps(further, default=str))

    def check_tools_read(self, messages: Sequence[Message]) -> None:
        """Refuse tools that the chat template writes for other messages, but not for these.

        Raises:
            ChatTemplateMissing: the chat template does not write them.
        """
        marked = [{**x, "function": {**x["function"], "name": MARKER}} for x in self.tools]
        if marked and MARKER not in replace(self, tools=marked).render(messages):
            raise ChatTemplateMissing(
                "this model's chat template does not write tools for these messages, so the model "
                "would not know of them; begin with a message of the user, or of the system"
            )

    def calls_are_written(self, answer: Message) -> bool:
        """Return whether the chat template takes an answer with all of its `tool_calls`."""
        with contextlib.suppress(ChatTemplateMissing):
            self.render([{"role": "user", "content": "."}, answer])
            return True
        return False

    @property
    def calls_are_marked(self) -> bool:
        """Return whether the chat template writes calls as Hermes and Qwen: in JSON, in marks."""
        call = {"type": "function", "function": {"name": MARKER, "arguments": {}}, "id": "0" * 9}
        answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        form = f'{HERMES}{{"name":"{MARKER}","arguments":{{}}}}</tool_call>'
        with contextlib.suppress(ChatTemplateMissing):
            text = self.render([{"role": "user", "content": "."}, answer])
            return form in "".join(text.split())
        return False

    def turn_has_results(
        self, system: str | None, answer: Sequence[Message], messages: Sequence[Message]
    ) -> bool:
        """Return whether `render_turn` writes `MAY_BE_LEFT_OUT` as the whole conversation has it.

        Templates that write a result together with its call (Gemma 4), or look up its name in the
        call (gpt-oss), need the call, which the stand-in for an answer lacks.

        Args:
            system: the system prompt.
            answer: the message before `messages`, if there is one.
            messages: that follow it.
        """
        marked = _marked(messages)
        if marked == list(messages):
            return True
        try:
            tail = self.render_turn(system, marked)
        except ChatTemplateMissing:
            return False
        if answer and answer[0].get("tool_calls"):
            whole = [*system_message(system), {"role": "user", "content": "."}, *answer, *marked]
            with contextlib.suppress(ChatTemplateMissing):  # it may take only one call at a time
                if not self.render(whole).endswith(tail):
                    return False
        return all(
            message["content"] in tail for message in marked if message["role"] in MAY_BE_LEFT_OUT
        )

    def check_written(self, first: Sequence[Message], messages: Sequence[Message]) -> None:
        """Refuse results of tools and later system messages that the chat template leaves out.

        Each is replaced by a marker, so that it does not matter how the template writes it.

        Args:
            first: the message of the system prompt, if there is one.
            messages: all others.

        Raises:
            ChatTemplateMissing: quoting the first message that is not written.
        """
        marked = _marked(messages)
        if marked == list(messages):
            return
        text = self.render([*first, *marked])
        for marked_message, message in zip(marked, messages, strict=True):
            if marked_message["role"] in MAY_BE_LEFT_OUT and marked_message["content"] not in text:
                # Not by its number, which is another in the bodies of some APIs.
                missing = MAY_BE_LEFT_OUT[marked_message["role"]].format(message["content"][:SHOWN])
                raise ChatTemplateMissing(f"this model's chat template leaves out {missing}")

    def render_turn(self, system: str | None, messages: Sequence[Message], begin: str = "") -> str:
        """Return the text to read for messages that follow an answer which is in the cache already.

        They are rendered behind a stand-in for that answer, and the text is cut after it. So the
        cost does not grow with the conversation, and the answer's turn is closed.

        Raises:
            ChatTemplateMissing: no template, or one that changes the answer it is given.
        """
        return self._around_answer(system, messages, begin)[1]

    def opens_as(self, options: Mapping[str, Any], system: str | None) -> bool:
        """Return whether other options write the same text before an answer.

        Some change what stands before it, such as a system prompt that says how to think.
        """
        if options == self.options:
            return True
        user: Message = {"role": "user", "content": "."}
        other = replace(self, options=options)
        heads = (writer._around_answer(system, [user])[0] for writer in (self, other))
        return next(heads) == next(heads)

    def _around_answer(
        self, system: str | None, messages: Sequence[Message], begin: str = ""
    ) -> tuple[str, str]:
        """Return the text before an answer, and the text of the messages after it."""
        exchange = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
        whole = self.render([*system_message(system), *exchange, *messages], begin=begin)
        head, mark, tail = whole.partition(MARK)
        if not mark:
            raise ChatTemplateMissing(
                "this tokenizer's chat template rewrites earlier answers, so a conversation cannot "
                "be continued without reading it again; use `kvcap generate`"
            )
        return head, tail


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    options: Mapping[str, Any] = NO_OPTIONS,
    **how: Any,
) -> str:
    """Return a conversation as the chat template writes it, as `ChatWriter.render` does."""
    return ChatWriter(tokenizer, tools, options).render(messages, **how)


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Return messages behind a system prompt, with a marker for each that may be left out."""
    return [
        {**message, "content": f"{MARKER}{index:06}"}
        if message["role"] in MAY_BE_LEFT_OUT
        else message
        for index, message in enumerate(messages)
    ]


def system_span(encode: Callable[[Sequence[Message]], list[int]], system: str) -> list[Span]:
    """Return where the system prompt lies: the first tokens, whatever the user says after them."""
    return [(0, len(first_tokens(encode, system_message(system))))]


def first_tokens(
    encode: Callable[[Sequence[Message]], list[int]], opening: Sequence[Message]
) -> list[int]:
    """Return the tokens that a conversation begins with, whatever the user says.

    Args:
        encode: gives the tokens of messages.
        opening: the message of the system prompt, if there is one.
    """
    first, other = (encode([*opening, {"role": "user", "content": text}]) for text in ("A", "0"))
    return first[: common_prefix(first, other)]


def message_spans(
    encode: Callable[[Sequence[Message]], list[int]],
    opening: Sequence[Message],
    messages: Sequence[Message],
    pinned: Collection[int],
    ids: list[int],
) -> list[Span]:
    """Return where `pinned` messages lie in `ids`, with the marks that open and close them.

    Args:
        encode: gives the tokens of messages, ready for an answer.
        opening: the message of the system prompt, if there is one.
        messages: all others.
        pinned: indices of those that are pinned, all of the user.
        ids: tokens of the whole conversation.
    """
    spans = []
    for index in sorted(pinned):
        before = [*opening, *messages[:index]]
        start = 0
        if index:
            start = common_prefix(encode(before), ids)
        elif opening:
            ((_, start),) = system_span(encode, opening[0]["content"])
        stop = common_prefix(encode([*before, messages[index]]), ids)
        spans.append((start, stop))
    return spans


def result_spans(
    encode: Callable[[str], list[int]], text: str, messages: Sequence[Message], start: int = 0
) -> list[Span | None]:
    """Return for each message where in the tokens of `text` its result of a tool lies, if it is.

    To a token or two, as texts that are cut may have other tokens at the cut.

    Args:
        encode: gives the tokens of a text.
        text: that the chat template wrote.
        messages: that it wrote.
        start: tokens in front of it.
    """
    spans, offset = list[Span | None](), 0
    for message in messages:
        result = message["content"].strip() if message["role"] == "tool" else ""
        forms = (result, json.dumps(result)[1:-1], json.dumps(result, ensure_ascii=False)[1:-1])
        at = max(((text.find(form, offset), form) for form in forms if form), default=(-1, ""))
        if at[0] < 0:
            spans.append(None)
            continue
        start += len(encode(text[offset : at[0]]))
        spans.append((start, start + len(encode(at[1]))))
        start, offset = spans[-1][1], at[0] + len(at[1])  # type: ignore[index]
    return spans


def results_by_age(
    messages: Sequence[Message], spans: Sequence[Span | None]
) -> dict[str, list[Span]]:
    """Return the spans of tool results by age: new ones are those after the last user message."""
    last_user = max(
        (i for i, message in enumerate(messages) if message["role"] == "user"), default=-1
    )
    return {
        "tool results": [span for span in spans[: last_user + 1] if span],
        "new tool results": [span for span in spans[last_user + 1 :] if span],
    }


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def common_suffix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens both end with."""
    return common_prefix(a[::-1], b[::-1])
