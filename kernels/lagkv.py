# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Scores rows of slots by LagKV: how far keys and values lie outside the next partition's range.

Slots are put in time order by `pool.py`; then each program scores a partition. Knows tensors only;
triton is imported when first needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels import pool
from kvcap.kernels.device import power_of_two
from kvcap.kernels.launch import run
from kvcap.policies.base import RowRanges
from kvcap.policies.lagkv import LagKV

MOST_LAG = 128  # most tokens of a partition, as a program holds all its numbers at once


def covers(policy: LagKV) -> bool:
    """Return whether the kernel covers a policy's options: no sinks of its own, and a short lag."""
    return policy.sinks == 0 and policy.lag <= MOST_LAG


def scores(keys: Tensor, values: Tensor, positions: Tensor, rows: RowRanges, lag: int) -> Tensor:
    """Score the slots of rows as `LagKV.score` does.

    Args:
        keys: [slots, D], rotated to the tokens' present positions.
        values: [slots, D].
        positions: positions of the rows' slots, [B, K, n] int32; all of a row differ, and those
            behind its slots are above all others.
        rows: first slot and length of the B·K rows.
        lag: tokens of a partition.

    Returns:
        Scores [B, K, n] float32, arbitrary behind a row's slots.
    """
    from kvcap.kernels.lagkv_triton import score_partition

    batch, heads, slots = positions.shape
    order = pool.in_time(positions)
    out = torch.empty(batch, heads, slots, device=keys.device)
    size, lag_pad = keys.shape[1], power_of_two(lag, 16)
    with torch.cuda.device_of(keys):
        run(
            score_partition,
            (-(-slots // lag), batch * heads),
            keys,
            values,
            order,
            rows.starts,
            rows.lengths,
            out,
            slots,
            lag,
            SIZE=size,
            SIZE_PAD=power_of_two(size, 16),
            LAG_PAD=lag_pad,
            num_warps=4 if lag_pad <= 32 else 8,
        )
    return out
