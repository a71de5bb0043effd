"""Answers requests for timed work, one JSON object per line, until its input ends.

A program loads its model once, and works only on a request, so that programs can alternate.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, Protocol

STATUS = Path("/proc/self/status")


class Unusable(Exception):
    """An error that says why a program cannot run here, and what would help."""


class Program(Protocol):
    """A loaded model that reads one sequence, and always chooses the likeliest token."""

    vocabulary: int
    packages: tuple[str, ...]  # packages whose versions are reported

    @property
    def kv_bytes(self) -> int:
        """Return the bytes that are allocated for the cache."""

    def fill(self, ids: list[int]) -> None:
        """Fill the cache as after these tokens, at the untimed beginning of a measurement.

        Keys and values need not be those of `ids` if times do not depend on them.
        """

    def prefill(self, ids: list[int]) -> None:
        """Read these tokens from an empty cache, until the first token of the answer is known."""

    def step(self) -> None:
        """Read the last token, until the next one is known."""

    def eviction_seconds(self, work: Callable[[], Any]) -> float | None:
        """Return the seconds of `work` that eviction took; None if they cannot be measured."""


def serve(load: Callable[[dict[str, Any]], Program]) -> None:
    """Load the program with the settings of the first line, then answer all other lines.

    The settings `cpus` has the numbers of the cores to use; all others are the program's own.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that output of libraries does not mix with answers

    def answer(facts: dict[str, Any]) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    settings = json.loads(sys.stdin.readline())
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings["cpus"])
    try:
        program = load(settings)
    except ImportError as error:
        answer({"missing": error.name} if error.name else {"unusable": str(error)})
        return
    except Unusable as error:
        answer({"unusable": str(error)})
        return
    versions = {name: version(name) for name in program.packages}
    versions |= getattr(program, "libraries", {})  # versions of libraries outside of Python
    answer({"versions": {**versions, "python": platform.python_version()}})
    for line in sys.stdin:
        answer(measure(program, **json.loads(line)))


def measure(
    program: Program, work: str, n: int, tokens: int, seed: int, evictions: bool = False
) -> dict[str, Any]:
    """Measure once; return the times in seconds, and the bytes of process and cache.

    Args:
        program: the loaded model.
        work: 'prefill' reads `n` tokens once; 'decode' writes `tokens` after `n`.
        n: tokens of the prompt.
        tokens: tokens to decode.
        seed: seed of the prompt's tokens.
        evictions: return eviction's share of the time in place of times.
    """
    ids = Random(seed).choices(range(program.vocabulary), k=n)
    seconds: list[float] = []

    def timed(work: Callable[[], None]) -> None:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)

    def all_timed() -> None:
        if work == "prefill":
            timed(lambda: program.prefill(ids))
            return
        for _ in range(tokens):
            timed(program.step)

    if work == "decode":
        program.fill(ids)
        program.step()  # warms up memory and code
    if evictions:
        spent = program.eviction_seconds(all_timed)
        return {"share": None if spent is None else spent / sum(seconds)}
    all_timed()
    return {"seconds": seconds, "peak_bytes": peak(), "kv_bytes": program.kv_bytes}


def peak(process: int | None = None) -> int | None:
    """Return the peak of resident bytes of this process, or of another one by its number.

    It is None for another process if the system does not report it. As in
    `runtime/testing/process_peak.py`, which programs cannot import.
    """
    status = Path("/proc", str(process), "status") if process else STATUS
    if status.exists():
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    if process:
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
