"""Holds Ctrl-C back while a block is read or a file is written, so that neither stops half-way."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold back Ctrl-C until the body has ended, and raise it then."""
    if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
        yield  # only the main thread is interrupted, and not at Python's end
        return
    caught: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        signal.raise_signal(signal.SIGINT)
