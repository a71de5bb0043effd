"""Defines the bodies of OpenAI's requests, as far as this server answers them.

A parameter that changes nothing here may be given with the value that asks for nothing, such as
`n: 1`; with another it is refused by name, as is one that is unknown. `LABELS` are taken and not
used, as they ask for nothing. Every number and list has a bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    model_validator,
)

from kvcap.runtime.recall.settings import AUTO, OFF
from kvcap.runtime.session import settings
from kvcap.runtime.session.thoughts import EFFORTS
from kvcap.runtime.session.tool_calls import schema_of_call
from kvcap.runtime.types import Message
from kvcap.serve.contract import Ask
from kvcap.serve.errors import ApiError
from kvcap.serve.limits import RequestLimits

if TYPE_CHECKING:
    from typing import Self

STOPS, STOP_LETTERS = 16, 256
TOOLS = 128
SCHEMA_DEPTH = 64  # of a JSON schema and of a tool's parameters
TOP_LOGPROBS, TOP_LOGPROBS_OF_TEXT = 20, 5  # the most there are, as in OpenAI's API
REPETITION = 10.0
RECALLED = 2**20  # tokens
ANSWERS = 128  # of one request: of `n`, and of several prompts
LIMITS = ("max_tokens", "max_completion_tokens")  # fields that limit an answer
TOKENS = 2**31  # of a vocabulary: ids are numbers of 32 bits

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""Holds a list of which only the first item that is wrong is an error, as there may be millions."""


class Strict(BaseModel):
    """Takes no field that it does not name, no text for a number, and neither NaN nor infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, body: Any) -> Any:
        """Drop fields that are null, since a null field counts as not given.

        Of many unknown ones only the first is left to be refused, as for `Items`.
        """
        if not isinstance(body, dict):
            return body
        given = {name: value for name, value in body.items() if value is not None}
        if len(given) <= len(cls.model_fields):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next(name for name in given if name not in known)
        return {name: value for name, value in given.items() if name in known or name == first}


def _only_text(content: Any) -> Any:
    """Return a message's content as text: of parts, all must be texts."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or part.keys() - {"cache_control"} != {"type", kind}:
            found_kind = f"{kind!r}"[:40] if isinstance(kind, str) else "no part of a message"
            raise ValueError(
                f"part {index} is {found_kind}; this server reads {{'type': 'text', 'text': TEXT}}"
            )
        if not isinstance(part[kind], str):
            raise ValueError(f"part {index} has no text; give one")
        texts.append(part[kind])
    return "".join(texts)


def _stops(value: Any) -> Any:
    """Return texts that stop an answer as a list, without empty ones, which stop nothing."""
    texts = value if isinstance(value, list) else [value]
    return [text for text in texts if text != ""]


def _unless_minus_one(value: Any) -> Any:
    """Return a seed or a number of tokens; -1, as llama.cpp's clients send it, is none."""
    return None if type(value) is int and value == -1 else value


def _all(value: Any) -> Any:
    """Return `top_k`; -1, as vLLM's clients send it, is all tokens, as 0 is."""
    return 0 if type(value) is int and value == -1 else value


def _prompts(value: Any) -> Any:
    """Return a completion's prompts, each a text or its tokens."""
    listed = isinstance(value, list)
    prompts = value if listed and not all(type(prompt) is int for prompt in value) else [value]
    for prompt in prompts:
        tokens = (
            isinstance(prompt, list)
            and prompt
            and all(type(token) is int and 0 <= token < TOKENS for token in prompt)
        )
        if not isinstance(prompt, str) and not tokens:
            raise ValueError("give a text, a list of token ids, or a list of such prompts")
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]


def _biases(value: Any) -> Any:
    """Return the numbers added to logits by token id; an empty dictionary where there are none."""
    settings.check({"logit_bias": value})
    return value or None


