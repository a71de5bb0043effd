# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Reads keys or values of 8 or 4 bits from rows of slots and rotates keys, in one launch.

The format is that of `runtime/cache/slot_format.py`. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvcap.kernels.device import power_of_two
from kvcap.kernels.launch import run
from kvcap.policies.base import Rows


def read(
    parts: Mapping[str, Tensor],
    size: int,
    dtype: torch.dtype,
    rows: Rows,
    to: Tensor,
    room: int,
    mean: Tensor | None = None,
    turn: tuple[Tensor, Tensor] | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Return numbers `q · scale + low + mean`; keys are rotated on by minus their shifts.

    Args:
        parts: a pool's buffers: bytes under '' and side tensors by name. In 8 bits [slots, D] and
            `scale` [slots]; in 4 bits [slots, D/2], number i in the low half of byte i and i + D/2
            in its high half, and `scale` and `low` [slots, D/g] of g neighbours each.
        size: `D`.
        dtype: type of the result.
        rows: first slot and length of each row that is read.
        to: [B·K] int32, where each row begins in the result.
        room: slots of the result.
        mean: [B, K, D] float32, contiguous, added to every slot of a row.
        turn: shifts [slots] int32, from minus a table's span up to 0, and that table, contiguous,
            [span, 2, R/2], of cosines and sines; None: nothing is rotated.
        interleaved: neighbours (2i, 2i + 1) are pairs; else halves (i, i + R/2) are.

    Returns:
        [room, D]; behind a row's slots it is arbitrary.
    """
    from kvcap.kernels.dequantise_triton import read_slots

    q, scale, low = parts[""], parts["scale"], parts.get("low")
    shift, table = (None, None) if turn is None else turn
    half, count = 0 if table is None else table.shape[-1], len(rows.lengths)
    out = torch.empty(room, size, dtype=dtype, device=q.device)
    block, rest = 32, size - 2 * half
    with torch.cuda.device_of(q):
        run(
            read_slots, (-(-rows.longest // block), count),
            q, scale, low, mean, shift, table, out, rows.starts, rows.lengths, to,
            SIZE=size, HALF=half, HALF_PAD=power_of_two(half),
            STEP=2 if interleaved else 1, MATE=1 if interleaved else half,
            REST=rest, REST_PAD=power_of_two(rest), BITS=8 if low is None else 4,
            GROUP=size if low is None else size // low.shape[-1], BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out
