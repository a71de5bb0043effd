"""Answers ollama's API (`/api/chat`, `/api/generate` and others) as OpenAI's chats are.

A body becomes a `ChatRequest`, and `OllamaForm` puts the answer into ollama's words: lines of JSON,
streamed unless the body says otherwise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvcap.serve import schemas
from kvcap.serve.chat_path import ChatPath, TranslatedForm, request_of
from kvcap.serve.contract import Piece, Reply
from kvcap.serve.errors import ApiError
from kvcap.serve.model_facts import ModelFacts
from kvcap.serve.streaming import WRITTEN
from kvcap.serve.tool_calls import arguments_of

OPTIONS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
           "seed": "seed", "stop": "stop", "num_predict": "max_tokens",
           "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
           "frequency_penalty": "frequency_penalty"}  # fmt: skip
NAMES = {ours: f"options.{name}" for name, ours in OPTIONS.items()}
UNUSED = (
    "num_ctx",
    "num_keep",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "use_mmap",
    "use_mlock",
    "low_vram",
    "numa",
    "f16_kv",
    "num_gqa",
    "penalize_newline",
    "rope_frequency_base",
    "rope_frequency_scale",
    "mirostat_tau",
    "mirostat_eta",
)
"""Names the options that say how ollama runs a model, which this server's own options do.

And those that change nothing without another that is refused."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "tfs_z": (1,),
    "typical_p": (1,),
    "vocab_only": (False,),
    "embedding_only": (False,),
    "logits_all": (False,),
}
"""Holds options that this server has not, with the values by which they change nothing."""
UNLIMITED = (-2, -1, 0)  # values of `num_predict`
LEVEL = "0.12.11"
"""Says which version's API this server speaks; clients ask for at least the one that they need."""


class GoBody(schemas.Strict):
    """A body of ollama's own client, which sends the fields that were not set with zero values.

    Such a value of a field that this server has not asks for nothing, and is left out. Of those
    that it has, `KEPT` mean something by their zero value.
    """

    KEPT: ClassVar = frozenset({"keep_alive", "stream", "think"})

    @model_validator(mode="before")
    @classmethod
    def _without_zeros(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if value or (name in cls.KEPT and value not in ("", None))
        }


class OllamaBody(GoBody):
    """A body with the fields that a chat and a text share."""

    model: Annotated[str, Field(max_length=256)]
    stream: bool | None = None
    options: dict[str, Any] | None = None
    format: Literal["json", ""] | schemas.Schema | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=schemas.TOP_LOGPROBS)] | None = None
    truncate: bool | None = None  # nothing is too long for a cache that evicts
    shift: bool | None = None  # likewise
    keep_alive: Any = None  # the model stays, whatever it is

    @property
    def load_or_unload(self) -> str:
        """Return "load" or "unload" for a body without a prompt; the model stays in any case."""
        kept = "1" if self.keep_alive is None else str(self.keep_alive)  # 0, "0", "0s", "0m0s"
        return "unload" if "0" in kept and not kept.strip("0.smh") else "load"

    def openai(self, **prompt: Any) -> dict[str, Any]:
        """Return the body as OpenAI's API has it, with the messages or the prompt that it asks.

        Raises:
            ValueError: an option that this server has not.
        """
        body: dict[str, Any] = {"model": self.model.removesuffix(":latest"), **prompt}
        body["stream"] = self.stream is not False
        options = dict(self.options or {})
        last = options.pop("repeat_last_n", -1)
        if type(last) is not int or last < -1:
            raise ValueError(f"options.repeat_last_n is {last!r}; use a whole number, -1 or more")
        if last == 0:  # the penalty looks at no token
            options["repeat_penalty"] = 1.0
        if type(most := options.get("num_predict")) is int and most in UNLIMITED:
            del options["num_predict"]
        for name, value in options.items():
            if name in OPTIONS:
                body[OPTIONS[name]] = value
            elif name not in UNUSED and not _changes_nothing(name, value):
                raise ValueError(
                    f"options has {name[:40]!r}, which this server has not; use "
                    f"{', '.join(OPTIONS)}"
                )
        if self.format:
            schema = {"type": "object"} if self.format == "json" else self.format
            named = {"name": "answer", "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        if self.logprobs or self.top_logprobs:
            body |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        if isinstance(self.think, str):
            body["reasoning_effort"] = self.think
        elif self.think is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.think}
        return body


def _changes_nothing(name: str, value: Any) -> bool:
    return any(
        type(value) in (type(neutral), float) and value == neutral
        for neutral in NEUTRAL.get(name, ())
    )


