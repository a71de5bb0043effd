"""Talks to devices through the adb program: lists them, runs commands, copies files, opens ports.

The adb program does the talking, as it restarts its server and knows every transport. Knows nothing
of plans. `adb shell` exits with 0 when the daemon dies under it, so every command ends in a marker.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcap.android_bench.errors import (
    DeviceError,
    DeviceFull,
    DeviceLost,
    DeviceUnauthorised,
    NoAdb,
    NoDevice,
    SeveralDevices,
)
from kvcap.runtime.errors import how_to_install

QUICK, FILES = 30.0, 900.0  # seconds that a command may take, and a transfer
END = "kvcap-end:"
LOST = re.compile(
    r"not found|offline|closed|no devices|cannot connect|protocol fault|EOF|failed to"
    r" read|connection reset|transport",
    re.IGNORECASE,
)


def adb_program() -> str:
    """Return the adb on the PATH, else the one that adbutils brings.

    Raises:
        NoAdb: neither is there.
    """
    if found := shutil.which("adb"):
        return found
    try:
        import adbutils  # type: ignore[import-untyped]

        return str(adbutils.adb_path())
    except Exception as error:  # not installed, or its package for this system has no adb
        raise NoAdb(
            f"there is no adb; {how_to_install('android')}, or install Android's platform tools"
        ) from error


def adb(*arguments: str, timeout: float = QUICK) -> subprocess.CompletedProcess[str]:
    """Run adb, which starts its server where none runs.

    Raises:
        NoAdb: it cannot be run.
        DeviceLost: it did not answer in time.
    """
    program = adb_program()
    try:
        return subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except OSError as error:
        raise NoAdb(f"{program} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise DeviceLost(f"adb {arguments[-1][:40]} got no answer in {timeout:g} s") from error


def connected() -> dict[str, str]:
    """Return the state of every device by serial number, such as 'device' or 'unauthorized'.

    Raises:
        NoAdb: there is no adb, or its server does not start.
    """
    done = adb("devices")
    if done.returncode:
        raise NoAdb(f"adb does not work: {_line(done.stderr)}")
    lines = (line.split("\t") for line in done.stdout.splitlines() if "\t" in line)
    return {serial: state.strip() for serial, state, *_ in lines}


def chosen(serial: str | None) -> Device:
    """Return the device of that serial number, or the only one.

    Raises:
        NoDevice: there is none, or it does not answer.
        SeveralDevices: there are more, and none was named.
        DeviceUnauthorised: it has not allowed this computer.
    """
    found = connected()
    if serial is None:
        if not found:
            raise NoDevice("no device is connected; switch on USB debugging and plug it in")
        if len(found) > 1:
            listed = ", ".join(f"{name} ({state})" for name, state in found.items())
            raise SeveralDevices(f"{len(found)} devices are connected: {listed}; use --serial")
        (serial,) = found
    if serial not in found:
        there = ", ".join(found) or "none"
        raise NoDevice(f"no device {serial!r} is connected; there is: {there}")
    if found[serial] in ("unauthorized", "authorizing"):
        raise DeviceUnauthorised(f"{serial} has not allowed this computer; unlock it and allow it")
    if found[serial] != "device":
        raise NoDevice(f"{serial} is connected, and is {found[serial]!r}; plug it in again")
    return Device(serial)


@dataclass(frozen=True)
class Device:
    """A device that answered."""

    serial: str

    def shell(self, script: str, timeout: float = QUICK) -> tuple[str, int]:
        """Run a script on the device; return what it prints, and the exit code of its last command.

        Raises:
            DeviceLost: it broke off, though adb may say that all is well.
            DeviceUnauthorised: the device no longer allows this computer.
        """
        done = adb("-s", self.serial, "shell", f'{script}\necho "{END}$?"', timeout=timeout)
        text, marker, code = done.stdout.rstrip().rpartition(END)
        if not marker or not code.isdigit():
            self._refuse(done.stderr, "the command broke off")
        return text, int(code)

    def push(self, source: Path, target: str) -> None:
        """Copy a file or a folder to the device.

        Raises:
            DeviceFull: it does not fit.
            DeviceLost: the device went away.
            DeviceError: adb says something else.
        """
        self._transfer("push", str(source), target)

    def pull(self, source: str, target: Path) -> None:
        """Copy a file from the device; raises as `push` does."""
        self._transfer("pull", source, str(target))

    def reverse(self, port: int) -> int:
        """Let a port of the device lead to `port` of this computer; returns the device's."""
        done = adb("-s", self.serial, "reverse", "tcp:0", f"tcp:{port}")
        if done.returncode or not done.stdout.strip().isdigit():
            self._refuse(done.stderr, "adb reverse failed")
        return int(done.stdout)

    def unreverse(self, port: int) -> None:
        """Take a port of the device back, if it is still there."""
        adb("-s", self.serial, "reverse", "--remove", f"tcp:{port}")

    def free_bytes(self, folder: str) -> int:
        """Return how many bytes may still be written to a folder of the device.

        Raises:
            DeviceError: the folder is not there.
        """
        text, code = self.shell(f"df -kP {quoted(folder)}")
        rows = re.findall(r"\s\d+\s+\d+\s+(\d+)\s+\d+%\s", text)
        if code or not rows:
            raise DeviceError(f"{self.serial} has no folder {folder}; --device-dir names another")
        return int(rows[-1]) * 1024

    def _transfer(self, *arguments: str) -> None:
        done = adb("-s", self.serial, *arguments, timeout=FILES)
        if done.returncode:
            self._refuse(done.stderr, f"adb {arguments[0]} failed")

    def _refuse(self, said: str, otherwise: str) -> None:
        """Raise what adb's words mean."""
        line = _line(said) or otherwise
        if "No space left" in said:
            raise DeviceFull(f"{self.serial} is full: {line}")
        if "unauthorized" in said:
            raise DeviceUnauthorised(f"{self.serial} no longer allows this computer: {line}")
        if line == otherwise or LOST.search(said):
            raise DeviceLost(f"{self.serial} was lost: {line}")
        raise DeviceError(f"{self.serial}: {line}")


def quoted(text: str | Sequence[str]) -> str:
    """Quote words for a shell."""
    return shlex.quote(text) if isinstance(text, str) else shlex.join(text)


def _line(text: str) -> str:
    """Return the line of the error, else the last that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "")
