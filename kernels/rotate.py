# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Keys moved to earlier positions in one pass: read, turned back, written. Knows tensors only."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import overlaps, power_of_two


def rotate_back(x: Tensor, shift: Tensor, table: Tensor) -> Tensor:
    """Rotate the halves (i, i + R/2) of every row back by its shift; a contiguous copy.

    Args:
        x: [B, K, n, D], any strides but of the last dimension.
        shift: [B, K, n] int32, below the table's span; any strides.
        table: [span, 2, R/2] float32, contiguous, cosines and sines.
    """
    from kvcap.kernels.rotate_triton import rotate

    batch, heads, slots, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    half = table.shape[-1]
    block, overlap = 32, overlaps(x.device)
    with torch.cuda.device_of(x):
        rotate[-(-slots // block), batch * heads](
            x, shift, table, out, slots, *x.stride()[:3], *shift.stride(),
            HEADS=heads, SIZE=size, HALF=half, HALF_PAD=power_of_two(half),
            REST=size - 2 * half, REST_PAD=power_of_two(size - 2 * half), BLOCK=block,
            OVERLAP=overlap, num_warps=4, **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return out
