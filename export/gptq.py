"""Rounds a weight matrix by GPTQ, so that its products with a text's activations change little.

https://arxiv.org/abs/2210.17323. Knows matrices; no model and no text.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcap.export.weights import Packed, below, joined
from kvcap.runtime.models.rounding import Rounding, in_blocks, nearest, steps_of

DAMPING = 0.01  # share of the inputs' mean square that is added to each input's square
NUMBERS = 1 << 22  # numbers of a matrix that are rounded at once


def gptq(matrix: Tensor, moments: Tensor, rounding: Rounding, damping: float = DAMPING) -> Packed:
    """Round a matrix `W` [N, K] to a `Q` for which `‖(W - Q) X‖²` is small.

    Columns are rounded one after another, and later columns make up for the error of each: with
    `UᵀU = (X Xᵀ + λ)⁻¹`, `W[:, k:] -= (w - q) / U[j, j] · U[j, k:]`, `k = j + 1` (algorithm 1). The
    scales of a block are computed just before it is rounded.

    Args:
        matrix: [N, K].
        moments: `X Xᵀ` [K, K] of the vectors `X` that the matrix multiplies, times any factor.
        rounding: how the blocks of the matrix are rounded.
        damping: `λ` as a share of the mean of the moments' diagonal; with a larger one `Q` is
            nearer to `W`.

    Returns:
        `Q`, packed in blocks.
    """
    missing = -len(moments) % rounding.block
    spread = _spread(pad(moments, (0, missing) * 2), damping)
    parts = matrix.split(max(1, NUMBERS // matrix.shape[1]))
    return below([_rounded(rows, spread, rounding) for rows in parts])


def _spread(moments: Tensor, damping: float) -> Tensor:
    """Return `U` [K, K], upper triangular: how one column's error spreads over those behind it.

    With rows and columns in reversed order, the moments have a lower triangular factor `L`, and `U`
    is its inverse. So only a triangular matrix is inverted.
    """
    turned = moments.flip(0, 1).double()
    mean = float(turned.diagonal().mean())
    turned.diagonal().add_(mean * damping or 1.0)
    turned = torch.linalg.cholesky(turned)
    whole = torch.eye(len(turned)).double()
    inverse: Tensor = torch.linalg.solve_triangular(turned, whole, upper=False)
    return inverse.float().flip(0, 1)


def _rounded(rows: Tensor, spread: Tensor, rounding: Rounding) -> Packed:
    size = rounding.block
    left = in_blocks(rows.float(), size).flatten(1).clone()  # [N, K], columns still to be rounded
    blocks = []
    for start in range(0, left.shape[1], size):
        end = start + size
        columns = left[:, start:end].T.contiguous()  # [size, N]
        scales, zeros = (x[:, 0] for x in steps_of(columns.T, rounding))
        within, numbers = spread[start:end, start:end], torch.empty_like(columns)
        errors = torch.empty_like(columns)
        for j, column in enumerate(columns):
            numbers[j] = nearest(column, scales, zeros, rounding)
            error = column - (numbers[j] - zeros) * scales
            errors[j] = error / within[j, j]
            columns[j + 1 :] -= within[j, j + 1 :, None] * errors[j]
        left[:, end:] -= errors.T @ spread[start:end, end:]
        blocks.append((numbers.T, scales[:, None], zeros[:, None]))
    numbers, scales, zeros = (torch.stack(parts, 1) for parts in zip(*blocks, strict=True))
    return joined(numbers, scales, zeros, rounding)
