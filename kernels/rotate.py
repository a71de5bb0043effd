# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Rotates keys back to earlier positions in one pass over them. Knows tensors only."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import overlapping, power_of_two
from kvcap.kernels.launch import run
from kvcap.policies.base import RowRanges

BLOCK = 32  # slots that a program rotates


def rotate_back(x: Tensor, shift: Tensor, table: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate pairs of numbers of every row back by its shift, into a contiguous copy.

    Args:
        x: [B, K, n, D]; the last stride is 1, others are free.
        shift: [B, K, n] int32, below the table's span; any strides.
        table: cosines and sines [span, 2, R/2] float32, contiguous.
        interleaved: whether pairs are neighbours (2i, 2i + 1); else they are (i, i + R/2).
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rotate(x, shift, table, out, interleaved)
    return out


def rotate_rows(
    x: Tensor, shift: Tensor, table: Tensor, rows: RowRanges, *, interleaved: bool = False
) -> Tensor:
    """Rotate back the slots in use of some rows of a pool, into a copy [rows · longest, D].

    Args:
        x: [slots, D].
        shift: [slots] int32.
        table: see `rotate_back`.
        rows: first slot and length of each row; the copy is arbitrary behind a row's slots.
        interleaved: see `rotate_back`.
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
    rows: RowRanges | None = None,
) -> None:
    """Launch the kernel, which writes `out`."""
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
            # With one slot the last stride is arbitrary, and could compile another kernel.
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
