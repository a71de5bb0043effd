"""All APIs over one server without a model: a table of addresses, of answers and of failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import pytest
from stand_in import Script

from kvcap.runtime import errors
from kvcap.serve.app import Settings
from kvcap.serve.limits import RequestLimits

LIMITS = RequestLimits(body_bytes=2_000, answer_tokens=100)
SETTINGS = Settings("pocket", limits=LIMITS, keys=["secret"])
HELLO: Any = [{"role": "user", "content": "Hello!"}]
PARAMETERS: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Answer(NamedTuple):
    """Holds the text, thoughts, calls, ending and token counts of any API's answer."""

    text: str
    thoughts: str
    calls: list[tuple[str, Any]]
    ended: str
    read: int
    written: int


def of_chat(said: Any) -> Answer:
    (choice,), usage = said["choices"], said["usage"]
    message = choice["message"]
    assert (said["object"], message["role"], choice["index"]) == ("chat.completion", "assistant", 0)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    called = [one["function"] for one in message.get("tool_calls", [])]
    calls = [(one["name"], json.loads(one["arguments"])) for one in called]
    read, written = usage["prompt_tokens"], usage["completion_tokens"]
    return Answer(
        message["content"] or "",
        message.get("reasoning_content", ""),
        calls,
        choice["finish_reason"],
        read,
        written,
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


def of_response(said: Any) -> Answer:
    usage, texts, calls = said["usage"], {"reasoning": "", "message": ""}, []
    assert (said["object"], said["error"]) == ("response", None)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    for item in said["output"]:
        assert item["status"] == "completed"
        if item["type"] == "function_call":
            calls.append((item["name"], json.loads(item["arguments"])))
        else:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    ended = (said["incomplete_details"] or {"reason": said["status"]})["reason"]
    return Answer(
        texts["message"],
        texts["reasoning"],
        calls,
        ended,
        usage["input_tokens"],
        usage["output_tokens"],
    )


def events(text: str) -> list[dict[str, Any]]:
    """Events of a stream, whose lines name the type that their data has."""
    found = []
    for event in text.split("\n\n")[:-1]:
        kind, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def of_response_stream(text: str) -> Answer:
    found = events(text)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    kinds = [one["type"].removeprefix("response.") for one in found]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds.count("output_item.added") == kinds.count("output_item.done")
    answer = of_response(found[-1]["response"])
    assert found[-1]["response"]["status"] == kinds[-1]
    deltas = [one for one in found if one["type"].endswith("output_text.delta")]
    assert "".join(one["delta"] for one in deltas) == answer.text
    return answer


def of_message(said: Any) -> Answer:
    usage, texts, calls = said["usage"], {"thinking": "", "text": ""}, []
    assert (said["type"], said["role"]) == ("message", "assistant")
    for block in said["content"]:
        if block["type"] == "tool_use":
            calls.append((block["name"], block["input"]))
        else:
            texts[block["type"]] += block[block["type"]]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return Answer(
        texts["text"], texts["thinking"], calls, said["stop_reason"], read, usage["output_tokens"]
    )


def of_message_stream(text: str) -> Answer:
    """Put the blocks together, each of which is begun, continued and ended in its turn."""
    found, blocks, is_open = events(text), list[dict[str, Any]](), False
    for one in found[1:-2]:
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
    assert [one["type"] for one in (found[0], *found[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    ended = {**found[-2]["delta"], "usage": found[-2]["usage"]}
    return of_message({**found[0]["message"], **ended, "content": blocks})


def of_line(said: Any) -> Answer:
    message = said.get("message", said)
    called = [one["function"] for one in message.get("tool_calls", [])]
    assert said["done"]
    return Answer(
        message.get("content", message.get("response")),
        message.get("thinking", ""),
        [(one["name"], one["arguments"]) for one in called],
        said["done_reason"],
        said["prompt_eval_count"],
        said["eval_count"],
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
    said = {**joined, "tool_calls": calls}
    if "message" in last:
        return of_line({**last, "message": said})
    return of_line({**last, **said, "content": said["response"]})


@dataclass(frozen=True)
class Api:
    """An API's address, the least that it answers, and its words."""

    path: str
    asked: dict[str, Any]
    tools: Any = None
    schema: dict[str, Any] | None = None
    whole: Callable[[Any], Answer] = of_chat
    stream: Callable[[str], Answer] = of_chat_stream
    streaming: dict[str, Any] = field(default_factory=dict)
    ended: tuple[str, str, str] = ("stop", "length", "tool_calls")
    limit: str = "max_tokens"


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
)
MESSAGES = Api(
    "/v1/messages",
    {**BOTH, "max_tokens": 9},
    [{"name": "add", "input_schema": PARAMETERS}],
    None,
    of_message,
    of_message_stream,
    {"stream": True},
    ("end_turn", "max_tokens", "tool_use"),
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


every_chat = pytest.mark.parametrize("api", CHATS, ids=named)
every_api = pytest.mark.parametrize("api", [*CHATS, *OTHERS], ids=named)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}) as client:
        yield client


ANSWERS: dict[str, tuple[Script, bool, tuple[Any, ...]]] = {  # with tools: text, thoughts, calls
    "text": (Script(), False, ("Hello there", "", [], 0, 3)),
    "cut": (Script(reason="length"), False, ("Hello there", "", [], 1, 3)),
    "nothing": (Script([]), False, ("", "", [], 0, 0)),
    "thoughts": (Script(["<think>Hm", "</think>", "Yes"]), False, ("Yes", "Hm", [], 0, 3)),
    "call": (Script(["Hm.\n", CALL]), True, ("Hm.", "", [("add", {"a": 1})], 2, 2)),
    "calls": (Script([f"{CALL}\n{CALL}"]), True, ("", "", [("add", {"a": 1})] * 2, 2, 1)),
}


@pytest.mark.parametrize(
    ("api", "case"),
    [
        (api, case)
        for api in CHATS
        for case, (_, tools, _) in ANSWERS.items()
        if api.tools or not tools
    ],
    ids=named,
)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_is_put_in_the_words_of_its_api(client, talk, api, case, streamed):
    talk.script, tools, (text, thoughts, calls, ended, written) = ANSWERS[case]
    asked = {**api.asked, **({"tools": api.tools} if tools else {})}
    said = client.post(api.path, json={**asked, **(api.streaming if streamed else {})})
    assert said.status_code == 200, said.text
    found = api.stream(said.text) if streamed else api.whole(said.json())
    assert found == Answer(text, thoughts, calls, api.ended[ended], 11, written)


@every_chat
def test_a_schema_and_a_limit_are_those_of_the_answer(client, talk, api):
    if api.schema is not None:
        assert client.post(api.path, json={**api.asked, **api.schema}).status_code == 200
        assert talk.asked.options["json_schema"] == PARAMETERS
    outer, _, inner = api.limit.partition(".")
    for most, status in ((7, 200), (-5, 400), ("7", 400), (101, 400)):
        limit = {outer: {inner: most} if inner else most}
        said = client.post(api.path, json={**api.asked, **limit})
        assert said.status_code == status, said.text
        assert status == 200 or f"{api.limit} is" in said.text
    assert talk.asked.options["max_new_tokens"] == 7


@every_api
def test_every_field_may_be_null_and_is_named_where_it_is_wrong(client, talk, api):
    """Fields are those of the document; no value of any is more than refused."""
    document = client.get("/openapi.json").json()
    (kind,) = document["paths"][api.path]["post"]["requestBody"]["content"].values()
    fields = document["components"]["schemas"][kind["schema"]["$ref"].split("/")[-1]]["properties"]
    asked = {**api.asked, "stream": False} if "stream" in fields else api.asked
    client.post(api.path, json=asked)
    plain = talk.asked
    said = client.post(api.path, json={**dict.fromkeys(fields), **asked})
    assert said.status_code == 200, said.text
    assert talk.asked == plain
    for name in sorted(fields.keys() - {"model"}):
        for wrong in (-7, "x", [5], {"x": 1}):
            said = client.post(api.path, json={**asked, name: wrong})
            assert said.status_code in (200, 400, 404), said.text
            assert said.status_code == 200 or name in said.text
    said = client.post(api.path, json={**asked, "unheard_of": 1})
    assert said.status_code == 400
    assert "unheard_of is no parameter" in said.text


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


def assert_refused(api: Api, said: httpx.Response, status: int) -> str:
    """Hold an error to its API's form; return its message."""
    assert said.status_code == status, said.text
    error = said.json()
    if api.path.startswith("/api/"):
        assert error.keys() == {"error"}
        return str(error["error"])
    if api.path.startswith("/v1/messages"):
        inner, kinds = error["error"], ANTHROPIC
        assert (error.keys(), error["type"]) == ({"type", "error"}, "error")
        assert inner.keys() == {"type", "message"}
    else:
        inner, kinds = error["error"], OPENAI
        assert error.keys() == {"error"}
        assert inner.keys() == {"type", "message", "param", "code"}
    assert inner["type"] == kinds.get(status, "invalid_request_error")
    return str(inner["message"])


JSON = {"Content-Type": "application/json"}
REFUSED: list[tuple[int, str, dict[str, Any]]] = [  # a status, words, and the request
    (400, "no JSON", {"content": b"{", "headers": JSON}),
    (400, "no JSON", {"content": b"", "headers": JSON}),
    (400, "a list", {"content": b"[]", "headers": JSON}),
    (400, "model is 5", {"json": {"model": 5}}),
    (400, "evil", {"headers": {"Host": "evil.example"}}),
    (401, "no API key", {"headers": {"Authorization": ""}}),
    (401, "wrong API key", {"headers": {"Authorization": "Bearer wrong"}}),
    (404, "use 'pocket'", {"json": {"model": "other"}}),
    (405, "use POST", {"method": "GET"}),
    (405, "use POST", {"method": "DELETE"}),
    (413, "2,000 bytes", {"content": b" " * 2_001, "headers": JSON}),
    (415, "application/json", {"content": b"{}", "headers": {"Content-Type": "text/plain"}}),
]
FAILED: list[tuple[int, str, Exception]] = [
    (400, "pinned", errors.PinsTooLarge("pinned tokens need more slots")),
    (429, "four wait", errors.Busy("four wait already", 2.5)),
    (500, "disagree", errors.SessionBroken("layers disagree")),
    (500, "its log says why", ZeroDivisionError("/a/path")),
    (503, "the cap", errors.MemoryCapExceeded("the cap would be passed")),
]


@every_api
@pytest.mark.parametrize(("status", "words", "request_"), REFUSED)
def test_what_is_refused_is_so_in_the_form_of_its_api(client, talk, api, status, words, request_):
    before = len(talk.answers)
    body = {**api.asked, **request_.get("json", {})}
    given = {**request_, **({} if "content" in request_ else {"json": body})}
    said = client.request(given.pop("method", "POST"), api.path, **given)
    assert words in assert_refused(api, said, status)
    assert len(talk.answers) == before


@every_chat
@pytest.mark.parametrize(("status", "words", "error"), FAILED)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_fails_does_so_in_the_form_of_its_api(
    client, talk, api, status, words, error, streamed
):
    asked = {**api.asked, **(api.streaming if streamed else {})}
    for talk.script in (Script(refused=error), Script(early=error)):
        said = client.post(api.path, json=asked)
        assert words in assert_refused(api, said, status)
        assert said.headers.get("Retry-After") == {429: "3", 503: "1"}.get(status)


@every_chat
def test_the_answer_to_a_failure_says_that_its_connection_ends(client, talk, api):
    """A client that keeps connections would find it closed by its next request."""
    talk.script = Script(refused=ZeroDivisionError())
    assert client.post(api.path, json=api.asked).headers["Connection"] == "close"


@pytest.mark.parametrize("path", ["/v1/nowhere", "/v1/messages/nowhere", "/api/embed"])
def test_an_address_that_there_is_not_has_the_form_of_its_api(client, path):
    assert path in assert_refused(Api(path, {}), client.post(path, json={}), 404)
