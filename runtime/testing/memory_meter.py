"""Measures memory exactly, for tests: peaks of tensors, bytes left behind, bytes of a cache.

PyTorch itself counts: its CPU allocator through the profiler, in every thread, and its CUDA
allocator. `tracemalloc` reads Python's allocator, which NumPy uses too. `process_peak` measures
whole processes. The resident set of a warm process is no measure: a process reuses the pages that
it has, so the difference is zero and a test of it could never fail.

memray and pytest-memray hook malloc for the whole process, which puts the allocations of Python and
of all libraries in one figure: good for finding who allocates. A bound to the byte needs each
allocator's own figures, so they are not used here.
"""

from __future__ import annotations

import gc
import importlib._bootstrap
import os
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch._C._profiler import RecordScope, _EventType
from torch.profiler import ProfilerActivity

from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.testing.stacks import CallLog, Place, clock
from kvcap.runtime.testing.threads import Hook, SharedCount

MARK = 4099  # bytes of an allocation that marks a thread's events; one more for each thread
MARKS = 9  # made before, and as many after: the quickest of each relate the two clocks
LOOKED_UP = 500  # of the allocations held at the peak, the largest


@dataclass(frozen=True)
class Allocations:
    """A group of allocations of one place in the code that were held at the peak."""

    nbytes: int
    count: int
    thread: str
    stack: tuple[Place, ...]  # innermost first


@dataclass
class Peak:
    """A record of the bytes that a piece of work took, beyond those allocated before it."""

    peak_bytes: int = 0  # held at once, at the most
    held_bytes: int = 0  # still held at the end, with the result
    result: Any = field(default=None, repr=False)  # of the function that was measured
    largest: Callable[[], list[Allocations]] = field(default=list, repr=False, compare=False)


