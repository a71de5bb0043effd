"""Whether a browser runs on a phone: what its own signs say, weighed in one place.

A browser can be told to call itself anything, and a developer's tools make a desktop look like a
phone. So a device is called real only where every sign agrees; one that cannot be told is not.
This is a safeguard against mistakes, no proof: who forges every sign is believed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcap.android_bench.words import plain

LONGEST = 2000  # characters of a user agent
PHONE = re.compile(r"Android|iPhone|iPad|Mobile")
ARM = re.compile(r"arm|aarch64|iPhone|iPad", re.IGNORECASE)
PHONE_GPU = re.compile(r"Adreno|Mali|Immortalis|PowerVR|Xclipse|Maleoon|Apple GPU")
NOT_A_CHIP = re.compile(r"emulator|translator|swiftshader|llvmpipe|virgl|gfxstream", re.IGNORECASE)
EMULATOR = re.compile(r"sdk_gphone|emulator|Android SDK built for|Cuttlefish", re.IGNORECASE)


class Origin(NamedTuple):
    """Where a measurement comes from, and what decided it."""

    source: str  # real, emulated, host
    reason: str


def origin(signs: Mapping[str, Any], header: str) -> Origin:
    """Judge a browser by its signs.

    Args:
        signs: what the page read: `user_agent`, `platform`, `model`, `webdriver`, `touch_points`,
            `gpu`; a missing one counts against it.
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
    found = [reason for reason, holds in against.items() if holds]
    if found:
        return Origin("emulated", "; ".join(found))
    return Origin("real", f"browser, processor, touch screen and graphics chip agree ({gpu})")
