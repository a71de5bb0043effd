"""Workers that are processes of this machine.

Each is a `ProcessPoolExecutor` of one process: where a process dies, the executor says so of the
one item that it was doing, and the other workers go on.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any

from kvcap.evals.quality.workers import Failed, Worker, WorkerJob, attempt


class Processes:
    """An engine that starts `workers` processes afresh, so that each may use a GPU."""

    def __init__(self, job: WorkerJob, workers: int) -> None:
        self.job, self.workers = job, workers

    def start(self, number: int) -> Worker:
        """Start a process that makes the job ready."""
        return _Process(self.job, number)

    def close(self) -> None:
        """Give nothing back, as nothing is held."""


class _Process:
    def __init__(self, job: WorkerJob, number: int) -> None:
        self.number = number
        # The process ends when the writing end is closed, be it by us or by the end of ours.
        lifeline, self._lifeline = Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _live, (lifeline,))
        with _interrupts_blocked():
            self.ready: Future[Failed | None] = self._pool.submit(_load, job, number)
        self._last: Future[Any] = self.ready
        self._theirs = lifeline  # kept open until the process has it

    def submit(self, message: Any) -> Future[Any]:
        try:
            self._last = self._pool.submit(_run, message)
        except BrokenProcessPool as error:  # it died while it was idle
            self._last = Future()
            self._last.set_exception(error)
        return self._last

    def close(self) -> None:
        if self._last.done():
            self._pool.shutdown()  # it ends by itself, and frees what it holds
        self._lifeline.close()
        self._pool.shutdown(cancel_futures=True)
        self._theirs.close()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Let a process that is started within never get Ctrl-C: its parent ends it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_job: WorkerJob | None = None  # the job of a worker's process


def _live(lifeline: Connection) -> None:
    """Watch the lifeline while the process works."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os._exit(1)


def _load(job: WorkerJob, number: int) -> Failed | None:
    global _job
    _job = job
    failed: Failed | None = attempt(job.load, number)
    gc.freeze()  # loaded objects stay, so that no collection needs to look at them
    atexit.register(gc.unfreeze)  # else extension modules report them as leaked
    return failed


def _run(message: Any) -> Any:
    assert _job is not None, "a worker is sent items once it is ready"
    return attempt(_job.run, message)
