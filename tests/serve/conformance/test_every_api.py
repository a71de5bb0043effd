"""All APIs over one server without a model: a table of addresses, of answers and of failures."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import pytest
from stand_in import Script
from tools import PATIENCE

from kvcap.runtime import errors
from kvcap.serve.app import Settings
from kvcap.serve.limits import HEAD_BYTES, RequestLimits

LIMITS = RequestLimits(body_bytes=400_000, answer_tokens=100)
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
    {**BOTH, "max_tokens": 9, "thinking": {"type": "adaptive"}},
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
    (413, "400,000 bytes", {"content": b" " * 400_001, "headers": JSON}),
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


DEEP: Any = b"[" * 5_000 + b"]" * 5_000
NUMBER = b"9" * 5_000


def body(api: Api, more: bytes = b"", **fields: Any) -> bytes:
    """The API's least body with further fields, or others; `more` is put in as it is."""
    return json.dumps({**api.asked, **fields}).encode()[:-1] + more + b"}"


def saying(api: Api, content: Any) -> bytes:
    """The API's least body, in which a text is `content`."""
    field = next(name for name in ("messages", "input", "prompt") if name in api.asked)
    return body(api, **{field: with_content(content) if field == "messages" else content})


def with_content(content: Any, **more: Any) -> Any:
    return [{"role": "user", "content": content, **more}]


def limited(api: Api, most: bytes) -> bytes:
    outer, _, inner = api.limit.partition(".")
    asked = {name: value for name, value in api.asked.items() if name != outer}
    value = b'{"%s": %s}' % (inner.encode(), most) if inner else most
    return json.dumps(asked).encode()[:-1] + b', "%s": %s}' % (outer.encode(), value)


def called(**more: Any) -> Any:
    return [*HELLO, {"role": "assistant", "content": "", **more}, *HELLO]


