# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Rotates one more token, quantises it into its slot and attends to all slots, in one launch.

As `kernels/token.py`, of slots of 8 or 4 bits: keys and values are dequantised, and keys rotated to
where they count, as they are read, and nowhere copied. What is written is what `quantise.append`
writes for the key as the model rotates it. The format is that of `runtime/cache/slot_format.py`.
Knows tensors only; triton is imported when first needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from kvcap.kernels import decode, token
from kvcap.kernels.arguments import MOST_AUX, aux, strides
from kvcap.kernels.device import on_gpu, overlapping, power_of_two
from kvcap.kernels.launch import run
from kvcap.kernels.quantise import SIDES, group_of, state_of


def covers(query: Tensor, key: Tensor, value: Tensor, slots: Mapping[str, Tensor]) -> bool:
    """Whether the kernel can do this here: on CUDA, or on a CPU in triton's interpreter.

    Arguments as in `attend`.
    """
    group, size = query.shape[1] // key.shape[1], query.shape[3]
    if query.shape[2] != 1 or group > token.MOST_GROUP or size % 2:
        return False
    # As to its size and type it is attention over keys such as the token's.
    return len(state_of(slots)) <= MOST_AUX and decode.covers(query, key, value)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    angles: tuple[Tensor, Tensor],
    time: Tensor,
    slots: Mapping[str, Tensor],
    scaling: float,
    mean: Tensor | None = None,
    table: Tensor | None = None,
    used: Tensor | None = None,
    summed: bool = False,
    *,
    tile: decode.Tile | None = None,
    most_parts: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise a token into the slot behind those in use, and attend to all of them.

    Slots are read while what was launched just before may still run: that must not write them.

    Args:
        query: [B, H, 1, D].
        key: [B, K, 1, D].
        value: [B, K, 1, D].
        angles: cosines and sines [B or 1, 1, D], both halves alike, by which the halves of query
            and key are rotated.
        time: [1] int32, which token it is.
        slots: by the names of `SlotFormat.shapes`, with 'positions' and where there is one 'shift':
            views [B, K, n, ...] whose rows are equally far apart in all. The last slot is the
            token's. What has another name becomes 0 there.
        scaling: factor of the logits.
        mean: with `table`, [B, K, D] float32, what keys are held without. A first token of all
            becomes it.
        table: [n or more, 2, D/2], contiguous, cosines and sines, by which keys are rotated on
            from position 0 to minus their shift; None: they are held as the model rotated them.
        used: slots in use before the token, an integer on the device []; None: n - 1.
        summed: the keys' sums are wanted, which takes `used` None.
        tile: how slots are read, where it is tried out, as are those below; by default as
            `token.tile_of` says.
        most_parts: into how many parts the slots are cut at most.

    Returns:
        What it attends to, [B, H, 1, D], the rotated query, likewise, and sums of parts of the
        keys as they are attended to, [B, K, parts, D] float32, or None.
    """
    from kvcap.kernels.quantised_token_triton import attend_quantised

    assert used is None or not summed, "parts not in use have no sums"
    assert (mean is None) == (table is None), "keys are held without both, or with both"
    (batch, heads, _, size), kv_heads = query.shape, key.shape[1]
    place, count, group = slots["positions"], batch * kv_heads, heads // kv_heads
    held, row_slots = place.shape[2] - 1, place.stride(1)
    for x in slots.values():
        step = x.stride(2)
        assert x.stride()[:3] == (kv_heads * row_slots * step, row_slots * step, step)
    tile = tile or token.tile_of(size * query.element_size(), query.device)
    blocks = token.blocks_of(held, float(count), tile, most_parts, query.device)
    chunk = tile.block * blocks
    parts = 1 + -(-held // chunk)
    new = partial(torch.empty, device=query.device)
    part_out = new(count, parts, group, size, dtype=torch.float32)
    part_lse = new(count, parts, group, dtype=torch.float32)
    sums = new(batch, kv_heads, parts, size, dtype=torch.float32) if summed else None
    out, turned = (new(batch, 1, heads, size, dtype=query.dtype) for _ in range(2))
    cos, sin = (x.contiguous() for x in angles)
    overlap = overlapping(query.device)
    with torch.cuda.device_of(query):
        run(
            attend_quantised, (parts, count),
            query, key, value, cos, sin, time, slots["keys"], slots["values"],
            *(slots.get(name) for name in SIDES), place, slots.get("shift"),
            **aux(state_of(slots)), mean=mean, table=table, queries=turned, sums=sums,
            part_out=part_out, part_lse=part_lse, used=used, slots=held, row_slots=row_slots,
            chunk=chunk, factor=scaling * decode.LOG2_E,
            **strides("bh", query=query, key=key, value=value, mean=mean),
            angle_b=0 if cos.shape[0] == 1 else size,
            KV_HEADS=kv_heads, GROUP=group, ROWS=token.MOST_GROUP, SIZE=size,
            HALF_PAD=power_of_two(size, 32) // 2, KEY_GROUP=group_of(slots, "key", size),
            VALUE_GROUP=group_of(slots, "value", size), BLOCK=tile.block, MORE=blocks > 1,
            STAGES=tile.stages, WIDEN=not on_gpu(query), num_warps=tile.warps,
            maxnreg=token.REGISTERS if blocks == 1 else None, **overlap,
        )  # fmt: skip
        decode.merge(part_out, part_lse, out, used, held, 0, chunk, 1, overlap)
    return out.transpose(1, 2), turned.transpose(1, 2), sums
