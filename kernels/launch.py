"""Launches Triton kernels, and remembers compiled ones by a key.

Triton examines every argument to find the compiled kernel, which takes the host 20 µs; scoring 16 K
slots takes a GPU 40 µs. `launch` does so only once for a key. Knows no kernel; imports no triton.
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
        kernel: the function.
        grid: numbers of programs, in up to three dimensions.
        args: arguments of the kernel.
        options: arguments of the kernel by name, and options of the compiler.

    Returns:
        The compiled kernel; None if it was interpreted.
    """
    return kernel[grid](*args, **options)


def launch(
    kernel: Any, grid: tuple[int, int, int], key: Hashable, args: Sequence[Any], **options: Any
) -> None:
    """Run a kernel as `run` does, but look up the compiled one by a key.

    Args:
        kernel: a function decorated with `triton.jit`.
        grid: numbers of programs.
        key: must differ between calls of this kernel that need different machine code: it has
            constants, options, types, and the value of each argument that Triton specialises (for
            tensors, whether they start at a multiple of 16 bytes).
        args: all arguments of the kernel in their order, constants too.
        options: options of the compiler.
    """
    compiled = _compiled.get((kernel, key))
    if compiled is not None:
        compiled[grid](*args)
        return
    compiled = run(kernel, grid, *args, **options)
    if compiled is not None and _remembers():
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[kernel, key] = compiled


@cache
def _remembers() -> bool:
    """Return whether a compiled kernel can be launched directly.

    Before Triton 3.3 it takes other arguments than its function.
    """
    return tuple(map(int, version("triton").split(".")[:2])) >= (3, 3)


def empty(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return memory for a kernel to fill; tests put NaN in it first."""
    return torch.empty(shape, dtype=dtype, device=device)
