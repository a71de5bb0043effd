"""Compares a kernel with its eager twin, the code that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from interpreted import DEVICE
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int | None = None) -> Tensor:
    """Return random numbers on the device; they depend on `seed` alone, if it is given."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def ints(numbers: Any) -> Tensor:
    """Return whole numbers of 32 bits on the device."""
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def assert_as_near(
    out: Tensor, truth: Tensor, eager: Tensor, slack: float = 1e-5, units: float = 0.25
) -> None:
    """Assert that a kernel's result is at most twice as wrong as eager low precision.

    Args:
        out: the kernel's result.
        truth: the plain formula's result in float64.
        eager: the plain formula's result in the type of `out`.
        slack: how much more wrong it may be in float32, where eager is often exact.
        units: how much more wrong it may be in any type, in units of the largest number.
    """
    assert (out.shape, out.dtype) == (truth.shape, eager.dtype)
    single = out.dtype == torch.float32
    floor = units * torch.finfo(out.dtype).eps * truth.abs().max() + slack * single
    # The interpreter truncates to bfloat16 and does not round, with twice the error.
    factor = 4 if DEVICE == "cpu" and out.dtype == torch.bfloat16 else 2
    allowed = factor * (eager.double() - truth).abs().max() + floor
    assert (out.double() - truth).abs().max() <= allowed  # NaN never passes


def twin_equals_eager(
    kernel: Callable[..., Tensor], eager: Callable[..., Tensor], *given: Any, units: float = 1
) -> Tensor:
    """Assert that a kernel gives what eager code does, to the bit in two runs; return that.

    Args:
        kernel: called with all that is given.
        eager: called likewise, and with tensors of float64 for the truth.
        given: tensors, and whatever else both take.
        units: see `assert_as_near`.
    """
    out = kernel(*given)
    wide = (x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given)
    assert_as_near(out, eager(*wide), eager(*given), 1e-6, units)
    assert torch.equal(out, kernel(*given))
    return out
