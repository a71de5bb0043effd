"""Runs workers as processes of this machine.

Each worker is a `ProcessPoolExecutor` of one process, so that a process that dies only fails its
own item.
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

from kvcap.lab.quality.workers import Failed, Worker, WorkerJob, attempt


class Processes:
    """An engine that spawns processes without forking, so that each may use a GPU."""

    def __init__(self, job: WorkerJob, workers: int) -> None:
        self.job, self.workers = job, workers

    def start(self, number: int) -> Worker:
        """Start a process that loads the job."""
        return _Process(self.job, number)

    def close(self) -> None:
        """Do nothing, as the engine holds nothing."""


class _Process:
    def __init__(self, job: WorkerJob, number: int) -> None:
        self.number = number
        # The worker ends when the writing end closes, by `close` or with this process.
        lifeline, self._lifeline = Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _live, (lifeline,))
        with _interrupts_blocked():
            self.ready: Future[Failed | None] = self._pool.submit(_load, job, number)
        self._last: Future[Any] = self.ready
        self._theirs = lifeline  # kept open until the process has received it

    def submit(self, message: Any) -> Future[Any]:
        try:
            self._last = self._pool.submit(_run, message)
        except BrokenProcessPool as error:  # the process died while it was idle
            self._last = Future()
            self._last.set_exception(error)
        return self._last

    def close(self) -> None:
        if self._last.done():
            self._pool.shutdown()  # the process ends by itself, and frees its resources
        self._lifeline.close()
        self._pool.shutdown(cancel_futures=True)
        self._theirs.close()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in processes that are started in the `with` block, as their parent ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_job: WorkerJob | None = None  # the job, in a worker's process


def _live(lifeline: Connection) -> None:
    """Watch the lifeline in a thread of its own."""
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
    gc.freeze()  # loaded objects stay, so that collections need not examine them
    atexit.register(gc.unfreeze)  # otherwise extension modules report them as leaked
    return failed


def _run(message: Any) -> Any:
    assert _job is not None, "a worker is sent items once it is ready"
    return attempt(_job.run, message)
