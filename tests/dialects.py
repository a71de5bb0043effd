"""Reads and refuses in the words of every API that the server speaks: its dialects.

Each API has an address, the least body that it answers, and functions that read its answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from server_chats import HELLO

PARAMETERS: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Answer(NamedTuple):
    """Holds the text, thoughts, calls, ending and token counts of any API's answer."""

    text: str
    thoughts: str
    calls: list[tuple[str, Any]]
    ended: str
    read: int
    cached: int | None  # of those read; None where the API does not say
    written: int


def of_chat(body: Any) -> Answer:
    (choice,), usage = body["choices"], body["usage"]
    message = choice["message"]
    assert (body["object"], message["role"], choice["index"]) == ("chat.completion", "assistant", 0)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    called = [one["function"] for one in message.get("tool_calls", [])]
    calls = [(one["name"], json.loads(one["arguments"])) for one in called]
    return Answer(
        message["content"] or "",
        message.get("reasoning_content", ""),
        calls,
        choice["finish_reason"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
    )


def of_chat_stream(text: str) -> Answer:
    *lines, done = [line for line in text.split("\n\n") if line]
    assert done == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {(one["id"], one["object"]) for one in parts} == {
        (parts[0]["id"], "chat.completion.chunk")
    }
    *parts, last = parts
    assert last["choices"] == []
    (*_, ended), deltas = (
        list(x)
        for x in zip(
            *((one["choices"][0]["finish_reason"], one["choices"][0]["delta"]) for one in parts),
            strict=True,
        )
    )
    assert deltas[0]["role"] == "assistant"
    message = {
        "role": "assistant",
        "content": "".join(one.get("content") or "" for one in deltas),
        "reasoning_content": "".join(one.get("reasoning_content") or "" for one in deltas),
        "tool_calls": [call for one in deltas for call in one.get("tool_calls", [])],
    }
    choice = {"index": 0, "message": message, "finish_reason": ended}
    return of_chat({**last, "object": "chat.completion", "choices": [choice]})


def of_response(body: Any) -> Answer:
    usage, texts, calls = body["usage"], {"reasoning": "", "message": ""}, []
    assert (body["object"], body["error"]) == ("response", None)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    for item in body["output"]:
        assert item["status"] == (body["status"] if item is body["output"][-1] else "completed")
        if item["type"] == "function_call":
            calls.append((item["name"], json.loads(item["arguments"])))
        else:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    ended = (body["incomplete_details"] or {"reason": body["status"]})["reason"]
    return Answer(
        texts["message"],
        texts["reasoning"],
        calls,
        ended,
        usage["input_tokens"],
        usage["input_tokens_details"]["cached_tokens"],
        usage["output_tokens"],
    )


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, whose lines name the type that their data has."""
    sent = []
    for event in text.split("\n\n")[:-1]:
        kind, data = event.split("\n")
        sent.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {sent[-1]['type']}"
    return sent


def of_response_stream(text: str) -> Answer:
    sent = events(text)
    assert [one["sequence_number"] for one in sent] == list(range(len(sent)))
    kinds = [one["type"].removeprefix("response.") for one in sent]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds.count("output_item.added") == kinds.count("output_item.done")
    answer = of_response(sent[-1]["response"])
    assert sent[-1]["response"]["status"] == kinds[-1]
    done = [one["item"] for one in sent if one["type"].endswith("output_item.done")]
    assert done == sent[-1]["response"]["output"]
    deltas = [one for one in sent if one["type"].endswith("output_text.delta")]
    assert "".join(one["delta"] for one in deltas) == answer.text
    return answer


def of_message(body: Any) -> Answer:
    usage, texts, calls = body["usage"], {"thinking": "", "text": ""}, []
    assert (body["type"], body["role"]) == ("message", "assistant")
    for block in body["content"]:
        if block["type"] == "tool_use":
            calls.append((block["name"], block["input"]))
        else:
            texts[block["type"]] += block[block["type"]]
    assert body["stop_sequence"] is None
    cached = usage["cache_read_input_tokens"]
    return Answer(
        texts["text"],
        texts["thinking"],
        calls,
        body["stop_reason"],
        usage["input_tokens"] + cached,
        cached,
        usage["output_tokens"],
    )


def of_message_stream(text: str) -> Answer:
    """Put the blocks together, each of which is begun, continued and ended in its turn."""
    sent, blocks, is_open = events(text), list[dict[str, Any]](), False
    for one in sent[1:-2]:
        kind = one["type"].removeprefix("content_block_")
        assert is_open == (kind != "start")
        is_open = kind != "stop"
        if kind == "start":
            blocks.append(one["content_block"])
        elif kind == "delta":
            field, more = list(one["delta"].items())[-1]
            blocks[-1][field] = blocks[-1].get(field, "") + more
        assert one["index"] == len(blocks) - 1
    for block in blocks:
        block["input"] = json.loads(block.pop("partial_json", "null"))
    assert [one["type"] for one in (sent[0], *sent[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    ended = {**sent[-2]["delta"], "usage": sent[-2]["usage"]}
    if blocks:  # a stream without a piece does not know the prompt's tokens when it begins
        assert sent[0]["message"]["usage"] == {**ended["usage"], "output_tokens": 0}
    return of_message({**sent[0]["message"], **ended, "content": blocks})


def of_line(body: Any) -> Answer:
    message = body.get("message", body)
    called = [one["function"] for one in message.get("tool_calls", [])]
    assert body["done"]
    return Answer(
        message.get("content", message.get("response")),
        message.get("thinking", ""),
        [(one["name"], one["arguments"]) for one in called],
        body["done_reason"],
        body["prompt_eval_count"],
        None,
        body["eval_count"],
    )


def of_lines(text: str) -> Answer:
    *parts, last = map(json.loads, text.splitlines())
    assert not any(one["done"] for one in parts)
    inner = [one.get("message", one) for one in parts]
    joined = {
        name: "".join(one.get(name, "") for one in inner)
        for name in ("content", "response", "thinking")
    }
    calls = [call for one in inner for call in one.get("tool_calls", [])]
    joined_message = {**joined, "tool_calls": calls}
    if "message" in last:
        return of_line({**last, "message": joined_message})
    return of_line({**last, **joined_message, "content": joined_message["response"]})


def of_chat_messages(body: Any) -> Iterator[Any]:
    message = body["choices"][0]["message"]
    called = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}
    yield {"messages": [*HELLO, message, called]}


def of_response_items(body: Any) -> Iterator[Any]:
    """Refer to what was said by its id, or say it again."""
    (call,) = body["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    yield {"input": [output], "previous_response_id": body["id"]}
    yield {"input": [*HELLO, call, output]}


def of_blocks(body: Any) -> Iterator[Any]:
    (block,) = body["content"]
    result = {"type": "tool_result", "tool_use_id": block["id"]}
    result["content"] = [{"type": "text", "text": "2"}]
    thought = {"type": "thinking", "thinking": "Hm", "signature": ""}
    answer = {"role": "assistant", "content": [thought, block]}
    yield {"messages": [*HELLO, answer, {"role": "user", "content": [result]}]}


def of_older_ollama(body: Any) -> Iterator[Any]:
    """Send a call back without its id, as older clients do."""
    calls = [{"function": one["function"]} for one in body["message"]["tool_calls"]]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    yield {"messages": [*HELLO, answer, {"role": "tool", "content": "2", "tool_name": "add"}]}


@dataclass(frozen=True)
class Api:
    """An API's address, the least that it answers, and its words."""

    path: str
    least: dict[str, Any]
    tools: Any = None
    schema: dict[str, Any] | None = None
    whole: Callable[[Any], Answer] = of_chat
    stream: Callable[[str], Answer] = of_chat_stream
    streaming: dict[str, Any] = field(default_factory=dict)
    ended: tuple[str, str, str] = ("stop", "length", "tool_calls")
    limit: str = "max_tokens"
    returned: Callable[[Any], Iterator[Any]] = of_chat_messages
    """Returns of an answer with a call the bodies that bring its result."""


FUNCTION: Any = {"name": "add", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
NAMED: Any = {"name": "x", "schema": PARAMETERS}
BOTH: Any = {"model": "pocket", "messages": HELLO}
CHAT = Api(
    "/v1/chat/completions",
    BOTH,
    [TOOL],
    {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    streaming={"stream": True, "stream_options": {"include_usage": True}},
)
RESPONSES = Api(
    "/v1/responses",
    {"model": "pocket", "input": "Hello!"},
    [{"type": "function", **FUNCTION}],
    {"text": {"format": {"type": "json_schema", **NAMED}}},
    of_response,
    of_response_stream,
    {"stream": True},
    ("completed", "max_output_tokens", "completed"),
    "max_output_tokens",
    of_response_items,
)
MESSAGES = Api(
    "/v1/messages",
    {**BOTH, "max_tokens": 9, "thinking": {"type": "adaptive"}},
    [{"name": "add", "input_schema": PARAMETERS}],
    None,
    of_message,
    of_message_stream,
    {"stream": True},
    ("end_turn", "max_tokens", "tool_use"),
    returned=of_blocks,
)
OLLAMA = Api(
    "/api/chat",
    {**BOTH, "stream": False},
    [TOOL],
    {"format": PARAMETERS},
    of_line,
    of_lines,
    {"stream": True},
    ("stop", "length", "stop"),
    "options.num_predict",
    of_older_ollama,
)
GENERATE = Api(
    "/api/generate",
    {"model": "pocket", "prompt": "Hello!", "stream": False},
    None,
    {"format": PARAMETERS},
    of_line,
    of_lines,
    {"stream": True},
    ("stop", "length", "stop"),
    "options.num_predict",
)
CHATS = (CHAT, RESPONSES, MESSAGES, OLLAMA, GENERATE)
OTHERS = (
    Api("/v1/completions", {"model": "pocket", "prompt": "Hello!"}),
    Api("/v1/messages/count_tokens", BOTH),
)


def named(value: Any) -> str | None:
    return value.path if isinstance(value, Api) else None


OPENAI = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
ANTHROPIC = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def assert_refused(api: Api, response: httpx.Response, status: int) -> str:
    """Hold an error to its API's form; return its message."""
    assert response.status_code == status, response.text
    error = response.json()
    if api.path.startswith("/api/"):
        assert error.keys() == {"error"}
        return str(error["error"])
    if api.path.startswith("/v1/messages"):
        inner, kinds = error["error"], ANTHROPIC
        assert (error.keys(), error["type"]) == ({"type", "error"}, "error")
        assert inner.keys() - {"details"} == {"type", "message"}
    else:
        inner, kinds = error["error"], OPENAI
        assert error.keys() == {"error"}
        assert inner.keys() == {"type", "message", "param", "code"}
    assert inner["type"] == kinds.get(status, "invalid_request_error")
    return str(inner["message"])
