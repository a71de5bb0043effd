"""Notes the matrix products of a model, and computes products of these sizes once, ahead.

A library of matrix products has many kernels, and loads one when it first needs it: for each length
of a block that keeps a GPU waiting for some 50 ms. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

MOST = 2**27  # numbers of a matrix; a larger one's memory is not taken for this


class Product(NamedTuple):
    """Sizes of `x Wᵀ`, or of `x Wᵀ + b`: x has `rows` rows, and `W` is [outputs, inputs]."""

    rows: int
    inputs: int
    outputs: int
    bias: bool


class Noted(TorchFunctionMode):
    """Within it, in this thread, `products` takes down the sizes of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[Product] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is functional.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | named
            rows, biased = given["input"][..., 0].numel(), given.get("bias") is not None
            if rows and given["weight"].dim() == 2:  # an LM head that is not asked has no rows
                outputs, inputs = given["weight"].shape
                self.products.add(Product(rows, inputs, outputs, biased))
        return func(*args, **named)


@torch.inference_mode()
def compute(products: Iterable[Product], dtype: torch.dtype, device: torch.device) -> None:
    """Compute each of them once, of arbitrary numbers.

    Where that fails, as there is no memory, the answer that needs them goes on without.
    """
    found = [p for p in products if p.inputs * p.outputs <= MOST]
    if not found:
        return

    def numbers(most: int) -> torch.Tensor:
        return torch.empty(most, dtype=dtype, device=device)

    try:
        weight = numbers(max(p.inputs * p.outputs for p in found))
        x = numbers(max(p.rows * p.inputs for p in found))
        bias = numbers(max(p.outputs for p in found))
        for p in found:
            functional.linear(
                x[: p.rows * p.inputs].view(1, p.rows, p.inputs),
                weight[: p.outputs * p.inputs].view(p.outputs, p.inputs),
                bias[: p.outputs] if p.bias else None,
            )
    except RuntimeError:  # torch.OutOfMemoryError is one
        pass
