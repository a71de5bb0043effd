"""kvcap android adb against a real adbd on loopback: full runs, and everything that can break.

The device is this machine: adbd's files are its own, in a folder of the test's; its tools are
Android's, mksh and toybox. With qemu the C runner is the one for ARM. None of it says anything of
speed, and must say so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from make import argv, free_port
from tools import (
    PATIENCE,
    TOOLS,
    installed,
    runner_for_arm,
    runner_here,
    script,
    skip_without,
    small_plan,
)

from kvcap.android_bench.devices import adb as devices
from kvcap.android_bench.devices import run as run_module
from kvcap.android_bench.devices.browser import run_in_browser
from kvcap.android_bench.devices.run import DeviceRunSettings, c_runner, run_on
from kvcap.android_bench.documents import plan_id
from kvcap.android_bench.errors import (
    DeviceError,
    DeviceFull,
    DeviceLost,
    DeviceUnauthorised,
    NoAdb,
    NoDevice,
    PlanBroken,
    ResultBroken,
    RunFailed,
    RunnerMissing,
    RunTimeout,
    SeveralDevices,
)
from kvcap.android_bench.results.judge import judged
from kvcap.android_bench.results.source import title
from kvcap.android_bench.server import vendor
from kvcap.cli import run

SOON = {"poll": 0.1, "lease": 20}  # seconds: tests do not wait as people do
PIXEL = {
    "ro.build.version.release": "16",
    "ro.product.model": "Pixel 9",
    "ro.soc.model": "G4",
    "ro.product.manufacturer": "Google",
    "ro.product.cpu.abi": "arm64-v8a",
}


@dataclass
class Phone:
    """adbd on loopback, with a folder for its files, one for its programs, and a home."""

    root: Path
    daemon: subprocess.Popen[bytes] | None = None
    port: int = field(default_factory=free_port)  # above an emulator's, which are 5554 to 5585

    def __post_init__(self) -> None:
        for name in ("data", "bin", "home"):
            (self.root / name).mkdir()

    @property
    def serial(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def data(self) -> Path:
        return self.root / "data"

    def start(self) -> None:
        """Start the daemon and connect."""
        lib = TOOLS / "adbd" / "usr" / "lib"
        own = lib / "x86_64-linux-gnu"
        command = [
            TOOLS / "adbd/usr/lib64/ld-linux-x86-64.so.2",
            "--library-path",
            f"{own}:{own}/android",
            "--preload",
            TOOLS / "bin/loopback.so",
            lib / "android-sdk/platform-tools/adbd",
        ]
        env = {
            "ADBD_PORT": str(self.port),
            "HOME": str(self.root / "home"),
            "LANG": "C.UTF-8",
            "PATH": f"{self.root / 'bin'}:{TOOLS / 'android'}:/usr/bin:/bin",
        }
        self.daemon = subprocess.Popen(
            command,
            env=env,
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.connect()

    def connect(self) -> None:
        """Let the server find it, which may think of it as offline."""
        end = time.monotonic() + PATIENCE
        while devices.connected().get(self.serial) != "device":
            assert time.monotonic() < end, "adbd does not answer"
            devices.adb("disconnect", self.serial)
            devices.adb("connect", self.serial)
            time.sleep(0.1)

    def stop(self) -> None:
        """Kill the daemon, as a crash would."""
        self.daemon.kill()
        self.daemon.wait()

    def processes(self) -> list[str]:
        """Return what runs in the device's folder."""
        ids = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # one that ends, or another user's
                if process.cwd().startswith(str(self.data)):
                    ids.append(" ".join(process.cmdline()))
        return ids

    def clean(self, seconds: float = 0) -> bool:
        """Return whether nothing is left there, or will be in some seconds."""
        end = time.monotonic() + seconds
        while self.processes() or list(self.data.iterdir()):
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    def properties(self, values: dict[str, str]) -> None:
        """Give it a getprop as Android's."""
        cases = "\n".join(f"{name}) echo '{value}';;" for name, value in values.items())
        listed = "\n".join(f"echo '[{name}]: [{value}]'" for name, value in values.items())
        script(self.root / "bin" / "getprop", f'case "$1" in\n{cases}\n"")\n{listed};;\nesac')


