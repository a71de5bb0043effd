"""Clients of the page's server that mean harm: each is bounded, named, and leaves the others be."""

from __future__ import annotations

import copy
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_requests import posted, requested, vendored
from bench_results import DEEP, MUTATIONS, mutated, put, result, written
from hypothesis import given, settings
from make import eventually
from tools import PATIENCE

from kvcap.android_bench.results import source
from kvcap.android_bench.results.judge import judged
from kvcap.android_bench.server import landing
from kvcap.android_bench.server.landing import ClientLimits, Landed
from kvcap.android_bench.server.serving import HEAD_BYTES, Serving

pytestmark = vendored
SOON = PATIENCE
HEAD = b"POST /results HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LARGE = b"GET /ort/ort-wasm-simd-threaded.asyncify.wasm HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return put(tmp_path_factory.mktemp("plan"))


@pytest.fixture
def serve(folder, tmp_path, capfd) -> Iterator[Any]:
    """Provide servers with limits of their own, of which nothing may reach the terminal."""
    started = []

    def start(**limits: Any) -> Serving:
        started.append(
            Serving(folder, tmp_path / "results", limits=replace(ClientLimits(), **limits))
        )
        return started[-1].__enter__()

    yield start
    for serving in started:
        serving.__exit__()
    assert "Traceback" not in capfd.readouterr().err


def line(serving: Serving) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", serving.port))
    connection.settimeout(SOON)
    return connection


def left(connection: socket.socket) -> bytes:
    """Return what comes until the server hangs up."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionError:
        pass
    return received


def another(number: int) -> dict[str, Any]:
    return {**result(), "run": {**result()["run"], "seed": number}}


@settings(max_examples=60)
@given(MUTATIONS)
def test_no_body_makes_the_server_fail(fuzzed, mutations):
    body = written(mutated(result(), mutations))
    status, answer = posted(fuzzed, body)
    assert status in (201, 422)
    assert set(answer) == ({"file", "flags"} if status == 201 else {"error"})


@pytest.fixture(scope="module")
def fuzzed(folder, tmp_path_factory) -> Iterator[Serving]:
    with Serving(
        folder, tmp_path_factory.mktemp("results"), limits=ClientLimits(spare_bytes=0)
    ) as serving:
        yield serving


@pytest.mark.slow(keep=13)
@pytest.mark.parametrize("path", ["/results", "/device"])
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 800 + b"]" * 800,
        b'{"a":' * 800 + b"1" + b"}" * 800,
        b"9" * 400,
        b"9" * 5000,
        b"NaN",
        b'{"touch_points": 1e999, "platform": Infinity}',
        b'{"user_agent": "Android", "platform": "\\ud800", "gpu": ' + b"9" * 400 + b"}",
        b'{"platform": ' + b"[" * 800 + b"]" * 800 + b', "user_agent": "Android"}',
        b'{"schema": "kvcap.android_bench/1", "cells": ' + b"[" * 800 + b"]" * 800 + b"}",
        b"\xff\xfe{",
        b"",
    ],
    ids=range(11),
)
def test_strange_numbers_and_depths_are_no_fault_of_the_server(serve, path, body):
    serving = serve()
    status, text = requested(serving, "POST", path, body, **{"Content-Type": "application/json"})
    assert status in ({422} if path == "/results" else {200, 400})
    json.loads(text)


def test_a_depth_or_a_number_within_a_good_result_is_refused_by_its_place(serve):
    serving = serve()
    for change, message in (
        ({"signs": DEEP}, "device/signs"),
        ({"ram_bytes": 10**400}, "device/ram"),
        ({"signs": {"a": DEEP}}, "device/signs/a"),
        ({"cores": float("inf")}, "device/cores"),
    ):
        document = copy.deepcopy(result())
        document["device"] |= change
        status, answer = posted(serving, written(document))
        assert status == 422
        assert message in answer["error"]


def test_what_a_result_brings_comes_back_in_a_form_that_can_be_sent(serve):
    """Half a character has no encoding but JSON's own."""
    serving = serve()
    document = result()
    document["cells"][4]["reason"] = "\ud800"
    status, answer = posted(serving, written(document))
    assert status == 201
    assert any(flag["kind"] == "failed" for flag in answer["flags"])


# Clients that leave or wait


def test_clients_that_leave_midway_leave_no_trace(serve):
    serving = serve()
    for sent in (
        b"",
        b"POST /res",
        HEAD,
        HEAD + b"Content-Length: 90\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        LARGE,
        b"\x00\xff\r\n\r\n",
        LARGE.replace(b"/ort/", b"/\xff"),
    ):
        with line(serving) as connection:
            connection.sendall(sent)
            time.sleep(0.05)
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )  # a reset
    assert posted(serving, result())[0] == 201


