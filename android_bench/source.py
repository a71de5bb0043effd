"""Whether a result is of a real device, and how it may be titled.

A result claims its source; here the claim can be lowered, never raised. A claim of a real device
needs Android's version or a phone's browser, an ARM processor, and nothing that only emulators and
desktops say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcap.android_bench.words import plain

TITLES = {"real": "", "emulated": "EMULATED, no device's speed: ", "host": "HOST, not a phone: "}
EMULATORS = ("goldfish", "ranchu", "cutf", "vsoc", "sdk_gphone", "emulator", "qemu")
NO_GPU = ("swiftshader", "llvmpipe", "lavapipe")

PHONES = ("Android", "iPhone", "iPad")  # what a phone's browser says
ARM = ("arm", "aarch64", "iphone", "ipad", "unknown")  # a browser may say nothing else


def believed(device: Mapping[str, Any]) -> tuple[str, str]:
    """The source that a result's device has, and what decided it."""
    claimed = str(device["source"])
    if claimed != "real":
        return claimed, str(device["source_reason"])
    agent = device.get("user_agent")
    text = " ".join(str(device.get(name) or "") for name in ("model", "soc")).lower()
    if agent and ("Headless" in agent or not any(word in agent for word in PHONES)):
        return "host", "its browser is no phone's"
    if not agent and not device.get("android"):
        return "host", "it names no version of Android"
    if marks := [word for word in EMULATORS if word in text]:
        return "emulated", f"its model or SoC says {marks[0]}"
    if any(word in str(device.get("gpu") or "").lower() for word in NO_GPU):
        return "emulated", "its GPU is a program"
    if not str(device["abi"]).lower().startswith(ARM):
        return "emulated", f"its processor is {device['abi']}, a phone's is ARM"
    return "real", str(device["source_reason"])


def title(result: Mapping[str, Any]) -> str:
    """What the numbers of one result may be called."""
    device = result["device"]
    source, _ = believed(device)
    parts = [device["model"], device.get("soc")]
    if device.get("android"):
        parts.append(f"Android {device['android']}")
    runtime, run = result["runtime"], result["run"]
    where = "in a browser" if run["runner"] == "browser" else f"{run['runner']} runner"
    parts += [where, f"{runtime['name']} {runtime['version']}"]
    return TITLES[source] + ", ".join(plain(part) for part in parts if part)
