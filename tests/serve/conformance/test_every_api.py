"""All APIs over one server without a model: tables of answers, failures and hostile bodies."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from dialects import (
    CHAT,
    CHATS,
    FUNCTION,
    GENERATE,
    MESSAGES,
    OLLAMA,
    OTHERS,
    PARAMETERS,
    RESPONSES,
    TOOL,
    Answer,
    Api,
    assert_refused,
    named,
)
from make import eventually
from server_chats import CALL, HELLO
from stand_in import Script
from tools import PATIENCE

from kvcap.runtime import errors
from kvcap.serve.app import Settings
from kvcap.serve.contract import Piece
from kvcap.serve.limits import HEAD_BYTES, RequestLimits

LIMITS = RequestLimits(body_bytes=400_000, answer_tokens=100)
SETTINGS = Settings("pocket", limits=LIMITS, keys=["secret"])
every_chat = pytest.mark.parametrize("api", CHATS, ids=named)
every_api = pytest.mark.parametrize("api", [*CHATS, *OTHERS], ids=named)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}) as client:
        yield client


ADD = [("add", {"a": 1})]
LONG = f"I add.\n{CALL}"
ANSWERS: dict[str, tuple[Script, bool, tuple[Any, ...]]] = {  # with tools: text, thoughts, calls
    "text": (Script(), False, ("Hello there", "", [], 0)),
    "cut": (Script(reason="length"), False, ("Hello there", "", [], 1)),
    "nothing": (Script([]), False, ("", "", [], 0)),
    "call": (Script([LONG[i : i + 5] for i in range(0, len(LONG), 5)]), True,
             ("I add.", "", ADD, 2)),
    "calls": (Script([f"{CALL}\n{CALL}"]), True, ("", "", ADD * 2, 2)),
    "thoughts": (Script(["<think>", "\nTwo", " and two.\n", "</think>\n\n", "Four", "."]), False,
                 ("Four.", "Two and two.", [], 0)),
    "opened thoughts": (Script([Piece("Two.", opened="<think>"), Piece("</think>4")]), False,
                        ("4", "Two.", [], 0)),
    "no thoughts": (Script(["<think>\n\n</think>\n\n4"]), False, ("4", "", [], 0)),
    "cut thoughts": (Script(["<think>Two and", " two"]), False, ("", "Two and two", [], 0)),
    "thoughts, text and a call": (Script(["<think>Add.</think>\n\nWait.\n", CALL]), True,
                                  ("Wait.", "Add.", ADD, 2)),
    **{f"the text {''.join(x)}": (Script(x), False, ("".join(x), "", [], 0))
       for x in (["<", "b>"], [" <thin", "g>"], ["a <think>b</think>"], ["<think"])},
}  # fmt: skip


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
    talk.script, tools, (text, thoughts, calls, ended) = ANSWERS[case]
    request = {**api.least, **({"tools": api.tools} if tools else {})}
    response = client.post(api.path, json={**request, **(api.streaming if streamed else {})})
    assert response.status_code == 200, response.text
    answer = api.stream(response.text) if streamed else api.whole(response.json())
    cached = None if api in (OLLAMA, GENERATE) else 4
    written = len(talk.script.pieces)
    assert answer == Answer(text, thoughts, calls, api.ended[ended], 11, cached, written)


@pytest.mark.parametrize("api", [api for api in CHATS if api.tools], ids=named)
def test_calls_and_their_results_are_those_of_a_chat(client, talk, api):
    talk.script, request = Script([CALL]), {**api.least, "tools": api.tools}
    first = client.post(api.path, json=request).json()
    parsed = talk.answers[-1].parsed.as_message()
    for more in api.returned(first):
        assert client.post(api.path, json={**request, **more}).status_code == 200
        question, called, returned = talk.request.messages
        assert question == HELLO[0]
        given = called["tool_calls"][0]
        if api is not OLLAMA:  # which gives it a new id
            assert re.fullmatch("[A-Za-z0-9]{9}", given["id"])
            assert called == parsed
        assert given["function"] == {"name": "add", "arguments": {"a": 1}}
        assert returned.pop("name", "add") == "add"
        assert returned == {"role": "tool", "tool_call_id": given["id"], "content": "2"}
        assert talk.request.tools[0]["function"]["parameters"] == PARAMETERS


@every_chat
def test_an_error_within_a_stream_ends_it_in_the_form_of_its_api(client, talk, api):
    talk.script = Script(at_end=errors.SessionBroken("layers disagree"))
    *_, last = client.post(api.path, json={**api.least, **api.streaming}).text.strip().split("\n")
    error = json.loads(last.removeprefix("data: "))
    if api is RESPONSES:
        assert error["type"] == "response.failed"
        error = error["response"]
    if api is MESSAGES:
        assert error["type"] == "error"
        assert error["error"] == {
            "type": "api_error",
            "message": "layers disagree",
            "details": {"error_code": "session_broken"},
        }
    assert "layers disagree" in str(error["error"])
    eventually(lambda: talk.answers[-1].closed)  # the client may know before


@every_chat
def test_a_schema_and_a_limit_are_those_of_the_answer(client, talk, api):
    if api.schema is not None:
        assert client.post(api.path, json={**api.least, **api.schema}).status_code == 200
        assert talk.request.options["json_schema"] == PARAMETERS
    outer, _, inner = api.limit.partition(".")
    for most, status in ((7, 200), (-5, 400), ("7", 400), (101, 400)):
        limit = {outer: {inner: most} if inner else most}
        response = client.post(api.path, json={**api.least, **limit})
        assert response.status_code == status, response.text
        assert status == 200 or f"{api.limit} is" in response.text
    assert talk.request.options["max_new_tokens"] == 7


@every_api
def test_every_field_may_be_null_and_is_named_where_it_is_wrong(client, talk, api):
    """Fields are those of the document; no value of any is more than refused."""
    document = client.get("/openapi.json").json()
    (kind,) = document["paths"][api.path]["post"]["requestBody"]["content"].values()
    fields = document["components"]["schemas"][kind["schema"]["$ref"].split("/")[-1]]["properties"]
    request = {**api.least, "stream": False} if "stream" in fields else api.least
    client.post(api.path, json=request)
    plain = talk.request
    response = client.post(api.path, json={**dict.fromkeys(fields), **request})
    assert response.status_code == 200, response.text
    assert talk.request == plain
    for name in sorted(fields.keys() - {"model"}):
        for wrong in (-7, "x", [5], {"x": 1}):
            response = client.post(api.path, json={**request, name: wrong})
            assert response.status_code in (200, 400, 404), response.text
            assert response.status_code == 200 or name in response.text
    response = client.post(api.path, json={**request, "unheard_of": 1})
    assert response.status_code == 400
    assert "unheard_of is no parameter" in response.text


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
    (415, "gzip", {"content": b"\x1f\x8b", "headers": {**JSON, "Content-Encoding": "gzip"}}),
]
FAILED: list[tuple[int, str | None, str, Exception]] = [  # a status, a code of OpenAI's, words
    (400, "pins_too_large", "pinned", errors.PinsTooLarge("pinned tokens need more slots")),
    (400, "messages_invalid", "the last", errors.MessagesInvalid("the last message is a system's")),
    (400, "token_unknown", "has '<extra>'", errors.TokenUnknown("the text has '<extra>'")),
    (400, None, "temperature=-1", ValueError("temperature=-1 will not work")),
    (429, "busy", "four wait", errors.Busy("four wait already", 2.5)),
    (500, "logits_broken", "no numbers", errors.LogitsBroken("logits are no numbers")),
    (500, "session_broken", "disagree", errors.SessionBroken("layers disagree")),
    (500, None, "its log says why", ZeroDivisionError("/a/path")),
    (503, "memory_cap_exceeded", "the cap", errors.MemoryCapExceeded("the cap would be passed")),
]


@every_api
@pytest.mark.parametrize(("status", "words", "request_"), REFUSED)
def test_what_is_refused_is_so_in_the_form_of_its_api(client, talk, api, status, words, request_):
    before = len(talk.answers)
    body = {**api.least, **request_.get("json", {})}
    given = {**request_, **({} if "content" in request_ else {"json": body})}
    response = client.request(given.pop("method", "POST"), api.path, **given)
    assert words in assert_refused(api, response, status)
    assert len(talk.answers) == before


@every_chat
@pytest.mark.parametrize(("status", "code", "words", "error"), FAILED)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_fails_does_so_in_the_form_of_its_api(
    client, talk, api, status, code, words, error, streamed
):
    request = {**api.least, **(api.streaming if streamed else {})}
    for talk.script in (Script(refused=error), Script(early=error)):
        response = client.post(api.path, json=request)
        message = assert_refused(api, response, status)
        assert words in message
        assert "/a/path" not in message
        if api in (CHAT, RESPONSES):
            assert response.json()["error"]["code"] == code
        assert response.headers.get("Retry-After") == {429: "3", 503: "1"}.get(status)


@every_chat
def test_the_answer_to_a_failure_says_that_its_connection_ends(client, talk, api):
    """A client that keeps connections would find it closed by its next request."""
    talk.script = Script(refused=ZeroDivisionError())
    assert client.post(api.path, json=api.least).headers["Connection"] == "close"


@pytest.mark.parametrize("path", ["/v1/nowhere", "/v1/messages/nowhere", "/api/embed"])
def test_an_address_that_there_is_not_has_the_form_of_its_api(client, path):
    assert path in assert_refused(Api(path, {}), client.post(path, json={}), 404)


DEEP: Any = b"[" * 5_000 + b"]" * 5_000
NUMBER = b"9" * 5_000


def body(api: Api, more: bytes = b"", **fields: Any) -> bytes:
    """Return the API's least body with further fields; `more` is put in as it is."""
    return json.dumps({**api.least, **fields}).encode()[:-1] + more + b"}"


