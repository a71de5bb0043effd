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
from kvcap.policies.base import RowRanges


def read(
    keys: Mapping[str, Tensor],
    values: Mapping[str, Tensor] | None,
    size: int,
    dtype: torch.dtype,
    rows: RowRanges,
    to: Tensor,
    room: int,
    mean: Tensor | None = None,
    turn: tuple[Tensor, Tensor] | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dequantised keys and values, `q · scale + low`; add `mean` to keys and rotate them.

    Args:
        keys: a pool's buffers: bytes under '' and side tensors by name. In 8 bits they are
            [slots, D] and `scale` [slots]. In 4 bits they are [slots, D/2], with number i in the
            low half of byte i and number i + D/2 in its high half, and `scale` and `low`
            [slots, D/g] for g neighbours each.
        values: buffers as for keys, maybe of other bits; None: values are not read.
        size: `D`.
        dtype: type of the result.
        rows: first slot and length of each row that is read.
        to: first slot of each row in the result, [B·K] int32.
        room: slots of the result.
        mean: [B, K, D] float32, contiguous, added to every key of a row.
        turn: shifts [slots] int32, from minus the table's span up to 0, and the contiguous table
            [span, 2, R/2] of cosines and sines; keys are rotated by minus their shifts. None:
            nothing is rotated.
        interleaved: whether pairs are neighbours (2i, 2i + 1); else they are (i, i + R/2).

    Returns:
        Keys and values, [room, D] each, arbitrary behind a row's slots; keys twice if values are
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
