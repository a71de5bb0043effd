"""Counts cores that compute nothing else, since llama.cpp's threads wait for each other in a loop.

A thread whose core another program has makes all others wait: beside two busy programs on two
cores, two threads took 30 times as long as one (docs/llamacpp.md).
"""

from __future__ import annotations

import os
from pathlib import Path

LOAD = Path("/proc/loadavg")


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_cores() -> int:
    """Return how many of them no other thread computes on at this moment; at least 1.

    All of them where the system does not say (outside Linux).
    """
    try:
        running = int(LOAD.read_text().split()[3].partition("/")[0])  # this thread is one of them
    except (OSError, ValueError, IndexError):
        return usable_cores()
    return max(1, min(usable_cores(), (os.cpu_count() or 1) - running + 1))