class ChatBody(OllamaBody):
    """A body that `POST /api/chat` takes."""

    messages: schemas.Items[dict[str, Any]] = Field(default_factory=list)
    tools: schemas.Items[dict[str, Any]] | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is to be answered."""
        return not self.messages

    def chat(self) -> dict[str, Any]:
        """Return the body as OpenAI's API has it; ollama's calls have no ids, and get their own."""
        messages, waiting = list[dict[str, Any]](), list[str]()
        for number, message in enumerate(self.messages):
            translated = {
                k: v for k, v in message.items() if v and k not in ("thinking", "tool_name")
            }
            translated.setdefault("content", "")
            if message.get("images"):
                raise ValueError(f"messages.{number} has images; this server reads texts")
            if calls := message.get("tool_calls"):
                if not isinstance(calls, list):
                    raise ValueError(f"messages.{number}.tool_calls is no list; give one of calls")
                translated["tool_calls"] = [
                    _as_openai(call, number, index) for index, call in enumerate(calls)
                ]
                waiting = [call["id"] for call in translated["tool_calls"]]
            if message.get("role") == "tool" and "tool_call_id" not in translated:
                translated["tool_call_id"] = waiting.pop(0) if waiting else "call"
            messages.append(translated)
        return {**self.openai(messages=messages), "tools": self.tools}


def _as_openai(call: Any, number: int, index: int) -> dict[str, Any]:
    """Return the call at a place of a message with that number as OpenAI's API has it.

    Raises:
        ValueError: it is none.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        where = f"messages.{number}.tool_calls.{index}"
        raise ValueError(f"{where} has no function; give one with name and arguments")
    arguments = json.dumps(function.get("arguments") or {})
    named = {"name": function.get("name"), "arguments": arguments}
    return {"type": "function", "id": call.get("id") or f"call_{number}_{index}", "function": named}


class GenerateBody(OllamaBody):
    """A body that `POST /api/generate` takes."""

    prompt: str = ""
    system: str | None = None
    suffix: Literal[""] | None = None
    raw: bool | None = None
    """Says that the prompt is continued without the chat template, as `/v1/completions` does."""

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is to be answered."""
        return not self.prompt

    def chat(self) -> dict[str, Any]:
        """Return the body as OpenAI's API has it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.openai(messages=[*system, {"role": "user", "content": self.prompt}])

    def text(self) -> dict[str, Any]:
        """Return the body as OpenAI's API has it, with a prompt that is continued as it is.

        Raises:
            ValueError: a field that needs the chat template.
        """
        for name in ("system", "format", "think"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} does not go with raw, which continues the prompt without the chat "
                    "template; leave one of them out"
                )
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true; add that, or leave it out")
        likelihoods = {"logprobs": self.top_logprobs or 0 if self.logprobs else None}
        without = {"chat_template_kwargs": None, "top_logprobs": None}
        return {**self.openai(prompt=self.prompt), **without, **likelihoods}


class ShowBody(GoBody):
    """A body that `POST /api/show` takes."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaForm(TranslatedForm):
    """A form that puts a chat's answer into ollama's words.

    Args:
        model: the name that the server has for it.
        most_calls: of tools.
        chat: whether a message is answered, or a prompt.
    """

    prefix, media_type, alive = "ollama", "application/x-ndjson", b""

    def __init__(self, model: str, most_calls: int, *, chat: bool) -> None:
        super().__init__(model, include_usage=False, most_calls=most_calls)
        self.chat, self.begun = chat, time.perf_counter_ns()
        self.first: int | None = None  # when the first piece came
        self.likely = list[dict[str, Any]]()  # how likely tokens were that no line has had yet

    def opening(self) -> bytes:
        """Write nothing, as a stream has no first line of its own."""
        return b""

    def put(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the choices of a piece, and note when the first came."""
        self.first = self.first or time.perf_counter_ns()
        self.likely += [_likely(logprob.as_dict()) for logprob in piece.logprobs or ()]
        return self.parts(piece)

    def parts(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the choices of a piece: thoughts, text, or none while it may be a call."""
        return super().put(piece)

    def closing(self, reply: Reply) -> bytes:
        """Write what was held back, the calls, and the figures."""
        last = {**self._delta_line({}), **self._likely(), **self._figures(reply)}
        return self.rest(reply) + _json_line(last)

    def failed(self, error: ApiError) -> bytes:
        """Write the error."""
        return _json_line(error.ollama)

    def body(self, reply: Reply) -> dict[str, Any]:
        """Return the whole answer, with its figures."""
        delta = {"content": self.content, "reasoning_content": self.thoughts}
        line = self._delta_line({**delta, "tool_calls": self.calls})
        return {**line, **self._likely(), **self._figures(reply)}

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """Write a delta's line."""
        if not delta or delta == {"content": ""}:
            return b""
        return _json_line({**self._delta_line(delta), **self._likely(), "done": False})

    def _likely(self) -> dict[str, Any]:
        """Return how likely the tokens were that no line has had, if that was asked for."""
        logprobs, self.likely = self.likely, []
        return {"logprobs": logprobs} if logprobs else {}

    def _delta_line(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        """Return one delta of a chat's stream in ollama's words."""
        text, thoughts = delta.get("content") or "", delta.get("reasoning_content")
        line = {"model": self.model, "created_at": now()}
        thinking = {"thinking": thoughts} if thoughts else {}
        if not self.chat:
            return {**line, "response": text, **thinking}
        message = {"role": "assistant", "content": text, **thinking}
        if calls := delta.get("tool_calls"):
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": arguments_of(call),
                    },
                }
                for call in calls
            ]
        return {**line, "message": message}

    def _figures(self, reply: Reply) -> dict[str, Any]:
        usage, ended = reply.usage, time.perf_counter_ns()
        first = self.first or ended
        return {
            "done": True,
            "done_reason": "length" if self._reason(reply) == "length" else "stop",
            "total_duration": ended - self.begun,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens if usage else 0,
            "prompt_eval_duration": first - self.begun,
            "eval_count": usage.completion_tokens if usage else 0,
            "eval_duration": ended - first,
        }


