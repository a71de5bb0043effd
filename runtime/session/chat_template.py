"""Renders chat templates in a process of their own, which can be ended whatever a template does.

One process serves all templates, so that a message does not wait for Python to start. It is started
while a model loads, ends with this process, and is replaced after a template that had to be ended.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("template_sandbox.py")
SECONDS = 10.0  # of processor time for one conversation; templates take some milliseconds
SPEED = 1 << 20  # bytes of a conversation that give it a second more
SPARE = 1 << 20  # letters that a template may write beyond eight times what it is given


class TemplateFailed(Exception):
    """An error that says how a template failed, or why it had to be ended."""


def start_renderer() -> None:
    """Start the process that renders, so that the first message does not wait for it."""
    with _lock:
        _renderer()


def render_template(template: str, names: Mapping[str, Any]) -> str:
    """Return the text that a template writes.

    Args:
        template: in Jinja.
        names: the values it can refer to, which JSON can hold.

    Raises:
        TemplateFailed: it fails, computes for too long, or takes too much memory.
    """
    request: dict[str, Any] = {"template": template, "names": dict(names)}
    size = len(json.dumps(request, default=str))
    request |= {"seconds": SECONDS + size / SPEED, "longest": SPARE + 8 * size}
    with _lock:
        answer = _renderer().ask(json.dumps(request, default=str).encode())
    if "error" in answer:
        raise TemplateFailed(answer["error"])
    return answer["text"]


class _Renderer:
    """A process that renders templates."""

    def __init__(self) -> None:
        path = os.pathsep.join(folder for folder in sys.path if folder)
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # a Ctrl-C is for this process to act upon
        )

    def ask(self, request: bytes) -> dict[str, str]:
        """Return the process's answer, or an error if the process ended instead."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(request + b"\n")
                stdin.flush()
            if line := stdout.readline():
                answer: dict[str, str] = json.loads(line)
                return answer
        except BaseException:  # a Ctrl-C: the next request must not read this one's answer
            self.process.kill()
            self.end()
            raise
        self.end()
        if self.process.returncode == -getattr(signal, "SIGPROF", 0):
            return {"error": f"it computes for more than {SECONDS:g} s"}
        return {"error": "the process that renders it was ended"}

    def end(self) -> None:
        """End the process and wait for it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


_lock = threading.Lock()
_only: _Renderer | None = None


def _renderer() -> _Renderer:
    """Return the running process, or start one."""
    global _only
    if _only is None or _only.process.poll() is not None:
        _stop()
        _only = _Renderer()
    return _only


@atexit.register
def _stop() -> None:
    if _only is not None:
        _only.end()
