"""Answers `POST /v1/messages`, Anthropic's API, by the one path that answers chats.

A body becomes a `ChatRequest`, and `MessageForm` puts the answer into Anthropic's words. What the
model thinks is a block of its own, for requests that enable `thinking`; others do not get it.
Counts of tokens are this tokenizer's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcap.serve import schemas
from kvcap.serve.chat_path import ChatPath, TranslatedForm, TranslatedPart, joined, request_of
from kvcap.serve.contract import Piece, Reply
from kvcap.serve.errors import ApiError
from kvcap.serve.streaming import WRITTEN
from kvcap.serve.tool_calls import arguments_of

ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
NAMES = {
    "stop": "stop_sequences",
    "tool_call_id": "tool_use_id",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "thinking_budget": "thinking.budget_tokens",
}
LATER_SYSTEM = "<system-reminder>\n{}\n</system-reminder>"
"""Writes what the system says between messages into the user's, as many templates take no other."""
UNUSED = ("thinking", "redacted_thinking")  # blocks of earlier answers that are not read again


def _of_the_client(kind: str) -> str:
    """Refuse a tool without a schema, which Anthropic's servers run or its models know."""
    if kind != "custom":
        raise ValueError(
            "neither this server nor its model has such a tool; give one of yours, with name, "
            "description and input_schema"
        )
    return kind


class MessageTool(schemas.Strict):
    """A tool that the model may call."""

    name: schemas.Name
    type: Annotated[str, AfterValidator(_of_the_client)] | None = None
    description: str | None = None
    input_schema: schemas.Schema | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """Says that the tool is offered only once a `tool_reference` among the messages names it."""
    input_examples: Annotated[list[schemas.Schema], Field(max_length=schemas.TOOLS)] | None = None
    """Lists arguments that go to the model behind the description."""
    # These fields are accepted only with values that ask for nothing.
    allowed_callers: schemas.Items[Literal["direct"]] | None = None
    # They ask for nothing, whatever they are: a call always comes whole.
    eager_input_streaming: Any = None
    cache_control: Any = None

    @property
    def openai(self) -> dict[str, Any]:
        """Return the tool as OpenAI's API has it."""
        examples = [f"Example: {json.dumps(example)}" for example in self.input_examples or ()]
        description = "\n".join([*filter(None, [self.description]), *examples])
        function: dict[str, Any] = {
            "description": description or None,
            "parameters": self.input_schema,
        }
        function |= {} if self.strict is None else {"strict": self.strict}
        return {"type": "function", "function": {"name": self.name, **function}}


class MessageToolChoice(schemas.Strict):
    """A choice of whether tools may, must or must not be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: schemas.Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> MessageToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("type 'tool' goes with the name of a tool, and no other type does")
        return self


class ThinkingSettings(schemas.Strict):
    """A group of settings of the model's thoughts."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    """Says at how many tokens of thoughts the answer begins."""
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(schemas.Strict):
    """A format that the answer must have."""

    type: Literal["json_schema"]
    schema_: Annotated[schemas.Schema, Field(alias="schema")]


class OutputSettings(schemas.Strict):
    """A group of settings of the answer."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    """Goes to the chat template as `reasoning_effort`."""
    format: OutputFormat | None = None


class ContextEdit(schemas.Strict):
    """A wish to leave thoughts of earlier answers out, which are never read again here."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(schemas.Strict):
    """A group of rules for leaving parts out of a long conversation."""

    edits: schemas.Items[ContextEdit] | None = None


