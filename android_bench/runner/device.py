"""Reads a machine's name and what may slow it down, from /proc and sysfs.

A value that cannot be read is null, never guessed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

from kvcap.android_bench.runner.inputs import Cell


class Refused(Exception):
    """The plan or an option cannot be used, for the reason in the message."""


def sysfs(pattern: str, root: str = "/sys") -> list[str]:
    """Return the contents of files, in the order of the numbers in their names.

    An unreadable file gives ''; if none can be read, the list is empty.
    """
    paths = sorted(Path(root).glob(pattern), key=lambda p: [int(d) for d in _digits(str(p))])
    contents = [_read(path) for path in paths]
    return contents if any(contents) else []


def _digits(text: str) -> list[str]:
    return "".join(c if c.isdigit() else " " for c in text).split()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _or_none(ask: Callable[[], float]) -> float | None:
    """Return the result of `ask`, None if the system has no such call or it fails."""
    try:
        return ask()
    except (OSError, AttributeError, ValueError):
        return None


def _int(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdigit() else None


def device() -> Cell:
    """Describe this machine, which is no phone."""
    names = [
        line.partition(":")[2].strip()
        for line in _read(Path("/proc/cpuinfo")).splitlines()
        if line.startswith(("model name", "Hardware"))
    ]
    return {
        "source": "host",
        "source_reason": "kvcap android host ran here",
        "model": (names or [platform.machine()])[0],
        "abi": platform.machine(),
        "cores": os.cpu_count(),
        "core_khz": core_khz(),
        "ram_bytes": _or_none(lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
    }


def core_khz() -> list[int | None]:
    """Return the largest frequency of each core in kHz, None if it is unknown."""
    return [_int(text) for text in sysfs("devices/system/cpu/cpu[0-9]*/cpufreq/cpuinfo_max_freq")]


def conditions() -> Cell:
    """Return conditions that may slow the device down; null where one cannot be known."""
    cpus = "devices/system/cpu/cpu[0-9]*/cpufreq"
    zones = zip(
        sysfs("class/thermal/thermal_zone*/type"),
        sysfs("class/thermal/thermal_zone*/temp"),
        strict=False,
    )
    level = "".join(sysfs("class/power_supply/BAT0/capacity"))
    status = "".join(sysfs("class/power_supply/BAT0/status"))
    return {
        "governor": sysfs(f"{cpus}/scaling_governor") or None,
        "khz": [_int(text) for text in sysfs(f"{cpus}/scaling_cur_freq")] or None,
        "thermal": {
            f"{i} {name}": int(value) / 1000
            for i, (name, value) in enumerate(zones)
            if _int(value) is not None
        }
        or None,
        "battery_percent": _int(level),
        "charging": status in ("Charging", "Full") if status else None,
        "load": _or_none(lambda: os.getloadavg()[0]),
    }


def peak_memory(status: Path = Path("/proc/self/status")) -> Cell:
    """Return the peak of this process's resident memory in bytes, null if the system has none."""
    for line in _read(status).splitlines():
        name, *value = line.split()
        if name == "VmHWM:":
            return {"of": "process", "peak_bytes": int(value[0]) * 1024, "reason": None}
    return {"of": "process", "peak_bytes": None, "reason": f"no VmHWM in {status}"}


def big_cores(count: int) -> list[int]:
    """Return the `count` fastest cores; among equals the last, which serve fewest interrupts."""
    allowed = sorted(os.sched_getaffinity(0))
    khz = dict(enumerate(core_khz()))
    order = sorted(allowed, key=lambda core: (khz.get(core) or 0, core), reverse=True)
    return sorted(order[:count])


def cores_for(wish: str, threads: int) -> list[int] | None:
    """Return the cores that `--cores` means for this many threads; None for no pinning.

    Raises:
        Refused: the text names no cores, or one that this process may not use.
    """
    if wish == "none" or not hasattr(os, "sched_setaffinity"):
        return None
    if wish == "auto":
        return big_cores(threads)
    try:
        parts = [part.split("-") for part in wish.split(",")]
        cores = [n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)]
    except ValueError:
        raise Refused(f"--cores {wish!r} is not auto, none, 7 or 4-7") from None
    if missing := set(cores) - os.sched_getaffinity(0):
        raise Refused(f"--cores {wish}: core {min(missing)} is not to be had")
    return cores
