# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Keys moved to earlier positions in one pass: read, turned back, written. Knows tensors only."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import overlapping, power_of_two

SUMMED = 64  # slots of which a sum is made


def rotate_back(
    x: Tensor, shift: Tensor, table: Tensor, out: Tensor, sums: Tensor | None = None
) -> None:
    """Rotate the halves (i, i + R/2) of every row back by its shift.

    And sum its parts on the way, where wanted: what reads nothing but their mean need not read
    what is written again.

    Args:
        x: [B, K, n, D], any strides but of the last dimension.
        shift: [B, K, n] int32, below the table's span; any strides.
        table: [span, 2, R/2] float32, contiguous, cosines and sines.
        out: [B, K, n, D], as `x`; is written.
        sums: [B, K, ceil(n / SUMMED), D] float32, rows contiguous and side by side; is written:
            sums of so many rows each.
    """
    from kvcap.kernels.rotate_triton import rotate

    batch, heads, slots, size = x.shape
    block, half = SUMMED if sums is not None else 32, table.shape[-1]
    if not out.numel():
        return
    with torch.cuda.device_of(x):
        rotate[-(-slots // block), batch * heads](
            x, shift, table, out, sums, slots, *x.stride()[:3], *shift.stride(),
            *out.stride()[:3], *((0, 0) if sums is None else sums.stride()[:2]),
            HEADS=heads, SIZE=size, HALF=half, HALF_PAD=power_of_two(half),
            REST=size - 2 * half, REST_PAD=power_of_two(size - 2 * half), BLOCK=block,
            num_warps=block // 8, **overlapping(x.device),
        )  # fmt: skip
