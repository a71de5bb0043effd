"""Finds the Python stack of an allocation by noting calls and returns with their times.

PyTorch's own profiler can note stacks too, but only of one thread, and at several times the memory.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

LIMIT = 4_000_000  # events that a thread notes at most: about 130 MB
# The clock of PyTorch's profiler itself, where it is offered.
clock = getattr(torch._C._profiler, "_get_approximate_time", time.perf_counter_ns)


@dataclass(frozen=True)
class Place:
    """A line that stands in a stack."""

    file: str
    line: int
    function: str
    exact: bool = True  # False: the last line known of this call; operators are no calls


@dataclass
class CallLog:
    """A log that notes the calls and returns of one thread, from a moment on."""

    thread: str = field(default_factory=lambda: threading.current_thread().name)
    base: list[tuple[CodeType, int]] = field(default_factory=list)
    _times: array[int] = field(default_factory=lambda: array("q"))
    _lasts: array[int] = field(default_factory=lambda: array("i"))
    _codes: list[CodeType] = field(default_factory=list)
    _events: list[str] = field(default_factory=list)
    _limit: int = LIMIT

    @classmethod
    def of(cls, frame: FrameType | None) -> CallLog:
        """Return an empty log that begins with the present stack of a thread."""
        base = []
        while frame is not None:
            base.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return cls(base=base[::-1])

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Note an event; a profile function, see `sys.setprofile`."""
        self._times.append(clock())
        self._codes.append(frame.f_code)
        self._events.append(event)
        if event == "call":
            before = frame.f_back
            self._lasts.append(-1 if before is None else before.f_lasti)
            if len(self._times) > self._limit:
                sys.setprofile(None)
        else:
            self._lasts.append(frame.f_lasti)

    @property
    def full(self) -> bool:
        """Return whether later stacks are missing."""
        return len(self._times) > self._limit

    def discard(self) -> None:
        """Drop all notes, and take no more from the thread's next call on."""
        self._limit = -1
        for noted in (self._times, self._lasts, self._codes, self._events):
            del noted[:]

    def stacks(self, times: Sequence[int]) -> list[list[Place]]:
        """Return the stack at each time, innermost call first; empty where it is not known."""
        stack = [(code, last, True) for code, last in self.base]
        stacks: list[list[Place]] = [[]] * len(times)
        done = 0
        for moment, index in sorted((t, i) for i, t in enumerate(times)):
            until = bisect_right(self._times, moment)
            for code, event, last in zip(
                self._codes[done:until],
                self._events[done:until],
                self._lasts[done:until],
                strict=True,
            ):
                if event == "call":
                    if stack:
                        stack[-1] = (stack[-1][0], last, True)
                    stack.append((code, -1, False))
                elif event == "return":
                    if stack:
                        stack.pop()
                    if stack:
                        stack[-1] = (*stack[-1][:2], False)
                elif stack:
                    stack[-1] = (code, last, event == "c_call")
            done = until
            if not (self.full and done == len(self._times)):
                stacks[index] = [_line_of(*each) for each in reversed(stack)]
        return stacks


def _line_of(code: CodeType, last: int, exact: bool) -> Place:
    line = code.co_firstlineno
    for begin, end, number in code.co_lines():
        if begin <= last < end and number is not None:
            line = number
    return Place(code.co_filename, line, code.co_name, exact)
