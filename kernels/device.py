"""Reads the properties of a GPU that kernels need, and rounds sizes of tiles.

Knows tensors; imports no triton.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Target(NamedTuple):
    """The properties of a GPU that kernels are compiled for."""

    multiprocessors: int
    shared_memory: int  # bytes that a program can have; 0 before Ampere, which cannot fetch ahead
    overlaps: bool  # whether a kernel can be launched before the one it waits for has ended

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """Return the target of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        room = getattr(properties, "shared_memory_per_block_optin", 0)
        overlaps = False
        if properties.major >= 9:
            from triton.language.extra import cuda  # type: ignore[import-untyped]

            overlaps = hasattr(cuda, "gdc_wait")
        ampere = properties.major >= 8
        return cls(properties.multi_processor_count, int(room) if ampere else 0, overlaps)


_pretended: ContextVar[Target | None] = ContextVar("pretended", default=None)
_target_of = lru_cache(Target.of)


@contextmanager
def pretending(target: Target | None) -> Iterator[None]:
    """Treat all tensors as on that GPU in a `with` block, to compile kernels without a GPU."""
    token = _pretended.set(target)
    try:
        yield
    finally:
        _pretended.reset(token)


def target(device: torch.device) -> Target | None:
    """Return the GPU that kernels are compiled for; None on a CPU, where they are interpreted."""
    pretended = _pretended.get()
    if pretended is not None:
        return pretended
    return _target_of(device) if device.type == "cuda" else None


def on_gpu(x: Tensor) -> bool:
    """Return whether kernels that read `x` are compiled."""
    return x.is_cuda or _pretended.get() is not None


def able(x: Tensor) -> bool:
    """Return whether Triton can run on the device of `x`: on CUDA, or interpreted on a CPU."""
    return _has_triton() and (on_gpu(x) or os.environ.get("TRITON_INTERPRET") == "1")


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def multiprocessors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors; the interpreter counts as a GPU with 8."""
    gpu = target(device)
    return 8 if gpu is None else gpu.multiprocessors


def overlaps(device: torch.device) -> bool:
    """Return whether a kernel can be launched before the one it waits for has ended."""
    gpu = target(device)
    return gpu is not None and gpu.overlaps


def overlapping(device: torch.device, enabled: bool = True) -> dict[str, bool]:
    """Return the options of a kernel that may be launched before its inputs are written.

    They allow it if it is `enabled` and the device supports it.
    """
    overlap = enabled and overlaps(device)
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}


def seen_and_clock(seen: int | Tensor, device: torch.device) -> tuple[int, Tensor]:
    """Return the number of tokens read as two arguments of a kernel, a number and a tensor [].

    The kernel uses the number, or the tensor if the number is -1. As the types of both never
    change, a plain call compiles the same kernel that a CUDA graph captures later.
    """
    return (-1, seen) if isinstance(seen, Tensor) else (seen, _no_clock(device))


def _no_clock(device: torch.device) -> Tensor:
    clock = _clocks.get(device)
    if clock is None:
        clock = torch.zeros((), dtype=torch.int64, device=device)
        if type(clock) is Tensor:  # a dry run's tensor is of another class and has no data
            _clocks[device] = clock
    return clock


_clocks: dict[torch.device, Tensor] = {}


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Holds the integer type of each size in bytes."""


def bits(x: Tensor) -> Tensor:
    """View `x` as integers of its size, so that one kernel moves numbers of any type."""
    return x.view(INTEGERS[x.element_size()])


def power_of_two(size: int, least: int = 1) -> int:
    """Return the next power of two, at least `least`, as sizes of tiles must be.

    >>> power_of_two(80), power_of_two(64), power_of_two(3, least=16)
    (128, 64, 16)
    """
    return max(least, 1 << max(size - 1, 0).bit_length())