def _shallow(value: Any) -> Any:
    """Refuse JSON that is nested too deeply for libraries that read it by recursion."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > SCHEMA_DEPTH:
            raise ValueError(f"it is nested too deeply; use at most {SCHEMA_DEPTH} levels")
        inner: list[Any] = []
        for item in level:
            inner += (
                item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            )
        level = inner
    return value


One = Annotated[float, Field(ge=1, le=1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Text = Annotated[str, BeforeValidator(_only_text)]
Stop = Annotated[
    Items[Annotated[str, StringConstraints(min_length=1, max_length=STOP_LETTERS)]],
    BeforeValidator(_stops),
    Field(max_length=STOPS),
]
Most = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_unless_minus_one)]
"""Names how many tokens an answer has at most; 0: the prompt is only read."""
Schema = Annotated[dict[str, Any], AfterValidator(_shallow)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
"""Holds a name of a tool: Anthropic's may be twice as long as OpenAI's, as those of MCP are."""
Short = Annotated[str, StringConstraints(max_length=256)]


class Called(Strict):
    """A function that a tool call names, with its arguments."""

    name: Name
    arguments: str
    """Holds the JSON text of an object."""

    def parsed(self) -> dict[str, Any]:
        """Return the arguments.

        Raises:
            ValueError: they are no JSON object.
        """
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError(
                f"the arguments of a call of {self.name!r} are no JSON object; give its text"
            )
        _shallow(arguments)
        return arguments


class MessageToolCall(Strict):
    """A call of a tool that an earlier answer asked for."""

    id: Short = ""
    type: Literal["function"] = "function"
    function: Called
    index: int | None = None  # part of calls that were streamed


class ChatMessage(Strict):
    """A message of a chat; `pin` is kvcap's own and says that it is never evicted."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=TOOLS)] | None = None
    tool_call_id: Short | None = None
    pin: bool = False
    name: Short | None = None
    """Names who speaks, for chat templates that read it; an assistant's is not used."""
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    # LABELS: they ask for nothing, whatever they are.
    reasoning_content: Any = None  # thoughts of earlier answers, which chat templates leave out
    reasoning: Any = None
    cache_control: Any = None

    @model_validator(mode="after")
    def _fits_role(self) -> ChatMessage:
        calls = self.tool_calls or []
        if calls and self.role != "assistant":
            raise ValueError(
                f"tool_calls are in a message of the {self.role}; give them in the assistant's"
            )
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a tool's message has no tool_call_id; say which call it answers")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(
                f"tool_call_id is in a message of the {self.role}; give it in a tool's"
            )
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("the message has no content; give a text")
        if self.pin and self.role in ("assistant", "tool"):
            raise ValueError(f"a message of the {self.role} cannot be pinned; pin a user's")
        for call in calls:
            call.function.parsed()
        return self

    @property
    def message(self) -> Message:
        """Return the message as the runtime and chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.parsed()},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name and role != "assistant":  # an answer in the cache has none, and is the same
            message["name"] = self.name
        return message


class Function(Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: Annotated[bool | None, Field(exclude=True)] = None  # said to the server, not the model
    """Says whether the arguments of a call that the model makes by itself are held to the schema.

    Those of a call that must be always are."""


class Tool(Strict):
    """A tool that the chat template gets."""

    type: Literal["function"]
    function: Function
    cache_control: Annotated[Any, Field(exclude=True)] = None
    """Asks for nothing: a conversation's tools are read once."""


def _template_options(value: Any) -> Any:
    """Refuse anything but options of a chat template, and names that it always gets."""
    settings.check({"template_options": value})
    return value


class ToolChoice(NamedTuple):
    """A choice of the tools that an answer may call, and of those that it must."""

    mode: str = "auto"
    called: str | None = None
    """Names the function that must be called; None: any will do."""
    allowed: frozenset[str] | None = None
    """Names the only tools that are offered; None: all are."""


def _choice(value: Any) -> ToolChoice:
    """Return a choice of tools, as OpenAI's API writes it."""
    match value:
        case "auto" | "none" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name), **more}, **rest} if (
            not more | rest
        ):
            return ToolChoice("required", called=name)
        case {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto" | "required" as mode,
                "tools": list(tools),
                **more,
            },
            **rest,
        } if not more | rest:
            return ToolChoice(mode, allowed=frozenset(map(_named_function, tools)))
    raise ValueError(
        "use 'auto', 'none', 'required', {'type': 'function', 'function': {'name': NAME}}, or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto', 'tools': [...]}} with such "
        "functions"
    )


def _named_function(tool: Any) -> str:
    """Return the name of a function that a choice of tools lists."""
    match tool:
        case {"type": "function", "function": {"name": str(name), **more}, **rest} if (
            not more | rest
        ):
            return name
    raise ValueError(
        "allowed_tools has what is no function; list {'type': 'function', 'function': {'name': "
        "NAME}}"
    )