HOSTILE: dict[str, Callable[[Api], bytes]] = {  # bodies by what is wrong with them
    "nested lists": lambda api: DEEP,
    "nested objects": lambda api: b'{"a":' * 5_000,
    "a nested field": lambda api: body(api, b', "unheard_of": ' + DEEP),
    "a nested text": lambda api: saying(api, json.loads(b"[" * 150 + b"]" * 150)),
    "nested parameters": lambda api: body(api, b', "tools": [{"a":' + b'{"a":' * 999),
    "a huge number": lambda api: limited(api, NUMBER),
    "a huge negative number": lambda api: limited(api, b"-" + NUMBER),
    "a huge exponent": lambda api: limited(api, b"1e999999"),
    "a negative limit": lambda api: limited(api, b"-9"),
    "half a token": lambda api: limited(api, b"1.5"),
    "a truth for a number": lambda api: limited(api, b"true"),
    "NaN": lambda api: body(api, b', "temperature": NaN'),
    "infinity": lambda api: body(api, b', "temperature": -Infinity'),
    "a hot temperature": lambda api: body(api, temperature=1e308),
    "a key twice": lambda api: body(api, b', "model": 5'),
    "no comma": lambda api: body(api, b' "a": 1'),
    "more behind the end": lambda api: body(api) + b"{}",
    "half a letter": lambda api: saying(api, "?").replace(b"?", rb"\ud83d"),
    "no UTF-8": lambda api: saying(api, "?").replace(b"?", b"\xff\xfe"),
    "UTF-16": lambda api: body(api).decode().encode("utf-16"),
    "a byte order mark": lambda api: b"\xef\xbb\xbf" + body(api),
    "a null byte": lambda api: saying(api, "?").replace(b"?", b"\0"),
    "only null bytes": lambda api: bytes(999),
    "a null in the model": lambda api: body(api, model="pocket\0"),
    "a long model": lambda api: body(api, model="x" * 99_999),
    "a path as model": lambda api: body(api, model="../../../etc/passwd"),
    "a list as model": lambda api: body(api, model=["pocket"]),
    "a long field": lambda api: body(api, **{"x" * 99_999: 1}),
    "a long word for a number": lambda api: limited(api, b'"%s"' % (b"9" * 99_999)),
    "an image": lambda api: saying(api, [{"type": "image_url", "image_url": {"url": "x"}}]),
    "an image as input": lambda api: saying(api, [{"type": "input_image", "image_url": "x"}]),
    "an image as a block": lambda api: saying(api, [{"type": "image", "source": {}}]),
    "a part of nothing": lambda api: saying(api, [None]),
    "a part without a text": lambda api: saying(api, [{"type": "text"}]),
    "a part of an odd type": lambda api: saying(api, [{"type": {}, "text": "x"}]),
    "an object as text": lambda api: saying(api, {"text": "x"}),
    "a number as text": lambda api: saying(api, 1.5),
    "images beside a text": lambda api: body(api, messages=with_content("x", images=["eA=="])),
    "an odd role": lambda api: body(api, messages=[{"role": ["user"], "content": "x"}]),
    "no message": lambda api: body(api, messages=[None]),
    "too many messages": lambda api: body(api, messages=HELLO * 5_000, prompt=["x"] * 5_000),
    "calls that are none": lambda api: body(api, messages=called(tool_calls=5)),
    "a call that is none": lambda api: body(api, messages=called(tool_calls=[None])),
    "a call of nothing": lambda api: body(api, messages=called(tool_calls=[{"function": 5}])),
    "an odd id of a call": lambda api: body(
        api, messages=called(tool_calls=[{"id": [1], "function": FUNCTION}])
    ),
    "tools that are none": lambda api: body(api, tools=5),
    "a tool that is none": lambda api: body(api, tools=[None]),
    "too many tools": lambda api: body(api, tools=(api.tools or [TOOL]) * 129),
    "an odd choice of tools": lambda api: body(api, tool_choice={"type": ["auto"]}),
    "an odd name of a choice": lambda api: body(api, tool_choice={"type": "tool", "name": [1]}),
    "too many stops": lambda api: body(
        api, **dict.fromkeys(("stop", "stop_sequences"), ["x"] * 9_999), options={"stop": "x"}
    ),
    "too many stops as an option": lambda api: body(api, options={"stop": ["x"] * 9_999}),
    "a stop that is none": lambda api: body(
        api, stop=[None], stop_sequences=[None], options={"stop": [None]}
    ),
    "a word for a truth": lambda api: body(api, stream="yes"),
    "a body in gzip": lambda api: gzip.compress(body(api)),
}
TYPES = (
    *("text/plain", "multipart/form-data; boundary=x"),
    *("application/jsonp", "application/octet-stream", "application/json, text/plain", "x" * 9_999),
)


@every_api
@pytest.mark.parametrize("case", [*HOSTILE, *TYPES], ids=lambda case: case[:40] or "none")
def test_no_hostile_body_is_more_than_refused(client, talk, api, case):
    before = len(talk.answers)
    headers = JSON if case in HOSTILE else {"Content-Type": case}
    if "gzip" in case:
        headers = {**headers, "Content-Encoding": "gzip"}
    given = HOSTILE.get(case, body)(api)
    said = client.post(api.path, content=given, headers=headers)
    assert said.status_code in ((400, 404) if case in HOSTILE else (415,)), said.text
    assert len(assert_refused(api, said, said.status_code)) < 1_000
    assert len(talk.answers) == before
    assert client.get("/health").status_code == 200


