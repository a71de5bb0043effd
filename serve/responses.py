"""Answers `POST /v1/responses`, OpenAI's newer API, by the one path that answers chats.

A body becomes a `ChatRequest`, and `ResponseForm` puts the answer into the words of that API.
Responses are kept here within a bound, with their input: they can be asked for by their ids,
`item_reference` names an item of one, and `previous_response_id` goes on, as the conversation is
known by its messages and still held, or read again.

Tools of other types than `function` run in OpenAI's machines, or answer in forms that only its
models write. They are left out, and named in the log and in the response's metadata.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcap.serve import schemas
from kvcap.serve.chat_path import ChatPath, TranslatedForm, TranslatedPart, joined, request_of
from kvcap.serve.contract import Reply
from kvcap.serve.errors import ApiError
from kvcap.serve.streaming import WRITTEN

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "tool_call_id": "call_id",
    "id": "call_id",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
TEXTS = ("input_text", "output_text", "text")
LEFT_OUT = "kvcap_tools_left_out"  # the name in a response's metadata of tools that are not offered
OF_HOSTED_TOOLS = Literal[
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Names what `include` may ask for: parts of items that no response has here."""
LOG = logging.getLogger("kvcap.serve")


class TextFormat(schemas.Strict):
    """A format that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: schemas.Name = "answer"
    description: str | None = None
    schema_: Annotated[schemas.Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextSettings(schemas.Strict):
    """A group of settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(schemas.Strict):
    """A group of settings of the model's thoughts."""

    effort: str | None = None
    summary: Any = None  # thoughts are given whole
    generate_summary: Any = None
    context: Any = None  # earlier thoughts stay in the conversation's cache


class ResponseStreamOptions(schemas.Strict):
    """A group of options of what a stream contains beside the answer."""

    include_obfuscation: Literal[False] | None = None


