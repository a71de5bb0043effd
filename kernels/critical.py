# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Computes CriticalKV: norms of projected values, and scores that let the best stay first.

A token's norm reads the output projection once, of a block in the model's own type with sums in
float32. Rescoring finds the best slots of a row without sorting it. Knows tensors only; triton is
imported when first needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.arguments import Pins, strides
from kvcap.kernels.device import DTYPES, able, multiprocessors, on_gpu, power_of_two
from kvcap.kernels.launch import empty, run
from kvcap.kernels.rows import tile_of_row
from kvcap.policies.base import Rows

MOST_SIZE = 256  # of a head
PROGRAMS = 4  # for each multiprocessor, where there is as much to do


def covers_norms(values: Tensor, weights: Tensor) -> bool:
    """Return whether `norms` can compute this here, with these arguments."""
    known = values.dtype in DTYPES and weights.dtype == values.dtype
    alike = weights.dim() == 4 and weights.shape[0] == values.shape[1]
    alike = alike and weights.shape[2] == values.shape[3] <= MOST_SIZE and values.stride(-1) == 1
    return able(values) and known and alike and values.numel() > 0


def norms(values: Tensor, weights: Tensor) -> Tensor:
    """Return `‖v W‖₁`, the mean over a KV head's query heads. [B, K, T], float32.

    Args:
        values: [B, K, T, D], any strides but of the last dimension.
        weights: [K, G, D, hidden], any strides.
    """
    from kvcap.kernels.critical_triton import project

    (batch, kv_heads, length, size), (_, group, _, hidden) = values.shape, weights.shape
    count, size_pad = batch * length, power_of_two(size, 16)
    rows = 16 if count <= 16 else 64 if count <= 64 else 128
    at_once = max(16, min(128, 32768 // (size_pad * values.element_size())))
    tiles, most = -(-hidden // at_once), kv_heads * group * -(-count // rows)
    # A block's values are read by few programs, each of which then reads many columns.
    parts = max(1, min(tiles, -(-PROGRAMS * multiprocessors(values.device) // most)))
    columns = -(-tiles // parts) * at_once
    parts = -(-hidden // columns)
    out = empty(batch, kv_heads, length, group * parts, device=values.device)
    with torch.cuda.device_of(values):
        run(
            project,
            (parts, -(-count // rows), kv_heads * group),
            values,
            weights,
            out,
            count,
            length,
            hidden,
            group,
            parts,
            columns,
            *values.stride()[:3],
            *weights.stride(),
            KV_HEADS=kv_heads,
            SIZE=size,
            SIZE_PAD=size_pad,
            ROWS=rows,
            COLUMNS=at_once,
            WIDEN=not on_gpu(values),
            num_warps=8 if rows == 128 else 4,
        )
    return out.sum(-1) / group


def rescore(
    scores: Tensor,
    positions: Tensor,
    norm: Tensor,
    pins: Pins,
    budgets: Tensor,
    alpha: float,
    epsilon: float,
    queries: int,
    rows: Rows,
    row_pins: Tensor,
) -> Tensor:
    """Return new scores [B, K, n] as `CriticalKV.rescore` has them, of scores made finite.

    Args:
        scores: [B, K, n] float32.
        positions: [B, K, n] int32.
        norm: [slots] float32, of projected values.
        pins: `seen` and `spans`; how many first and newest tokens stay each row says for itself.
        budgets: [B·K] int32, slots of each row that stay.
        alpha: of the policy.
        epsilon: of the policy.
        queries: that scores are summed over.
        rows: where heads lie. Behind a row nothing is written.
        row_pins: [B·K, 2] int32, how many first and newest tokens of each row stay.
    """
    from kvcap.kernels.critical_triton import rescore_rows

    batch, heads, slots = positions.shape
    out = empty(batch, heads, slots, device=scores.device)
    with torch.cuda.device_of(scores):
        run(
            rescore_rows,
            (batch * heads,),
            scores,
            positions,
            norm,
            out,
            slots=slots,
            heads=heads,
            **strides("bhn", score=scores),
            **strides("bh", position=positions),
            **pins.arguments(scores.device),
            starts=rows.starts,
            lengths=rows.lengths,
            row_pins=row_pins,
            budgets=budgets,
            alpha=alpha,
            epsilon=epsilon,
            queries=float(queries),
            **tile_of_row(slots),
        )
    return out
