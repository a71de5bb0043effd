# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Writes a block into slots of 8 or 4 bits: rotates keys to position 0 and quantises, in one pass.

Eagerly that is some forty launches. The format is that of `runtime/cache/slot_format.py`. Knows
tensors only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvcap.kernels.arguments import strides
from kvcap.kernels.device import DTYPES, able, power_of_two
from kvcap.kernels.launch import run

MOST_STATE = 2  # further tensors of a number a slot
SIDES = ("key_scale", "key_low", "value_scale", "value_low")


def covers(keys: Tensor, values: Tensor, slots: Mapping[str, Tensor]) -> bool:
    """Whether the kernel can do this here: on CUDA, or on a CPU in triton's interpreter.

    Arguments as in `append`.
    """
    if not able(keys) or not keys.numel():
        return False
    alike = all(x.dtype in DTYPES and x.stride(-1) == 1 for x in (keys, values))
    return alike and keys.shape == values.shape and len(state_of(slots)) <= MOST_STATE


def append(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Mapping[str, Tensor],
    rank: int,
    after: Tensor | None = None,
    mean: Tensor | None = None,
    table: Tensor | None = None,
    start: int = 0,
    *,
    first: bool = False,
    interleaved: bool = False,
) -> None:
    """Quantise a block and write it.

    Args:
        keys: [b, k, T, D] as the model rotated them, any strides but of the last dimension.
        values: [b, k, T, D] likewise.
        positions: [T] int32.
        slots: what is written, by the names of `SlotFormat.shapes`, with 'positions' and where
            there is one 'shift': views [b, k, T, ...] whose rows are equally far apart in all. What
            has another name becomes 0.
        rank: of the first token among those of its head.
        after: an integer on the device [], by how many slots what is written lies behind these,
            and its rank and position behind `rank` and `start`.
        mean: [b, k, D] float32, what keys are written without.
        table: [span, 2, R/2], contiguous, cosines and sines; None: keys stay as they are rotated.
        start: the position of the first token, which lies in the table with all that follow it.
        first: the block's own mean is taken and left in `mean`; with `after` where that is 0.
        interleaved: neighbours (2i, 2i + 1) are pairs; else halves (i, i + R/2) are.
    """
    from kvcap.kernels.quantise_triton import take_mean, write_slots

    (batch, heads, length, size), half = keys.shape, 0 if table is None else table.shape[-1]
    place, block = slots["positions"], 8
    row = place.stride(1)  # slots from one to the next
    for x in slots.values():
        step = x.stride(2)
        assert x.stride()[:3] == (heads * row * step, row * step, step), "rows side by side"
    state = state_of(slots)
    turned = {
        "HEADS": heads, "SIZE": size, "HALF": half, "INTERLEAVED": interleaved,
    }  # fmt: skip
    rows = strides("bh", mean=mean)
    with torch.cuda.device_of(keys):
        if mean is not None and (first or after is not None):
            run(
                take_mean, (batch * heads,),
                keys, mean, table, length, start, after, **strides("bht", key=keys), **rows,
                **turned, SIZE_PAD=power_of_two(size, 16), BLOCK=32, num_warps=4,
            )  # fmt: skip
        run(
            write_slots, (-(-length // block), batch * heads),
            keys, values, positions, mean, table, slots["keys"], slots["values"],
            *(slots.get(name) for name in SIDES), place, slots.get("shift"),
            *(state[i] if i < len(state) else None for i in range(MOST_STATE)),
            length, row, rank, start, after,
            **strides("bht", key=keys, value=values), **rows, **turned,
            PAD=power_of_two(size - size // 2, 16), KEY_GROUP=group_of(slots, "key", size),
            VALUE_GROUP=group_of(slots, "value", size), BLOCK=block, num_warps=4,
        )  # fmt: skip


def group_of(slots: Mapping[str, Tensor], name: str, size: int) -> int:
    """Numbers of a vector that share a scale in 4 bits; 0: it has 8."""
    low = slots.get(f"{name}_low")
    return 0 if low is None else size // low.shape[-1]


def state_of(slots: Mapping[str, Tensor]) -> list[Tensor]:
    """What a policy remembers of slots."""
    known = {"keys", "values", "positions", "shift", *SIDES}
    return [x for name, x in slots.items() if name not in known]