def test_what_is_written_is_sent_at_once(serve):
    """Without it asyncio leaves TCP_NODELAY off, and an answer's second packet waits."""
    assert serve().socket.proto == socket.IPPROTO_TCP


def test_a_request_that_never_begins_is_hung_up_on(serve):
    serving = serve(head_seconds=1)
    for sent in (b"", b"POST /results HTTP/1.1\r\nHost: loc"):
        with line(serving) as connection:
            connection.sendall(sent)
            assert left(connection) == b""
    with line(serving) as connection:  # after a whole one, likewise
        connection.sendall(b"GET /app.js HTTP/1.1\r\nHost: localhost\r\n\r\nGET /app")
        assert left(connection).startswith(b"HTTP/1.1 200")
    assert posted(serving, result())[0] == 201


def test_a_body_that_never_ends_is_answered(serve):
    serving = serve(body_seconds=1)
    for path in (b"/results", b"/device"):
        with line(serving) as connection:
            connection.sendall(HEAD.replace(b"/results", path) + b"Content-Length: 90\r\n\r\n{")
            assert connection.recv(64).startswith(b"HTTP/1.1 408")
    assert posted(serving, result())[0] == 201


def test_an_answer_that_nobody_reads_is_given_up(serve):
    serving = serve(request_seconds=1)
    with line(serving) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(LARGE)
        eventually(lambda: not serving.server.server_state.tasks)


def test_more_connections_than_allowed_are_turned_away(serve):
    serving = serve(connections=3)
    held = [line(serving) for _ in range(3)]
    with line(serving) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 503")
    for one in held:
        one.close()
    eventually(lambda: not serving.server.server_state.connections)
    assert posted(serving, result())[0] == 201


def test_only_so_many_results_arrive_at_once(serve):
    serving = serve(uploads=2)
    held = [line(serving) for _ in range(2)]
    for one in held:
        one.sendall(HEAD + b"Content-Length: 90\r\n\r\n{")
    eventually(lambda: posted(serving, result())[0] == 503)
    for one in held:
        one.close()
    eventually(lambda: posted(serving, result())[0] == 201)


def test_a_head_that_is_too_long_is_refused(serve):
    with line(serve()) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 2 * HEAD_BYTES)
        assert left(connection).startswith(b"HTTP/1.1 400")


# The disk


@pytest.mark.parametrize(
    "limits", [{"results": 2}, {"stored_bytes": int(2.5 * len(json.dumps(judged(result()))))}]
)
def test_results_are_taken_up_to_a_limit(serve, tmp_path, limits):
    serving = serve(**limits)
    assert [posted(serving, another(i))[0] for i in (1, 2)] == [201, 201]
    status, answer = posted(serving, another(3))
    assert status == 507  # of the 5xx, upon which the page keeps the result and sends it again
    assert "2 results are stored" in answer["error"]
    assert posted(serving, another(1))[0] == 201  # what is there already takes no room
    assert len(list((tmp_path / "results").iterdir())) == 2
    assert posted(serve(), another(3))[0] == 201  # as after another start


def test_the_disk_is_not_filled(serve, monkeypatch):
    usage = landing.shutil.disk_usage("/")._replace(free=ClientLimits().spare_bytes + 10)
    monkeypatch.setattr(landing.shutil, "disk_usage", lambda _: usage)
    status, answer = posted(serve(), result())
    assert status == 507
    assert "disk is full" in answer["error"]


# Who may ask


def test_another_site_gets_no_leave_to_send(serve):
    """A page elsewhere may send JSON only after a preflight, which grants it nothing here."""
    with line(serve()) as connection:
        connection.sendall(
            b"OPTIONS /results HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n"
            b"Access-Control-Request-Method: POST\r\nConnection: close\r\n"
            b"Access-Control-Request-Headers: content-type\r\n\r\n"
        )
        response = left(connection).lower()
    assert b"405" in response.splitlines()[0]
    assert b"access-control-allow" not in response


def test_the_terminal_gets_no_words_of_a_client_as_they_are(serve, monkeypatch, capfd):
    from kvcap.android_bench.commands import _tell

    document = result()
    document["device"]["model"] = "\x1b[2Jx\n<b>"
    serving = serve()
    assert posted(serving, written(document))[0] == 201
    landed: Landed = serving.landed.get(timeout=SOON)
    _tell(landed, False)
    _tell(landed, True)
    printed = capfd.readouterr()
    for one in (printed.out + printed.err).splitlines():
        assert one.isprintable()
    reason = source.origin({"user_agent": "Android", "platform": "\x1b\n"}, "Android").reason
    assert reason.isprintable()
