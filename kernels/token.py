# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Rotates one token to its position, appends it and attends to all slots in one launch.

While the matrix product before it still computes the query, the kernel already reads the first
block of slots and rotates its keys, as they do not depend on the query. Knows tensors only; Triton
is imported when first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvcap.kernels import append, decode
from kvcap.kernels.arguments import aux, strides
from kvcap.kernels.device import on_gpu, overlapping, power_of_two, target
from kvcap.kernels.launch import run
from kvcap.policies.base import RowRanges

MOST_GROUP = 16
ROOMY = 224 * 1024  # bytes of shared memory for two programs with five stages, 105 KiB each
# Registers of a thread, so few that a multiprocessor can start one of these programs beside five of
# the product before it (kernels/linear.py): (65,536 - 5 · 128 threads · 64) / 128.
REGISTERS = 192


def covers(query: Tensor, key: Tensor, value: Tensor, buffers: Sequence[Tensor]) -> bool:
    """Return whether the kernel covers these tensors, on CUDA or on a CPU in Triton's interpreter.

    Arguments are those of `attend`.
    """
    group, size = query.shape[1] // key.shape[1], query.shape[3]
    if query.shape[2] != 1 or group > MOST_GROUP or size % 2:
        return False
    return append.covers(key, value, buffers) and decode.covers(query, buffers[0], buffers[1])


def tile_of(row_bytes: int, device: torch.device) -> decode.Tile:
    """Return how to read slots: with more blocks in flight if two programs have memory for it.

    Args:
        row_bytes: bytes of one key.
        device: the device of the slots.
    """
    tile, gpu = decode.tile_of(row_bytes), target(device)
    roomy = gpu is not None and gpu.shared_memory >= ROOMY
    return tile._replace(stages=5) if roomy and tile.block == 64 else tile


def blocks_of(
    slots: int, tiles: float, tile: decode.Tile, most_parts: int | None, device: torch.device
) -> int:
    """Return how many blocks of slots a part of a row has.

    By default `decode.blocks_in_part` chooses; with `most_parts`, it is the least number that cuts
    a row's `slots` into at most so many parts.
    """
    blocks = -(-slots // tile.block)
    if most_parts is None:
        return decode.blocks_in_part(blocks, tiles, tile, device)
    return max(1, -(-blocks // most_parts))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    angles: tuple[Tensor, Tensor],
    time: Tensor,
    buffers: Sequence[Tensor],
    scaling: float,
    turn: tuple[Tensor, Tensor] | None,
    rows: RowRanges,
    summed: bool = False,
    read_at: Tensor | None = None,
    *,
    tile: decode.Tile | None = None,
    most_parts: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Write a token into the slot behind those in use, and attend to all of them.

    Slots are read while the kernel launched just before may still run; that must not write them.

    Args:
        query: [B, H, 1, D].
        key: [B, K, 1, D].
        value: [B, K, 1, D].
        angles: cosines and sines [B or 1, 1, D], both halves equal, by which the halves of query
            and key are rotated.
        time: the token's position [1] int32.
        buffers: the pool's keys and values [slots, D], positions [slots] int32, and auxiliary
            tensors [slots], which become 0.
        scaling: factor of the logits.
        turn: the auxiliary tensor of shifts, int32, by which keys are rotated back, and a
            contiguous table [span, 2, D/2] of cosines and sines; None: keys are not rotated.
        rows: first slot and length of each of the B·K rows, without the token.
        summed: whether to return sums of the keys.
        read_at: with `turn`, the position that a sequence's `angles` belong to, integers on the
            device [B]. In each row the token's position is its length instead, so query and key
            are rotated back by the difference.
        tile: how slots are read, by default as `tile_of` chooses; `kvcap bench token` tries others.
        most_parts: most parts that the slots are cut into; by default `blocks_of` chooses.

    Returns:
        The attention's output [B, H, 1, D], the rotated query [B, H, 1, D] and, if `summed`, sums
        of the keys of each part as they are attended to, [B, K, parts, D] float32, else None.
        Parts that a row does not have sum to 0.
    """
    from kvcap.kernels.token_triton import attend_part

    (batch, heads, _, size), kv_heads = query.shape, key.shape[1]
    count, group = batch * kv_heads, heads // kv_heads
    slots = rows.longest
    # The work is that of so many rows of the longest one's length.
    tiles = min(count, len(buffers[2]) / slots)
    tile = tile or tile_of(size * query.element_size(), query.device)
    blocks = blocks_of(slots, tiles, tile, most_parts, query.device)
    chunk = tile.block * blocks
    parts = 1 + -(-slots // chunk)
    new = partial(torch.empty, device=query.device)
    part_out = new(count, parts, group, size, dtype=torch.float32)
    part_lse = new(count, parts, group, dtype=torch.float32)
    sums = None
    if summed:
        sums = torch.zeros(batch, kv_heads, parts, size, device=query.device)
    out, turned = (new(batch, 1, heads, size, dtype=query.dtype) for _ in range(2))
    cos, sin = (x.contiguous() for x in angles)
    shift, table = (None, None) if turn is None else turn
    with torch.cuda.device_of(query):
        run(
            attend_part,
            (parts, count),
            query,
            key,
            value,
            cos,
            sin,
            time,
            *buffers[:3],
            **aux(buffers[3:]),
            shift=shift,
            table=table,
            queries=turned,
            sums=sums,
            part_out=part_out,
            part_lse=part_lse,
            chunk=chunk,
            starts=rows.starts,
            lengths=rows.lengths,
            read_at=read_at,
            factor=scaling * decode.LOG2_E,
            **strides("bh", query=query, key=key, value=value),
            angle_b=0 if cos.shape[0] == 1 else size,
            KV_HEADS=kv_heads,
            GROUP=group,
            ROWS=MOST_GROUP,
            SIZE=size,
            HALF=size // 2,
            HALF_PAD=power_of_two(size, 32) // 2,
            BLOCK=tile.block,
            MORE=blocks > 1,
            STAGES=tile.stages,
            WIDEN=not on_gpu(query),
            num_warps=tile.warps,
            maxnreg=REGISTERS if blocks == 1 else None,
            **overlapping(query.device),
        )
        overlap = overlapping(query.device)
        decode.merge(part_out, part_lse, out, rows.lengths, slots, chunk, 1, overlap)
    return out.transpose(1, 2), turned.transpose(1, 2), sums
