# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Pools scores in time order on a GPU, without sorting whole rows.

A slot's place in time is the number of slots of its row with a smaller position. Rows are cut into
tiles. Each tile is sorted by comparing all its slots; then each slot's place is found by bisection
in every tile. Without atomics, two runs are equal to the bit. Knows tensors only; triton is
imported when first needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import able, power_of_two, seen_and_clock

LOG_TILE = 9
"""Holds the binary logarithm of a tile's slots, 512.

On an H200 it takes 11, 16, 30 and 62 µs to pool 8 rows of 2,049, 4,097, 8,193 and 16,384 slots.
Comparing all slots of a row takes 13, 30, 96 µs and more, and torch's sort 36 to 85 µs.
"""
MOST_SLOTS = 32768  # most slots of a row
MOST_KERNEL = 63
MOST_GROUPS = 64


def covers(scores: Tensor, positions: Tensor, kernel: int) -> bool:
    """Return whether the kernels cover these tensors, on CUDA or in Triton's interpreter.

    Args:
        scores: [B, K, n] or [B, K, G, n].
        positions: [B, K, n].
        kernel: window length in tokens.
    """
    if not able(scores) or scores.dtype != torch.float32 or scores.dim() not in (3, 4):
        return False
    if positions.dtype not in (torch.int32, torch.int64) or positions.stride(-1) != 1:
        return False
    if scores.dim() == 4 and not 1 <= scores.shape[2] <= MOST_GROUPS:
        return False
    return scores.numel() > 0 and scores.shape[-1] <= MOST_SLOTS and kernel <= MOST_KERNEL


def pool_in_time(
    scores: Tensor, positions: Tensor, kernel: int, pool: str, seen: int | Tensor, window: int
) -> Tensor:
    """Pool scores over neighbours in time order, as `policies.base.pool_in_time` does.

    Args:
        scores: [B, K, n] or [B, K, G, n] float32, any strides.
        positions: [B, K, n] int32 or int64; all of a row differ, and a row is contiguous.
        kernel: odd window length in tokens; 1 leaves the scores as they are.
        pool: 'max' or 'avg'; at borders, 'avg' is the mean over neighbours that count.
        seen: tokens read so far, an int or one int64 on the device.
        window: how many of the newest tokens do not count as neighbours.

    Returns:
        A contiguous copy, or `scores` itself with a kernel of 1.
    """
    if kernel == 1:
        return scores
    from kvcap.kernels.launch import empty, launch
    from kvcap.kernels.pool_triton import pool_ranks

    wide = scores if scores.dim() == 4 else scores[:, :, None]
    batch, heads, groups, slots = wide.shape
    ranks, counted, in_order = _in_time(wide, positions, seen, window)
    out = empty(*scores.shape, device=scores.device)
    block, maximum = 128, pool == "max"
    with torch.cuda.device_of(scores):
        launch(
            pool_ranks,
            (-(-slots // block), batch * heads * groups, 1),
            (scores.device, kernel, maximum),
            (ranks, counted, in_order, out, slots, groups, kernel, maximum, block),
            num_warps=4,
        )
    return out


def in_time(positions: Tensor) -> Tensor:
    """Return the slots of every row in time order, [B, K, n] float32, exact below 2^24.

    Args:
        positions: [B, K, n] int32 or int64; all of a row differ, and a row is contiguous.
    """
    index = torch.arange(positions.shape[-1], dtype=torch.float32, device=positions.device)
    wide = index.expand(*positions.shape[:2], 1, -1)
    return _in_time(wide, positions, 0, 0)[2][:, :, 0]


def _in_time(
    wide: Tensor, positions: Tensor, seen: int | Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return places in time [B·K, n], and in time order: marks of slots that count, and scores.

    See `pool_in_time` for the arguments; `wide` are scores [B, K, G, n].
    """
    from kvcap.kernels.launch import empty, launch
    from kvcap.kernels.pool_triton import rank_slots, sort_tiles

    batch, heads, groups, slots = wide.shape
    rows, device = batch * heads, wide.device
    log_tile = min(LOG_TILE, power_of_two(slots, 16).bit_length() - 1)
    whole = -(-slots >> log_tile) << log_tile  # slots with the last tile filled up
    tiles = torch.empty((rows, whole), dtype=positions.dtype, device=device)
    whose = torch.empty((rows, whole), dtype=torch.int32, device=device)
    ranks = torch.empty((rows, slots), dtype=torch.int32, device=device)
    counted = torch.empty((rows, slots), dtype=torch.int8, device=device)
    in_order = empty(*wide.shape, device=device)
    highest, padded = torch.iinfo(positions.dtype).max, power_of_two(groups)
    with torch.cuda.device_of(wide):
        block, chunk = 16, 256
        launch(
            sort_tiles,
            (whole // block, rows, 1),
            (device, highest, log_tile),
            (
                positions,
                tiles,
                whose,
                slots,
                heads,
                *positions.stride()[:2],
                highest,
                block,
                chunk,
                log_tile,
            ),
            num_warps=2,
        )
        block, chunk = min(128, 1 << log_tile), 8
        launch(
            rank_slots,
            (whole // block, rows, 1),
            (device, highest, padded, log_tile),
            (
                wide,
                tiles,
                whose,
                ranks,
                counted,
                in_order,
                slots,
                heads,
                groups,
                *wide.stride(),
                *seen_and_clock(seen, device),
                window,
                highest,
                padded,
                block,
                chunk,
                log_tile,
            ),
            num_warps=4,
        )
    return ranks, counted, in_order
