"""Names the device and versions that every result carries, and lays out Markdown tables."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvcap

if TYPE_CHECKING:  # imported where it is used, as some processes are measured without it
    import torch


def versions() -> dict[str, str]:
    """Return the versions of kvcap, Python, and the libraries that compute where they are there."""
    installed = {"kvcap": kvcap.__version__, "python": platform.python_version()}
    for library in ("torch", "transformers"):
        with suppress(PackageNotFoundError):
            installed[library] = version(library)
    return installed


def device_name(device: torch.device | str, threads: int | None = None) -> str:
    """Return the device's kind and product name, and for a CPU the threads: PyTorch's if None."""
    kind, _, _ = str(device).partition(":")
    if kind == "cuda":
        import torch

        return f"cuda, {torch.cuda.get_device_name(device)}"
    if kind == "cpu":
        return f"cpu, {_cpu()}, {_threads(threads)} threads"
    return f"{kind}, {platform.machine()}"


def environment(device: torch.device | str, threads: int | None = None) -> dict[str, Any]:
    """Return device, versions and threads, for JSON; PyTorch's threads if None."""
    return {
        "device": device_name(device, threads),
        "versions": versions(),
        "threads": _threads(threads),
    }


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, with aligned columns for reading as plain text."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    aligned = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
    return [f"| {' | '.join(line)} |" for line in aligned]


def _threads(count: int | None) -> int:
    if count is None:
        import torch  # which runs of GGUF files do without

        return torch.get_num_threads()
    return count


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