@pytest.fixture(scope="module", autouse=True)
def own_adb(tmp_path_factory):
    """Provide a server, keys and serial numbers of the tests' own, killed in the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANDROID_ADB_SERVER_PORT", str(free_port()))
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("ADB_MDNS", "0")
        patch.setenv("ADB_LIBUSB", "0")  # looks for devices on USB for three seconds
        patch.delenv("ANDROID_SERIAL", raising=False)
        yield
        devices.adb("kill-server")


@pytest.fixture(scope="module")
def phone(tmp_path_factory):
    skip_without(installed)
    device = Phone(tmp_path_factory.mktemp("phone"))
    device.start()
    yield device
    device.stop()
    devices.adb("disconnect", device.serial)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return small_plan(tmp_path_factory)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return runner_here(tmp_path_factory)


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    return runner_for_arm(tmp_path_factory)


def rewritten(plan: Path, folder: Path, **rules: float) -> Path:
    """Return the same plan by other rules."""
    shutil.copytree(plan, folder)
    document = json.loads((folder / "plan.json").read_text())
    document["rules"] |= rules
    document["id"] = plan_id(document)
    (folder / "plan.json").write_text(json.dumps(document))
    return folder


@pytest.fixture
def endless(plan, tmp_path):
    """Return a plan that takes an hour."""
    return rewritten(plan, tmp_path / "endless", min_seconds=3600.0)


def planted(folder: Path, text: str) -> Path:
    """Return the folder of a C runner that is a script."""
    folder.mkdir()
    script(folder / "kvcap-bench", text)
    (folder / "libonnxruntime.so").touch()
    return folder


def measured(phone: Phone, plan: Path, folder: Path, **changes) -> dict:
    settings = DeviceRunSettings(str(phone.data), **{"note": lambda _: None, **SOON, **changes})
    return run_on(devices.chosen(phone.serial), plan, c_runner(folder), settings)


def cells_are_right(result: dict, plan: Path) -> None:
    wanted = json.loads((plan / "plan.json").read_text())
    assert {cell["id"] for cell in result["cells"]} == {cell["id"] for cell in wanted["cells"]}
    assert {cell["stage"] for cell in result["cells"]} == {"score", "evict"}
    for cell in result["cells"]:
        assert cell["status"] == "ok", cell["reason"]
        assert cell["parity"]["passed"], cell["parity"]
        assert [len(part) >= 2 for part in cell["samples_us"]] == [True] * 3
    kinds = {flag["kind"] for flag in judged(result)["validity"]["flags"]}
    assert kinds <= {"rules", "drift", "spread", "throttled", "timer"}


# --- full runs


@pytest.mark.slow
def test_a_run_with_the_c_runner(phone, plan, here, tmp_path, capsys):
    out = tmp_path / "result.json"
    command = argv(
        "android adb {} -o {} --runner-dir {} --threads 1,2 --profile --device-dir {}",
        plan,
        out,
        here,
        phone.data,
    )
    assert run(command) == 0
    result = json.loads(out.read_text())
    cells_are_right(result, plan)
    assert all(cell["operators"] for cell in result["cells"])
    assert result["memory"]["peak_bytes"] > 1 << 20
    assert result["run"]["runner"] == "c"
    assert {cell["threads"] for cell in result["cells"]} == {1, 2}
    assert result["repeat"]["samples_us"]
    assert "HOST, not a phone" in capsys.readouterr().out
    assert phone.clean()
    assert not [path for path in (phone.root / "home").rglob("*") if path.is_file()]  # telemetry


@pytest.mark.slow
def test_an_arm_run_is_emulated_whatever_the_device_says(phone, plan, arm):
    phone.properties(PIXEL)
    try:
        result = measured(phone, plan, arm)
    finally:
        (phone.root / "bin" / "getprop").unlink()
    cells_are_right(result, plan)
    assert result["device"]["model"] == "Google Pixel 9"
    assert result["device"]["source"] == "emulated"
    assert "qemu" in result["device"]["source_reason"]
    assert title(result).startswith("EMULATED")
    assert phone.clean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("marks", "why"),
    [({}, "Android on x86_64"), ({"ro.kernel.qemu": "1"}, "ro.kernel.qemu=1"),
     ({"ro.hardware": "Ranchu"}, "ro.hardware=Ranchu")],
)  # fmt: skip
def test_a_desktop_with_a_phones_properties_is_none(marks, why, phone, plan, here):
    phone.properties(PIXEL | marks)
    try:
        result = measured(phone, plan, here)
    finally:
        (phone.root / "bin" / "getprop").unlink()
    assert why in result["device"]["source_reason"]
    assert title(judged(result)).startswith("EMULATED")


# --- the page on the device's browser


BROWSER = """
import json, sys, urllib.request
url, _, begin = sys.argv[-1].partition("#")
assert begin == "start"
assert b"<html" in urllib.request.urlopen(url).read()
result = open({result!r}, "rb").read()
request = urllib.request.Request(url + "results", result, {{"Content-Type": "application/json"}})
print(urllib.request.urlopen(request).status)
"""


@pytest.fixture
def page(phone, plan, here, tmp_path):
    """Provide what the page would send; skip where the page's library is not there."""
    try:
        vendor.require()
    except vendor.VendorError as error:
        pytest.skip(str(error))
    result = measured(phone, plan, here)
    result["run"]["runner"] = "browser"
    result["runtime"]["name"] = "onnxruntime-web"
    result["device"] |= {"user_agent": "Python-urllib", "signs": {}}
    (tmp_path / "sent.json").write_text(json.dumps(result))
    (tmp_path / "am.py").write_text(BROWSER.format(result=str(tmp_path / "sent.json")))
    yield phone
    (phone.root / "bin" / "am").unlink(missing_ok=True)