@every_api
@pytest.mark.parametrize("kind", [None, "", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
def test_a_body_without_its_type_is_taken_where_no_browser_sends_it(
    client, talk, api, kind, header
):
    """As curl and litellm send it; a page of another site cannot leave both headers out."""
    given = {} if kind is None else {"Content-Type": kind}
    assert client.post(api.path, content=body(api), headers=given).status_code == 200
    said = client.post(api.path, content=body(api), headers={**given, header: "null"})
    assert "Content-Type" in assert_refused(api, said, 415)


@every_chat
def test_thoughts_are_counted(client, talk, api):
    """All but the marks, which are three tokens here."""
    talk.script = Script(["<think>", "Hm", "\n", "so", "</", "think>", "Yes"])
    said = client.post(api.path, json=api.asked).json()
    usage = said.get("usage", {})
    names = ("completion_tokens_details", "output_tokens_details")
    found = [usage[name]["reasoning_tokens"] for name in names if name in usage]
    assert found == ([3] if api in (CHAT, RESPONSES) else [])


CUT: dict[str, tuple[str, list[tuple[str, Any]]]] = {  # what is left of a call that was cut
    '{"na': ("", []),
    '{"name": "add"': ("", [("add", {})]),
    '{"name": "add", "arguments": {"a": [1, 2': ('{"a": [1, 2', [("add", {"a": [1, 2]})]),
}


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES], ids=named)
@pytest.mark.parametrize("written", CUT)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_must_be_is_one_even_if_it_is_cut(client, talk, api, written, streamed):
    """Its text is no content; where the API wants an object, arguments are those that are whole."""
    talk.script = Script([written[:6], written[6:]], reason="length")
    text, calls = CUT[written]
    choice = {"type": "any"} if api is MESSAGES else "required"
    asked = {**api.asked, "tools": api.tools, "tool_choice": choice, "stream": streamed}
    said = client.post(api.path, json=asked)
    assert said.status_code == 200, said.text
    assert r"{\"na" not in said.text
    assert json.dumps(text)[1:-1] in said.text or (api is MESSAGES and not streamed)
    if not streamed and api is MESSAGES:
        assert said.json()["stop_reason"] == "max_tokens"
        blocks = said.json()["content"]
        assert [(one["name"], one["input"]) for one in blocks] == calls
    if not streamed and api is CHAT:
        (one,) = said.json()["choices"]
        assert (one["message"]["content"] or "", one["finish_reason"]) == ("", "length")
        found = one["message"].get("tool_calls", [])
        assert [one["function"]["arguments"] for one in found] == [text] * len(calls)


POST = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
TEXT = POST + b"Content-Type: text/plain\r\n"  # refused before its body is read
SENT: dict[str, bytes] = {  # what is sent by clients that speak no HTTP, or badly
    "chunks that end early": POST + b"Content-Type: application/json\r\nTransfer-Encoding: chunked"
    b"\r\n\r\nff\r\n{",
    "a body that ends early": POST
    + b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    "a head that ends early": POST,
    "a chunk of odd size": TEXT + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length of -1": POST + b"Content-Length: -1\r\n\r\n",
    "a huge length": POST + b"Content-Length: " + NUMBER[:20] + b"\r\n\r\n",
    "a length and chunks": TEXT
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "many headers": POST + b"X: y\r\n" * 20_000 + b"\r\n",
    "a long header": POST + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
    "a header without a name": POST + b": x\r\n\r\n",
    "a null in a header": POST + b"X: \0\r\n\r\n",
    "two hosts": POST + b"Host: evil.example\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(99),
    **{
        f"the path {path[:40]!r}": b"GET %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        b"secret\r\nConnection: close\r\n\r\n" % path
        for path in (
            *(b"/../../etc/passwd", b"//etc/passwd", b"/..%2f..%2fetc%2fpasswd", b"/%00", b"/%ff"),
            *(
                b"/v1/models/../../etc/passwd",
                b"/v1/models/%2e%2e%2fx",
                b"/v1/models/" + b"x" * 9_999,
            ),
            *(
                b"/v1/chat/completions/..",
                b"/v1/messages/%0d%0aX: y",
                b"http://evil.example/",
                b"*",
            ),
            *(b"/" + b"x" * 99_999, b"/?" + b"x" * 99_999, b"/v1//models", b"\\..\\windows"),
        )
    },
}


@pytest.mark.parametrize("case", SENT)
def test_no_hostile_request_is_more_than_refused(served, client, talk, case):
    """No answer reaches who says nothing more within a body, or sends more than is read."""
    with socket.create_connection(served[1].socket.getsockname(), PATIENCE) as sender:
        answer = http.client.HTTPResponse(sender)
        try:
            sender.sendall(SENT[case])
            sender.shutdown(socket.SHUT_WR)
            answer.begin()
            said = json.loads(answer.read())
        except (http.client.BadStatusLine, OSError):
            assert "early" in case or len(SENT[case]) > HEAD_BYTES
        else:
            assert 400 <= answer.status < 500, answer.status
            assert said["error"]
    assert client.post(CHAT.path, json=CHAT.asked).status_code == 200