def _recall(value: Any) -> Any:
    """Refuse anything but a measure of recall."""
    if value in (AUTO, OFF) or (type(value) is int and 0 <= value <= RECALLED):
        return value
    raise ValueError(
        f"use '{AUTO}', '{OFF}', or the most tokens of evicted text to read again, such as 128"
    )


class NamedSchema(Strict):
    """A schema that `response_format` names."""

    name: Name = "answer"
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None
    """Changes nothing: an answer is always held to the schema."""


class ResponseFormat(Strict):
    """A format that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    """Holds the schema itself, as llama.cpp's clients send it."""

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        count = sum(schema is not None for schema in (self.json_schema, self.schema_))
        if self.type == "json_schema" and count != 1:
            raise ValueError("type 'json_schema' has no schema, or two; give one as json_schema")
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError("json_schema goes with type 'json_schema', and with no other")
        if self.schema_ is not None and self.type == "text":
            raise ValueError("schema goes with type 'json_object' or 'json_schema'; give one")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """Return the JSON schema that the answer is held to; None: any text will do."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        if self.schema_ is not None:
            return self.schema_
        return {"type": "object"} if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """A form that the answer must have, as vLLM's clients send it."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    """Holds a JSON schema, or its text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[Items[str], Field(min_length=1, max_length=ANSWERS)] | None = None
    """Lists texts, one of which is the answer."""
    # These fields are accepted only with values that ask for nothing.
    disable_fallback: bool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> StructuredOutputs:
        forms = (self.json_, self.json_object or None, self.regex, self.choice)
        if sum(form is not None for form in forms) != 1:
            raise ValueError("give json, json_object: true, regex or choice, and one of them")
        _ = self.schema_of_answer
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """Return the JSON schema that the answer is held to; None: it is to none.

        Raises:
            ValueError: the text is none.
        """
        if not isinstance(self.json_, str):
            return {"type": "object"} if self.json_object else self.json_
        try:
            schema = json.loads(self.json_)
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, dict):
            raise ValueError("json is a text that is no JSON object; give a JSON schema")
        _shallow(schema)
        return schema

    @property
    def regex_of_answer(self) -> str | None:
        """Return the regular expression that the answer matches; None: it need match none."""
        if self.choice is None:
            return self.regex
        return "|".join(re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text) for text in self.choice)


