"""Launches a Triton kernel again without what Triton's own launcher works out every time.

Triton looks at every argument to find the compiled kernel, 20 µs of a host's time; scoring 16 K
slots takes a GPU 40. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

MOST = 1024  # compiled kernels remembered by their keys

# Before 3.3 a compiled kernel takes other arguments than the function it was made of.
_REMEMBERS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)
_compiled: dict[Hashable, Any] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], key: Hashable, args: Sequence[Any], **options: Any
) -> None:
    """Run `kernel` over `grid`.

    Args:
        kernel: decorated with `triton.jit`.
        grid: programs.
        key: tells apart, together with `kernel`, whatever calls need different machine code:
            constants, options, types, and of each argument that Triton specialises its value
            (tensors: whether they start at a multiple of 16 bytes).
        args: of the kernel, its constants too, in their order.
        options: of the compiler.
    """
    known = _compiled.get((kernel, key))
    if known is not None:
        known[grid](*args)
        return
    known = kernel[grid](*args, **options)
    if _REMEMBERS and known is not None:  # None: interpreted
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[kernel, key] = known


def empty(*shape: int, device: torch.device) -> Tensor:
    """Float32 memory for a kernel to fill; tests put NaN in it first."""
    return torch.empty(shape, dtype=torch.float32, device=device)