class CountBody(schemas.Strict):
    """A body that `POST /v1/messages/count_tokens` takes."""

    model: Annotated[str, Field(max_length=256)]
    messages: schemas.Items[dict[str, Any]]
    system: str | schemas.Items[dict[str, Any]] | None = None
    tools: Annotated[list[MessageTool], Field(max_length=schemas.TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingSettings | None = None
    """Goes to the chat template as `enable_thinking`, which is off where it is left out."""
    output_config: OutputSettings | None = None
    output_format: OutputFormat | None = None  # an older name of `output_config.format`
    context_management: ContextManagement | None = None
    # These fields are accepted only with values that ask for nothing.
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    # They ask for nothing, whatever they are.
    cache_control: Any = None
    speed: Any = None

    def openai(self) -> dict[str, Any]:
        """Return the body as OpenAI's API has it.

        Raises:
            ValueError: a block that this server does not read.
        """
        body: dict[str, Any] = {"model": self.model, "messages": self._messages()}
        names = _referenced(self.messages)
        if tools := [t.openai for t in self.tools or () if not t.defer_loading or t.name in names]:
            body["tools"] = tools
        if (choice := self.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            words = {"any": "required", "tool": named}
            body["tool_choice"] = words.get(choice.type, choice.type)
            body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        body["chat_template_kwargs"] = {"enable_thinking": self.thinks}
        if self.thinking is not None and self.thinks:
            body["thinking_budget"] = self.thinking.budget_tokens
        config = self.output_config or OutputSettings()
        body["reasoning_effort"] = config.effort
        if format_ := config.format or self.output_format:
            named = {"schema": format_.schema_}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return body

    @property
    def thinks(self) -> bool:
        """Return whether the request enables thinking."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def _messages(self) -> list[dict[str, Any]]:
        messages = list[dict[str, Any]]()
        if self.system:
            messages.append({"role": "system", "content": _text(self.system, "system")})
        begun = False  # by others than the system
        for number, message in enumerate(self.messages):
            where, system = f"messages.{number}", message.get("role") == "system"
            if system and begun:
                text = LATER_SYSTEM.format(_text(message.get("content"), f"{where}.content"))
                message = {**message, "role": "user", "content": text}
            begun = begun or not system
            messages += _translated(message, where)
        return joined(messages)


class MessageBody(CountBody):
    """A body that `POST /v1/messages` takes."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: schemas.Items[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Any = None  # it asks for nothing
    service_tier: Any = None  # likewise
    thread: Any = None
    """Asks for the conversation to be held by the id of its last answer, which this server refuses.

    Anthropic's client knows that by the error's code, and sends all messages instead."""

    def openai(self) -> dict[str, Any]:
        """Return the body as OpenAI's API has it.

        Raises:
            ApiError: a thread is asked for.
        """
        if self.thread is not None:
            message = "this server continues no thread; send all messages, and leave thread out"
            raise ApiError(400, message, code="thread_unsupported_request")
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        fields = {name: getattr(self, name) for name in same}
        return super().openai() | fields | {"stop": self.stop_sequences}

    @property
    def shows_thoughts(self) -> bool:
        """Return whether the answer has a block with the model's thoughts."""
        return self.thinks and self.thinking is not None and self.thinking.display != "omitted"


def _translated(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return a message as OpenAI's API has it; results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant") or message.keys() - {"role", "content"}:
        raise ValueError(f"{where} is no message; give role, user or assistant, and content")
    if isinstance(content, str):
        return [TranslatedPart(where, role=role, content=content)]
    results, texts, calls = list[dict[str, Any]](), list[Any](), list[dict[str, Any]]()
    for number, block in enumerate(content if isinstance(content, list) else [None]):
        path = f"{where}.content.{number}"
        match block:
            case {"type": "text"}:
                texts.append(block)
            case {"type": "tool_result", "tool_use_id": str(id_)} if role == "user":
                text = _text(block.get("content") or "", f"{path}.content")
                text = f"Error: {text}" if block.get("is_error") else text
                results.append(TranslatedPart(path, role="tool", tool_call_id=id_, content=text))
            case {"type": "tool_use", "id": id_, "name": name, "input": input_} if (
                role == "assistant"
            ):
                if not isinstance(input_, dict):
                    raise ValueError(f"{path}.input is no object; give the call's arguments")
                function = {"name": name, "arguments": json.dumps(input_)}
                calls.append(TranslatedPart(path, type="function", id=id_, function=function))
            case {"type": kind} if kind in UNUSED:
                pass
            case _:
                kind = block.get("type") if isinstance(block, dict) else None
                fitting = {"user": "text or tool_result", "assistant": "text or tool_use"}
                raise ValueError(
                    f"{path} is {str(kind)[:40]!r}; this server reads {fitting.get(role, 'text')} "
                    f"in a message of the {role}"
                )
    if not texts and not calls:
        return results
    called = {"tool_calls": calls} if calls else {}
    translated = TranslatedPart(
        where, role=role, content=_text(texts, f"{where}.content"), **called
    )
    return [*results, translated]


def _referenced(messages: list[dict[str, Any]]) -> set[str]:
    """Return the names of the tools that results of a search for tools refer to."""
    results = [block for message in messages for block in _blocks(message)]
    blocks = [block for result in results for block in _blocks(result)]
    return {str(part.get("tool_name")) for part in blocks if part.get("type") == "tool_reference"}


def _blocks(of: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the blocks that the content of a message, or of a block, has."""
    content = of.get("content")
    return (
        [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    )


def _text(content: Any, where: str) -> str:
    """Return a text, given as such or as blocks.

    Raises:
        ValueError: a block is none.
    """
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = list[str]()
    for block in blocks if isinstance(blocks, list) else [None]:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_reference", "tool_name": str(name)}:
                texts.append(f"The tool {name} is offered.\n")
            case _:
                raise ValueError(f"{where} has a block that is no text; this server reads texts")
    return "".join(texts)


class MessageForm(TranslatedForm):
    """A form that puts a chat's answer into Anthropic's words.

    Args:
        model: the name that the server has for it.
        most_calls: of tools.
        body: the body.
    """

    prefix = "msg"
    alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, model: str, most_calls: int, body: MessageBody) -> None:
        super().__init__(model, include_usage=False, most_calls=most_calls)
        self.prompt = _read(0, 0)
        self.shows_thoughts = body.shows_thoughts
        edits: dict[str, Any] = {"context_management": {"applied_edits": []}}  # none is taken
        self.edits = edits if body.context_management else {}
        self.blocks = 0  # that were opened
        self.open: str | None = None  # the kind of the last one, until it is closed

    def count(self, piece: Piece) -> None:
        """Note the tokens of the prompt."""
        self.prompt = _read(piece.prompt_tokens, piece.reused_tokens)

    def opening(self) -> bytes:
        """Write the message without its content."""
        usage = {**self.prompt, "output_tokens": 0}
        message = {**self._message([], None), "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def closing(self, reply: Reply) -> bytes:
        """Write what was held back, the calls, and why the answer ended."""
        last = self.rest(reply) + self._close()
        ended = {"stop_reason": self._stopped(reply), "stop_sequence": _stop_string(reply)}
        last += _event("message_delta", delta=ended, usage=_usage(reply), **self.edits)
        return last + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """Write the error."""
        return _event(**error.anthropic)

    def body(self, reply: Reply) -> dict[str, Any]:
        """Return the whole message."""
        content = list[dict[str, Any]]()
        if self.thoughts and self.shows_thoughts:
            content.append({"type": "thinking", "thinking": self.thoughts, "signature": ""})
        if self.content:
            content.append({"type": "text", "text": self.content})
        content += [{**_call(call), "input": arguments_of(call)} for call in self.calls]
        message = self._message(content, self._stopped(reply))
        stopped = {"stop_sequence": _stop_string(reply), "usage": _usage(reply)}
        return {**message, **stopped, **self.edits}

    def _message(self, content: list[Any], reason: str | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
        }

    def _stopped(self, reply: Reply) -> str:
        return "stop_sequence" if _stop_string(reply) else ENDS[self._reason(reply)]

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """Write the blocks that a delta opens or continues."""
        events = b""
        if (text := delta.get("reasoning_content")) and self.shows_thoughts:
            events += self._begin("thinking", {"thinking": "", "signature": ""})
            events += self._go_on({"type": "thinking_delta", "thinking": text})
        if text := delta.get("content"):
            events += self._begin("text", {"text": ""})
            events += self._go_on({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls", ()):
            events += self._close() + self._begin("tool_use", {**_call(call), "input": {}})
            text = call["function"]["arguments"]
            events += self._go_on({"type": "input_json_delta", "partial_json": text})
        return events

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        """Write that a block begins, unless it is open."""
        if self.open == kind:
            return b""
        closed, self.open = self._close(), kind
        self.blocks += 1
        block = {"type": kind, **block}
        return closed + _event("content_block_start", index=self.blocks - 1, content_block=block)

    def _go_on(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self.blocks - 1, delta=delta)

    def _close(self) -> bytes:
        """Write that the block ends that is open."""
        if self.open is None:
            return b""
        self.open = None
        return _event("content_block_stop", index=self.blocks - 1)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _usage(reply: Reply) -> dict[str, int]:
    usage = reply.usage
    if usage is None:
        return {"input_tokens": 0, "output_tokens": 0}
    read = _read(usage.prompt_tokens, usage.reused_tokens)
    return {**read, "output_tokens": usage.completion_tokens}


def _read(prompt: int, reused: int) -> dict[str, int]:
    """Return the counts of a prompt's tokens, of which so many need not be read."""
    return {"input_tokens": prompt - reused, "cache_read_input_tokens": reused}


def _stop_string(reply: Reply) -> str | None:
    return None if reply.usage is None else reply.usage.stop_string


def _event(type: str, **fields: Any) -> bytes:
    return f"event: {type}\ndata: {WRITTEN({'type': type, **fields})}\n\n".encode("ascii")


class Messages:
    """An application that answers at Anthropic's addresses.

    Args:
        api: that answers chats.
    """

    def __init__(self, api: ChatPath) -> None:
        self.api = api

    async def create(self, request: Request) -> Response:
        """Answer messages: `POST /v1/messages`."""
        body = await self.api.body_of(request, MessageBody)
        request_body = request_of(schemas.ChatRequest, body.openai, NAMES)
        return await self.api.answer(
            request, request_body, lambda: MessageForm(self.api.name, request_body.most_calls, body)
        )

    async def count(self, request: Request) -> Response:
        """Count the tokens that messages would take: `POST /v1/messages/count_tokens`."""
        body = await self.api.body_of(request, CountBody)
        ask = self.api.ask(request, body.openai, NAMES)
        ids = await self.api.conversations.encode(ask)
        return JSONResponse({"input_tokens": len(ids)})
