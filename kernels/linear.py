# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""One row times a matrix, for decoding: every weight read once, at the speed of memory.

Libraries' matrix products reach half of that with one row: 9.3 µs against 6.7 for 3,072 × 3,072
in bfloat16 on an H200, 7.5 against 3.8 for 1,024 × 3,072. Knows tensors only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import DTYPES

ROWS, COLUMNS = 4, 512  # of the matrix that a program reads at once: fastest of those tried


def covers(x: Tensor, weight: Tensor) -> bool:
    """Whether `matvec` takes these: one row, dense and alike."""
    one = x.numel() == x.shape[-1]
    alike = x.dtype == weight.dtype and x.dtype in DTYPES and x.device == weight.device
    return one and alike and weight.dim() == 2 and weight.stride(1) == 1


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x Wᵀ + b`, summed in float32.

    Args:
        x: [..., I], all other sizes 1.
        weight: [O, I].
        bias: [O], or none.

    Returns:
        [..., O]
    """
    from kvcap.kernels.linear_triton import dot

    rows, columns = weight.shape
    out = torch.empty(*x.shape[:-1], rows, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        dot[-(-rows // ROWS),](
            weight, x.contiguous(), bias, out, rows, columns, weight.stride(0),
            ROWS=ROWS, COLUMNS=COLUMNS, EVEN=rows % ROWS == columns % COLUMNS == 0,
            num_warps=4,
        )  # fmt: skip
    return out
