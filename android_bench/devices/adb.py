"""Talks to devices through the adb program: lists them, runs commands, copies files, opens ports.

It calls the adb program, which restarts its server and knows every transport. `adb shell` exits
with 0 if its daemon dies, so every command ends by printing a marker. Knows nothing of plans.
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
        NoAdb: there is neither.
    """
    if program := shutil.which("adb"):
        return program
    try:
        import adbutils  # type: ignore[import-untyped]

        return str(adbutils.adb_path())
    except Exception as error:  # not installed, or its package for this system has no adb
        raise NoAdb(
            f"there is no adb; {how_to_install('android')}, or install Android's platform tools"
        ) from error


def adb(*arguments: str, timeout: float = QUICK) -> subprocess.CompletedProcess[str]:
    """Run adb, which starts its server if none runs.

    Args:
        arguments: the arguments of adb.
        timeout: seconds that adb may take.

    Raises:
        NoAdb: adb cannot be run.
        DeviceLost: adb did not end in time.
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
        NoDevice: there is no such device, or it does not answer.
        SeveralDevices: several are connected, and `serial` is None.
        DeviceUnauthorised: the device has not allowed this computer.
    """
    states = connected()
    if serial is None:
        if not states:
            raise NoDevice("no device is connected; switch on USB debugging and plug it in")
        if len(states) > 1:
            listed = ", ".join(f"{name} ({state})" for name, state in states.items())
            raise SeveralDevices(f"{len(states)} devices are connected: {listed}; use --serial")
        (serial,) = states
    if serial not in states:
        there = ", ".join(states) or "none"
        raise NoDevice(f"no device {serial!r} is connected; there is: {there}")
    if states[serial] in ("unauthorized", "authorizing"):
        raise DeviceUnauthorised(f"{serial} has not allowed this computer; unlock it and allow it")
    if states[serial] != "device":
        raise NoDevice(f"{serial} is connected, and is {states[serial]!r}; plug it in again")
    return Device(serial)


@dataclass(frozen=True)
class Device:
    """A connected device that answers."""

    serial: str

    def shell(self, script: str, timeout: float = QUICK) -> tuple[str, int]:
        """Run a script on the device; return what it prints, and the exit code of its last command.

        Raises:
            DeviceLost: the script did not end, even if adb reports success.
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
            DeviceFull: the files do not fit.
            DeviceLost: the device went away.
            DeviceError: adb reports another fault.
        """
        self._transfer("push", str(source), target)

    def pull(self, source: str, target: Path) -> None:
        """Copy a file from the device; raise the errors that `push` does."""
        self._transfer("pull", source, str(target))

    def reverse(self, port: int) -> int:
        """Forward a free port of the device to `port` of this computer; return its number."""
        done = adb("-s", self.serial, "reverse", "tcp:0", f"tcp:{port}")
        if done.returncode or not done.stdout.strip().isdigit():
            self._refuse(done.stderr, "adb reverse failed")
        return int(done.stdout)

    def unreverse(self, port: int) -> None:
        """Stop forwarding a port of the device, if the device is still there."""
        adb("-s", self.serial, "reverse", "--remove", f"tcp:{port}")

    def free_bytes(self, folder: str) -> int:
        """Return how many bytes may still be written to a folder of the device.

        Raises:
            DeviceError: there is no such folder.
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

    def _refuse(self, output: str, otherwise: str) -> None:
        """Raise the error that adb's output means; its message is `otherwise` without any."""
        line = _line(output) or otherwise
        if "No space left" in output:
            raise DeviceFull(f"{self.serial} is full: {line}")
        if "unauthorized" in output:
            raise DeviceUnauthorised(f"{self.serial} no longer allows this computer: {line}")
        if line == otherwise or LOST.search(output):
            raise DeviceLost(f"{self.serial} was lost: {line}")
        raise DeviceError(f"{self.serial}: {line}")


def quoted(text: str | Sequence[str]) -> str:
    """Quote words for a shell."""
    return shlex.quote(text) if isinstance(text, str) else shlex.join(text)


def _line(text: str) -> str:
    """Return the line of adb's output that begins with its error, else the last one with text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "")