class StreamOptions(Strict):
    """A group of options of what a stream contains beside the answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None


class Request(Strict):
    """A request of a chat or a completion, with the fields that both have."""

    OPTIONS: ClassVar[dict[str, str]] = {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
        "dry_multiplier": "dry_multiplier",
        "seed": "seed",
        "stop": "stop_strings",
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_tokens",
        "logit_bias": "logit_bias",
    }
    """Maps parameters to the settings of generation that they are."""

    model: Annotated[str, StringConstraints(max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    """Says that a stream tells how much of the prompt is read, as llama.cpp's server does."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Annotated[int, Field(ge=0, le=2**31 - 1)] | None, BeforeValidator(_all)] = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=REPETITION)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=10)] | None = None
    seed: Annotated[
        Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None, BeforeValidator(_unless_minus_one)
    ] = None
    stop: Stop | None = None
    max_tokens: Most = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Says how many tokens an answer has at least, as vLLM's clients send it."""
    structured_outputs: StructuredOutputs | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_biases)] = None
    n: Annotated[int, Field(ge=1, le=ANSWERS)] | None = None
    """Asks for so many answers, which are written one after the other."""
    recall: Annotated[Any, AfterValidator(_recall)] | None = None
    """Says how much evicted text is read again in front of the last message; kvcap's own."""
    # These fields of vLLM's and llama.cpp's servers are accepted only with values that ask for
    # nothing.
    cache_prompt: Literal[True] | None = None
    id_slot: Literal[-1] | None = None
    include_reasoning: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    length_penalty: One | None = None
    mirostat: Literal[0] | None = None
    priority: Literal[0] | None = None
    return_token_ids: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    stop_token_ids: Annotated[list[Any], Field(max_length=0)] | None = None
    timings_per_token: Literal[False] | None = None
    typical_p: One | None = None
    use_beam_search: Literal[False] | None = None
    # LABELS: they are accepted with any value, as they ask for nothing.
    user: Short | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Short | None = None
    store: bool | None = None
    service_tier: Short | None = None
    _names: Mapping[str, str] = PrivateAttr(default_factory=dict)
    """Holds fields as the client's API has them, by the names that they have here."""

    def named(self, names: Mapping[str, str]) -> Self:
        """Have errors name fields as the client's API does, by the names that they have here."""
        self._names = names
        return self

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Request:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for stream: true; add that, or leave them out")
        if self.return_progress and not self.stream:
            raise ValueError("return_progress is for stream: true; add that, or leave it out")
        return self

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_each(self) -> bool:
        """Return whether every part of a stream has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def options(self, limits: RequestLimits, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of generation.

        Args:
            limits: of this server.
            defaults: settings of this server for what a request leaves out.

        Raises:
            ApiError: an answer may be longer than the server allows, or the runtime has no such
                setting.
        """
        fields = {name: getattr(self, field) for field, name in self.OPTIONS.items()}
        if self.ignore_eos:
            fields["eos_token_id"] = []
        fields |= {"regex": self.regex, "min_tokens": self.min_tokens or None}
        fields |= self.further_options()
        if self.max_tokens == 0:
            fields |= {"max_new_tokens": None, "only_read": True}
        options = {**defaults, **{k: v for k, v in fields.items() if v is not None}}
        if "template_options" in defaults:  # a request changes those that it names
            options["template_options"] = defaults["template_options"] | options["template_options"]
        field_of = {name: field for field, name in self.OPTIONS.items()}
        for name in options:
            if name not in settings.NAMES:
                field = self._named(field_of.get(name, name))
                raise ApiError(
                    400,
                    f"{field} is not supported by this server; leave it out",
                    param=field,
                    code="unsupported_parameter",
                )
        self._check_thoughts(options)
        least = options.get("min_tokens", 0)
        if least > options.get("max_new_tokens", limits.answer_tokens):
            message = (
                f"min_tokens is {least:,}, and the answer has fewer at most; give a lower number"
            )
            raise ApiError(400, message, param="min_tokens")
        if (most := options.get("max_new_tokens", 1)) > limits.answer_tokens:
            given_as = [name for name in LIMITS if getattr(self, name, None) is not None]
            field = self._named(given_as[0] if given_as else LIMITS[0])
            raise ApiError(
                400,
                f"{field} is {most:,}, and this server writes answers of at "
                f"most {limits.answer_tokens:,} tokens",
                param=field,
            )
        return options

    def _check_thoughts(self, options: dict[str, Any]) -> None:
        """Limit thoughts to half of an answer by default; refuse a budget that takes all of it."""
        budget, most = options.get("thinking_budget"), options.get("max_new_tokens")
        if budget is None or most is None or budget < most:
            return
        if getattr(self, "thinking_budget", None) is not None:
            field, longest = self._named("thinking_budget"), self._named("max_tokens")
            message = (
                f"{field} is {budget:,}, which leaves no token of {longest}, {most:,}; lower it"
            )
            raise ApiError(400, message, param=field)
        options["thinking_budget"] = most // 2

    @property
    def held_to(self) -> dict[str, Any] | None:
        """Return the JSON schema that the answer is held to."""
        outputs = self.structured_outputs
        return None if outputs is None else outputs.schema_of_answer

    @property
    def regex(self) -> str | None:
        """Return the regular expression that the answer matches."""
        return None if self.structured_outputs is None else self.structured_outputs.regex_of_answer

    @property
    def has_form(self) -> bool:
        """Return whether the answer is held to a form."""
        return self.held_to is not None or self.regex is not None

    def check_form(self, form: str) -> None:
        """Refuse settings that contradict an answer's form.

        Args:
            form: the fields that may hold it.

        Raises:
            ValueError: the answer is held to a form, and something else says when it ends.
        """
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name) and self.has_form:
                raise ValueError(
                    f"{name} does not go with {form}, by which the answer ends; leave one of them "
                    "out"
                )

    def _named(self, field: str) -> str:
        return self._names.get(field, field)

    def further_options(self) -> dict[str, Any]:
        """Return settings that are no plain parameter."""
        return {}

    def asks(self, ask: Ask) -> list[Ask]:
        """Return one request `n` times, each with another seed where one was given."""
        seed = settings.seeded(ask.options.get("seed"))
        more = [{} if seed is None else {"seed": (seed + i) % 2**64} for i in range(self.n or 1)]
        return [
            replace(ask, number=i, options={**ask.options, **also}) if i else ask
            for i, also in enumerate(more)
        ]


