"""Runs work in threads that leave none behind, beside the one that computes answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def by_a_thread(make: Callable[[], Result]) -> Result:
    """Make something on a thread of its own, so that threads which it computed with end, too.

    OpenMP keeps threads for each that ever computed. Where all of them are more than the cores, it
    lets them sleep between two parts of a pass, and a token of a small model takes twice the time.
    So only the thread that computes answers may keep such threads.
    """
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="kvcap-serve-once", daemon=True)
    thread.start()
    result = future.result()
    thread.join()
    return result
