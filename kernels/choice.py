"""Chooses between kernels and eager code: by device, by `KVCAP_KERNELS`, or by `use`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from kvcap.kernels.device import able, on_gpu

CHOICES = ("auto", "eager", "triton")

_override: ContextVar[str | None] = ContextVar("kernels", default=None)


@contextmanager
def use(choice: str) -> Iterator[None]:
    """Choose `auto`, `eager` or `triton` within a `with` block, over `KVCAP_KERNELS`.

    A cache keeps the choice that it was allocated under.
    """
    token = _override.set(choice)
    try:
        yield
    finally:
        _override.reset(token)


def ready(x: Tensor) -> bool:
    """Return whether kernels are wanted and can run on the device of `x`.

    Raises:
        ValueError: `KVCAP_KERNELS` is none of `CHOICES`.
        RuntimeError: `triton` is chosen, and kernels cannot run there.
    """
    choice = _override.get() or os.environ.get("KVCAP_KERNELS") or "auto"
    if choice not in CHOICES:
        raise ValueError(f"KVCAP_KERNELS={choice!r} will not work; use {', '.join(CHOICES)}")
    if choice == "eager" or (choice == "auto" and not on_gpu(x)):
        return False
    if choice == "triton" and not able(x):
        raise RuntimeError(
            "KVCAP_KERNELS=triton needs triton, and tensors on CUDA or TRITON_INTERPRET=1; "
            "use auto, which runs eagerly where there is none"
        )
    return able(x)
