"""A server that ends says so to its clients and in its log, and at once at a second signal."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from typing import Any

import httpx
from make import argv
from server_chats import pocket
from tools import PATIENCE

from kvcap.serve.app import Settings, application
from kvcap.serve.limits import RequestLimits
from kvcap.serve.scheduler import Limits, Scheduler
from kvcap.serve.server import Server, bound

LONG: Any = {
    "messages": [{"role": "user", "content": "Hello!"}],
    "max_tokens": 30_000,
    "ignore_eos": True,
}


def test_streams_end_by_an_error_and_the_log_says_so(caplog):
    scheduler, received = Scheduler(pocket(), Limits(places=2, together=2)), list[Any]()
    app = application(scheduler, Settings("pocket"))
    with caplog.at_level(logging.WARNING, "kvcap.serve"):
        server = Server(app, bound("127.0.0.1", 0), RequestLimits(), patience_s=0.2)
        with server:
            url, began = f"{server.url}/v1/chat/completions", threading.Event()

            def ask() -> None:
                body = {**LONG, "stream": True}
                with httpx.stream("POST", url, json=body, timeout=PATIENCE) as answer:
                    for line in answer.iter_lines():
                        received.append(line)
                        began.set()

            asking = threading.Thread(target=ask)
            asking.start()
            assert began.wait(PATIENCE)
        asking.join(PATIENCE)
    last = [line for line in received if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], "the server is closing" in error["message"]) == ("busy", True)
    assert "the server ends after 0.2 s; answers cut short: 1" in caplog.text


def listens(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return False
    return True


def test_a_second_signal_ends_the_server_at_once():
    with subprocess.Popen(
        argv("{} -m kvcap serve --port 0 --budget-tokens 64 --grace 600", sys.executable),
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    ) as process:
        address = re.search(r"at (http://127\.0\.0\.1:\d+)/v1", process.stderr.readline())
        assert address
        url = f"{address[1]}/v1/chat/completions"
        body = {**LONG, "stream": True}
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            while listens(address[1]):  # else both signals may be taken for one
                next(lines)  # the answer goes on
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 1
        assert "at once, at a second signal" in process.stderr.read()
