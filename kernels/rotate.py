# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Rotates keys back to earlier positions in one pass over them. Knows tensors only."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import overlapping, power_of_two
from kvcap.kernels.launch import empty, run

MOST_BLOCKS = 8  # of slots that a program rotates


def rotate_back(
    x: Tensor, shift: Tensor, table: Tensor, sums: bool = False, *, interleaved: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Rotate pairs of numbers of every row back by its shift, into a contiguous copy.

    With `sums`, parts of the rows are summed on the way: who needs only their mean need not read
    the copy again.

    Args:
        x: [B, K, n, D], any strides but of the last dimension.
        shift: [B, K, n] int32, below the table's span; any strides.
        table: [span, 2, R/2] float32, contiguous, cosines and sines.
        sums: make them.
        interleaved: neighbours (2i, 2i + 1) are pairs; else halves (i, i + R/2) are.

    Returns:
        The copy, and its sums [B, K, parts, D] over parts of the rows, float32, or None.
    """
    from kvcap.kernels.rotate_triton import rotate

    batch, heads, slots, size = x.shape
    half, block = table.shape[-1], 32
    # Sums take longer to make of fewer slots, and longer to add up of more parts.
    blocks = min(MOST_BLOCKS, max(1, slots // 2048)) if sums else 1
    parts = -(-slots // (block * blocks))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = empty(batch, heads, parts, size, device=x.device) if sums else None
    if not out.numel():
        return out, summed
    with torch.cuda.device_of(x):
        run(
            rotate, (parts, batch * heads),
            x, shift, table, out, summed, slots, *x.stride()[:3], *shift.stride(),
            HEADS=heads, SIZE=size, HALF=half, HALF_PAD=power_of_two(half),
            STEP=2 if interleaved else 1, MATE=1 if interleaved else half,
            REST=size - 2 * half, REST_PAD=power_of_two(size - 2 * half),
            BLOCK=block, BLOCKS=blocks, num_warps=2 if sums else 4, **overlapping(x.device),
        )  # fmt: skip
    return out, summed
