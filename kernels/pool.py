# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Pooling of scores in time on a GPU in two launches, without a sort.

A slot's place in time is the number of slots of its row with a smaller position: each is compared
with each, which up to some thousands costs less than sorting them. No atomics: two runs are equal
to the bit. Knows tensors only; triton is imported when first needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import able, power_of_two

MOST_SLOTS = 6144  # of a row: as long as that takes less than sorting (12 µs of 36 at 2,049)
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
    block, chunk, padded = 16, 256, power_of_two(groups)
    highest = torch.iinfo(positions.dtype).max
    with torch.cuda.device_of(scores):
        launch(
            rank_slots, (-(-slots // block), rows, 1), (device, highest, padded),
            (wide, positions, ranks, in_time, slots, heads, groups,
             *wide.stride(), *positions.stride()[:2], highest, padded, block, chunk),
            num_warps=2,
        )  # fmt: skip
        block, maximum = 128, pool == "max"
        launch(
            pool_ranks, (-(-slots // block), rows * groups, 1), (device, kernel, maximum),
            (ranks, in_time, out, slots, groups, kernel, maximum, block), num_warps=4,
        )  # fmt: skip
    return out
