# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Runs the operations between a decoder's matrix products: sums, norms, rotations and gates.

Each takes one launch for several tokens; PyTorch's own operations take two to ten, and write every
step to memory. Results are rounded in the same places. Knows tensors only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import overlapping, power_of_two
from kvcap.kernels.launch import run

COLUMNS = 1024  # columns of a row of gates that a program computes


def add_norm(x: Tensor, y: Tensor | None, gain: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `x + y` and its RMS norm, `norm(x) = x · gain / sqrt(mean(x²) + epsilon)`.

    Args:
        x: [..., C].
        y: [..., C]; None adds nothing.
        gain: [C].
        epsilon: see the formula.
    """
    x = x.contiguous()
    total = x if y is None else torch.empty_like(x)
    out = torch.empty_like(x)
    plus = None if y is None else y.contiguous()
    _norm(x.view(-1, 1, x.shape[-1]), plus, total, out, gain, epsilon)
    return total, out


def norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm of every head.

    Args:
        x: [B, T, N, D], with one stride from token to token over all of B and T.
        gain: [D], or [N, D].
        epsilon: see `add_norm`.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x.flatten(0, 1), None, out, out, gain, epsilon)
    return out


def _norm(
    x: Tensor, y: Tensor | None, total: Tensor, out: Tensor, gain: Tensor, epsilon: float
) -> None:
    """Write the norms of x + y [rows, N, D] to `out`, and the sums to `total` unless y is None."""
    from kvcap.kernels.elementwise_triton import add_norm as kernel

    rows, heads, size = x.shape
    warps = 8 if size > 2048 else 4 if size > 512 else 1
    with torch.cuda.device_of(x):
        run(
            kernel,
            (rows * heads,),
            x,
            y,
            total,
            out,
            gain,
            x.stride(0),
            x.stride(1),
            gain.stride(0) * (gain.dim() == 2),
            size,
            epsilon,
            HEADS=heads,
            BLOCK=power_of_two(size),
            num_warps=warps,
            **overlapping(x.device),
        )


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate halves of queries and keys by their positions' angles.

    Args:
        query: [B, H, T, D]; the last stride is 1, others are free.
        key: [B, K, T, D]; the last stride is 1, others are free.
        cos: cosines [B or 1, T, D], of both halves.
        sin: sines [B or 1, T, D], of both halves.

    Returns:
        Copies of query and key, in which the heads of a token lie side by side.
    """
    from kvcap.kernels.elementwise_triton import rotate as kernel

    batch, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
    cos, sin = (x.expand(batch, -1, -1) for x in (cos, sin))
    copies = [
        torch.empty(batch, tokens, n, size, dtype=query.dtype, device=query.device)
        for n in (heads, kv_heads)
    ]
    with torch.cuda.device_of(query):
        run(
            kernel,
            (batch * tokens, heads + kv_heads),
            query,
            key,
            cos,
            sin,
            *copies,
            tokens,
            *query.stride()[:3],
            *key.stride()[:3],
            *cos.stride()[:2],
            *sin.stride()[:2],
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=size // 2,
            HALF_PAD=power_of_two(size // 2),
            num_warps=1,
            **overlapping(query.device),
        )
    rotated_query, rotated_key = (x.transpose(1, 2) for x in copies)
    return rotated_query, rotated_key


def gate(gates: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gates) · up` [B, T, I], for [B, T, I] with one stride from row to row."""
    from kvcap.kernels.elementwise_triton import gate as kernel

    out = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    gates, up = gates.flatten(0, -2), up.flatten(0, -2)
    rows, size = gates.shape
    with torch.cuda.device_of(gates):
        run(
            kernel,
            (rows, -(-size // COLUMNS)),
            gates,
            up,
            out,
            gates.stride(0),
            up.stride(0),
            size,
            BLOCK=COLUMNS,
            num_warps=4,
            **overlapping(gates.device),
        )
    return out