def saying(api: Api, content: Any) -> bytes:
    """Return the API's least body, in which a text is `content`."""
    field = next(name for name in ("messages", "input", "prompt") if name in api.least)
    return body(api, **{field: with_content(content) if field == "messages" else content})


def with_content(content: Any, **more: Any) -> Any:
    return [{"role": "user", "content": content, **more}]


def limited(api: Api, most: bytes) -> bytes:
    outer, _, inner = api.limit.partition(".")
    request = {name: value for name, value in api.least.items() if name != outer}
    value = b'{"%s": %s}' % (inner.encode(), most) if inner else most
    return json.dumps(request).encode()[:-1] + b', "%s": %s}' % (outer.encode(), value)


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
    "half a letter, its second": lambda api: saying(api, "?").replace(b"?", rb"\ude42 "),
    "no UTF-8": lambda api: saying(api, "?").replace(b"?", b"\xff\xfe"),
    "no UTF-8, but Latin-1": lambda api: saying(api, "?").replace(b"?", b"\xe9"),
    "no UTF-8, but a surrogate": lambda api: saying(api, "?").replace(b"?", b"\xed\xa0\xbd"),
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
    given = HOSTILE.get(case, body)(api)
    response = client.post(api.path, content=given, headers=headers)
    assert response.status_code in ((400, 404) if case in HOSTILE else (415,)), response.text
    message = assert_refused(api, response, response.status_code)
    assert len(message) < 1_000
    if case.startswith(("half a letter", "no UTF-8")):
        assert "give UTF-8, and whole letters" in message
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
    response = client.post(api.path, content=body(api), headers={**given, header: "null"})
    assert "Content-Type" in assert_refused(api, response, 415)


