# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Multiplies one row with a matrix, for decoding: weights are read once, at the speed of memory.

Libraries' matrix products reach half of that speed for one row and few outputs (`kvcap bench
parts`). The operations between two products (a norm, a gate, a sum) take longer to launch than to
compute, so the kernel does them, too. Knows tensors only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import DTYPES, overlapping
from kvcap.kernels.launch import run

TILE, WIDE_TILE = (8, 1024), (4, 2048)  # rows, columns read at once: fastest of those tried
WIDE = 4096  # a matrix gets WIDE_TILE if its columns are a multiple of this


def covers(x: Tensor, weight: Tensor) -> bool:
    """Return whether `matvec` covers these: one row, contiguous, of the same type and device."""
    one_row = x.numel() == x.shape[-1] == weight.shape[-1]
    alike = weight.dtype == x.dtype and weight.device == x.device
    return one_row and alike and weight.dim() == 2 and weight.stride(1) == 1 and x.dtype in DTYPES


def matvec(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    epsilon: float = 0.0,
    gated: bool = False,
    plus: Tensor | None = None,
) -> Tensor:
    """Return `gate(W norm(x) + b) + plus`, with products summed in float32.

    Args:
        x: [..., I], all other sizes 1.
        weight: W, [O, I].
        bias: b, [O]; None: 0.
        gain: [I]; norm(x) = x · gain / sqrt(mean(x²) + epsilon). None: norm(x) = x.
        epsilon: see `gain`.
        gated: gate(y) = silu(y₁) · y₂ for the first and second half of y; else gate(y) = y.
        plus: [..., O], if gated [..., O/2]; None: 0.

    Returns:
        [..., O], if gated [..., O/2].
    """
    from kvcap.kernels.linear_triton import dot

    columns, rows = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    tile_rows, tile_columns = TILE if columns % WIDE else WIDE_TILE
    each = tile_rows // 2 if gated else tile_rows
    out = torch.empty(*x.shape[:-1], rows, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        run(
            dot,
            (-(-rows // each),),
            x.contiguous(),
            out,
            weight,
            bias,
            gain,
            None if plus is None else plus.contiguous(),
            rows,
            columns,
            weight.stride(0),
            epsilon,
            ROWS=tile_rows,
            COLUMNS=tile_columns,
            SHARE=8,
            GATED=gated,
            EVEN=columns % tile_columns == 0 and rows % each == 0,
            num_warps=4,
            **overlapping(x.device),
        )
    return out
