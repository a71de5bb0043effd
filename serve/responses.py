"""Answers `POST /v1/responses`, OpenAI's newer API, by the one path that answers chats.

A body becomes a `ChatRequest`, and `ResponseForm` puts the answer into the words of that API. What
was said in earlier responses is kept here as messages, within a bound, so that
`previous_response_id` goes on: the conversation is known by its messages and still held, or read
again.
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from kvcap.serve import schemas
from kvcap.serve.chat_path import ChatPath, TranslatedForm, TranslatedPart, request_of
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


class ResponseTool(schemas.Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: schemas.Name
    description: str | None = None
    parameters: schemas.Schema | None = None
    strict: bool | None = None


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
    verbosity: Literal["medium"] | None = None


class ReasoningSettings(schemas.Strict):
    """A group of settings of what the model thinks."""

    effort: str | None = None
    summary: Any = None  # thoughts are given whole
    generate_summary: Any = None


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
    tools: Annotated[list[ResponseTool], Field(max_length=schemas.TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    store: bool | None = None
    metadata: Any = None
    # These fields are accepted only with values that ask for nothing.
    background: Literal[False] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    top_logprobs: Literal[0] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    stream_options: dict[str, Literal[False]] | None = None
    # They ask for nothing, whatever they are.
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None

    def openai(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the body as `POST /v1/chat/completions` takes it, with all messages."""
        system = {"role": "system", "content": self.instructions}
        found: dict[str, Any] = {
            "model": self.model,
            "messages": [*([system] if self.instructions else []), *messages],
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
        }
        if self.tools:
            found["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"})}
                for tool in self.tools
            ]
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.keys() == {"type", "name"}:
            choice = {"type": choice["type"], "function": {"name": choice["name"]}}
        found["tool_choice"] = choice
        if self.text is not None and (format_ := self.text.format) is not None:
            said = format_.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
            shaped = {"json_schema": said} if format_.type == "json_schema" else {}
            found["response_format"] = {"type": format_.type, **shaped}
        return found

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the input as messages.

        Raises:
            ValueError: an item that this server does not read.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found = list[dict[str, Any]]()
        for number, item in enumerate(self.input):
            _add(found, item, f"input.{number}")
        return found


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
        case {
            "role": "system" | "developer" | "user" | "assistant" as role,
            "content": content,
        } if item.get("type", "message") == "message":
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
    """A record of what one response added to a conversation."""

    before: str | None  # the id of the response before it
    messages: list[dict[str, Any]]
    nbytes: int


class Responses:
    """An application that answers at `/v1/responses`, and keeps what was said in the last ones.

    Args:
        api: that answers chats.
    """

    def __init__(self, api: ChatPath) -> None:
        self.api = api
        self.most_bytes = 4 * api.limits.body_bytes
        self.kept = OrderedDict[tuple[str, str], Said]()  # by owner and id
        self.nbytes = 0

    async def create(self, request: Request) -> Response:
        """Answer an input: `POST /v1/responses`."""
        body = await self.api.said(request, ResponseBody)
        owner = request.user.username

        def made() -> dict[str, Any]:
            return body.openai([*self._before(owner, body.previous_response_id), *body.messages])

        said = request_of(schemas.ChatRequest, made, NAMES)

        def keep(form: ResponseForm) -> None:
            if body.store is not False:
                new = [*body.messages, form.message]
                size = len(json.dumps(new))
                self._keep((owner, form.id), Said(body.previous_response_id, new, size))

        model = self.api.name
        response: Response = await self.api.answer(
            request, said, lambda: ResponseForm(model, said.most_calls, body, keep)
        )
        return response

    def _before(self, owner: str, id_: str | None) -> Iterator[dict[str, Any]]:
        """Yield the messages of a response and of those before it.

        Raises:
            ApiError: one is not known any more.
        """
        chain = list[list[dict[str, Any]]]()
        while id_ is not None:
            said = self.kept.get((owner, id_))
            if said is None:
                raise ApiError(
                    404,
                    f"the response {id_[:80]!r} is not known, or not any more; send the whole "
                    "input without previous_response_id",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            self.kept.move_to_end((owner, id_))
            chain.append(said.messages)
            id_ = said.before
        for messages in reversed(chain):
            yield from messages

    def _keep(self, name: tuple[str, str], said: Said) -> None:
        self.kept[name] = said
        self.nbytes += said.nbytes
        while self.nbytes > self.most_bytes:
            self.nbytes -= self.kept.popitem(last=False)[1].nbytes


class ResponseForm(TranslatedForm):
    """A form that puts a chat's answer into the words of `/v1/responses`.

    Args:
        model: the name that the server has for it.
        most_calls: of tools.
        asked: the body.
        keep: takes the form once the answer has ended.
    """

    prefix, whole_object = "resp", "response"

    def __init__(
        self, model: str, most_calls: int, asked: ResponseBody, keep: Callable[[ResponseForm], None]
    ) -> None:
        super().__init__(model, include_usage=False, most_calls=most_calls)
        self.asked, self.keep = asked, keep
        self.output = list[dict[str, Any]]()  # items, of which the last may be open
        self.open = ""  # the type of the item that is open
        self.number = 0  # of the next event

    @property
    def message(self) -> dict[str, Any]:
        """Return the answer as a message of a chat."""
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.content, **calls}

    def opening(self) -> bytes:
        """Write the response without its output."""
        said = self._response(None, "in_progress")
        return self._event("created", response=said) + self._event("in_progress", response=said)

    def closing(self, reply: Reply) -> bytes:
        """Write what was held back, the calls, and the whole response."""
        last = self.rest(reply) + self._close()
        self.keep(self)
        said = self._response(reply)
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
        self.keep(self)
        return self._response(reply)

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
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": found.prompt_tokens + found.completion_tokens,
            }
        format_ = asked.text and asked.text.format
        shown = {"type": "text"}
        if format_:
            shown = format_.model_dump(by_alias=True, exclude_none=True)
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
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "tool_choice": asked.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "text": {"format": shown},
            "reasoning": {"effort": None, "summary": None},
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