def test_the_page_is_opened_through_the_cable(page, plan, tmp_path, capsys):
    command = ["android", "adb", str(plan), "-o", str(tmp_path / "r.json"), "--browser"]
    assert run(command) == 1  # no am, so no browser
    assert "opens no browser" in capsys.readouterr().err
    script(page.root / "bin" / "am", f'exec {sys.executable} {tmp_path / "am.py"} "$@"')
    assert run(command) == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    assert "leave its screen on" in printed.err
    assert "HOST, not a phone" in printed.out
    assert json.loads((tmp_path / "r.json").read_text())["run"]["runner"] == "browser"
    assert devices.adb("-s", page.serial, "reverse", "--list").stdout.strip() == ""


@pytest.mark.slow
def test_a_page_that_sends_nothing(page, plan):
    script(page.root / "bin" / "am", "exit 0")
    settings = DeviceRunSettings(timeout=0.5, note=lambda _: None, **SOON)
    with pytest.raises(RunTimeout, match="no result came"):
        run_in_browser(devices.chosen(page.serial), plan, settings)
    script(page.root / "bin" / "am", "exit 0")
    with pytest.raises(DeviceLost):
        run_in_browser(
            devices.chosen(page.serial), plan, DeviceRunSettings(note=lambda _: page.stop(), **SOON)
        )
    page.start()


# --- what breaks while it runs: a name, nothing left, and the next run works


class Breaks:
    """Breaks something when the run has begun."""

    def __init__(self, act) -> None:
        self.act, self.done = act, False

    def __call__(self, line: str) -> None:
        if line.startswith("[") and not self.done:
            self.done = True
            self.act()


