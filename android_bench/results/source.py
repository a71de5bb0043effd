"""Decides whether a measurement is of a real device, by a browser's signs or a result's claims.

A browser can call itself anything, and a developer's tools make a desktop look like a phone. So
`origin` calls a browser's device real only if every sign is there and agrees. A result claims its
source, and `believed` can lower the claim but never raise it: a real device needs Android's version
or a phone's browser, an ARM processor, and no name that only emulators and desktops have. This
guards against mistakes, not against someone who forges every sign.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcap.android_bench.safe_text import plain

# Patterns of a browser's signs, for `origin`.
LONGEST = 2000  # characters of a user agent
PHONE = re.compile(r"Android|iPhone|iPad|Mobile")
ARM = re.compile(r"arm|aarch64|iPhone|iPad", re.IGNORECASE)
PHONE_GPU = re.compile(r"Adreno|Mali|Immortalis|PowerVR|Xclipse|Maleoon|Apple GPU")
NOT_A_CHIP = re.compile(r"emulator|translator|swiftshader|llvmpipe|virgl|gfxstream", re.IGNORECASE)
EMULATOR = re.compile(r"sdk_gphone|emulator|Android SDK built for|Cuttlefish", re.IGNORECASE)

# Patterns of a result's claims, for `believed`.
TITLES = {"real": "", "emulated": "EMULATED, no device's speed: ", "host": "HOST, not a phone: "}
EMULATORS = ("goldfish", "ranchu", "cutf", "vsoc", "sdk_gphone", "emulator", "qemu")
NO_GPU = ("swiftshader", "llvmpipe", "lavapipe")
SAID_BY_PHONES = ("Android", "iPhone", "iPad")  # what a phone's browser says
ARM_ABIS = ("arm", "aarch64", "iphone", "ipad", "unknown")  # some browsers say 'unknown' only


class Origin(NamedTuple):
    """The kind of device that a measurement comes from, and the reason for that decision."""

    source: str  # real, emulated, host
    reason: str


def origin(signs: Mapping[str, Any], header: str) -> Origin:
    """Judge a browser by its signs.

    Args:
        signs: values that the page read: `user_agent`, `platform`, `model`, `webdriver`,
            `touch_points`, `gpu`; a missing one counts against a real device.
        header: the user agent of the request itself.
    """
    agent = plain(signs.get("user_agent") or "", LONGEST)
    header = plain(header, LONGEST)
    if not (PHONE.search(agent) or PHONE.search(header)):
        return Origin("host", "the browser is a computer's")
    platform, gpu = plain(signs.get("platform") or ""), plain(signs.get("gpu") or "")
    model = plain(signs.get("model") or "")
    against = {
        "a program drives the browser": signs.get("webdriver") is not False,
        "the browser has no window": "Headless" in agent + header,
        "the page and its requests name different browsers": agent != header,
        f"the processor is {platform or 'not named'}": not ARM.search(platform),
        "there is no touch screen": not signs.get("touch_points"),
        f"the graphics chip is {gpu or 'not named'}": bool(NOT_A_CHIP.search(gpu))
        or not PHONE_GPU.search(gpu),
        f"the model is {model}": bool(EMULATOR.search(agent + model)),
    }
    reasons = [reason for reason, holds in against.items() if holds]
    if reasons:
        return Origin("emulated", "; ".join(reasons))
    return Origin("real", f"browser, processor, touch screen and graphics chip agree ({gpu})")


def believed(device: Mapping[str, Any]) -> tuple[str, str]:
    """Return the source of a result's device (real, emulated, host), and the reason."""
    claimed = str(device["source"])
    if claimed != "real":
        return claimed, str(device["source_reason"])
    agent = device.get("user_agent")
    text = " ".join(str(device.get(name) or "") for name in ("model", "soc")).lower()
    if agent and ("Headless" in agent or not any(word in agent for word in SAID_BY_PHONES)):
        return "host", "its browser is no phone's"
    if not agent and not device.get("android"):
        return "host", "it names no version of Android"
    if marks := [word for word in EMULATORS if word in text]:
        return "emulated", f"its model or SoC says {marks[0]}"
    if any(word in str(device.get("gpu") or "").lower() for word in NO_GPU):
        return "emulated", "its GPU is a program"
    if not str(device["abi"]).lower().startswith(ARM_ABIS):
        return "emulated", f"its processor is {device['abi']}, a phone's is ARM"
    return "real", str(device["source_reason"])


def title(result: Mapping[str, Any]) -> str:
    """Return a title for one result: its source if not real, device, runner and runtime."""
    device = result["device"]
    source, _ = believed(device)
    parts = [device["model"], device.get("soc")]
    if device.get("android"):
        parts.append(f"Android {device['android']}")
    runtime, run = result["runtime"], result["run"]
    where = "in a browser" if run["runner"] == "browser" else f"{run['runner']} runner"
    parts += [where, f"{runtime['name']} {runtime['version']}"]
    return TITLES[source] + ", ".join(plain(part) for part in parts if part)
