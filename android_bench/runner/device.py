"""Reads a device's name and what may slow it down from Android's properties, sysfs and dumpsys.

A value that cannot be read is null, never guessed. A device is real only by Android's properties.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from .inputs import Cell


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


def _output_of(*command: str) -> str:
    """Return a command's output, '' if there is no such command or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _or_none(ask: Callable[[], float]) -> float | None:
    """Return the result of `ask`, None if the system has no such call or it fails."""
    try:
        return ask()
    except (OSError, AttributeError, ValueError):
        return None


def _int(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdigit() else None


def device(source: str) -> Cell:
    """Describe the device, and decide by Android's own properties whether it is a real one."""
    android = _output_of("getprop", "ro.build.version.release")
    cpu = _read(Path("/proc/cpuinfo"))
    names = [
        line.partition(":")[2].strip()
        for line in cpu.splitlines()
        if line.startswith(("model name", "Hardware"))
    ]
    model = " ".join(
        filter(
            None, (_output_of("getprop", f"ro.product.{key}") for key in ("manufacturer", "model"))
        )
    )
    decided, why = ("host", "no Android here")
    if source != "auto":
        decided, why = source, f"--source {source}"
    elif under_qemu():
        decided, why = "emulated", "qemu runs the runner"
    elif android and (mark := emulator_mark(_output_of("getprop"))):
        decided, why = "emulated", f"Android says {mark}"
    elif android and not platform.machine().startswith(("aarch64", "arm")):
        decided, why = "emulated", f"Android on {platform.machine()} is no phone"
    elif android:
        decided, why = "real", "Android's properties name a device and no emulator"
    return {
        "source": decided,
        "source_reason": why,
        "model": model or (names or [platform.machine()])[0],
        "soc": _output_of("getprop", "ro.soc.model")
        or _output_of("getprop", "ro.board.platform")
        or None,
        "abi": _output_of("getprop", "ro.product.cpu.abi") or platform.machine(),
        "cores": os.cpu_count(),
        "core_khz": core_khz(),
        "android": android or None,
        "ram_bytes": _or_none(lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
    }


def under_qemu() -> bool:
    """Return whether qemu runs this program; it fakes `/proc/self`, but not `/proc/thread-self`."""
    try:
        return "qemu" in os.readlink("/proc/thread-self/exe")
    except OSError:
        return False


def emulator_mark(properties: str) -> str | None:
    """Return the first property in `getprop`'s output that only an emulator has, else None."""
    for line in properties.splitlines():
        key, _, value = line.replace("[", "").replace("]", "").partition(": ")
        if key in ("ro.kernel.qemu", "ro.boot.qemu") and value == "1":
            return f"{key}={value}"
        if key in ("ro.hardware", "ro.product.device", "ro.product.model") and any(
            word in value.lower()
            for word in ("goldfish", "ranchu", "cutf", "vsoc", "sdk_gphone", "emulator")
        ):
            return f"{key}={value}"
    return None


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
    battery = _output_of("dumpsys", "battery")
    level = next((line.split(":")[1] for line in battery.splitlines() if " level:" in line), "")
    level = level or "".join(sysfs("class/power_supply/battery/capacity"))
    status = "".join(sysfs("class/power_supply/battery/status"))
    wake = _output_of("dumpsys", "power")
    return {
        "governor": sysfs(f"{cpus}/scaling_governor") or None,
        "khz": [_int(text) for text in sysfs(f"{cpus}/scaling_cur_freq")] or None,
        "thermal": {
            f"{i} {name}": int(value) / 1000
            for i, (name, value) in enumerate(zones)
            if _int(value) is not None
        }
        or None,
        "battery_percent": _int(level.strip()),
        "charging": "powered: true" in battery
        if battery
        else status in ("Charging", "Full")
        if status
        else None,
        "screen_on": "mWakefulness=Awake" in wake if wake else None,
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


def cores_for(asked: str, threads: int) -> list[int] | None:
    """Return the cores that `--cores` means for this many threads; None for no pinning.

    Raises:
        Refused: the text names no cores, or one that this process may not use.
    """
    if asked == "none" or not hasattr(os, "sched_setaffinity"):
        return None
    if asked == "auto":
        return big_cores(threads)
    try:
        parts = [part.split("-") for part in asked.split(",")]
        cores = [n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)]
    except ValueError:
        raise Refused(f"--cores {asked!r} is not auto, none, 7 or 4-7") from None
    if missing := set(cores) - os.sched_getaffinity(0):
        raise Refused(f"--cores {asked}: core {min(missing)} is not to be had")
    return cores
