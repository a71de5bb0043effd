# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""One row times matrices, for decoding: every weight read once, at the speed of memory.

Libraries' matrix products reach half of that with one row of few outputs (`kvcap bench parts`).
Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcap.kernels.device import DTYPES, overlapping

ROWS, COLUMNS = 8, 1024  # of the matrix that a program reads at once: fastest of those tried
MOST = 3  # matrices of one launch


def covers(x: Tensor, *weights: Tensor) -> bool:
    """Whether `matvec` takes these: one row, dense and alike."""
    one, first = x.numel() == x.shape[-1], weights[0]
    alike = all(
        w.dtype == x.dtype and w.device == x.device and w.dim() == 2 and w.stride(1) == 1
        and (w.shape[1], w.stride(0)) == (first.shape[1], first.stride(0))
        for w in weights
    )  # fmt: skip
    return one and alike and x.dtype in DTYPES and len(weights) <= MOST


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x Wᵀ + b`, summed in float32.

    Args:
        x: [..., I], all other sizes 1.
        weight: [O, I].
        bias: [O], or none.

    Returns:
        [..., O]
    """
    return matvecs(x, [weight], [bias])[0]


def matvecs(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """`matvec` with several matrices in one launch.

    Args:
        x: as in `matvec`.
        weights: up to three.
        biases: of each.
    """
    from kvcap.kernels.linear_triton import dot

    rows, columns = [w.shape[0] for w in weights], weights[0].shape[1]
    more = MOST - len(weights)
    out = torch.empty(*x.shape[:-1], sum(rows), dtype=x.dtype, device=x.device)
    even = columns % COLUMNS == 0 and all(n % ROWS == 0 for n in rows)
    with torch.cuda.device_of(x):
        dot[sum(-(-n // ROWS) for n in rows),](
            x.contiguous(), out, *weights, *[None] * more, *biases, *[None] * more,
            *rows, *[0] * more, columns, weights[0].stride(0),
            ROWS=ROWS, COLUMNS=COLUMNS, EVEN=even,
            num_warps=8 if columns >= 8192 else 4,
            **overlapping(x.device),
        )  # fmt: skip
    split: tuple[Tensor, ...] = out.split(rows, dim=-1)
    return split
