"""Computes the statistical leverage of rows: how much of a direction each has to itself.

A graph of ONNX has neither Cholesky nor an inverse, and a CUDA graph waits for no check of one. So
the inverse is a fixed number of Newton-Schulz steps: products of small matrices. They are of
float64, as float32 leaves errors of percents, by which a token read beside others is kept or not.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 20  # each squares what is left of the error: enough for the condition that FLOOR leaves
FLOOR = 1e-5  # of the largest eigenvalue


def leverage(rows: Tensor, ridge: float) -> Tensor:
    """Return `x_jᵀ (XᵀX + ridge · I)⁻¹ x_j` of rows `X` [..., n, D], in [0, 1]. Shape [..., n].

    Directions in which the rows hold less than 1e-5 of the largest eigenvalue count for less than
    they would exactly. Columns are brought to one length before, which changes no leverage and
    keeps channels that are large in all rows from making others look small.

    Args:
        rows: float32.
        ridge: above 0; it keeps the inverse finite if there are few rows.
    """
    size = rows.shape[-1]
    rows = rows.to(torch.float32 if rows.device.type == "mps" else torch.float64)  # it has no other
    identity = torch.eye(size, dtype=rows.dtype, device=rows.device)
    scale = (rows.square().sum(-2, keepdim=True) + ridge).rsqrt()  # [..., 1, D]
    rows = rows * scale
    # By letters: ONNX Runtime 1.22 fuses a transposition into products that it lacks in float64.
    gram = torch.einsum("...tc,...td->...cd", rows, rows)  # [..., D, D]
    gram = gram + identity * (ridge * scale.square())
    norm = gram.abs().sum(-1, keepdim=True).amax(-2, keepdim=True)  # [..., 1, 1]
    gram = gram / norm + FLOOR * identity
    inverse = identity / (1 + FLOOR)
    for _ in range(STEPS):
        inverse = torch.matmul(inverse, 2 * identity - torch.matmul(gram, inverse))
    return ((torch.matmul(rows, inverse) * rows).sum(-1) / norm[..., 0]).float()