class ResponseBody(schemas.Strict):
    """A body that `POST /v1/responses` takes."""

    model: Annotated[str, Field(max_length=256)] | None = None
    input: str | schemas.Items[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: schemas.Short | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=schemas.TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Limits calls of tools that a server runs, of which there are none here."""
    # These fields are accepted only with values that ask for nothing.
    background: Literal[False] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    top_logprobs: Literal[0] | None = None
    include: schemas.Items[OF_HOSTED_TOOLS] | None = None
    stream_options: ResponseStreamOptions | None = None
    # They ask for nothing, whatever they are.
    client_metadata: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None

    def openai(self, items: list[tuple[str, dict[str, Any]]]) -> tuple[dict[str, Any], list[str]]:
        """Return the body as `POST /v1/chat/completions` takes it, and which tools it leaves out.

        Args:
            items: of the whole conversation, each with its place in the body.

        Raises:
            ValueError: an item, or a tool, that this server does not read.
        """
        system = {"role": "system", "content": self.instructions}
        messages = [system] if self.instructions else []
        tools = [(f"tools.{number}", tool) for number, tool in enumerate(self.tools or ())]
        for where, item in items:
            if item.get("type") == "additional_tools" and isinstance(item.get("tools"), list):
                tools += [(f"{where}.tools.{i}", tool) for i, tool in enumerate(item["tools"])]
            else:
                _add(messages, item, where)
        body: dict[str, Any] = {
            "model": self.model,
            "messages": joined(messages),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
        }
        functions, left_out = _sorted(tools)
        choice = self.tool_choice
        match choice:
            case {"type": "allowed_tools", "tools": list(allowed), **more}:
                named = [
                    {"type": "function", "function": {"name": one.get("name")}}
                    for one in allowed
                    if isinstance(one, dict) and one.get("type", "function") == "function"
                ]
                choice = {"type": "allowed_tools", "allowed_tools": {**more, "tools": named}}
            case {"type": type_, "name": name, **more} if not more:
                choice = {"type": type_, "function": {"name": name}}
        if functions:
            body["tools"] = functions
        body["tool_choice"] = choice
        if self.text is not None:
            body["verbosity"] = self.text.verbosity
        if self.text is not None and (format_ := self.text.format) is not None:
            schema = format_.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
            held = {"json_schema": TranslatedPart("text.format", **schema)}
            shaped = held if format_.type == "json_schema" else {}
            body["response_format"] = {"type": format_.type, **shaped}
        return body, left_out

    @property
    def items(self) -> list[dict[str, Any]]:
        """Return the input as items."""
        message = {"role": "user", "content": self.input}
        return [message] if isinstance(self.input, str) else self.input


def _sorted(tools: list[tuple[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions among tools in the format of chats, and the names of the other tools.

    Raises:
        ValueError: one is no tool.
    """
    functions, left_out = list[dict[str, Any]](), list[str]()
    for where, tool in tools:
        match tool:
            case {"type": "function", **function}:
                translated = TranslatedPart(where, **{str(name): x for name, x in function.items()})
                functions.append(TranslatedPart(where, type="function", function=translated))
            case {"type": str(type_)}:
                name = str(tool.get("name") or tool.get("server_label") or "")
                left_out.append(f"{type_} {name}".strip()[:64])
            case _:
                raise ValueError(f"{where} is no tool; give {{'type': 'function', 'name': NAME}}")
    return functions, left_out


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add an item of the input to messages; calls join the assistant's message before them."""
    match item:
        case {"type": "reasoning"}:
            pass
        case {"type": "function_call", "call_id": id_, "name": name, "arguments": arguments}:
            function = {"name": name, "arguments": arguments}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append(TranslatedPart(where, role="assistant", content=""))
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append(TranslatedPart(where, type="function", id=id_, function=function))
        case {"type": "function_call_output", "call_id": id_, "output": output}:
            text = _text(output, f"{where}.output")
            messages.append(TranslatedPart(where, role="tool", tool_call_id=id_, content=text))
        case {"type": "function_call_output", "name": str(name), "output": output}:
            # Codex's own word on its state: it answers no call, so that no template takes it.
            text = f"{name}: {_text(output, f'{where}.output')}"
            messages.append(TranslatedPart(where, role="user", content=text))
        case {
            "role": "system" | "developer" | "user" | "assistant" as role,
            "content": content,
        } if item.get("type", "message") == "message":
            role = "system" if role == "developer" else role
            messages.append(
                TranslatedPart(where, role=role, content=_text(content, f"{where}.content"))
            )
        case _:
            kind = str(item.get("type") or item.get("role"))[:40]
            raise ValueError(
                f"{where} is {kind!r}; use a message of the system, developer, user "
                "or assistant, function_call or function_call_output"
            )


def _text(content: Any, where: str) -> str:
    """Return a text, given as such or in parts.

    Raises:
        ValueError: a part is none.
    """
    if isinstance(content, str):
        return content
    texts = list[str]()
    for part in content if isinstance(content, list) else [None]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in TEXTS else None
        if not isinstance(text, str):
            raise ValueError(f"{where} has a part that is no text; this server reads texts")
        texts.append(text)
    return "".join(texts)


class KeptResponse(NamedTuple):
    """A record of a response and of the input items that it answers."""

    items: list[dict[str, Any]]
    response: dict[str, Any]
    nbytes: int


class Responses:
    """An application that answers at `/v1/responses`, and keeps the last responses.

    Args:
        api: that answers chats.
    """

    def __init__(self, api: ChatPath) -> None:
        self.api = api
        self.most_bytes = 4 * api.limits.body_bytes
        self.kept = OrderedDict[tuple[str, str], KeptResponse]()  # by owner and id
        self.items = dict[tuple[str, str], dict[str, Any]]()  # of the outputs of those, likewise
        self.nbytes = 0

    async def create(self, request: Request) -> Response:
        """Answer an input: `POST /v1/responses`."""
        body = await self.api.body_of(request, ResponseBody)
        owner, own, left_out = request.user.username, list[dict[str, Any]](), list[str]()

        def make_body() -> dict[str, Any]:
            own.extend(self._item(owner, item, f"input.{i}") for i, item in enumerate(body.items))
            before = [("previous_response_id", x) for x in self._before(owner, body)]
            chat_body, left = body.openai(
                [*before, *((f"input.{i}", x) for i, x in enumerate(own))]
            )
            left_out.extend(left)
            return chat_body

        chat = request_of(schemas.ChatRequest, make_body, NAMES)
        if left_out:
            _log_left_out(", ".join(left_out))

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                size = len(json.dumps([own, response]))
                self._keep((owner, response["id"]), KeptResponse(own, response, size))

        return await self.api.answer(
            request,
            chat,
            lambda: ResponseForm(self.api.name, chat.most_calls, body, left_out, keep),
        )

    async def one(self, request: Request) -> Response:
        """Return a response that is kept, or forget it: `GET`, `DELETE /v1/responses/{id}`."""
        owner, id_ = request.user.username, request.path_params["id"]
        kept = self._known(owner, id_)
        if request.method != "DELETE":
            return JSONResponse(kept.response)
        self._forget((owner, id_))
        return JSONResponse({"id": id_, "object": "response", "deleted": True})

    def _known(self, owner: str, id_: str, param: str | None = None) -> KeptResponse:
        """Return a response that is kept.

        Raises:
            ApiError: it is not known any more.
        """
        kept = self.kept.get((owner, id_))
        if kept is None:
            raise ApiError(
                404,
                f"the response {id_[:80]!r} is not kept, or not any more; send the whole input "
                "instead of its id",
                param=param,
                code="previous_response_not_found" if param else "response_not_found",
            )
        self.kept.move_to_end((owner, id_))
        return kept

    def _before(self, owner: str, body: ResponseBody) -> Iterator[dict[str, Any]]:
        """Yield the items of all earlier responses that a body continues, the oldest first."""
        chain, id_ = list[KeptResponse](), body.previous_response_id
        while id_ is not None:
            chain.append(self._known(owner, id_, "previous_response_id"))
            id_ = chain[-1].response["previous_response_id"]
        for kept in reversed(chain):
            yield from kept.items
            yield from kept.response["output"]

    def _item(self, owner: str, item: dict[str, Any], where: str) -> dict[str, Any]:
        """Return an item, or that which it refers to.

        Raises:
            ApiError: that one is not known any more.
        """
        if item.get("type") != "item_reference":
            return item
        id_ = str(item.get("id"))
        if (owner, id_) not in self.items:
            raise ApiError(
                404,
                f"the item {id_[:80]!r} is not known, or not any more; send the item itself",
                param=f"{where}.id",
                code="item_not_found",
            )
        return self.items[owner, id_]

    def _keep(self, name: tuple[str, str], kept: KeptResponse) -> None:
        self.kept[name] = kept
        self.items |= {(name[0], item["id"]): item for item in kept.response["output"]}
        self.nbytes += kept.nbytes
        while self.nbytes > self.most_bytes:
            self._forget(next(iter(self.kept)))

    def _forget(self, name: tuple[str, str]) -> None:
        kept = self.kept.pop(name)
        self.nbytes -= kept.nbytes
        for item in kept.response["output"]:
            del self.items[name[0], item["id"]]


@lru_cache(maxsize=64)
def _log_left_out(names: str) -> None:
    """Log tools that are not offered, once while the last ones are remembered."""
    LOG.warning("tools of types that this server cannot offer are left out: %s", names)


class ResponseForm(TranslatedForm):
    """A form that puts a chat's answer into the words of `/v1/responses`.

    Args:
        model: the name that the server has for it.
        most_calls: of tools.
        body: the body.
        left_out: names of its tools that are not offered.
        keep: takes the response once it has ended.
    """

    prefix, whole_object = "resp", "response"

    def __init__(
        self,
        model: str,
        most_calls: int,
        body: ResponseBody,
        left_out: list[str],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(model, include_usage=False, most_calls=most_calls)
        self.request, self.left_out, self.keep = body, left_out, keep
        self.output = list[dict[str, Any]]()  # items, of which the last may be open
        self.open = ""  # the type of the item that is open
        self.number = 0  # of the next event

    def opening(self) -> bytes:
        """Write the response without its output."""
        response = self._response(None, "in_progress")
        return self._event("created", response=response) + self._event(
            "in_progress", response=response
        )

    def closing(self, reply: Reply) -> bytes:
        """Write what was held back, the calls, and the whole response."""
        last = self.rest(reply) + self._close(cut=self._reason(reply) == "length")
        response = self._response(reply)
        self.keep(response)
        return last + self._event(response["status"], response=response)

    def failed(self, error: ApiError) -> bytes:
        """Write the response as one that failed."""
        response = self._response(None, "failed")
        code = {"code": error.code or error.kind, "message": error.message}
        return self._event("failed", response={**response, "error": code})

    def body(self, reply: Reply) -> dict[str, Any]:
        """Return the whole response."""
        for delta in (
            {"reasoning_content": self.thoughts},
            {"content": self.content},
            {"tool_calls": self.calls},
        ):
            self.delta(delta)
        self._close(cut=self._reason(reply) == "length")
        response = self._response(reply)
        self.keep(response)
        return response

    def _response(self, reply: Reply | None, status: str = "") -> dict[str, Any]:
        """Return the response as it is so far; with a reply, once it has ended."""
        body, cut, usage = self.request, False, None
        if reply is not None:
            cut = self._reason(reply) == "length"
            status = "incomplete" if cut else "completed"
        if reply is not None and (tokens := reply.usage) is not None:
            usage = {
                "input_tokens": tokens.prompt_tokens,
                "input_tokens_details": {"cached_tokens": tokens.reused_tokens},
                "output_tokens": tokens.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": tokens.prompt_tokens + tokens.completion_tokens,
            }
        format_ = body.text and body.text.format
        shown = {"type": "text"}
        if format_:
            shown = format_.model_dump(by_alias=True, exclude_none=True)
        left_out = {LEFT_OUT: ", ".join(self.left_out)[:512]} if self.left_out else {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.model,
            "output": list(self.output),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": {**(body.metadata or {}), **left_out},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool for tool in body.tools or () if tool["type"] == "function"],
            "text": {
                "format": shown,
                "verbosity": (body.text and body.text.verbosity) or "medium",
            },
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": body.store is not False,
            "truncation": "disabled",
            "usage": usage,
        }

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """Write the items that a delta opens or continues."""
        events = b""
        if text := delta.get("reasoning_content"):
            events += self._begin("reasoning", "reasoning_text", {"summary": [], "content": []})
            events += self._go_on("reasoning_text", text)
        if text := delta.get("content"):
            events += self._begin("message", "output_text", {"role": "assistant", "content": []})
            events += self._go_on("output_text", text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            item = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            events += self._close() + self._begin("function_call", "", item)
            events += self._go_on("function_call_arguments", function["arguments"])
        return events

    def _begin(self, kind: str, part: str, item: dict[str, Any]) -> bytes:
        """Write that an item begins, and its one part, unless it is open."""
        if self.open == kind:
            return b""
        closed, self.open = self._close(), kind
        name = {"type": kind, "id": f"{kind[:3]}_{secrets.token_hex(12)}"}
        self.output.append({**name, "status": "in_progress", **item})
        events = closed + self._event(
            "output_item.added", **self._output_index(), item=self.output[-1]
        )
        if not part:
            return events
        empty = {"type": part, "text": "", "annotations": []}
        self.output[-1]["content"].append(empty)
        return events + self._event("content_part.added", **self._within(), part=empty)

    def _go_on(self, kind: str, text: str) -> bytes:
        """Write more of the item that is open."""
        item = self.output[-1]
        if kind == "function_call_arguments":
            item["arguments"] += text
            return self._event(
                f"{kind}.delta", **self._output_index(), item_id=item["id"], delta=text
            )
        item["content"][0]["text"] += text
        return self._event(f"{kind}.delta", **self._within(), delta=text, logprobs=[])

    def _close(self, *, cut: bool = False) -> bytes:
        """Write that the item ends that is open, and whether it was cut short."""
        if not self.open:
            return b""
        item, self.open = self.output[-1], ""
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] == "function_call":
            fields = {"item_id": item["id"], "arguments": item["arguments"], "name": item["name"]}
            events = self._event("function_call_arguments.done", **self._output_index(), **fields)
        else:
            (part,) = item["content"]
            text = {"text": part["text"], "logprobs": []}
            events = self._event(f"{part['type']}.done", **self._within(), **text)
            events += self._event("content_part.done", **self._within(), part=part)
        return events + self._event("output_item.done", **self._output_index(), item=item)

    def _output_index(self) -> dict[str, Any]:
        return {"output_index": len(self.output) - 1}

    def _within(self) -> dict[str, Any]:
        return {**self._output_index(), "item_id": self.output[-1]["id"], "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        kind = f"response.{kind}"
        fields = {"type": kind, "sequence_number": self.number, **fields}
        self.number += 1
        return f"event: {kind}\ndata: {WRITTEN(fields)}\n\n".encode("ascii")