class ChatRequest(Request):
    """A body that `POST /v1/chat/completions` takes."""

    messages: Items[ChatMessage]
    max_tokens: Annotated[
        Annotated[int, Field(ge=1)] | None, BeforeValidator(_unless_minus_one)
    ] = None
    max_completion_tokens: Annotated[
        Annotated[int, Field(ge=1)] | None, BeforeValidator(_unless_minus_one)
    ] = None
    continue_final_message: bool | None = None
    """Says that an assistant's last message is continued, as it always is."""
    add_generation_prompt: bool | None = None
    """Says the opposite of `continue_final_message`."""
    tools: Annotated[list[Tool], Field(max_length=TOOLS)] | None = None
    tool_choice: Annotated[Any, AfterValidator(_choice)] | None = None
    """Says which tools may or must be called; it becomes a `ToolChoice`."""
    reasoning_effort: Effort | None = None
    """Goes to the chat template by its name, and says how long the model may think (`EFFORTS`).

    With none `enable_thinking` is false as well.
    """
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    """Says at how many tokens of thoughts the answer begins, as Qwen's API names it."""
    chat_template_kwargs: Annotated[Schema, AfterValidator(_template_options)] | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    parallel_tool_calls: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Goes to the chat template by its name."""
    prediction: Any = None
    """Asks for nothing: of a predicted answer only the speed depends."""
    modalities: Items[Literal["text"]] | None = None  # nothing else can be asked for

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true; add that, or leave it out")
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError(
                "structured_outputs and response_format both hold the answer; give one"
            )
        if self.regex is not None and self.offered:
            raise ValueError(
                "tools do not go with a regex or choice of structured_outputs, which no call "
                "matches; give its json, or leave one of them out"
            )
        if self._chosen.mode == "required" and not self.forced:
            raise ValueError(
                "tool_choice asks for a call of what is not among the tools; give that tool, or "
                "leave tool_choice out"
            )
        self.check_form("response_format, structured_outputs or tool_choice")
        self._check_begun()
        return self

    def _check_begun(self) -> None:
        """Refuse an answer that is begun by the last message, and cannot be, or is not to be."""
        last = self.messages[-1] if self.messages else None
        begun = last is not None and last.role == "assistant"
        for name, flag in (
            ("continue_final_message", self.continue_final_message),
            ("add_generation_prompt", _not(self.add_generation_prompt)),
        ):
            if flag not in (None, begun):
                whose = "an assistant's, which is continued" if begun else "no assistant's"
                raise ValueError(f"{name} does not fit: the last message is {whose}; leave it out")
        if last is None or not begun:
            return
        if last.tool_calls:
            raise ValueError("the last message has tool_calls; give what they returned behind it")
        if last.content and self.has_form:
            raise ValueError(
                "the last message begins the answer, which response_format, structured_outputs or "
                "tool_choice constrain from its start; end with a user's message, or leave them out"
            )

    @property
    def held_to(self) -> dict[str, Any] | None:
        """Return the JSON schema that the answer is held to.

        With tools and a schema of the answer it is held to either: a call, or what fits that.
        """
        if self.forced:
            return schema_of_call(self.forced)
        format_ = self.response_format
        schema = super().held_to if format_ is None else format_.schema_of_answer
        return schema_of_call(self.offered, schema) if schema and self.offered else schema

    @property
    def call_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of calls that the model makes by itself; None: none is strict."""
        strict = [tool.function.strict is True for tool in self._offered]
        if not any(strict) or self.held_to or self.ignore_eos:
            return None
        free = {"parameters": {"type": "object"}}
        return schema_of_call(
            [
                tool if held else {**tool, "function": {**tool["function"], **free}}
                for tool, held in zip(self.offered, strict, strict=True)
            ]
        )

    @property
    def forced(self) -> tuple[Mapping[str, Any], ...]:
        """Return the tools of which the answer must call one; empty if it need not call any."""
        if self._chosen.mode != "required":
            return ()
        name = self._chosen.called
        return tuple(tool for tool in self.offered if name in (None, tool["function"]["name"]))

    @property
    def offered(self) -> tuple[Mapping[str, Any], ...]:
        """Return the tools that the chat template is given."""
        return tuple(tool.model_dump(exclude_none=True) for tool in self._offered)

    @property
    def _offered(self) -> list[Tool]:
        mode, _, allowed = self._chosen
        tools = () if mode == "none" else self.tools or ()
        return [tool for tool in tools if allowed is None or tool.function.name in allowed]

    @property
    def _chosen(self) -> ToolChoice:
        return self.tool_choice or ToolChoice()

    @property
    def most_calls(self) -> int:
        """Return how many calls of tools the answer may have; 0: no tools are offered."""
        single = self.held_to is not None or self.parallel_tool_calls is False
        return (1 if single else TOOLS) if self.offered else 0

    @property
    def template_options(self) -> dict[str, Any] | None:
        """Return the further names that the chat template gets; None: none were given."""
        named = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        options: dict[str, Any] = {
            name: value for name, value in named.items() if value is not None
        }
        if self.reasoning_effort == "none":
            options["enable_thinking"] = False
        return options | (self.chat_template_kwargs or {}) or None

    def further_options(self) -> dict[str, Any]:
        """Return settings that are no plain parameter."""
        options: dict[str, Any] = {
            "json_schema": self.held_to,
            "call_schema": self.call_schema,
            "template_options": self.template_options,
            "thinking_budget": EFFORTS.get(self.reasoning_effort or ""),
        }
        if self.thinking_budget is not None:
            options["thinking_budget"] = self.thinking_budget
        if self.max_completion_tokens is not None:
            options["max_new_tokens"] = self.max_completion_tokens
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        return options

    def ask(
        self, owner: str, session_id: str | None, limits: RequestLimits, defaults: Mapping[str, Any]
    ) -> Ask:
        """Return the request as the conversations take it.

        Raises:
            ApiError: more messages, or a longer answer, than this server takes.
        """
        if len(self.messages) > limits.messages:
            raise ApiError(
                400,
                f"there are {len(self.messages):,} messages, and this server takes at most "
                f"{limits.messages:,}; what a conversation has read need not fit into one",
                param=self._named("messages"),
            )
        messages, begin = list(self.messages), ""
        if messages and messages[-1].role == "assistant":
            begin = messages.pop().content or ""
        return Ask(
            messages=tuple(message.message for message in messages),
            begin=begin,
            options=self.options(limits, defaults),
            owner=owner,
            session_id=session_id,
            tools=self.offered,
            must_call=bool(self.forced),
            pins=frozenset(i for i, message in enumerate(messages) if message.pin),
            recall=self.recall,
            progress=bool(self.return_progress),
        )


