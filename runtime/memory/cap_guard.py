"""Holds a process to a cap: checks before every block, and can have the system refuse the rest."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.memory.free_memory import process_bytes, return_freed
from kvcap.runtime.units import with_margin

Enforce = Literal["check", "rlimit"]


@dataclass
class CapGuard:
    """A guard that checks before a block is read that the process will stay within its cap.

    Allocators keep the memory that a block frees, and later blocks use it again. So a block is
    expected to take the process to its size before the first block plus one workspace, or to leave
    it at its present size if that is larger. Before a block is refused, allocators are asked to
    give back what nothing uses, such as what tokenising a long text took.
    """

    cap: int  # bytes of the whole process
    workspace: int  # bytes planned for a block of `block` tokens
    block: int
    _before: int | None = field(default=None, init=False)  # held before the first block

    def check(self, tokens: int) -> None:
        """Refuse a block that would pass the cap.

        Raises:
            MemoryCapExceeded: saying what is held, what is asked for and what would fit.
        """
        held = process_bytes()
        before = held if self._before is None else self._before
        needed_workspace = self.workspace * tokens // self.block
        if max(held, before + needed_workspace) > self.cap:
            return_freed()
            held = process_bytes()
            before = min(before, held)
        if (needed := max(held, before + needed_workspace)) > self.cap:
            fits = max(0, self.cap - before) * self.block // max(1, self.workspace)
            smaller = f"a block of {fits} would fit, or " if held <= self.cap and fits else ""
            raise MemoryCapExceeded(
                f"the process holds {held:,} bytes and a block of {tokens} tokens takes it to "
                f"{needed:,}, above the cap of {self.cap:,}; {smaller}raise the cap to "
                f"{with_margin(needed) >> 20}MiB"
            )
        self._before = before


def check_enforce(enforce: str, cap: object) -> None:
    """Refuse an unknown way to hold a cap, and to have the system hold one where none is given.

    Raises:
        ValueError: there is no such way, or no cap.
    """
    if enforce not in get_args(Enforce):
        raise ValueError(f"enforce={enforce!r}: use {' or '.join(map(repr, get_args(Enforce)))}")
    if enforce == "rlimit" and cap is None:
        raise ValueError(
            "enforce 'rlimit' has the system hold a memory cap, and none is given; give one, such "
            "as --memory-cap 2GiB, or leave --enforce out"
        )


def limit_data(cap: int) -> None:
    """Have the system refuse memory to this process beyond `cap` bytes.

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
            f"{with_margin(held) >> 20}MiB"
        )
    reserved = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData:")
    )
    import resource  # not on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (reserved + cap - held, hard))
