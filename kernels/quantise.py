# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Writes a block into slots of 8 or 4 bits: rotates keys to position 0 and quantises, in one pass.

Eager code takes some forty launches. The format is that of `runtime/cache/slot_format.py`. Knows
tensors only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvcap.kernels.arguments import strides
from kvcap.kernels.device import power_of_two
from kvcap.kernels.launch import run
from kvcap.policies.base import RowRanges

MOST_STATE = 2  # most tensors of a policy's state, with one number per slot
SIDES = ("key_scale", "key_low", "value_scale", "value_low")


def append(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Mapping[str, Tensor],
    rows: RowRanges,
    mean: Tensor | None = None,
    turn: tuple[Tensor, Tensor] | None = None,
    count: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> None:
    """Quantise a block and write it behind the slots of rows of a pool.

    Args:
        keys: [B, K, T, D] as the model rotated them; the last stride is 1, others are free.
        values: [B, K, T, D]; the last stride is 1, others are free.
        positions: [T] int32.
        slots: the pool's buffers [slots, ...], by the names of `SlotFormat.shapes`, 'positions',
            and maybe 'shift', which becomes minus a token's rank in its row. All others become 0.
        rows: first slot and length of each row, without the block.
        mean: [B, K, D] float32, contiguous, subtracted from keys before they are written. In a row
            without slots it is first set to the mean of the block's keys.
        turn: position of each sequence's first token [B] int32, and a contiguous table
            [span, 2, R/2] of cosines and sines, by which keys are rotated back to position 0;
            None: keys are not rotated.
        count: number of the block's tokens that are no fillers, int32 [] on the device; None: all.
        interleaved: whether pairs are neighbours (2i, 2i + 1); else they are (i, i + R/2).
    """
    from kvcap.kernels.quantise_triton import write_slots

    (batch, heads, length, size), block = keys.shape, 8
    read_at, table = (None, None) if turn is None else turn
    stored = {"keys", "values", "positions", "shift", *SIDES}
    state = [x for name, x in slots.items() if name not in stored]
    assert len(state) <= MOST_STATE, "no policy keeps more"
    assert mean is None or mean.is_contiguous()
    with torch.cuda.device_of(keys):
        run(
            write_slots,
            (-(-length // block), batch * heads),
            keys,
            values,
            positions,
            mean,
            read_at,
            table,
            slots["keys"],
            slots["values"],
            *(slots.get(name) for name in SIDES),
            slots["positions"],
            slots.get("shift"),
            *(state[i] if i < len(state) else None for i in range(MOST_STATE)),
            length,
            count,
            rows.starts,
            rows.lengths,
            **strides("bht", key=keys, value=values),
            HEADS=heads,
            SIZE=size,
            HALF=0 if table is None else table.shape[-1],
            INTERLEAVED=interleaved,
            PAD=power_of_two(size - size // 2, 16),
            KEY_GROUP=group_of(slots, "key", size),
            VALUE_GROUP=group_of(slots, "value", size),
            BLOCK=block,
            num_warps=4,
        )


def group_of(slots: Mapping[str, Tensor], name: str, size: int) -> int:
    """Return how many numbers of a 4-bit vector share a scale; 0 for a vector of 8 bits."""
    low = slots.get(f"{name}_low")
    return 0 if low is None else size // low.shape[-1]
