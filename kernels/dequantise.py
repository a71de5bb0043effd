# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Reads keys and values of 8 or 4 bits from rows of slots and rotates keys, in one launch.

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
    keys: Mapping[str, Tensor],
    values: Mapping[str, Tensor] | None,
    size: int,
    dtype: torch.dtype,
    rows: Rows,
    to: Tensor,
    room: int,
    mean: Tensor | None = None,
    turn: tuple[Tensor, Tensor] | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return numbers `q · scale + low`; keys also have `mean`, and are rotated by minus shifts.

    Args:
        keys: a pool's buffers: bytes under '' and side tensors by name. In 8 bits [slots, D] and
            `scale` [slots]; in 4 bits [slots, D/2], number i in the low half of byte i and i + D/2
            in its high half, and `scale` and `low` [slots, D/g] of g neighbours each.
        values: likewise, maybe of other bits; None: they are not read.
        size: `D`.
        dtype: type of the result.
        rows: first slot and length of each row that is read.
        to: [B·K] int32, where each row begins in the result.
        room: slots of the result.
        mean: [B, K, D] float32, contiguous, added to every key of a row.
        turn: shifts [slots] int32, from minus a table's span up to 0, and that table, contiguous,
            [span, 2, R/2], of cosines and sines; None: nothing is rotated.
        interleaved: neighbours (2i, 2i + 1) are pairs; else halves (i, i + R/2) are.

    Returns:
        keys and values, [room, D] each, arbitrary behind a row's slots. Keys twice, if values are
        not read.
    """
    from kvcap.kernels.dequantise_triton import read_slots

    shift, table = (None, None) if turn is None else turn
    half, block, count = 0 if table is None else table.shape[-1], 32, len(rows.lengths)
    outs = [
        torch.empty(room, size, dtype=dtype, device=to.device)
        for _ in range(1 if values is None else 2)
    ]
    sides = [(x[""], x["scale"], x.get("low")) for x in (keys, values or keys)]
    (key_bits, key_group), (value_bits, value_group) = (
        (8, size) if low is None else (4, size // low.shape[-1]) for *_, low in sides
    )
    with torch.cuda.device_of(to):
        run(
            read_slots,
            (-(-rows.longest // block), count, len(outs)),
            *sides[0],
            *sides[1],
            mean,
            shift,
            table,
            outs[0],
            outs[-1],
            rows.starts,
            rows.lengths,
            to,
            SIZE=size,
            HALF=half,
            HALF_PAD=power_of_two(half),
            STEP=2 if interleaved else 1,
            MATE=1 if interleaved else half,
            REST_PAD=power_of_two(size - 2 * half),
            SIZE_PAD=power_of_two(size),
            KEY_BITS=key_bits,
            KEY_GROUP=key_group,
            VALUE_BITS=value_bits,
            VALUE_GROUP=value_group,
            BLOCK=block,
            num_warps=4,
        )
    return outs[0], outs[-1]