def called(peak: Peak, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Peak:
    """Note what the function returns for these arguments in the peak that is being measured.

    Raises:
        TypeError: it is no function.
    """
    if not callable(function):
        raise TypeError(
            f"a peak of memory is measured of a function, and {function!r:.60} was given; give the "
            "function and then its arguments, as in cpu_peak(f, 4), or measure a `with` block: "
            "with cpu_meter() as peak"
        )
    peak.result = function(*args, **kwargs)
    return peak


def cpu_peak(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Peak:
    """Measure the exact peak of CPU tensors that `function` allocates, and the bytes it leaves.

    It is called with the other arguments. The peak is the running sum of all allocations and
    releases that PyTorch's profiler sees, in every Python thread. Tensors allocated before do not
    count, nor does their release. A function that returns None and leaves bytes behind has a leak.

    >>> import torch
    >>> took = cpu_peak(lambda: torch.ones(1024, dtype=torch.uint8).sum().item())
    >>> took.peak_bytes >= 1024, took.held_bytes
    (True, 0)

    Raises:
        RuntimeError: called while PyTorch's profiler is on, as within another such measurement.
        ThreadsNotCounted: this build of PyTorch cannot count in every thread.
    """
    with cpu_meter() as peak:
        return called(peak, function, *args, **kwargs)


def allocator_peak(function: Callable[[], Any]) -> int:
    """Return the most bytes of CPU tensors that `function` holds at once; see `cpu_peak`."""
    return cpu_peak(function).peak_bytes


@contextmanager
def cpu_meter(*, stacks: bool = False) -> Iterator[Peak]:
    """Measure a `with` block as `cpu_peak` does a function; its figures are known at its end.

    Args:
        stacks: note Python's calls, so that `largest()` of the result tells who held most at the
            peak; Python code takes about twice the time meanwhile. Not beside `host_meter`, which
            would count the notes.
    """
    if _autograd._profiler_enabled() or not _ONE_AT_A_TIME.acquire(blocking=False):
        raise RuntimeError(
            "PyTorch's profiler is on already and counts once only: measure inside a test without "
            "the memory_budget marker, or after the other measurement"
        )
    try:
        gc.collect()
        peak, recording = Peak(), _Recording(stacks and not _COUNTING_HOST)
        _RECORDING.append(recording)
        recording.start()
        try:
            yield peak
        finally:
            _RECORDING.remove(recording)
            recording.calm()
            gc.collect()  # objects that only a cycle holds do not count as left behind
            recording.stop(peak)
    finally:
        _ONE_AT_A_TIME.release()


_ONE_AT_A_TIME = threading.Lock()
_RECORDING: list[_Recording] = []  # the one that is on, if any
_COUNTING_HOST: list[_HostCount] = []  # the ones that are on


@dataclass(frozen=True)
class _Event:
    """An event that allocates bytes or, with a negative size, releases them."""

    time: int
    pointer: int
    size: int
    thread: int


class _Recording:
    """A run of PyTorch's profiler that records memory, and the calls of every thread if wanted."""

    def __init__(self, stacks: bool) -> None:
        self._before = sys.getprofile()
        self._stacks = stacks and self._before is None  # another profiler keeps its hook
        self._logs: list[CallLog] = []
        self._marks: list[tuple[int, int]] = []  # from when to when, by the clock of the logs
        self._marking = threading.Lock()
        self._shared = SharedCount(self._joined)
        self._discarded = False  # no call is noted any more

    def start(self) -> None:
        """Begin to count."""
        config = torch.autograd.profiler.profile(profile_memory=True).config()
        with _without_usdt():
            _autograd._prepare_profiler(config, {ProfilerActivity.CPU})
            # Of operators, only what users mark by record_function: each takes time and memory.
            scopes = {RecordScope.USER_SCOPE}
            _autograd._enable_profiler(config, {ProfilerActivity.CPU}, scopes)  # type: ignore[call-arg]
        if self._stacks:  # the first log and the first marks are this thread's
            log = CallLog.of(sys._getframe())
            self._logs.append(log)
            self._mark()
        self._shared.start()
        if self._stacks:
            sys.setprofile(log.note)

    def discard_stacks(self) -> None:
        """Stop noting calls in all threads, since the notes take memory."""
        with self._marking:
            self._discarded = True
            for log in self._logs:
                log.discard()

    def calm(self) -> None:
        """Stop noting calls in this thread."""
        if self._stacks:
            sys.setprofile(self._before)
            self._mark()

    def stop(self, peak: Peak) -> None:
        """Stop counting, and fill in the figures of `peak`."""
        self._shared.stop()
        with _without_usdt():
            result = _autograd._disable_profiler()
        self._shared.release()
        self._count(_events(result.experimental_event_tree()), peak)

    def _joined(self, frame: FrameType) -> Hook | None:
        """Note the calls of another thread, which counts from here on."""
        if not self._stacks:
            return None
        with self._marking:
            self._logs.append(log := CallLog.of(frame.f_back))
            if self._discarded:
                log.discard()
            torch.empty(MARK + len(self._logs) - 1, dtype=torch.uint8, device="cpu")
        return log.note

    def _mark(self) -> None:
        for _ in range(MARKS):
            before = clock()
            torch.empty(MARK, dtype=torch.uint8, device="cpu")
            self._marks.append((before, clock()))

    def _count(self, events: list[_Event], peak: Peak) -> None:
        events, owners, ours = self._take_marks(events)
        live: dict[int, _Event] = {}
        now, top = 0, 0
        for index, event in enumerate(events):
            if event.size > 0:
                live[event.pointer] = event
                now += event.size
            # Skip releases of what was allocated earlier: the event's size may not be its own.
            elif event.pointer in live:
                now -= live.pop(event.pointer).size
            if now > peak.peak_bytes:
                peak.peak_bytes, top = now, index
        peak.held_bytes = now
        if self._stacks and not self._discarded:
            peak.largest = lambda: self._largest(events[: top + 1], owners, ours)

    def _take_marks(
        self, events: list[_Event]
    ) -> tuple[list[_Event], dict[int, CallLog], Callable[[int], int]]:
        """Return events without marks, each thread's log, and a map from the profiler's clock."""
        if not self._stacks:
            return events, {}, int
        firsts: dict[int, _Event] = {}
        for event in events:
            firsts.setdefault(event.thread, event)
        (main,) = {e.thread for e in events[:1]}
        ours = [e for e in events if e.thread == main and e.size == MARK]
        marks = ours[:MARKS] + ours[-MARKS:]
        owners = {main: self._logs[0]}
        for number, log in enumerate(self._logs[1:], 1):
            for thread, first in firsts.items():
                if thread not in owners and first.size == MARK + number:
                    owners[thread] = log
                    marks.append(first)
                    break
        chosen = {id(mark) for mark in marks}
        (start, first), (end, last) = (
            min(
                zip(self._marks[part], marks[part], strict=True),
                key=lambda pair: pair[0][1] - pair[0][0],
            )
            for part in (slice(MARKS), slice(MARKS, 2 * MARKS))
        )
        begin = sum(start) // 2
        rate = (sum(end) // 2 - begin) / max(1, last.time - first.time)
        kept = [e for e in events if id(e) not in chosen]
        return kept, owners, lambda time: begin + int((time - first.time) * rate)

    def _largest(
        self, events: list[_Event], owners: dict[int, CallLog], ours: Callable[[int], int]
    ) -> list[Allocations]:
        """Return the allocations held after these events, by place, the largest first."""
        live: dict[int, _Event] = {}
        for event in events:
            live.pop(event.pointer, None)
            if event.size > 0:
                live[event.pointer] = event
        most = sorted(live.values(), key=lambda e: -e.size)[:LOOKED_UP]
        sizes_by_stack: dict[tuple[str, tuple[Place, ...]], list[int]] = {}
        for thread in {e.thread for e in most}:
            mine, log = [e for e in most if e.thread == thread], owners.get(thread)
            times = [ours(e.time) for e in mine]
            stacks: list[list[Place]] = log.stacks(times) if log else [[] for _ in mine]
            for event, stack in zip(mine, stacks, strict=True):
                name = log.thread if log else "of PyTorch"
                sizes_by_stack.setdefault((name, tuple(stack)), []).append(event.size)
        groups = [
            Allocations(sum(sizes), len(sizes), *key) for key, sizes in sizes_by_stack.items()
        ]
        return sorted(groups, key=lambda group: -group.nbytes)


def _events(tree: list[Any]) -> list[_Event]:
    """Return the events of the CPU's memory in order of time, without those of a GPU."""
    events, todo = [], list(tree)
    while todo:
        node = todo.pop()
        todo += node.children
        if node.tag == _EventType.Allocation:
            fields = node.extra_fields
            if fields.device.type == "cpu":
                events.append(
                    _Event(node.start_time_ns, fields.ptr, fields.alloc_size, node.start_tid)
                )
    return sorted(events, key=lambda event: event.time)


@contextmanager
def _without_usdt() -> Iterator[None]:
    """Keep the profiler's lines "USDT:..." from stderr while it starts or stops, and no others.

    Setting its log level instead is final for the process and hides its warnings as well.
    """
    try:
        own = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    with tempfile.TemporaryFile() as stderr:
        os.dup2(stderr.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
            os.close(own)
            stderr.seek(0)
            os.write(2, b"".join(line for line in stderr if not line.startswith(b"USDT:")))


def host_peak(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Peak:
    """Measure the exact peak of Python objects and NumPy arrays that `function` allocates.

    It is called with the other arguments. PyTorch's tensors, memory that libraries take from
    malloc, and modules that are imported meanwhile are not counted.

    >>> host_peak(lambda: bytearray(1 << 20)).peak_bytes >= 1 << 20
    True
    """
    with host_meter() as peak:
        return called(peak, function, *args, **kwargs)


@contextmanager
def host_meter() -> Iterator[Peak]:
    """Measure a `with` block as `host_peak` does a function; its figures are known at its end."""
    gc.collect()
    began = not tracemalloc.is_tracing()
    if began:
        tracemalloc.start()
    for recording in _RECORDING:
        recording.discard_stacks()
    peak, count = Peak(), _HostCount()
    _COUNTING_HOST.append(count)
    try:
        with count.without_imports():
            yield peak
    finally:
        count.note()
        _COUNTING_HOST.remove(count)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        if began:
            tracemalloc.stop()
        peak.peak_bytes, peak.held_bytes = count.peak, held - count.before - count.imported


class _HostCount:
    """A counter of the bytes that `tracemalloc` sees, without those of imports.

    An import happens once in a process, in whichever test needs it first: it takes as much as 100
    MB (`transformers`), and would make every figure depend on the order of tests. What other
    threads allocate during an import counts as part of it.
    """

    def __init__(self) -> None:
        tracemalloc.reset_peak()
        self.before, _ = tracemalloc.get_traced_memory()
        self.peak = self.imported = 0

    def note(self) -> int:
        """Note the peak so far; return the bytes that are traced at this moment."""
        traced, most = tracemalloc.get_traced_memory()
        self.peak = max(self.peak, most - self.before - self.imported)
        return traced

    @contextmanager
    def without_imports(self) -> Iterator[None]:
        """Count what imports of modules allocate separately, within the `with` block.

        Python has no hook around an import. Statements and `importlib` alike call this private
        function for modules that are not imported yet.
        """
        importing, bootstrap = threading.Lock(), vars(importlib._bootstrap)
        plain = bootstrap["_find_and_load"]

        def find_and_load(*args: Any) -> Any:
            if not importing.acquire(blocking=False):  # nested in an import, or beside one
                return plain(*args)
            try:
                traced = self.note()
                try:
                    return plain(*args)
                finally:
                    self.imported += tracemalloc.get_traced_memory()[0] - traced
                    tracemalloc.reset_peak()
            finally:
                importing.release()

        bootstrap["_find_and_load"] = find_and_load
        try:
            yield
        finally:
            bootstrap["_find_and_load"] = plain


def cuda_peak(function: Callable[[], Any], device: torch.device | str | int = "cuda") -> Peak:
    """Measure the exact peak of bytes that `function` allocates on a GPU, and the bytes it leaves.

    Raises:
        RuntimeError: no CUDA device.
        TypeError: `device` is none; arguments of the function are given by a lambda.
    """
    with cuda_meter(device) as peak:
        return called(peak, function)


@contextmanager
def cuda_meter(device: torch.device | str | int = "cuda") -> Iterator[Peak]:
    """Measure a `with` block as `cuda_peak` does a function; its figures are known at its end."""
    if not isinstance(device, (torch.device, str, int)):
        raise TypeError(
            f"{device!r:.60} is no device; give arguments of the function by a lambda: "
            "cuda_peak(lambda: f(x))"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            "cuda_peak needs a CUDA device and PyTorch sees none; skip the test where "
            "torch.cuda.is_available() is false, or measure with cpu_peak"
        )
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, peak = torch.cuda.memory_allocated(device), Peak()
    try:
        yield peak
    finally:
        torch.cuda.synchronize(device)
        peak.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        gc.collect()
        peak.held_bytes = torch.cuda.memory_allocated(device) - before


def kv_bytes(cache: Any) -> int:
    """Return the bytes that a cache really holds: whole storages, however small their views are.

    It takes a `BudgetCache`, or one of transformers' caches (DynamicCache, StaticCache, ...).

    >>> import torch
    >>> from transformers import DynamicCache
    >>> cache = DynamicCache()
    >>> big = torch.zeros(1, 2, 100, 4)
    >>> _ = cache.update(big[:, :, :1], big[:, :, :1], 0)
    >>> kv_bytes(cache) <= big.nbytes
    True
    """
    if isinstance(cache, BudgetCache):
        return cache.nbytes
    tensors: list[Tensor] = []
    for layer in cache.layers:
        tensors += _tensors(vars(layer).values())
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
