"""Holds a process to a cap: looks before every block, and can let the system refuse the rest."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.memory.free_memory import process_bytes
from kvcap.runtime.units import roomy

Enforce = Literal["check", "rlimit"]


@dataclass
class CapGuard:
    """Compares what is held and what a block will take with the cap, before it is read.

    Allocators keep what a block gives back, so that later blocks take up again what the first one
    added: what counts is the process before its first block and one workspace, or what it has
    grown to beyond that.
    """

    cap: int  # bytes of the whole process
    workspace: int  # of a block of `block` tokens, planned
    block: int
    _before: int | None = field(default=None, init=False)  # held before the first block

    def check(self, tokens: int) -> None:
        """Refuse a block that would pass the cap.

        Raises:
            MemoryCapExceeded: saying what is held, what is asked for and what would fit.
        """
        held = process_bytes()
        before = held if self._before is None else self._before
        asked = self.workspace * tokens // self.block
        if (needed := max(held, before + asked)) > self.cap:
            fits = max(0, self.cap - before) * self.block // max(1, self.workspace)
            smaller = f"a block of {fits} would fit, or " if held <= self.cap and fits else ""
            raise MemoryCapExceeded(
                f"the process holds {held:,} bytes and a block of {tokens} tokens takes it to "
                f"{needed:,}, above the cap of {self.cap:,}; {smaller}raise the cap to "
                f"{roomy(needed) >> 20}MiB"
            )
        self._before = before


def limit_data(cap: int) -> None:
    """Let the system refuse what this process would take beyond `cap` bytes.

    The limit is on data (RLIMIT_DATA), which counts private writable memory; one on all addresses
    (RLIMIT_AS) would count libraries and reserved stacks that are never touched, gigabytes of them.

    Raises:
        MemoryCapExceeded: the process holds more already.
        OSError: not on Linux.
    """
    if sys.platform != "linux":
        raise OSError(f"enforce='rlimit' needs Linux, not {sys.platform}; use enforce='check'")
    held = process_bytes()
    if held >= cap:
        raise MemoryCapExceeded(
            f"the process holds {held:,} bytes, more than the cap of {cap:,}; raise the cap to "
            f"{roomy(held) >> 20}MiB"
        )
    reserved = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData:")
    )
    import resource  # not on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (reserved + cap - held, hard))
