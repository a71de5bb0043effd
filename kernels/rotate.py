# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Rotates keys back to earlier positions in one pass over them. Knows tensors only."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import overlapping, power_of_two
from kvcap.kernels.launch import empty, run
from kvcap.policies.base import Rows

BLOCK = 32  # slots that a program rotates at once
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
    batch, heads, slots, size = x.shape
    # Sums take longer to make of fewer slots, and longer to add up of more parts.
    blocks = min(MOST_BLOCKS, max(1, slots // 2048)) if sums else 1
    parts = -(-slots // (BLOCK * blocks))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = empty(batch, heads, parts, size, device=x.device) if sums else None
    if out.numel():
        _rotate(x, shift, table, out, summed, blocks, interleaved)
    return out, summed


def rotate_rows(
    x: Tensor, shift: Tensor, table: Tensor, rows: Rows, *, interleaved: bool = False
) -> Tensor:
    """`rotate_back` of the slots in use of some rows of a pool, [rows · longest, D].

    Args:
        x: [slots, D].
        shift: [slots].
        table: as in `rotate_back`.
        rows: where they lie; what is behind their slots is arbitrary.
        interleaved: as in `rotate_back`.
    """
    count, size = len(rows.lengths), x.shape[1]
    out = torch.empty(1, count, rows.longest, size, dtype=x.dtype, device=x.device)
    views = x.expand(1, count, -1, -1), shift.expand(1, count, -1)
    _rotate(*views, table, out, None, 1, interleaved, rows)
    return out.view(-1, size)


def _rotate(
    x: Tensor,
    shift: Tensor,
    table: Tensor,
    out: Tensor,
    sums: Tensor | None,
    blocks: int,
    interleaved: bool,
    rows: Rows | None = None,
) -> None:
    """Launches the kernel, each program of which rotates so many blocks of slots."""
    from kvcap.kernels.rotate_triton import rotate

    (batch, heads, slots, size), half = out.shape, table.shape[-1]
    starts, lengths = (None, None) if rows is None else rows[:2]
    with torch.cuda.device_of(x):
        run(
            rotate, (-(-slots // (BLOCK * blocks)), batch * heads),
            x, shift, table, out, sums, starts, lengths, slots, *x.stride()[:3],
            # Of one slot the last stride says nothing, and would ask for a kernel of its own.
            *shift.stride()[:2], 0 if shift.shape[2] == 1 else shift.stride(2),
            HEADS=heads, SIZE=size, HALF=half, HALF_PAD=power_of_two(half),
            STEP=2 if interleaved else 1, MATE=1 if interleaved else half,
            REST=size - 2 * half, REST_PAD=power_of_two(size - 2 * half),
            BLOCK=BLOCK, BLOCKS=blocks, num_warps=4 if sums is None else 2,
            **overlapping(x.device),
        )  # fmt: skip
