"""Answers what kernels ask of a device, and rounds tile sizes. Knows tensors; imports no triton."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def able(x: Tensor) -> bool:
    """Whether Triton can run where `x` is: on CUDA, or on a CPU in its interpreter."""
    return _has_triton() and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; interpreted, enough to cut the slots into parts."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one it waits for has ended."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    from triton.language.extra import cuda  # type: ignore[import-untyped]

    return hasattr(cuda, "gdc_wait")


def overlapping(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """Options of a kernel that waits by itself for what it reads, if it `overlaps` as `wanted`."""
    overlap = wanted and overlaps(device)
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}


def told(seen: int | Tensor, device: torch.device) -> tuple[int, Tensor]:
    """Tokens read as kernels take them: a number, or -1 and where it is on the device.

    Alike in type either way: what a CUDA graph replays is compiled before it, by a number.
    """
    return (-1, seen) if isinstance(seen, Tensor) else (seen, _no_clock(device))


@lru_cache
def _no_clock(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def bits(x: Tensor) -> Tensor:
    """`x` as integers of its size: what is only moved needs no type of its own."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def power_of_two(size: int, least: int = 1) -> int:
    """The next one, at least `least`: tiles have such sizes.

    >>> power_of_two(80), power_of_two(64), power_of_two(3, least=16)
    (128, 64, 16)
    """
    return max(least, 1 << max(size - 1, 0).bit_length())