@pytest.mark.slow
def test_a_daemon_that_dies(phone, plan, endless, here):
    with pytest.raises(DeviceLost, match=phone.serial):
        measured(phone, endless, here, note=Breaks(phone.stop))
    assert phone.clean(PATIENCE)  # what runs there ends itself
    phone.start()
    cells_are_right(measured(phone, plan, here), plan)


@pytest.mark.slow
def test_a_device_that_is_unplugged(phone, plan, endless, here):
    def unplug() -> None:
        devices.adb("disconnect", phone.serial)
        devices.adb("kill-server")

    with pytest.raises(DeviceLost, match="not found"):
        measured(phone, endless, here, note=Breaks(unplug))
    assert phone.clean(PATIENCE)
    phone.connect()
    cells_are_right(measured(phone, plan, here), plan)


@pytest.mark.slow
def test_a_server_that_is_restarted_does_no_harm(phone, plan, here, tmp_path):
    """A loose contact: the device is back before its lease ends."""
    longer = rewritten(plan, tmp_path / "longer", min_seconds=0.15)

    def interrupt() -> None:
        devices.adb("kill-server")
        phone.connect()

    cells_are_right(measured(phone, longer, here, note=Breaks(interrupt)), plan)


@pytest.mark.slow
def test_a_run_that_takes_too_long(phone, plan, endless, here):
    with pytest.raises(RunTimeout, match="more than 2 s"):
        measured(phone, endless, here, timeout=2)
    assert phone.clean(PATIENCE)
    cells_are_right(measured(phone, plan, here), plan)


def test_a_run_that_is_interrupted(phone, endless, here):
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(phone, endless, here, note=Breaks(interrupt))
    assert phone.clean(PATIENCE)


@pytest.mark.slow
def test_a_computer_that_sleeps(phone, endless, here):
    with pytest.raises(RunTimeout, match="asleep"):
        measured(phone, endless, here, note=Breaks(lambda: time.sleep(4)), lease=1)
    assert phone.clean(PATIENCE)


# --- no space


