# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Rotates keys back to earlier positions in one pass over them. Knows tensors only."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import overlapping, power_of_two
from kvcap.kernels.launch import run
from kvcap.policies.base import Rows

BLOCK = 32  # slots that a program rotates


def rotate_back(x: Tensor, shift: Tensor, table: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate pairs of numbers of every row back by its shift, into a contiguous copy.

    Args:
        x: [B, K, n, D], any strides but of the last dimension.
        shift: [B, K, n] int32, below the table's span; any strides.
        table: [span, 2, R/2] float32, contiguous, cosines and sines.
        interleaved: neighbours (2i, 2i + 1) are pairs; else halves (i, i + R/2) are.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rotate(x, shift, table, out, interleaved)
    return out


def rotate_rows(
    x: Tensor, shift: Tensor, table: Tensor, rows: Rows, *, interleaved: bool = False
) -> Tensor:
    """Rotate back the slots in use of some rows of a pool, as a copy [rows · longest, D].

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
    _rotate(*views, table, out, interleaved, rows)
    return out.view(-1, size)


def _rotate(
    x: Tensor,
    shift: Tensor,
    table: Tensor,
    out: Tensor,
    interleaved: bool,
    rows: Rows | None = None,
) -> None:
    """Launch the kernel."""
    from kvcap.kernels.rotate_triton import rotate

    (batch, heads, slots, size), half = out.shape, table.shape[-1]
    starts, lengths = (None, None) if rows is None else rows[:2]
    with torch.cuda.device_of(x):
        run(
            rotate,
            (-(-slots // BLOCK), batch * heads),
            x,
            shift,
            table,
            out,
            starts,
            lengths,
            slots,
            *x.stride()[:3],
            # Of one slot the last stride says nothing, and would ask for a kernel of its own.
            *shift.stride()[:2],
            0 if shift.shape[2] == 1 else shift.stride(2),
            HEADS=heads,
            SIZE=size,
            HALF=half,
            HALF_PAD=power_of_two(half),
            STEP=2 if interleaved else 1,
            MATE=1 if interleaved else half,
            REST=size - 2 * half,
            REST_PAD=power_of_two(size - 2 * half),
            BLOCK=BLOCK,
            num_warps=4,
            **overlapping(x.device),
        )
