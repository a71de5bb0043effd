"""Launches Triton kernels, and remembers what was compiled for a key.

Triton looks at every argument to find the compiled kernel, 20 µs of a host's time; scoring 16 K
slots takes a GPU 40. `launch` saves it the second look. Knows no kernel; imports no triton.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

MOST = 1024  # compiled kernels remembered by their keys

_compiled: dict[Hashable, Any] = {}


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Run `kernel`, decorated with `triton.jit`, over a grid of programs.

    Args:
        kernel: decorated with `triton.jit`.
        grid: programs, in up to three dimensions.
        args: of the kernel.
        options: arguments of the kernel by name, and options of the compiler.

    Returns:
        What was compiled; None: it was interpreted.
    """
    return kernel[grid](*args, **options)


def launch(
    kernel: Any, grid: tuple[int, int, int], key: Hashable, args: Sequence[Any], **options: Any
) -> None:
    """Run a kernel as `run` does, without what Triton's own launcher works out every time.

    Args:
        kernel: decorated with `triton.jit`.
        grid: programs.
        key: distinguishes, together with `kernel`, whatever calls need different machine code:
            constants, options, types, and of each argument that Triton specialises its value
            (tensors: whether they start at a multiple of 16 bytes).
        args: of the kernel, its constants too, in their order.
        options: of the compiler.
    """
    known = _compiled.get((kernel, key))
    if known is not None:
        known[grid](*args)
        return
    known = run(kernel, grid, *args, **options)
    if known is not None and _remembers():
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[kernel, key] = known


@cache
def _remembers() -> bool:
    """Return whether a compiled kernel can be launched by itself.

    Before 3.3 it takes other arguments than the function it was made of.
    """
    return tuple(map(int, version("triton").split(".")[:2])) >= (3, 3)


def empty(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return memory for a kernel to fill; tests put NaN in it first."""
    return torch.empty(shape, dtype=dtype, device=device)
