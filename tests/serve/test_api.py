"""The API over conversations without a model: by OpenAI's own client, by curl and by hand."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import fields

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as some
from make import eventually
from server_chats import CALL, HELLO, TOOL, post, serving
from stand_in import Script, StandIn
from tools import PATIENCE

from kvcap.runtime import errors
from kvcap.runtime.session.tool_calls import parsed_text
from kvcap.serve import schemas
from kvcap.serve.app import Settings, application
from kvcap.serve.contract import Figures
from kvcap.serve.limits import RequestLimits
from kvcap.serve.server import Server, bound, is_loopback
from kvcap.serve.tool_calls import CallGate

SETTINGS = Settings(
    "pocket", limits=RequestLimits(body_bytes=20_000, messages=3, quiet_seconds=0.1)
)
KEYS = ("one-key", "another-key")


def test_options_of_the_chat_template_change_those_of_the_server():
    off = {"enable_thinking": False, "mood": "kind"}
    request = schemas.ChatRequest(messages=[], chat_template_kwargs={"mood": None})
    assert request.options(RequestLimits(), {"template_options": off}) == {
        "template_options": {"enable_thinking": False, "mood": None}
    }
    assert schemas.ChatRequest(messages=[]).options(RequestLimits(), {"template_options": off}) == {
        "template_options": off
    }


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_stops_when_its_client_goes(client, talk, stream):
    talk.script = Script(["a"] * 10**6, wait_s=0.001)
    before = len(talk.answers)
    if stream:
        with client.chat.completions.create(model="pocket", messages=HELLO, stream=True) as parts:
            for _ in zip(range(3), parts, strict=False):
                pass
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.2).chat.completions.create(model="pocket", messages=HELLO)
    eventually(lambda: len(talk.answers) > before and talk.answers[-1].closed)
    assert talk.answers[-1].given < 10**6


def test_a_client_that_goes_before_the_first_token_stops_its_answer(url, talk):
    talk.script = Script(wait_s=PATIENCE)
    before = len(talk.answers)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{url}/v1/chat/completions", timeout=0.05, json={"messages": HELLO, "stream": True}
        )
    eventually(lambda: len(talk.answers) > before and talk.answers[-1].closed)


def test_a_long_prompt_keeps_its_stream_alive(url, client, talk):
    talk.script = Script(["x"], wait_s=0.35)
    response = post(url, stream=True)
    assert response.text.count(": the prompt is being read\n\n") >= 2
    parts = client.chat.completions.create(model="pocket", messages=HELLO, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "x"


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize(
    ("written", "content", "calls"),
    [
        (f"Well.\n{CALL}\n{CALL}\n", "Well.", 2),
        (CALL.removeprefix("<tool_call>").removesuffix("</tool_call>"), "", 1),
        ("a <tool_call>no call</tool_call> b", "a <tool_call>no call</tool_call> b", 0),
        ('x <tool_call>{"name": "add"', 'x <tool_call>{"name": "add"', 0),
        ("a < b <tool_", "a < b <tool_", 0),
        ("ends with spaces \n", "ends with spaces \n", 0),
        (' {"no": "call"}', ' {"no": "call"}', 0),
        (" [see] there", " [see] there", 0),
    ],
)
def test_what_may_be_a_call_is_held_back_and_nothing_else(written, content, calls, step):
    gate = CallGate()
    got = [gate.put(written[at : at + step]) for at in range(0, len(written), step)]
    parsed = parsed_text(written, written, [TOOL])
    assert len(parsed.tool_calls) == calls
    assert "".join([*got, gate.end(parsed)]) == content


def test_only_the_right_keys_are_let_in_and_each_is_an_owner():
    talk = StandIn()
    with serving(talk, keys=KEYS) as server:
        for key in ("wrong", "", KEYS[0][:-1], "ключ"):
            headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
            for path in ("/v1/models", "/metrics", "/v1/chat/completions", "/nowhere"):
                response = httpx.get(server.url + path, headers=headers)
                assert (response.status_code, response.headers["WWW-Authenticate"]) == (
                    401,
                    "Bearer",
                )
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        owners = set()
        for key in KEYS:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
                client.chat.completions.create(model="pocket", messages=HELLO)
                owners.add(talk.request.owner)
        assert len(owners) == 2
        assert not any(key in owner for key in KEYS for owner in owners)
    assert talk.saved


def test_other_sites_reach_nothing(url, talk):
    for host in ("127.0.0.1.evil.example", ""):
        assert httpx.get(f"{url}/v1/models", headers={"Host": host}).status_code == 400
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:9", "[::1]:8000"):
        assert httpx.get(f"{url}/v1/models", headers={"Host": host}).status_code == 200
    sent = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    response = httpx.post(f"{url}/v1/chat/completions", headers=sent, content=b'{"messages": []}')
    assert response.status_code == 415
    asks = {**sent, "Access-Control-Request-Method": "POST"}
    response = httpx.options(f"{url}/v1/chat/completions", headers=asks)
    assert response.status_code == 405
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_body_in_pieces_and_names_of_conversations_have_their_limits(url, talk):
    kind = {"Content-Type": "application/json"}
    address = f"{url}/v1/chat/completions"
    response = httpx.post(address, content=iter([b"x" * 10_000] * 3), headers=kind)
    assert (response.status_code, response.json()["error"]["type"]) == (
        413,
        "invalid_request_error",
    )
    for name in ("../../etc", "a b", "x" * 200, "-x", ""):
        response = httpx.post(address, json={"messages": HELLO}, headers={"X-Session-Id": name})
        assert response.status_code == 400, name


def test_wrong_addresses_and_methods_say_which_are_right(url, talk):
    for path, says in (
        ("/v1/images", "there is nothing at '/v1/images'; use /v1/chat/completions"),
        ("/v1/embeddings", "kvcap writes text; ask a server of an embedding model"),
    ):
        response = httpx.post(url + path, json={})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "unknown_url")
        assert says in error["message"]
    response = httpx.put(f"{url}/v1/chat/completions", json={})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (405, "method_not_supported")
    assert error["message"] == "'/v1/chat/completions' does not answer PUT; use POST"
    assert response.headers["Allow"] == "POST"
    error = httpx.delete(f"{url}/health").json()["error"]
    assert error["message"] == "'/health' does not answer DELETE; use GET or HEAD"
    allowed = httpx.put(f"{url}/v1/responses/x", json={}).headers["Allow"]
    assert set(allowed.split(", ")) == {"GET", "HEAD", "DELETE"}


def test_no_http_behind_an_answer_ends_the_connection(served, caplog):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(served[1].socket.getsockname(), PATIENCE) as client:
        client.sendall(head)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert (answer.status, answer.read()[:8]) == (415, b'{"error"')
        client.sendall(b"no length\r\n")
        assert client.recv(1) == b""
    assert not [one for one in caplog.records if one.name == "asyncio"]


VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=20),
    lambda inner: (
        some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = (
    "messages",
    "model",
    "stream",
    "stop",
    "tools",
    "temperature",
    "response_format",
    "seed",
    "stream_options",
    "max_tokens",
    "logprobs",
    "tool_choice",
    "metadata",
    "pin",
)
MESSAGE = some.dictionaries(
    some.sampled_from(["role", "content", "tool_calls", "tool_call_id", "pin", "name"]),
    some.sampled_from(["user", "assistant", "tool", "x", None, True]) | VALUES,
)


@given(
    some.binary(max_size=200)
    | some.dictionaries(some.sampled_from(FIELDS), VALUES, max_size=4).map(
        lambda more: json.dumps({"messages": HELLO, **more}).encode()
    )
    | some.lists(MESSAGE, max_size=3).map(
        lambda messages: json.dumps({"messages": messages}).encode()
    )
)
def test_no_body_makes_the_server_fail(served, body):
    talk, server = served
    talk.script = Script()
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = httpx.post(
            server.url + path, content=body, headers={"Content-Type": "application/json"}
        )
        assert response.status_code in (200, 400, 404), response.text


def test_clients_that_say_or_read_nothing_are_let_go_of():
    talk = StandIn(Script(["x" * 10_000] * 10_000))
    limits = RequestLimits(head_seconds=0.2, body_seconds=0.2, write_seconds=0.2)
    with serving(talk, limits=limits) as server:
        address = server.socket.getsockname()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        whole = head + b"Content-Type: application/json\r\n"
        for sent, answer in (
            (b"", b""),
            (head, b""),
            (whole + b"Content-Length: 9\r\n\r\n{", b"HTTP/1.1 408"),
        ):
            with socket.create_connection(address) as mute:
                mute.settimeout(PATIENCE)
                mute.sendall(sent)
                assert mute.recv(12) == answer
        body = json.dumps({"messages": HELLO, "stream": True}).encode()
        with socket.create_connection(address) as deaf:
            deaf.sendall(whole + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            eventually(lambda: bool(talk.answers) and talk.answers[-1].closed)
        assert talk.answers[-1].given < 10_000


def test_more_connections_than_allowed_are_turned_away():
    limits = RequestLimits(connections=3)
    with serving(StandIn(), limits=limits) as server:
        address = server.socket.getsockname()
        idle = [socket.create_connection(address) for _ in range(2)]
        response = httpx.get(f"{server.url}/health")
        assert (response.status_code, response.headers["Connection"]) == (503, "close")
        assert response.json()["error"]["code"] == "busy"
        for one in idle:
            one.close()
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200)


def test_metrics_show_every_figure_and_no_word_of_a_client(url, talk):
    httpx.get(f"{url}/made/up/by/a/client")
    text = httpx.get(f"{url}/metrics").text
    assert "kvcap_waiting 3.0" in text
    assert 'kvcap_http_requests_total{path="other",status="404"}' in text
    assert "made/up" not in text
    names = {each.name for each in fields(Figures)}
    unshown = {name for name in names if f"# HELP kvcap_{name}" not in text}
    assert unshown == {"policy", "model", "chat_template", "closing"}


def test_a_server_that_closes_says_so():
    with serving(StandIn(saved=True)) as server:
        response = httpx.get(f"{server.url}/health")
        assert (response.status_code, response.json()) == (503, {"status": "closing"})


def test_answers_come_to_their_end_when_the_server_is_stopped():
    talk = StandIn(Script(["a"] * 30, wait_s=0.01))
    server = serving(talk)
    server.__enter__()
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json={"messages": HELLO, "stream": True}
    ) as response:
        lines = response.iter_lines()
        next(lines)
        server.stop()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    server.__exit__()
    assert talk.saved


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_is_written_is_sent_at_once(host):
    """Without TCP_NODELAY an answer's second packet waits until the first was confirmed."""
    settings = Settings("pocket")
    try:
        listening = bound(host, 0)
    except errors.PortTaken:
        pytest.skip("this machine has no IPv6")
    server = Server(application(StandIn(), settings), listening, settings.limits)
    with server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        (one,) = server.server.server_state.connections
        taken = one.transport.get_extra_info("socket")
        assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_taken_port_is_said_and_addresses_of_this_machine_are_known():
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(errors.PortTaken, match="--port 0 takes a free port"):
            bound("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(errors.PortTaken, match=r"is no address .*; give one"):
        bound("no.such.name.invalid", 0)
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1")))


def test_defaults_of_the_server_are_for_what_a_request_leaves_out():
    talk = StandIn()
    with serving(talk, defaults={"temperature": 0.0, "max_new_tokens": 9}) as server:
        post(server.url, max_tokens=2)
        assert talk.request.options == {"temperature": 0.0, "max_new_tokens": 2}
