"""Finds the devices of PyTorch that a model can run on here."""

from __future__ import annotations

import torch

from kvcap.runtime.errors import first_line


def usable(device: str | torch.device | None) -> str | torch.device | None:
    """Return `device` if tensors can be made there.

    Raises:
        ValueError: they cannot be; it says which devices can be used.
    """
    if device is None:
        return None
    there = " or ".join(dict.fromkeys(("cpu", best_device())))
    hint = f"; use {there}"
    if str(device).lower().split(":")[0] in ("gpu", "nvidia", "amd", "rocm", "hip"):
        hint = f", GPUs of NVIDIA and AMD are called cuda; here there is {there}"
    try:
        if torch.device(device).type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = "" if "device type at start" in str(error) else f" ({first_line(error)})"
        raise ValueError(f"device {str(device)!r} cannot be used here{reason}{hint}") from error
    return device


def best_device() -> str:
    """Return 'cuda', 'mps' or 'cpu', the first that there is."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