class RawForm(OllamaForm):
    """A form of a prompt that is continued as it is, so that all of the answer is text.

    Args:
        model: the name that the server has for it.
    """

    def __init__(self, model: str) -> None:
        super().__init__(model, most_calls=0, chat=False)

    def parts(self, piece: Piece) -> list[dict[str, Any]]:
        """Return a choice with the piece's text."""
        self.content += piece.text
        return [{"delta": {"content": piece.text}}] if piece.text else []


class Ollama:
    """An application that answers at ollama's addresses.

    Args:
        api: that answers chats.
    """

    def __init__(self, api: ChatPath) -> None:
        self.api, self.begun = api, now()

    @property
    def facts(self) -> ModelFacts:
        """Return the model's description and abilities."""
        return self.api.conversations.figures().model

    @property
    def model(self) -> dict[str, Any]:
        """Return the model as ollama lists it."""
        name, facts = self.api.name, self.facts
        return {
            "name": name,
            "model": name,
            "modified_at": self.begun,
            "size": 0,
            "digest": "0" * 64,
            "details": {
                "parent_model": "",
                "format": "kvcap",
                "family": facts.architecture,
                "families": [facts.architecture],
                "parameter_size": facts.size,
                "quantization_level": facts.level,
            },
        }

    @property
    def routes(self) -> list[Route]:
        """Return the routes that can be asked for."""
        return [
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/tags", self.tags, methods=["GET"]),
            Route("/api/ps", self.running, methods=["GET"]),
            Route("/api/version", self.version, methods=["GET"]),
        ]

    async def chat(self, request: Request) -> Response:
        """Answer messages; none ask only for the model to be there."""
        return await self._answer(request, ChatBody)

    async def generate(self, request: Request) -> Response:
        """Answer a prompt; an empty one asks only for the model to be there."""
        return await self._answer(request, GenerateBody)

    async def _answer(
        self, request: Request, kind: type[ChatBody] | type[GenerateBody]
    ) -> Response:
        chats, name = kind is ChatBody, self.api.name
        body = await self.api.body_of(request, kind)
        if body.is_empty:
            self.api.check_model(body.model.removesuffix(":latest"))
            answer = (
                {"message": {"role": "assistant", "content": ""}} if chats else {"response": ""}
            )
            ended = {"done": True, "done_reason": body.load_or_unload}
            return JSONResponse({"model": name, "created_at": now(), **answer, **ended})
        if isinstance(body, GenerateBody) and body.raw:
            text = request_of(
                schemas.CompletionRequest, body.text, {**NAMES, "logprobs": "top_logprobs"}
            )
            return await self.api.go_on(request, text, lambda: RawForm(name))
        chat = request_of(schemas.ChatRequest, body.chat, NAMES)
        return await self.api.answer(
            request, chat, lambda: OllamaForm(name, chat.most_calls, chat=chats)
        )

    async def show(self, request: Request) -> Response:
        """Describe the model."""
        body = await self.api.body_of(request, ShowBody)
        self.api.check_model((body.model or body.name or "").removesuffix(":latest"))
        facts = self.facts
        can = {"completion": True, "tools": facts.tools, "thinking": facts.thinking}
        more = {"general.parameter_count": facts.parameters} if facts.parameters else {}
        return JSONResponse(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "details": self.model["details"],
                "model_info": {
                    "general.architecture": facts.architecture,
                    f"{facts.architecture}.context_length": facts.context_length,
                    **more,
                },
                "capabilities": [name for name, able in can.items() if able],
            }
        )

    async def tags(self, _: Request) -> Response:
        """List the one model."""
        return JSONResponse({"models": [self.model]})

    async def running(self, _: Request) -> Response:
        """List the one model, which is always loaded."""
        figures = self.api.conversations.figures()
        more = {"expires_at": "2100-01-01T00:00:00Z", "size": figures.process_bytes, "size_vram": 0}
        return JSONResponse({"models": [{**self.model, **more}]})

    async def version(self, _: Request) -> Response:
        """Return the version of the API that is spoken."""
        return JSONResponse({"version": LEVEL})


def now() -> str:
    """Return the time as ollama writes it."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def _likely(noted: dict[str, Any]) -> dict[str, Any]:
    """Return how likely a token was, as ollama has it."""
    return noted if noted["top_logprobs"] else {k: noted[k] for k in ("token", "logprob", "bytes")}


def _json_line(fields: dict[str, Any]) -> bytes:
    return f"{WRITTEN(fields)}\n".encode("ascii")
