"""Replaces operations that exporters or float16 cannot take by equal ones, while a graph is traced.

The policy's own code runs; single operations of it are replaced, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

UNIT = "kvcap::unit"
# Core ML's tools take no bitwise operation.
LOGICAL = {Tensor.__and__: torch.logical_and, Tensor.__or__: torch.logical_or}


@torch.library.custom_op(UNIT, mutates_args=())
def unit(vectors: Tensor) -> Tensor:
    """Compute `x / |x|` along the last axis of any shape; 0 where `x` is 0.

    In a graph this becomes LpNormalization, whose kernels neither overflow where |x| > 256 in
    float16 nor divide by zero.
    """
    return torch.nn.functional.normalize(vectors.float(), dim=-1, eps=1e-30).to(vectors.dtype)


@unit.register_fake
def _(vectors: Tensor) -> Tensor:
    return torch.empty_like(vectors)


def translations() -> dict[Any, Callable[..., Any]]:
    """Return translations to ONNX of `unit`, `median` and `nan_to_num`, by torch's operation.

    The exporter does not know the first two, and writes the third with many nodes.
    """
    from kvcap.runtime.backends.onnxruntime.library import library

    op = library("onnxscript").opset18

    def median(x: Any, dim: int, keepdim: bool = False) -> Any:
        length = op.Shape(x, start=dim, end=None if dim == -1 else dim + 1)
        values, indices = op.TopK(x, length, axis=dim, largest=0)
        middle = op.Div(op.Sub(length, op.Constant(value_ints=[1])), op.Constant(value_ints=[2]))
        results = (op.Gather(values, middle, axis=dim), op.Gather(indices, middle, axis=dim))
        if keepdim:
            return results
        axes = op.Constant(value_ints=[dim])
        return tuple(op.Squeeze(tensor, axes) for tensor in results)

    def nan_to_num(x: Any, nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
        least, most = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
        assert posinf is None
        assert neginf is None
        number = op.CastLike(op.Constant(value_float=nan), x)
        bounds = [op.Constant(value_float=bound) for bound in (least, most)]
        return op.Clip(op.Where(op.IsNaN(x), number, x), *bounds)

    return {
        torch.ops.aten.nan_to_num.default: nan_to_num,
        torch.ops.aten.median.dim: median,
        torch.ops.kvcap.unit.default: lambda x: op.LpNormalization(x, axis=-1, p=2),
    }


class Portable(TorchFunctionMode):
    """Replaces operations whose shapes torch.export would freeze, or that engines lack."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, or its replacement."""
        kwargs = kwargs or {}
        if func in (torch.max_pool1d, torch.nn.functional.max_pool1d):
            return _max_pool(*args, **kwargs)
        if func in LOGICAL and args[0].dtype == torch.bool:
            return LOGICAL[func](*args)
        if func is Tensor.sort:
            return _sort(*args, **kwargs)
        if func is Tensor.argsort:
            return _sort(*args, **kwargs).indices
        return func(*args, **kwargs)


def _sort(
    x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False
) -> torch.return_types.topk:
    """Compute `sort` by `topk`, which engines without a sort have.

    In ONNX the result is a stable sort, as TopK puts the lower index first among equals.
    """
    return x.topk(x.shape[dim], dim=dim, largest=descending)


def _max_pool(x: Tensor, kernel: int, stride: int = 1, padding: int = 0, **_: Any) -> Tensor:
    """Compute `max_pool1d` of [B, C, L] by `max_pool2d`, whose length torch.export leaves open."""
    pooled: Tensor = torch.nn.functional.max_pool2d(
        x[..., None, :], (1, kernel), stride=(1, stride), padding=(0, padding)
    )
    return pooled.squeeze(-2)


class Float64(TorchFunctionMode):
    """Runs code that computes in float32 in float64: the truth that low precision is held to."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, with float64 in place of float32."""
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
