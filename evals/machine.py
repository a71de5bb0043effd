"""What a number was measured on: every result carries it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import kvcap


def versions() -> dict[str, str]:
    """Versions of what computes."""
    return {
        "kvcap": kvcap.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device | str) -> str:
    """The device's kind and product name, and for a CPU the threads in use."""
    device = torch.device(device)
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu, {_cpu()}, {torch.get_num_threads()} threads"
    return f"{device.type}, {platform.machine()}"


def environment(device: torch.device | str) -> dict[str, Any]:
    """Device, versions and threads, for JSON."""
    return {
        "device": device_name(device),
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
