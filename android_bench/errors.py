"""Defines every error of android_bench, as one tree; a `ValueError` is a user's mistake.

```
AndroidError
├── PlanBroken       no plan, another schema, or files that are missing or were changed
├── PlanExists       the folder holds something already
├── ResultBroken     no result, another schema, or one that contradicts itself
├── ResultsFull      as many results were taken as one start takes, or the disk is full
├── ServerMissing    the packages that serve the page are not installed
├── NoNetwork        this machine has no address that a phone could reach
├── ServerEnded      the page's server ended by itself
├── VendorError      onnxruntime-web is not beside the page, or cannot be put there
├── RunFailed        the runner ended without a result
├── NotComparable    results that have no cell in common, or of other shapes
├── Regressed        a cell is slower than its baseline by more than was allowed
└── DeviceError      adb, or the device that it reaches, failed
    ├── NoAdb               there is no adb program
    ├── NoDevice            none is connected, or none of that serial number
    ├── SeveralDevices      more than one is connected, and none was chosen
    ├── DeviceUnauthorised  the device has not allowed this computer
    ├── DeviceFull          files or the result do not fit
    ├── RunnerMissing       no C runner was built, or it does not start on the device
    ├── DeviceLost          the device or its adb daemon went away
    └── RunTimeout          the run took longer than was allowed; it was ended
```
"""

from __future__ import annotations

from kvcap.android_bench.safe_text import plain

MESSAGE = 1000  # characters


class AndroidError(Exception):
    """The base class of all errors here; messages are made safe to print on a terminal."""

    def __init__(self, message: object) -> None:
        super().__init__(plain(message, MESSAGE))


class PlanBroken(AndroidError, ValueError):
    """The folder holds no plan that can be run."""


class PlanExists(AndroidError, ValueError):
    """A plan is written into a new or empty folder only."""


class ResultBroken(AndroidError, ValueError):
    """The file is no result, or its parts contradict each other."""


class ResultsFull(AndroidError):
    """The server takes no more results, so that no client fills the disk."""


class ServerMissing(AndroidError):
    """The packages that serve the page are not installed."""


class NoNetwork(AndroidError):
    """This machine has no address that a phone could reach."""


class ServerEnded(AndroidError):
    """The page's server ended by itself."""


class VendorError(AndroidError):
    """onnxruntime-web is not beside the page, or cannot be put there."""


class RunFailed(AndroidError):
    """The runner ended without a result."""


class NotComparable(AndroidError, ValueError):
    """The results cannot stand side by side."""


class Regressed(AndroidError):
    """A cell became slower by more than was allowed."""


class DeviceError(AndroidError):
    """adb, or the device that it reaches, failed."""


class NoAdb(DeviceError):
    """There is no adb program."""


class NoDevice(DeviceError):
    """There is no device connected, or none of that serial number."""


class SeveralDevices(DeviceError, ValueError):
    """More than one device is connected, and none was chosen."""


class DeviceUnauthorised(DeviceError):
    """The device has not allowed this computer."""


class DeviceFull(DeviceError):
    """Files or the result do not fit on the device."""


class RunnerMissing(DeviceError, ValueError):
    """There is no C runner built, or it does not start on the device."""


class DeviceLost(DeviceError):
    """The device or its adb daemon went away; what was started there ends itself."""


class RunTimeout(DeviceError):
    """The run took longer than was allowed; it was ended."""