@every_chat
def test_thoughts_are_counted(client, talk, api):
    """All but the marks, which are three tokens here."""
    talk.script = Script(["<think>", "Hm", "\n", "so", "</", "think>", "Yes"])
    reply = client.post(api.path, json=api.least).json()
    usage = reply.get("usage", {})
    names = ("completion_tokens_details", "output_tokens_details")
    counts = [usage[name]["reasoning_tokens"] for name in names if name in usage]
    assert counts == ([3] if api in (CHAT, RESPONSES) else [])


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
    request = {**api.least, "tools": api.tools, "tool_choice": choice, "stream": streamed}
    response = client.post(api.path, json=request)
    assert response.status_code == 200, response.text
    assert r"{\"na" not in response.text
    assert json.dumps(text)[1:-1] in response.text or (api is MESSAGES and not streamed)
    if not streamed and api is MESSAGES:
        assert response.json()["stop_reason"] == "max_tokens"
        blocks = response.json()["content"]
        assert [(one["name"], one["input"]) for one in blocks] == calls
    if not streamed and api is CHAT:
        (one,) = response.json()["choices"]
        assert (one["message"]["content"] or "", one["finish_reason"]) == ("", "length")
        whole_calls = one["message"].get("tool_calls", [])
        assert [one["function"]["arguments"] for one in whole_calls] == [text] * len(calls)


POST = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
TEXT = POST + b"Content-Type: text/plain\r\n"  # refused before its body is read
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
NO_HTTP: dict[str, bytes] = {
    "rubbish": b"rubbish\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a letter of no path": b"GET /h\x01 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a length in letters": GET + b"Content-Length: x\r\n\r\n",
    "a chunk of no size": POST + b"Content-Type: application/json\r\nTransfer-Encoding: chunked"
    b"\r\n\r\nzz\r\n",
}
SENT: dict[str, bytes] = {  # what is sent by clients that speak no HTTP, or badly
    **NO_HTTP,
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
            if case not in NO_HTTP:
                sender.shutdown(socket.SHUT_WR)
            answer.begin()
            content = json.loads(answer.read())
        except (http.client.BadStatusLine, OSError):
            assert "early" in case or len(SENT[case]) > HEAD_BYTES
        else:
            assert 400 <= answer.status < 500, answer.status
            assert content["error"]
            if case in NO_HTTP:  # in OpenAI's form, and the connection ends
                assert (answer.status, answer.headers["Content-Type"]) == (400, "application/json")
                assert content["error"]["type"] == "invalid_request_error"
                assert "no request of HTTP/1.1" in content["error"]["message"]
                assert sender.recv(1) == b""
    assert client.post(CHAT.path, json=CHAT.least).status_code == 200
