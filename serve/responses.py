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
    """Goes to the chat template by its name."""


class ReasoningSettings(schemas.Strict):
    """A group of settings of what the model thinks."""

    effort: str | None = None
    summary: Any = None  # thoughts are given whole
    generate_summary: Any = None
    context: Any = None  # earlier thoughts stay in the conversation's cache


class ResponseBody(schemas.Strict):
    """A body that `POST /v1/responses` takes."""

    model: Annotated[str, Field(max_length=256)] | None = None
    input: str | list[dict[str, Any]]
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
    include: list[OF_HOSTED_TOOLS] | None = None
    stream_options: dict[str, Literal[False]] | None = None
    # They ask for nothing, whatever they are.
    client_metadata: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
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
        found: dict[str, Any] = {
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
            case {"type": "allowed_tools", "mode": str(mode), "tools": list(allowed), **more} if (
                not more
            ):
                names = [one.get("name") for one in allowed if isinstance(one, dict)]
                functions = [one for one in functions if one["function"].get("name") in names]
                choice = mode
            case {"type": type_, "name": name, **more} if not more:
                choice = {"type": type_, "function": {"name": name}}
        if functions:
            found["tools"] = functions
        found["tool_choice"] = choice
        if self.text is not None and self.text.verbosity is not None:
            found["chat_template_kwargs"] = {"verbosity": self.text.verbosity}
        if self.text is not None and (format_ := self.text.format) is not None:
            said = format_.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
            shaped = {"json_schema": said} if format_.type == "json_schema" else {}
            found["response_format"] = {"type": format_.type, **shaped}
        return found, left_out

    @property
    def items(self) -> list[dict[str, Any]]:
        """Return the input as items."""
        message = {"role": "user", "content": self.input}
        return [message] if isinstance(self.input, str) else self.input


def _sorted(tools: list[tuple[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions among tools as OpenAI's older API has them, and the names of all others.

    Raises:
        ValueError: one is no tool.
    """
    functions, left_out = list[dict[str, Any]](), list[str]()
    for where, tool in tools:
        match tool:
            case {"type": "function", **function}:
                said = TranslatedPart(where, **{str(name): x for name, x in function.items()})
                functions.append(TranslatedPart(where, type="function", function=said))
            case {"type": str(type_)}:
                name = str(tool.get("name") or tool.get("server_label") or "")
                left_out.append(f"{type_} {name}".strip()[:64])
            case _:
                raise ValueError(f"{where} is no tool; give {{'type': 'function', 'name': NAME}}")
    return functions, left_out


def _add(found: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add an item of the input to messages; calls join the assistant's message before them."""
    match item:
        case {"type": "reasoning"}:
            pass
        case {"type": "function_call", "call_id": id_, "name": name, "arguments": arguments}:
            function = {"name": name, "arguments": arguments}
            if not found or found[-1]["role"] != "assistant":
                found.append(TranslatedPart(where, role="assistant", content=""))
            calls = found[-1].setdefault("tool_calls", [])
            calls.append(TranslatedPart(where, type="function", id=id_, function=function))
        case {"type": "function_call_output", "call_id": id_, "output": output}:
            text = _text(output, f"{where}.output")
            found.append(TranslatedPart(where, role="tool", tool_call_id=id_, content=text))
        case {"type": "function_call_output", "name": str(name), "output": output}:
            # Codex's own word on its state: it answers no call, so that no template takes it.
            text = f"{name}: {_text(output, f'{where}.output')}"
            found.append(TranslatedPart(where, role="user", content=text))
        case {
            "role": "system" | "developer" | "user" | "assistant" as role,
            "content": content,
        } if item.get("type", "message") == "message":
            role = "system" if role == "developer" else role
            found.append(
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


class Said(NamedTuple):
    """A record of a response, and of what was said to it."""

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
        self.kept = OrderedDict[tuple[str, str], Said]()  # by owner and id
        self.items = dict[tuple[str, str], dict[str, Any]]()  # of the outputs of those, likewise
        self.nbytes = 0

    async def create(self, request: Request) -> Response:
        """Answer an input: `POST /v1/responses`."""
        body = await self.api.said(request, ResponseBody)
        owner, own, left_out = request.user.username, list[dict[str, Any]](), list[str]()

        def made() -> dict[str, Any]:
            own.extend(self._item(owner, one, f"input.{i}") for i, one in enumerate(body.items))
            before = [("previous_response_id", x) for x in self._before(owner, body)]
            found, left = body.openai([*before, *((f"input.{i}", x) for i, x in enumerate(own))])
            left_out.extend(left)
            return found

        said = request_of(schemas.ChatRequest, made, NAMES)
        if left_out:
            _log_left_out(", ".join(left_out))

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                size = len(json.dumps([own, response]))
                self._keep((owner, response["id"]), Said(own, response, size))

        return await self.api.answer(
            request,
            said,
            lambda: ResponseForm(self.api.name, said.most_calls, body, left_out, keep),
        )

    async def read(self, request: Request) -> Response:
        """Return a response that is kept: `GET /v1/responses/{id}`."""
        return JSONResponse(self._known(request.user.username, request.path_params["id"]).response)

    async def delete(self, request: Request) -> Response:
        """Forget a response: `DELETE /v1/responses/{id}`."""
        owner, id_ = request.user.username, request.path_params["id"]
        self._known(owner, id_)
        self._forget((owner, id_))
        return JSONResponse({"id": id_, "object": "response", "deleted": True})

    def _known(self, owner: str, id_: str, param: str | None = None) -> Said:
        """Return a response that is kept.

        Raises:
            ApiError: it is not known any more.
        """
        said = self.kept.get((owner, id_))
        if said is None:
            raise ApiError(
                404,
                f"the response {id_[:80]!r} is not kept, or not any more; send the whole input "
                "instead of its id",
                param=param,
                code="previous_response_not_found" if param else "response_not_found",
            )
        self.kept.move_to_end((owner, id_))
        return said

    def _before(self, owner: str, body: ResponseBody) -> Iterator[dict[str, Any]]:
        """Yield the items of the response before a body, and of those before it."""
        chain, id_ = list[Said](), body.previous_response_id
        while id_ is not None:
            chain.append(self._known(owner, id_, "previous_response_id"))
            id_ = chain[-1].response["previous_response_id"]
        for said in reversed(chain):
            yield from said.items
            yield from said.response["output"]

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

    def _keep(self, name: tuple[str, str], said: Said) -> None:
        self.kept[name] = said
        self.items |= {(name[0], item["id"]): item for item in said.response["output"]}
        self.nbytes += said.nbytes
        while self.nbytes > self.most_bytes:
            self._forget(next(iter(self.kept)))

    def _forget(self, name: tuple[str, str]) -> None:
        said = self.kept.pop(name)
        self.nbytes -= said.nbytes
        for item in said.response["output"]:
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
        asked: the body.
        left_out: names of its tools that are not offered.
        keep: takes the response once it has ended.
    """

    prefix, whole_object = "resp", "response"

    def __init__(
        self,
        model: str,
        most_calls: int,
        asked: ResponseBody,
        left_out: list[str],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(model, include_usage=False, most_calls=most_calls)
        self.asked, self.left_out, self.keep = asked, left_out, keep
        self.output = list[dict[str, Any]]()  # items, of which the last may be open
        self.open = ""  # the type of the item that is open
        self.number = 0  # of the next event

    def opening(self) -> bytes:
        """Write the response without its output."""
        said = self._response(None, "in_progress")
        return self._event("created", response=said) + self._event("in_progress", response=said)

    def closing(self, reply: Reply) -> bytes:
        """Write what was held back, the calls, and the whole response."""
        last = self.rest(reply) + self._close()
        said = self._response(reply)
        self.keep(said)
        return last + self._event(said["status"], response=said)

    def failed(self, error: ApiError) -> bytes:
        """Write the response as one that failed."""
        said = self._response(None, "failed")
        code = {"code": error.code or error.kind, "message": error.message}
        return self._event("failed", response={**said, "error": code})

    def body(self, reply: Reply) -> dict[str, Any]:
        """Return the whole response."""
        for delta in (
            {"reasoning_content": self.thoughts},
            {"content": self.content},
            {"tool_calls": self.calls},
        ):
            self.delta(delta)
        self._close()
        said = self._response(reply)
        self.keep(said)
        return said

    def _response(self, reply: Reply | None, status: str = "") -> dict[str, Any]:
        """Return the response as it is so far; with a reply, once it has ended."""
        asked, cut, usage = self.asked, False, None
        if reply is not None:
            cut = self._reason(reply) == "length"
            status = "incomplete" if cut else "completed"
        if reply is not None and (found := reply.usage) is not None:
            usage = {
                "input_tokens": found.prompt_tokens,
                "input_tokens_details": {"cached_tokens": found.reused_tokens},
                "output_tokens": found.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": found.prompt_tokens + found.completion_tokens,
            }
        format_ = asked.text and asked.text.format
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
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": {**(asked.metadata or {}), **left_out},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "tool_choice": asked.tool_choice or "auto",
            "tools": [tool for tool in asked.tools or () if tool["type"] == "function"],
            "text": {
                "format": shown,
                "verbosity": (asked.text and asked.text.verbosity) or "medium",
            },
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
            "store": asked.store is not False,
            "truncation": "disabled",
            "usage": usage,
        }

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """Write the items that a delta opens or continues."""
        found = b""
        if text := delta.get("reasoning_content"):
            found += self._begin("reasoning", "reasoning_text", {"summary": [], "content": []})
            found += self._go_on("reasoning_text", text)
        if text := delta.get("content"):
            found += self._begin("message", "output_text", {"role": "assistant", "content": []})
            found += self._go_on("output_text", text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            item = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            found += self._close() + self._begin("function_call", "", item)
            found += self._go_on("function_call_arguments", function["arguments"])
        return found

    def _begin(self, kind: str, part: str, item: dict[str, Any]) -> bytes:
        """Write that an item begins, and its one part, unless it is open."""
        if self.open == kind:
            return b""
        closed, self.open = self._close(), kind
        name = {"type": kind, "id": f"{kind[:3]}_{secrets.token_hex(12)}"}
        self.output.append({**name, "status": "in_progress", **item})
        found = closed + self._event("output_item.added", **self._place(), item=self.output[-1])
        if not part:
            return found
        empty = {"type": part, "text": "", "annotations": []}
        self.output[-1]["content"].append(empty)
        return found + self._event("content_part.added", **self._within(), part=empty)

    def _go_on(self, kind: str, text: str) -> bytes:
        """Write more of the item that is open."""
        item = self.output[-1]
        if kind == "function_call_arguments":
            item["arguments"] += text
            return self._event(f"{kind}.delta", **self._place(), item_id=item["id"], delta=text)
        item["content"][0]["text"] += text
        return self._event(f"{kind}.delta", **self._within(), delta=text, logprobs=[])

    def _close(self) -> bytes:
        """Write that the item ends that is open."""
        if not self.open:
            return b""
        item, self.open = self.output[-1], ""
        item["status"] = "completed"
        if item["type"] == "function_call":
            said = {"item_id": item["id"], "arguments": item["arguments"], "name": item["name"]}
            found = self._event("function_call_arguments.done", **self._place(), **said)
        else:
            (part,) = item["content"]
            text = {"text": part["text"], "logprobs": []}
            found = self._event(f"{part['type']}.done", **self._within(), **text)
            found += self._event("content_part.done", **self._within(), part=part)
        return found + self._event("output_item.done", **self._place(), item=item)

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self.output) - 1}

    def _within(self) -> dict[str, Any]:
        return {**self._place(), "item_id": self.output[-1]["id"], "content_index": 0}

    def _event(self, kind: str, **said: Any) -> bytes:
        kind = f"response.{kind}"
        said = {"type": kind, "sequence_number": self.number, **said}
        self.number += 1
        return f"event: {kind}\ndata: {WRITTEN(said)}\n\n".encode("ascii")