class CompletionRequest(Request):
    """A body that `POST /v1/completions` takes."""

    prompt: Annotated[list[str | tuple[int, ...]], BeforeValidator(_prompts)]
    """Lists texts, or tokens as they are, each of which is continued."""
    echo: bool | None = None
    """Says that the prompt comes before the answer, with its log probabilities if asked for."""
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_OF_TEXT)] | None = None
    # These fields are accepted only with values that ask for nothing.
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
        if (count := len(self.prompt) * (self.n or 1)) > ANSWERS:
            raise ValueError(
                f"prompt and n ask for {count} answers; ask for {ANSWERS} at most in one request"
            )
        self.check_form("structured_outputs")
        if self.echo and self.logprobs is not None and self.recall not in (None, OFF):
            raise ValueError(
                "recall adds text to the prompt, and echo with logprobs needs the prompt as it is; "
                "leave recall or echo out"
            )
        return self

    def further_options(self) -> dict[str, Any]:
        """Return settings that are no plain parameter."""
        if self.logprobs is None:
            return {"json_schema": self.held_to}
        both = {"prompt_logprobs": self.logprobs} if self.echo else {}
        return {"logprobs": self.logprobs, "json_schema": self.held_to, **both}

    def ask(
        self,
        prompt: str | tuple[int, ...],
        owner: str,
        session_id: str | None,
        limits: RequestLimits,
        defaults: Mapping[str, Any],
    ) -> Ask:
        """Return the request for one of its prompts, as the conversations take it.

        Raises:
            ApiError: a longer answer than this server writes, or a session, which completions
                have not.
        """
        if session_id is not None:
            raise ApiError(400, "a completion goes on with no session; leave X-Session-Id out")
        options = self.options(limits, defaults)
        return Ask(
            prompt=prompt,
            options=options,
            owner=owner,
            recall=self.recall,
            echo=bool(self.echo),
            progress=bool(self.return_progress),
        )


def _not(value: bool | None) -> bool | None:
    """Return the opposite of a choice, where one was made."""
    return None if value is None else not value
