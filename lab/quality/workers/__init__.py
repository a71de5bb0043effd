"""Spreads work over workers: in this process, in processes of this machine, or on a Ray cluster.

A worker loads its job once and then does one item after another. Engines differ in where workers
run; `spread` drives them all. Knows nothing of cells, models or files.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from kvcap.runtime.errors import WorkersLost

NO_ITEM = object()


class WorkerJob(Protocol):
    """A job that every worker does; it must be picklable, as other processes get a copy."""

    def load(self, worker: int) -> None:
        """Load everything that the job needs, once for each worker; workers count from 0."""
        ...

    def run(self, message: Any) -> Any:
        """Return the result of an item, from the message that the worker was sent for it."""
        ...


class Worker(Protocol):
    """A worker, which does items one at a time.

    A future that ends with an exception means that the worker has died. An error of the job is a
    `Failed` result instead.
    """

    number: int
    ready: Future[Failed | None]  # done once the job is loaded

    def submit(self, message: Any) -> Future[Any]:
        """Start the job's `run`; return the future of its result."""
        ...

    def close(self) -> None:
        """End the worker at once, whatever it is doing."""
        ...


class WorkerEngine(Protocol):
    """An engine that starts workers: in this process, in others, or on other machines."""

    workers: int  # most workers

    def start(self, number: int) -> Worker:
        """Start a worker with this number, which that of a dead one may have had."""
        ...

    def close(self) -> None:
        """Release all that the engine holds besides its workers."""
        ...


@dataclass(frozen=True)
class Failed:
    """The error of an item, or of loading a worker's job."""

    error: Exception


def attempt(function: Callable[..., Any], *given: Any) -> Any:
    """Return the result of a function, or its error as a picklable `Failed`."""
    try:
        return function(*given)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return Failed(RuntimeError(f"{type(error).__name__}: {error}"))
        return Failed(error)


class Here:
    """An engine that has a single worker: this process."""

    workers = 1

    def __init__(self, job: WorkerJob) -> None:
        self.job = job

    def start(self, number: int) -> Worker:
        """Load the job in this process."""
        return _ThisProcess(self.job, number)

    def close(self) -> None:
        """Do nothing, as the engine holds nothing."""


class _ThisProcess:
    def __init__(self, job: WorkerJob, number: int) -> None:
        self.number, self._job = number, job
        self.ready = _done(attempt(job.load, number))

    def submit(self, message: Any) -> Future[Any]:
        return _done(attempt(self._job.run, message))

    def close(self) -> None:
        pass


def _done(result: Any) -> Future[Any]:
    future = Future[Any]()
    future.set_result(result)
    return future


def spread(
    engine: WorkerEngine,
    items: Sequence[Hashable],
    message: Callable[[Any], Any],
    note: Callable[[str], None],
    name: Callable[[Any], str] = str,
) -> Generator[tuple[Any, Any], None, None]:
    """Do every item once, and yield (item, result) in the order in which they are done.

    An item whose worker dies is done once more, by another worker; if that one dies too, its result
    is a `Failed`, as for an error of the job. Other items go on. All workers end with the
    iteration, however it ends.

    Args:
        engine: starts the workers; it is closed at the end.
        items: the items, in the order of starting.
        message: makes the message that a worker is sent for an item; messages and results must be
            picklable.
        note: called with a sentence on every worker that dies.
        name: makes an item's name, for these notes.

    Raises:
        WorkersLost: no worker is left, and new ones die before they are ready.
        Exception: the error of the job's `load`.
    """
    waiting = deque(items)
    busy: dict[Future[Any], tuple[Worker, Any]] = {}  # a starting worker has NO_ITEM
    blamed = set[Any]()  # items whose worker died
    spare = engine.workers  # number of workers that may still die before they are ready
    death: BaseException | None = None  # the reason of the last such death

    def start(number: int) -> None:
        worker = engine.start(number)
        busy[worker.ready] = worker, NO_ITEM

    def proceed(worker: Worker) -> None:
        if waiting:
            item = waiting.popleft()
            busy[worker.submit(message(item))] = worker, item
        else:
            worker.close()

    try:
        for number in range(min(engine.workers, len(items))):
            start(number)
        while waiting or any(item is not NO_ITEM for _, item in busy.values()):
            if not busy:
                raise WorkersLost(
                    f"no worker is left with {len(waiting)} to do, as each ended while it loaded, "
                    "for want of memory perhaps; give fewer --workers "
                    f"({str(death).strip().splitlines()[-1]})"
                )
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                worker, item = busy.pop(future)
                death = future.exception()
                if death is None:
                    result = future.result()
                    if item is not NO_ITEM:
                        yield item, result
                    elif isinstance(result, Failed):
                        raise result.error
                    proceed(worker)
                    continue
                worker.close()
                if item is NO_ITEM:
                    note(f"worker {worker.number} ended before it was ready")
                    spare -= 1
                elif item in blamed:
                    yield item, Failed(WorkersLost("both workers that were given it ended"))
                else:
                    note(f"worker {worker.number} ended at {name(item)}, which is given to another")
                    blamed.add(item)
                    waiting.appendleft(item)
                if waiting and spare >= 0:
                    start(worker.number)
    finally:
        for worker, _ in busy.values():
            worker.close()
        engine.close()
