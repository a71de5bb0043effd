"""Runs a plan in the browser of a phone, which loads the page over adb and so needs no network.

`adb reverse` makes the page local to the phone. Browsers trust local pages, and give them threads
and a fine clock.
"""

from __future__ import annotations

import queue
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcap.android_bench.devices.adb import Device, quoted
from kvcap.android_bench.devices.run import DeviceRunSettings
from kvcap.android_bench.errors import DeviceError, DeviceLost, RunTimeout

if TYPE_CHECKING:
    from kvcap.android_bench.server.serving import Serving


def run_in_browser(device: Device, plan: Path, settings: DeviceRunSettings) -> dict[str, Any]:
    """Open the page on the device and wait for the result that it sends.

    Raises:
        PlanBroken: there is no plan.
        DeviceError: the device opens no browser.
        DeviceLost: the device went away.
        RunTimeout: no result came.
        ServerEnded: the page's server ended by itself.
    """
    from kvcap.android_bench.server.serving import Serving

    with tempfile.TemporaryDirectory(prefix="kvcap-") as name, Serving(plan, Path(name)) as serving:
        port = device.reverse(serving.port)
        try:
            _open(device, f"http://localhost:{port}/#start")  # the page then begins by itself
            settings.note(f"{device.serial}: the page measures on the device; leave its screen on")
            return _landed(device, serving, settings)
        finally:
            _close(device, port, settings)


def _open(device: Device, url: str) -> None:
    device.shell("input keyevent KEYCODE_WAKEUP 2>/dev/null")
    view = f"am start -a android.intent.action.VIEW -d {quoted(url)} 2>&1"
    output, code = device.shell(view)
    if code or "Error" in output:
        line = (output.strip().splitlines() or [f"exit code {code}"])[-1]
        raise DeviceError(f"{device.serial} opens no browser: {line}; open {url} there by hand")


def _landed(device: Device, serving: Serving, settings: DeviceRunSettings) -> dict[str, Any]:
    """Wait for the first result and return it; raise if the device or the server goes away."""
    start = seen = time.monotonic()
    while time.monotonic() - start < settings.timeout:
        try:
            result: dict[str, Any] = serving.landed.get(timeout=settings.poll).result
            return result
        except queue.Empty:
            serving.check()
        try:
            device.shell("true")
            seen = time.monotonic()
        except DeviceLost:
            if time.monotonic() - seen > settings.lease / 2:
                raise
    raise RunTimeout(f"no result came from {device.serial} in {settings.timeout:g} s")


def _close(device: Device, port: int, settings: DeviceRunSettings) -> None:
    try:
        device.unreverse(port)
    except DeviceError:
        settings.note(f"{device.serial} does not answer; its port {port} goes when it restarts")
