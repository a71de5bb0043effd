# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Pooling of scores in time on a GPU, without a sort of whole rows.

A slot's place in time is the number of slots of its row with a smaller position. Each is compared
with each in short rows; long ones are cut into tiles, each is compared with those of its tile, and
looked for by bisection in every tile thus sorted. Both find the same places. No atomics: two runs
are equal to the bit. Knows tensors only; triton is imported when first needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import able, power_of_two

# Of 8 rows on an H200, comparing each with each takes 12, 96 and 350 µs at 2,049, 8,193 and 16,384
# slots, torch's sort 36, 80 and 85. Tiles, whose work grows slower, are not measured yet.
COUNTED = 6144  # slots of a row, at most, that are compared each with each
LOG_TILE = 10  # of a longer row: 1,024 slots a tile, a multiple of what a program searches for
MOST_SLOTS = 32768  # of a row
MOST_KERNEL = 63
MOST_GROUPS = 64


def covers(scores: Tensor, positions: Tensor, kernel: int) -> bool:
    """Whether the kernels can do this here: on CUDA, or on a CPU in triton's interpreter.

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


def pool_in_time(scores: Tensor, positions: Tensor, kernel: int, pool: str) -> Tensor:
    """1-D pooling over the slots in time order, as `policies.base.pool_in_time` has it.

    Args:
        scores: [B, K, n] or [B, K, G, n] float32, any strides.
        positions: [B, K, n] int32 or int64, those of a row distinct and contiguous.
        kernel: odd window length in tokens; 1 leaves the scores as they are.
        pool: 'max' or 'avg' (borders average over what exists).

    Returns:
        A contiguous copy, or `scores` themselves with a kernel of 1.
    """
    if kernel == 1:
        return scores
    from kvcap.kernels.launch import empty, launch
    from kvcap.kernels.pool_triton import pool_ranks, rank_slots

    wide = scores if scores.dim() == 4 else scores[:, :, None]
    batch, heads, groups, slots = wide.shape
    rows, device = batch * heads, scores.device
    ranks = torch.empty((rows, slots), dtype=torch.int32, device=device)
    in_time, out = (empty(*shape, device=device) for shape in (wide.shape, scores.shape))
    highest, padded = torch.iinfo(positions.dtype).max, power_of_two(groups)
    with torch.cuda.device_of(scores):
        if slots <= COUNTED:
            log_tile, block, chunk, warps = 0, 16, 256, 2
            whose = ranks  # not read
        else:
            log_tile, block, chunk, warps = LOG_TILE, 128, 8, 4
            positions, whose = _in_tiles(positions)
        launch(
            rank_slots, (-(-positions.shape[-1] // block), rows, 1),
            (device, highest, padded, log_tile),
            (wide, positions, whose, ranks, in_time, slots, heads, groups,
             *wide.stride(), *positions.stride()[:2], highest, padded, block, chunk, log_tile),
            num_warps=warps,
        )  # fmt: skip
        block, maximum = 128, pool == "max"
        launch(
            pool_ranks, (-(-slots // block), rows * groups, 1), (device, kernel, maximum),
            (ranks, in_time, out, slots, groups, kernel, maximum, block), num_warps=4,
        )  # fmt: skip
    return out


def _in_tiles(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [B, K, n] sorted within tiles, the last filled up, and whose they are.

    Returns:
        Positions and slots (int32), both [B, K, n rounded up to whole tiles].
    """
    from kvcap.kernels.launch import launch
    from kvcap.kernels.pool_triton import sort_tiles

    batch, heads, slots = positions.shape
    shape = batch, heads, -(-slots >> LOG_TILE) << LOG_TILE
    tiles = torch.empty(shape, dtype=positions.dtype, device=positions.device)
    whose = torch.empty(shape, dtype=torch.int32, device=positions.device)
    block, chunk, highest = 16, 256, torch.iinfo(positions.dtype).max
    launch(
        sort_tiles, (shape[-1] // block, batch * heads, 1), (positions.device, highest, LOG_TILE),
        (positions, tiles, whose, slots, heads, *positions.stride()[:2],
         highest, block, chunk, LOG_TILE),
        num_warps=2,
    )  # fmt: skip
    return tiles, whose
