"""Finds how much memory this process may still take, from the machine and its cgroups.

A cgroup counts the page cache as used, though the kernel gives it back on demand. Without allowing
for that, a nearly empty container would look full.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 where there is no limit


@dataclass(frozen=True)
class FreeMemory:
    """A number of bytes that can still be taken, with the limit that sets it."""

    nbytes: int
    source: str


def free_memory(root: Path = Path("/")) -> FreeMemory:
    """Return the least of what the machine has available and what each enclosing cgroup has left.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    limits = [_machine(root), *_version_2(root), *_version_1(root)]
    return min(limits, key=lambda free: free.nbytes)


def process_bytes() -> int:
    """Return the bytes that this process holds in memory (its resident set)."""
    if pages := _text(Path("/proc/self/statm")).split():
        return int(pages[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil  # type: ignore[import-untyped]  # here, as it takes longer than it is needed

    return int(psutil.Process().memory_info().rss)


def _machine(root: Path) -> FreeMemory:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return FreeMemory(int(line.split()[1]) * 1024, "MemAvailable")
    import psutil

    return FreeMemory(int(psutil.virtual_memory().available), "available memory")


def _version_2(root: Path) -> Iterator[FreeMemory]:
    mount = root / "sys/fs/cgroup"
    for folder in _above(root, mount, lambda line: line.startswith("0::")):
        limit = _text(folder / "memory.max").strip()
        if limit.isdigit():
            used = _number(folder / "memory.current")
            names = ("inactive_file", "active_file", "slab_reclaimable")
            yield _left(folder, int(limit), used, names)


def _version_1(root: Path) -> Iterator[FreeMemory]:
    mount = root / "sys/fs/cgroup/memory"
    for folder in _above(root, mount, lambda line: "memory" in line.split(":")[1].split(",")):
        limit = _number(folder / "memory.limit_in_bytes")
        if 0 < limit < UNLIMITED:
            used = _number(folder / "memory.usage_in_bytes")
            yield _left(folder, limit, used, ("total_inactive_file", "total_active_file"))


def _left(folder: Path, limit: int, used: int, reclaimable: tuple[str, ...]) -> FreeMemory:
    stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines() if line)
    kept = used - sum(int(stat.get(name, 0)) for name in reclaimable)
    return FreeMemory(max(0, limit - max(0, kept)), f"the limit of cgroup {folder.name}")


def _above(root: Path, mount: Path, mine: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the process's cgroup and all above it, as far as they are visible here."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        if line.count(":") >= 2 and mine(line):
            folder = mount / line.split(":", 2)[2].lstrip("/")
            # Inside a container the path is the host's, and its own cgroup is the mount itself.
            folder = folder if folder.is_dir() and ".." not in folder.parts else mount
            yield folder
            while folder != mount:
                folder = folder.parent
                yield folder


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else 0


def return_freed() -> None:
    """Have the allocator give free memory back to the system, where it can.

    glibc keeps it otherwise, and the process would count as larger than what it holds.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)