@contextmanager
def disk(folder: Path, megabytes: int):
    """Provide a small disk at `folder`."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "kvcap-test", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_seen_before_anything_is_copied(phone, plan, here):
    with disk(phone.data, 30), pytest.raises(DeviceFull, match="make room"):
        measured(phone, plan, here)
    assert phone.clean()


def test_a_disk_that_becomes_full_while_copying(phone, plan, here, monkeypatch):
    monkeypatch.setattr(run_module, "SPARE", -(1 << 40))  # nobody looked before
    with disk(phone.data, 8):
        with pytest.raises(DeviceFull, match="No space left"):
            measured(phone, plan, here)
        assert phone.clean()


@pytest.mark.slow
def test_a_disk_that_becomes_full_during_the_run(phone, plan, here, tmp_path):
    longer = rewritten(plan, tmp_path / "longer", min_seconds=0.1)

    def fill() -> None:
        with (
            suppress(OSError),
            (phone.data / "filler").open("wb", buffering=0) as file,
        ):
            while True:
                file.write(bytes(4096))

    with disk(phone.data, 80):
        with pytest.raises(DeviceFull, match="during the run"):
            measured(phone, longer, here, note=Breaks(fill))
        (phone.data / "filler").unlink()
        assert phone.clean()
    cells_are_right(measured(phone, plan, here), plan)


# --- runners that are missing, or wrong


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("echo '{}' >result.json", ResultBroken, "schema None"),
        ("echo 'half a res' >result.json", ResultBroken, "cannot be read"),
        ("exit 0", ResultBroken, "left no result"),
        ("echo 'kvcap-bench: no cell could be run' >&2; exit 1", RunFailed, "no cell could be run"),
        ("kill -9 $$", RunFailed, "137"),
        ("exec /no-such-loader", RunnerMissing, "not found"),
        ("echo 'write error: No space left on device'; exit 1", DeviceFull, "make room"),
    ],
)
def test_a_runner_that_fails(text, error, message, phone, plan, tmp_path):
    with pytest.raises(error, match=message):
        measured(phone, plan, planted(tmp_path / "bad", text))
    assert phone.clean()


@pytest.mark.slow
def test_a_result_of_another_plan(phone, plan, here, tmp_path):
    other = rewritten(plan, tmp_path / "other", min_runs=3)
    result = tmp_path / "result.json"
    result.write_text(json.dumps(measured(phone, other, here)))
    wrong = planted(tmp_path / "bad", f"cp {result} result.json")
    with pytest.raises(ResultBroken, match="is of plan"):
        measured(phone, plan, wrong)


def test_a_file_that_does_not_arrive_as_it_is(phone, plan, tmp_path, monkeypatch):
    push = devices.Device.push

    def damage(device, source, target):
        next((source / "models").iterdir()).write_bytes(b"cut")
        push(device, source, target)

    monkeypatch.setattr(devices.Device, "push", damage)
    with pytest.raises(DeviceError, match=r"models/.*FAILED"):
        measured(phone, plan, planted(tmp_path / "bad", "exit 0"))
    assert phone.clean()


def test_a_c_runner_that_was_not_built(tmp_path):
    for folder in (None, tmp_path):
        with pytest.raises(RunnerMissing, match=r"kvcap-bench.*--browser"):
            c_runner(folder)


# --- devices


def test_no_device(plan, tmp_path, capsys):
    with pytest.raises(NoDevice, match="no device 'x1'"):
        devices.chosen("x1")
    out = str(tmp_path / "r.json")
    assert run(["android", "adb", str(plan), "-o", out, "--serial", "x1"]) == 1
    assert "no device 'x1'" in capsys.readouterr().err
    assert run(["android", "adb", str(tmp_path), "-o", out]) == 2
    assert run(["android", "adb", str(plan), "-o", str(tmp_path / "no" / "r.json")]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("listed", "error", "message"),
    [
        ("", NoDevice, "no device is connected"),
        ("a\tdevice\nb\tdevice", SeveralDevices, r"a \(device\), b \(device\); use --serial"),
        ("a\tunauthorized", DeviceUnauthorised, "unlock it"),
        ("a\toffline", NoDevice, "'offline'"),
        ("a\tno permissions (missing udev rules?)", NoDevice, "no permissions"),
    ],
)
def test_devices_in_every_state(listed, error, message, tmp_path, monkeypatch):
    script(tmp_path / "adb", f"echo 'List of devices attached'; printf '{listed}\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(error, match=message):
        devices.chosen(None)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("echo out; exit 0", DeviceLost, "broke off"),  # as adb does when the daemon dies
        ("echo 'error: closed' >&2; exit 1", DeviceLost, "closed"),
        ("echo \"adb: device 'a' not found\" >&2; exit 1", DeviceLost, "not found"),
        ("echo 'error: device unauthorized.' >&2; exit 1", DeviceUnauthorised, "no longer"),
        ("echo 'something else' >&2; exit 1", DeviceError, "something else"),
        ("sleep 9", DeviceLost, "no answer in 0.2 s"),
    ],
)
def test_adb_that_fails(text, error, message, tmp_path, monkeypatch):
    script(tmp_path / "adb", text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(error, match=message) as caught:
        devices.Device("a").shell("true", timeout=0.2 if "sleep" in text else PATIENCE)
    assert type(caught.value) is error


def test_no_adb(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "adbutils", None)
    with pytest.raises(NoAdb, match=r"pip install '\.\[android\]'"):
        devices.connected()
    script(tmp_path / "adb", "echo 'cannot bind listener' >&2; exit 1")
    with pytest.raises(NoAdb, match="cannot bind"):
        devices.connected()


def test_a_plan_that_was_changed_is_not_sent(phone, plan, here, tmp_path):
    copy = shutil.copytree(plan, tmp_path / "copy")
    next((copy / "models").iterdir()).write_bytes(b"changed")
    with pytest.raises(PlanBroken, match="was changed"):
        measured(phone, copy, here)
    assert phone.clean()
