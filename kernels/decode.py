# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Computes attention of a token or a block over the slots of a cache, on a GPU.

A decode step over few KV heads would leave most of a GPU idle. So the slots of every head are cut
into parts, attended in parallel and merged in a fixed order, so that two runs are equal to the bit.
Keys and values are read once, from where they lie. Lengths can be tensors on the device, so that
one CUDA graph serves while they change. Knows tensors only; triton is imported when needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcap.kernels.device import (
    DTYPES,
    able,
    multiprocessors,
    on_gpu,
    overlapping,
    power_of_two,
    target,
)
from kvcap.kernels.launch import run
from kvcap.policies.base import RowRanges

MOST_TOKENS = 16  # most tokens of a block whose keys are wider than 256 bytes
MOST_ROWS = 64  # query rows of a KV head that a program attends
MOST_SIZE = 256
MERGED = 9  # blocks that could be read while a part is written and merged
LOG2_E = math.log2(math.e)


def covers(query: Tensor, keys: Tensor, values: Tensor, kv_heads: int | None = None) -> bool:
    """Return whether the kernel covers these tensors, on CUDA or on a CPU in Triton's interpreter.

    Args:
        query: [B, H, T, D].
        keys: [B, K, n, D] for `attend`, a pool [slots, D] for `attend_ragged`.
        values: as `keys`.
        kv_heads: K; needed if the keys are a pool.
    """
    (_, heads, tokens, size), item = query.shape, query.element_size()
    kv_heads = keys.shape[1] if kv_heads is None else kv_heads
    rows = tokens * heads // kv_heads
    if not able(query) or query.dtype not in DTYPES or size > MOST_SIZE:
        return False
    if tokens > MOST_TOKENS and size * item > 256:
        return False
    if any(x.dtype != query.dtype or x.stride(-1) != 1 for x in (query, keys, values)):
        return False
    gpu = target(query.device)
    small = rows <= 16 and size * item <= 512
    return gpu is None or gpu.shared_memory >= (96 if small else 224) * 1024


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of the newest T tokens over n slots, of which the last T are their own.

    All older slots are visible, the block is causal. The last stride of every tensor is 1; others
    are free.

    Args:
        query: [B, H, T, D].
        keys: [B, K, n, D].
        values: [B, K, n, D].
        scaling: factor of the logits.
        softcap: logits = softcap · tanh(logits / softcap).
        sinks: sink logits [H], which take part in a query head's softmax and have no value.

    Returns:
        [B, H, T, D]
    """
    return _attend(query, keys, values, scaling, softcap, sinks)


def attend_with_lse(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softcap: float | None = None,
    own: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute attention as `attend` does, and return the log-sum-exp of its logits, too.

    Args:
        query: [B, H, T, D].
        keys: [B, K, n, D].
        values: [B, K, n, D].
        scaling: factor of the logits.
        softcap: logits = softcap · tanh(logits / softcap).
        own: whether the last T slots are the tokens' own, so that the block is causal; else all
            slots are older than the tokens.

    Returns:
        Outputs [B, H, T, D] and log-sum-exp [B, H, T] in float32.
    """
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    return _attend(query, keys, values, scaling, softcap, lse=lse, own=own), lse


