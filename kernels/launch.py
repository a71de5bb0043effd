"""Every launch of a Triton kernel goes through here: at once, remembered, or only noted.

Triton looks at every argument to find the compiled kernel, 20 µs of a host's time; scoring 16 K
slots takes a GPU 40. `launch` saves it the second look. Knows no kernel; imports no triton.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

MOST = 1024  # compiled kernels remembered by their keys

Listener = Callable[[Any, Sequence[Any], Mapping[str, Any]], bool]
"""Is told a kernel, its arguments and options; says whether it is to be launched."""

ahead: list[Callable[[Any, Sequence[Any], Mapping[str, Any]], None]] = []
"""While kernels are compiled ahead: waits for the one that a launch needs."""

_listener: ContextVar[Listener | None] = ContextVar("launches", default=None)
_compiled: dict[Hashable, Any] = {}


@contextmanager
def heard(listener: Listener) -> Iterator[None]:
    """Within it, in this thread, `listener` is told of every launch before it happens."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Run `kernel`, decorated with `triton.jit`, over a grid of programs.

    Args:
        kernel: decorated with `triton.jit`.
        grid: programs, in up to three dimensions.
        args: of the kernel.
        options: arguments of the kernel by name, and options of the compiler.

    Returns:
        What was compiled; None: interpreted, or not launched.
    """
    listener = _listener.get()
    if listener is not None and not listener(kernel, args, options):
        return None
    for wait in tuple(ahead):
        wait(kernel, args, options)
    return kernel[grid](*args, **options)


def launch(
    kernel: Any, grid: tuple[int, int, int], key: Hashable, args: Sequence[Any], **options: Any
) -> None:
    """`run`, again without what Triton's own launcher works out every time.

    Args:
        kernel: decorated with `triton.jit`.
        grid: programs.
        key: tells apart, together with `kernel`, whatever calls need different machine code:
            constants, options, types, and of each argument that Triton specialises its value
            (tensors: whether they start at a multiple of 16 bytes).
        args: of the kernel, its constants too, in their order.
        options: of the compiler.
    """
    known = _compiled.get((kernel, key)) if _listener.get() is None else None
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
    """Before 3.3 a compiled kernel takes other arguments than the function it was made of."""
    return tuple(map(int, version("triton").split(".")[:2])) >= (3, 3)


def empty(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for a kernel to fill; tests put NaN in it first."""
    return torch.empty(shape, dtype=dtype, device=device)
