"""Starts servers of OpenAI's API, each in a process of its own, and reads what they stream."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcap.lab.peers.process import WAIT
from kvcap.runtime.errors import PeerFailed

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
CONFIGS = ("config.json", "generation_config.json")


@dataclass
class PeerServer:
    """A server in a process of its own, which clients measure over HTTP."""

    process: subprocess.Popen[str]
    port: int = 0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))  # the last lines of stderr

    def post(self, body: Any, path: str = "chat/completions") -> http.client.HTTPResponse:
        """Send a body, as JSON unless it is bytes, and return the server's response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", f"/v1/{path}", data, headers)
        return connection.getresponse()

    def figures(self) -> dict[str, float]:
        """Return the server's own figures from `/metrics`, by name."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("GET", "/metrics", headers={"Connection": "close"})
        lines = connection.getresponse().read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def processor(self) -> dict[str, int]:
        """Return the processor time of each thread in ns, by id; the first thread serves HTTP."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        if not tasks.is_dir():
            raise PeerFailed("threads are timed by /proc, which this system has not")
        return {t.name: int((t / "schedstat").read_text().split()[0]) for t in tasks.iterdir()}

    def memory(self, name: str) -> int:
        """Return the process's resident bytes (`VmRSS`), or their peak (`VmHWM`)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(rf"{name}:\s+(\d+)", status)[0]) * 1024


@contextmanager
def running(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    limit_s: float | None = None,
) -> Iterator[PeerServer]:
    """Run a server that prints its address on stderr; end it after the `with` block.

    Args:
        command: the command that starts the server.
        environment: environment of its process; None: this process's.
        folder: folder that it is started in; None: this process's.
        limit_s: seconds after which it is killed in any case.

    Raises:
        PeerFailed: the server did not start, or was killed.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
    ) as process:
        overdue = threading.Event()

        def kill() -> None:
            overdue.set()
            process.kill()

        watchdog = threading.Timer(limit_s or 0, kill)
        if limit_s is not None:
            watchdog.start()
        try:
            server = PeerServer(process)
            _await_address(server)
            yield server
        except Exception as error:
            if overdue.is_set():
                reason = f"it was killed, as it was not done after {limit_s:.0f} s"
                raise PeerFailed(f"{reason}: {error}") from error
            raise
        finally:
            watchdog.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def _await_address(server: PeerServer) -> None:
    assert server.process.stderr is not None
    for line in server.process.stderr:
        server.lines.append(line)
        if match := ADDRESS.search(line):
            server.port = int(match[1])
            break
    else:
        last = next(filter(None, map(str.strip, reversed(server.lines))), "it said nothing")
        raise PeerFailed(f"the server did not start: {last}")
    threading.Thread(
        target=lambda lines: server.lines.extend(lines), args=[server.process.stderr], daemon=True
    ).start()


@contextmanager
def kvcap_server(
    model: str, budget: int, *options: str, limit_s: float | None = None
) -> Iterator[PeerServer]:
    """Run `kvcap serve`, with 'model' as the model's name.

    Raises:
        PeerFailed: the server did not start, or was killed.
    """
    command = [
        sys.executable,
        "-m",
        "kvcap",
        "serve",
        model,
        "--port",
        "0",
        "--budget-tokens",
        str(budget),
        "--name",
        "model",
        *options,
    ]
    with running(command, limit_s=limit_s) as server:
        yield server


@contextmanager
def transformers_server(
    model: str, *options: str, python: str | None = None, limit_s: float | None = None
) -> Iterator[PeerServer]:
    """Run `transformers serve` with continuous batching.

    Args:
        model: a directory.
        options: further options of the command.
        python: the interpreter with `transformers[serving]`; by default this one.
        limit_s: seconds after which it is killed.

    Raises:
        PeerFailed: the server did not start, or was killed.
    """
    model = str(Path(model).resolve())
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "PYTHONSAFEPATH": "1",
    }
    environment.pop(WAIT, None)
    if python is not None:
        environment.pop("PYTHONPATH", None)
    command = [
        python or sys.executable,
        "-m",
        "transformers.cli.transformers",
        "serve",
        model,
        "--continuous-batching",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        *options,
    ]
    # Not in a checkout, where it would import the folder `kernels` as the package of that name.
    with running(command, environment, model, limit_s) as server:
        yield server


def endless(model: str, folder: Path) -> str:
    """Make a model that never ends an answer, from links to the files of `model`; return it."""
    folder.mkdir()
    for file in Path(model).iterdir():
        if file.name in CONFIGS:
            settings = {**json.loads(file.read_text()), "eos_token_id": []}
            (folder / file.name).write_text(json.dumps(settings))
        elif file.is_file():
            (folder / file.name).symlink_to(file.resolve())
        else:
            shutil.copytree(file, folder / file.name)
    return str(folder)


def pieces(response: http.client.HTTPResponse) -> Iterator[tuple[float, str]]:
    """Yield the texts of a stream, with the times at which they arrived.

    Raises:
        PeerFailed: the request was refused, or the stream ended too early.
    """
    if response.status != 200:
        raise PeerFailed(f"status {response.status}: {response.read().decode()[:300]}")
    ended = False
    while line := response.readline():
        if line == b"data: [DONE]\n":
            ended = True
            break
        if line.startswith(b"data: "):
            try:
                message = json.loads(line[6:])
            except ValueError as error:  # transformers writes errors that are no JSON
                raise PeerFailed(line[6:300].decode(errors="replace").strip()) from error
            if (wrong := message.get("error")) is not None:
                raise PeerFailed(wrong["message"] if isinstance(wrong, dict) else str(wrong))
            for choice in message["choices"]:
                ended = ended or choice.get("finish_reason") is not None
                text = choice["delta"].get("content") if "delta" in choice else choice["text"]
                yield time.perf_counter(), text or ""
    if not ended:
        raise PeerFailed("a stream ended before its end")
    response.read()
