"""Spreads work over workers: in this process, in processes of this machine, or on a Ray cluster.

A worker loads what it needs once and then does one item after another. Engines differ in where
workers run; `spread` drives them all. Knows nothing of cells, models or files.
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
    """A job that every worker does. Workers elsewhere get a copy, so it must be picklable."""

    def load(self, worker: int) -> None:
        """Load what the job needs, once for each worker; workers are counted from 0."""
        ...

    def run(self, message: Any) -> Any:
        """Return the result of an item, of which `message` is what the worker was sent."""
        ...


class Worker(Protocol):
    """A place where items are done, one at a time.

    A future that ends with an exception says that the worker is gone; whatever the job raises comes
    as a `Failed` result.
    """

    number: int
    ready: Future[Failed | None]  # done once the job's `load` is

    def submit(self, message: Any) -> Future[Any]:
        """Begin the job's `run`."""
        ...

    def close(self) -> None:
        """End the worker at once, whatever it is doing."""
        ...


class WorkerEngine(Protocol):
    """An engine that starts workers: in this process, in others, or on other machines."""

    workers: int  # the most workers

    def start(self, number: int) -> Worker:
        """Start a worker, under the number of one that is gone if there is one."""
        ...

    def close(self) -> None:
        """Give back what the engine holds beside its workers."""
        ...


@dataclass(frozen=True)
class Failed:
    """An error with which an item ended, or with which a worker could not be made ready."""

    error: Exception


def attempt(function: Callable[..., Any], *given: Any) -> Any:
    """Call `function`; return what it returns, or its error as a `Failed` that can be pickled."""
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
        """Make the job ready here."""
        return _ThisProcess(self.job, number)

    def close(self) -> None:
        """Give nothing back, as nothing is held."""


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

    An item whose worker dies is done once more, by another worker; if that one dies too, its
    result is a `Failed`, as it is where the job raises an error. The other items go on. However
    the iteration ends, all workers are ended with it.

    Args:
        engine: where workers run; it is closed at the end.
        items: what to do, in the order in which it is begun.
        message: what a worker is sent of an item; it must be picklable, as results must be.
        note: called for every worker that dies.
        name: of an item, for these notes.

    Raises:
        WorkersLost: no worker is left, and new ones die before they are ready.
        Exception: what the job's `load` raised.
    """
    waiting = deque(items)
    busy: dict[Future[Any], tuple[Worker, Any]] = {}  # the item is NO_ITEM while a worker starts
    blamed = set[Any]()  # items whose worker died
    spare = engine.workers  # workers that may die before they are ready
    death: BaseException | None = None  # why the last of these died

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
