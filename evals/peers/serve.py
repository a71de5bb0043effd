"""Answers requests for timed work, one JSON object a line, until its input ends.

A program loads its model once; what is timed is done when it is asked for, so that programs can
take turns.
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
    """A program cannot be run here; its text says why, and what would help."""


class Program(Protocol):
    """A protocol of a loaded model that reads one sequence.

    Where a token is chosen, it is the likeliest.
    """

    vocabulary: int
    packages: tuple[str, ...]  # whose versions are reported

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the cache that it has allocated."""

    def fill(self, ids: list[int]) -> None:
        """Hold what is held after these tokens; the untimed beginning of a turn.

        Where time does not depend on what keys and values are, they need not be those of `ids`.
        """

    def prefill(self, ids: list[int]) -> None:
        """Read these tokens from an empty cache, until the first token of the answer is known."""

    def step(self) -> None:
        """Read the last token, until the next one is known."""

    def eviction_seconds(self, turn: Callable[[], Any]) -> float | None:
        """Return the seconds of `turn` that eviction took; None where it cannot be measured."""


def serve(load: Callable[[dict[str, Any]], Program]) -> None:
    """Load by the first line's settings, then answer the others.

    Settings are the program's own, besides `cpus`: the numbers of the cores that it may use.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

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
    versions |= getattr(program, "libraries", {})  # of what is no package of Python
    answer({"versions": {**versions, "python": platform.python_version()}})
    for line in sys.stdin:
        answer(turn(program, **json.loads(line)))


def turn(
    program: Program, work: str, n: int, tokens: int, seed: int, evictions: bool = False
) -> dict[str, Any]:
    """Do one turn; return its seconds by work, the process's most bytes, and the cache's.

    Args:
        program: the model.
        work: 'prefill' reads `n` tokens once; 'decode' writes `tokens` after `n`.
        n: tokens of the prompt.
        tokens: that are decoded.
        seed: of the prompt's tokens.
        evictions: tell the eviction's share of the time in place of times.
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
        program.step()  # the first one's memory and code are warm then
    if evictions:
        spent = program.eviction_seconds(all_timed)
        return {"share": None if spent is None else spent / sum(seconds)}
    all_timed()
    return {"seconds": seconds, "peak_bytes": peak(), "kv_bytes": program.kv_bytes}


def peak(process: int | None = None) -> int | None:
    """Return a process's peak of resident bytes, as `runtime/testing/process_peak.py` does.

    By default this one's; another's is None where the system does not tell it.
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