def attend_ragged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scaling: float,
    softcap: float | None = None,
    max_length: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention as `attend` does, over heads of unequal lengths in a pool.

    Args:
        query: [B, H, T, D].
        keys: [slots, D].
        values: [slots, D].
        starts: first slot of every sequence's KV heads, [B·K] int32 on the device.
        lengths: slots of each, at least T, [B·K] int32 on the device.
        scaling: factor of the logits.
        softcap: see `attend`.
        max_length: an upper bound of all lengths; by default the pool's slots.
        sinks: see `attend`.

    Returns:
        [B, H, T, D]
    """
    rows = RowRanges(starts, lengths, keys.shape[0] if max_length is None else max_length)
    return _attend(query, keys, values, scaling, softcap, sinks, rows)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None = None,
    ranges: RowRanges | None = None,
    lse: Tensor | None = None,
    own: bool = True,
) -> Tensor:
    """Launch the kernel over all rows.

    Args:
        query: see `attend`, as for the next five.
        keys: see `attend`.
        values: see `attend`.
        scaling: see `attend`.
        softcap: see `attend`.
        sinks: see `attend`.
        ranges: where rows lie, see `attend_ragged`; None: keys and values are [B, K, n, D].
        lse: log-sum-exp [B, H, T] float32, is written unless None.
        own: see `attend_with_lse`.
    """
    from kvcap.kernels.decode_triton import attend_part

    batch, heads, tokens, size = query.shape
    starts = lengths = None
    if ranges is None:
        kv_heads, longest = keys.shape[1:3]
        strides, slots = keys.stride()[:3] + values.stride()[:3], batch * kv_heads * longest
    else:
        (starts, lengths, longest), slots = ranges, keys.shape[0]
        kv_heads = starts.numel() // batch
        strides = (0, 0, keys.stride(0), 0, 0, values.stride(0))
    rows, count = batch * kv_heads, heads // kv_heads * tokens
    rows_pad = 16 if count <= 16 else MOST_ROWS  # only two sizes, as each is compiled
    size_pad = power_of_two(size, 16)
    tiles = -(-count // rows_pad)
    tile = tile_of(size * query.element_size())
    blocks = -(-longest // tile.block)
    blocks = blocks_in_part(blocks, tiles * slots / max(1, longest), tile, query.device)
    chunk = tile.block * blocks
    parts = -(-longest // chunk)
    whole = parts == 1 and lengths is None
    part = partial(torch.empty, dtype=torch.float32, device=query.device)
    part_out = part(0 if whole else rows, parts, count, size)
    part_lse = part(0 if whole else rows, parts, count)
    out = torch.empty(batch, tokens, heads, size, dtype=query.dtype, device=query.device)
    factor = scaling * LOG2_E if softcap is None else 2 * scaling / softcap * LOG2_E
    warps = tile.warps if tiles > 1 else min(8, max(tile.warps, rows_pad * size_pad // 1024))
    # With many programs, those that wait would keep others from running.
    overlap = overlapping(query.device, enabled=not whole and tiles == 1)
    with torch.cuda.device_of(query):
        run(
            attend_part,
            (parts, tiles, rows),
            query,
            keys,
            values,
            starts,
            lengths,
            part_out,
            part_lse,
            out if whole else None,
            lse if whole else None,
            sinks if whole else None,
            longest,
            chunk,
            tokens,
            tokens if own else 0,
            factor,
            (softcap or 0.0) * LOG2_E,
            *query.stride()[:3],
            *strides,
            KV_HEADS=kv_heads,
            GROUP=heads // kv_heads,
            ROWS=rows_pad,
            SIZE=size,
            SIZE_PAD=size_pad,
            SOFTCAP=softcap is not None,
            BLOCK=tile.block,
            STAGES=tile.stages,
            WIDEN=not on_gpu(query),
            num_warps=warps,
            **overlap,
        )
        if whole:
            return out.transpose(1, 2)
        merge(part_out, part_lse, out, lengths, longest, chunk, 0, overlap, sinks, lse)
    return out.transpose(1, 2)


def merge(
    part_out: Tensor,
    part_lse: Tensor,
    out: Tensor,
    lengths: Tensor | None,
    length: int,
    chunk: int,
    more: int,
    overlap: Mapping[str, bool],
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Merge every query row's attention over parts of the slots into one, in a fixed order.

    Args:
        part_out: [B·K, S, G·T, D] float32.
        part_lse: [B·K, S, G·T] float32, log-sum-exp in base 2.
        out: [B, T, H, D], is written.
        lengths: slots of each row, integers on the device; None: every row has `length`.
        length: slots of every row if `lengths` is None.
        chunk: slots of a part.
        more: number of parts besides those of slots.
        overlap: options from `overlapping`.
        sinks: sink logits [H], which count as one more part without an output.
        lse: log-sum-exp of all parts [B, H, T] float32, is written unless None.
    """
    from kvcap.kernels.decode_triton import merge_parts

    rows, parts, count, size = part_out.shape
    batch, tokens, heads = out.shape[:3]
    kv_heads = rows // batch
    few = count <= MOST_ROWS
    step = min(128, max(32 if few else 8, power_of_two(parts)))  # parts merged at once
    run(
        merge_parts,
        (count, rows),
        part_out,
        part_lse,
        out,
        lse,
        sinks,
        lengths,
        length,
        chunk,
        parts,
        more,
        tokens,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        SIZE=size,
        SIZE_PAD=power_of_two(size, 16),
        PARTS_PAD=max(64 if few else 8, power_of_two(parts)),
        STEP=step,
        num_warps=8 if step > 64 else 4 if step > 8 else 1,
        **overlap,
    )


class Tile(NamedTuple):
    """The way in which a program reads slots; `tile_of` chooses it."""

    block: int  # slots read at once
    stages: int  # blocks in flight, one more than are fetched ahead
    warps: int
    programs: int  # programs that a multiprocessor runs at once


def tile_of(row_bytes: int) -> Tile:
    """Return the tile that was fastest on an H200, for 512 to 32,768 slots of 8 heads.

    Args:
        row_bytes: bytes of one key.
    """
    return Tile(32, 2, 4, 2) if row_bytes > 256 else Tile(64, 3, 4, 2)


def blocks_in_part(blocks: int, tiles: float, tile: Tile, device: torch.device) -> int:
    """Return how many blocks of slots each program should read, so that all end the soonest.

    Args:
        blocks: blocks of slots that a tile of query rows reads.
        tiles: tiles of all rows; a fraction if some rows read less than others.
        tile: how slots are read.
        device: the GPU, whose number of multiprocessors matters.
    """
    return _soonest(max(1, blocks), tiles, tile.programs * multiprocessors(device))


@lru_cache(maxsize=4096)
def _soonest(blocks: int, tiles: float, at_once: int) -> int:
    """Compute `blocks_in_part` if `at_once` programs run at the same time.

    Programs run in rounds, and a round takes as long as one program even if it is not full.
    """

    def takes(parts: int) -> int:
        rounds = math.ceil(tiles * parts / at_once)
        return rounds * (-(-blocks // parts) + (MERGED if parts > 1 else 0))

    most = min(blocks, max(1, int(4 * at_once / tiles)))
    return -(-blocks // min(range(1, most + 1), key=takes))
