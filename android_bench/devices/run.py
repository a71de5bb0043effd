"""Runs a plan on a device over adb: copies and starts it, watches it, and brings the result back.

Nothing is left on the device. A watcher (`watch.sh`) starts the runner there, and ends it and
removes all files once this computer has been silent for some time, such as after a pulled cable.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcap.android_bench.devices.adb import Device, quoted
from kvcap.android_bench.documents import PLAN_FILE, read_plan, read_result
from kvcap.android_bench.errors import (
    DeviceError,
    DeviceFull,
    DeviceLost,
    ResultBroken,
    RunFailed,
    RunnerMissing,
    RunTimeout,
)
from kvcap.android_bench.safe_text import plain

C_PROGRAM, C_LIBRARY = "kvcap-bench", "libonnxruntime.so"
SPARE = 16 << 20  # bytes that must be free besides the plan: for the result, and for the device
NEARLY_FULL = 1 << 20  # fewer free bytes explain why a runner is gone
WATCHER = Path(__file__).with_name("watch.sh")


@dataclass(frozen=True)
class DeviceRunSettings:
    """The settings of a run on a device."""

    base: str = "/data/local/tmp"  # the only folder of a device in which adb may run files
    options: Sequence[str] = ()  # options of the runner's command line
    timeout: float = 3600  # seconds that the whole run may take
    poll: float = 2.0  # seconds between two checks, each of which costs the device some time
    lease: int = 60  # seconds without a check after which the device ends the run
    note: Callable[[str], None] = field(default=lambda line: print(plain(line), file=sys.stderr))


@dataclass(frozen=True)
class Runner:
    """A runner: files that are copied beside the plan, and the command that starts them there."""

    files: tuple[Path, ...]
    command: tuple[str, ...]


def c_runner(folder: Path | None) -> Runner:
    """Return the C runner that CMake built in `folder`.

    Raises:
        RunnerMissing: the folder does not have it.
    """
    for name in (C_PROGRAM, C_LIBRARY):
        if folder is None or not (folder / name).is_file():
            raise RunnerMissing(
                f"no {name} in {str(folder)!r}; build the C runner as docs/android.md says and "
                "name its folder by --runner-dir, or use --browser, which needs nothing"
            )
    assert folder is not None
    command = (f"./{C_PROGRAM}", "--lib", f"./{C_LIBRARY}")
    return Runner((folder / C_PROGRAM, folder / C_LIBRARY), command)


def run_on(
    device: Device, plan: Path, runner: Runner, settings: DeviceRunSettings
) -> dict[str, Any]:
    """Run a plan on a device and bring the result here.

    Raises:
        PlanBroken: there is no plan.
        DeviceFull: files or the result do not fit.
        DeviceLost: the device went away; it ends the run by itself.
        RunTimeout: the run took too long, and was ended.
        RunFailed: the runner ended without a result.
        ResultBroken: the runner wrote no result of this plan.
    """
    folder = f"{settings.base}/kvcap-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="kvcap-") as name:
        staged = _staged(plan, runner, Path(name) / folder.rsplit("/", 1)[1])
        _check_space(device, staged, settings.base)
        watcher: str | None = None
        try:
            settings.note(f"{device.serial}: copying to {folder}")
            device.push(staged, folder)
            _check_arrived(device, folder)
            watcher = _started(device, folder, runner, settings)
            _watched(device, folder, watcher, settings)
            return _pulled(device, folder, plan, Path(name) / "result.json")
        finally:
            _cleaned(device, folder, watcher, settings)


def _staged(plan: Path, runner: Runner, staged: Path) -> Path:
    """Put the plan, the runner and the watcher into one folder, with checksums; return it."""
    named = [entry["file"] for entry in read_plan(plan)["files"]]
    sources = {name: plan / name for name in (PLAN_FILE, *named)}
    sources |= {path.name: path for path in (*runner.files, WATCHER)}
    sums = []
    for name, source in sources.items():
        target = staged / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
        sums.append(f"{hashlib.sha256(target.read_bytes()).hexdigest()}  {name}\n")
    (staged / "sums").write_text("".join(sums))
    return staged


def _check_space(device: Device, staged: Path, base: str) -> None:
    needed = SPARE + sum(path.stat().st_size for path in staged.rglob("*") if path.is_file())
    free = device.free_bytes(base)
    if free < needed:
        raise DeviceFull(
            f"{device.serial} has {free / 1e6:.1f} MB free in {base}, needed are "
            f"{needed / 1e6:.1f} MB; make room, or plan fewer cells"
        )


def _check_arrived(device: Device, folder: str) -> None:
    output, code = device.shell(f"cd {quoted(folder)} && sha256sum -c sums 2>&1 | grep -v ': OK$'")
    if code == 0:  # grep found a line that is not OK
        raise DeviceError(f"files did not arrive as they are: {output.strip().splitlines()[0]}")


def _started(device: Device, folder: str, runner: Runner, settings: DeviceRunSettings) -> str:
    """Start the watcher in a session of its own; return its process id, also its group's."""
    command = (*runner.command, PLAN_FILE, "-o", "result.json", *settings.options)
    output, _ = device.shell(
        f"cd {quoted(folder)} && export TMPDIR=$PWD && {{ ORT_DISABLE_TELEMETRY=1 setsid sh "
        f"{quoted(folder + '/' + WATCHER.name)} {settings.lease} {quoted(command)} "
        "</dev/null >/dev/null 2>&1 & } && echo $!"
    )
    if not output.strip().isdigit():
        raise DeviceError(f"{device.serial} did not start the runner: {output.strip()[:200]}")
    return output.strip()


