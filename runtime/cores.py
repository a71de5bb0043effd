"""Counts cores, and those that compute nothing else at this moment.

llama.cpp's threads wait for each other in a loop. A thread whose core another program has makes all
others wait: beside two busy programs on two cores, two threads took 30 times as long as one
(docs/llamacpp.md).
"""

from __future__ import annotations

import os
from pathlib import Path

LOAD = Path("/proc/loadavg")


def usable_cores() -> list[int]:
    """Return the cores that this process may use, by their numbers."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def free_core_count() -> int:
    """Return how many of them no other thread computes on at this moment; at least 1.

    All of them where the system does not say (outside Linux).
    """
    usable = len(usable_cores())
    try:
        running = int(LOAD.read_text().split()[3].partition("/")[0])  # this thread is one of them
    except (OSError, ValueError, IndexError):
        return usable
    return max(1, min(usable, (os.cpu_count() or 1) - running + 1))
