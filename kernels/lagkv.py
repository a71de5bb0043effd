# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Scores rows of slots by LagKV: how far a token's key and value stand out of the next partition.

Slots are put in time order as `pool.py` does it; then a program scores a partition. Knows tensors
only; triton is imported when first needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels import pool
from kvcap.kernels.device import power_of_two
from kvcap.kernels.launch import run
from kvcap.policies.base import Rows
from kvcap.policies.lagkv import LagKV

MOST_LAG = 128  # tokens of a partition, all of whose numbers a program holds at once


def covers(policy: LagKV) -> bool:
    """Return whether the kernel knows a policy's options: none of its own sinks, a short lag."""
    return policy.sinks == 0 and policy.lag <= MOST_LAG


def scores(keys: Tensor, values: Tensor, positions: Tensor, rows: Rows, lag: int) -> Tensor:
    """Score the slots of rows as `LagKV.score` does; arbitrary behind a row's slots.

    Args:
        keys: [slots, D], where the tokens count.
        values: [slots, D].
        positions: [B, K, n] int32 of the rows' slots, distinct, above all tokens' behind a row.
        rows: where the B·K rows lie among keys and values.
        lag: tokens of a partition.

    Returns:
        [B, K, n] float32.
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