def _watched(device: Device, folder: str, watcher: str, settings: DeviceRunSettings) -> None:
    """Check on the run until the runner has ended well, and print its progress.

    Raises:
        RunTimeout, DeviceLost, RunFailed, DeviceFull: see `run_on`.
    """
    start = seen = time.monotonic()
    last = ""
    look = (
        f"if cd {quoted(folder)}; then touch alive; if [ -s exit ]; then cat exit; "
        f"elif kill -0 {watcher}; then echo runs; else echo gone; fi; tail -n 1 log; "
        "else echo left; fi 2>/dev/null"
    )
    while time.monotonic() - start < settings.timeout:
        try:
            state, *rest = device.shell(look)[0].strip().splitlines()
        except DeviceLost:
            # A loose contact may interrupt the connection for a moment.
            if time.monotonic() - seen > settings.lease / 2:
                raise
            state, rest = "runs", []
        else:
            seen = time.monotonic()
        if state == "left":
            raise RunTimeout(
                f"{device.serial} ended the run, as nobody asked for it for "
                f"{settings.lease} s; was this computer asleep?"
            )
        if state != "runs":
            return _ended(device, folder, state, settings)
        if rest and rest[-1] != last:
            last = rest[-1]
            settings.note(last)
        time.sleep(settings.poll)
    raise RunTimeout(
        f"the run on {device.serial} took more than {settings.timeout:g} s and was "
        "ended; --timeout allows more, or plan fewer cells"
    )


def _ended(device: Device, folder: str, state: str, settings: DeviceRunSettings) -> None:
    """Raise the reason why the runner ended, unless `state` is '0'.

    Args:
        device: the device.
        folder: the run's folder there.
        state: the runner's exit code, or 'gone' if it was killed.
        settings: settings of the run.
    """
    if state == "0":
        return
    output, _ = device.shell(f"tail -n 3 {quoted(folder + '/log')}")
    line = (output.strip().splitlines() or ["it said nothing"])[-1]
    full = state == "gone" and device.free_bytes(settings.base) < NEARLY_FULL
    if full or "No space left" in line:  # a full device cannot even write its log
        raise DeviceFull(f"{device.serial} became full during the run; make room")
    if "cannot be opened" in line or "not executable" in line or state in ("126", "127"):
        raise RunnerMissing(f"the runner does not start on {device.serial}: {line}")
    raise RunFailed(f"the runner on {device.serial} ended ({state}): {line}")


def _pulled(device: Device, folder: str, plan: Path, target: Path) -> dict[str, Any]:
    """Fetch the result, check it against schema and plan, and return it."""
    try:
        device.pull(f"{folder}/result.json", target)
    except DeviceLost:
        raise
    except DeviceError as error:
        raise ResultBroken(f"the runner on {device.serial} left no result: {error}") from error
    result = read_result(target)
    plan_id = read_plan(plan)["id"]
    if result["run"]["plan"] != plan_id:
        raise ResultBroken(f"the result is of plan {result['run']['plan']}, not {plan_id}")
    return result


def _cleaned(device: Device, folder: str, watcher: str | None, settings: DeviceRunSettings) -> None:
    """End the watcher's process group, and remove the folder."""
    end = f"kill -9 -{watcher} 2>/dev/null; " if watcher else ""
    try:
        device.shell(f"{end}rm -rf {quoted(folder)}")
    except DeviceError:
        left = (
            f"it ends the run by itself within {settings.lease} s and removes {folder}"
            if watcher
            else f"{folder} may be left there"
        )
        settings.note(f"{device.serial} does not answer; {left}")
