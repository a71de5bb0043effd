# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Computes CriticalKV: norms of projected values, and scores that let the best stay first.

The norms of a block read the output projection once, in the model's own type with sums in float32.
Rescoring finds the best slots of a row without sorting it. Knows tensors only; triton is imported
when first needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.arguments import Pins, strides
from kvcap.kernels.device import DTYPES, able, multiprocessors, on_gpu, power_of_two
from kvcap.kernels.launch import empty, run
from kvcap.kernels.rows import tile_of_row
from kvcap.policies.base import Rows

MOST_SIZE = 256  # largest size of a head
PROGRAMS = 4  # programs for each multiprocessor, if there is as much to do


def covers_norms(values: Tensor, weights: Tensor) -> bool:
    """Return whether the kernel of `norms` covers these arguments on their device."""
    covered_dtype = values.dtype in DTYPES and weights.dtype == values.dtype
    alike = weights.dim() == 4 and weights.shape[0] == values.shape[1]
    alike = alike and weights.shape[2] == values.shape[3] <= MOST_SIZE and values.stride(-1) == 1
    return able(values) and covered_dtype and alike and values.numel() > 0


def norms(values: Tensor, weights: Tensor) -> Tensor:
    """Return `‖v W‖₁`, the mean over a KV head's query heads, [B, K, T] float32.

    Args:
        values: [B, K, T, D]; the last stride is 1, others are free.
        weights: [K, G, D, hidden], any strides.
    """
    from kvcap.kernels.critical_triton import project

    (batch, kv_heads, length, size), (_, group, _, hidden) = values.shape, weights.shape
    count, size_pad = batch * length, power_of_two(size, 16)
    rows = 16 if count <= 16 else 64 if count <= 64 else 128
    at_once = max(16, min(128, 32768 // (size_pad * values.element_size())))
    tiles, most = -(-hidden // at_once), kv_heads * group * -(-count // rows)
    # Few programs read a block's values, so each must read many columns.
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
    """Return new scores [B, K, n] as `CriticalKV.rescore` does, of scores made finite.

    Args:
        scores: [B, K, n] float32.
        positions: [B, K, n] int32.
        norm: norms of projected values, [slots] float32.
        pins: `seen` and `spans`; `row_pins` takes the place of `sinks` and `recents`.
        budgets: slots of each row that stay, [B·K] int32.
        alpha: option of the rescorer.
        epsilon: option of the rescorer.
        queries: number of queries that scores are summed over.
        rows: first slot and length of each row. Nothing is written behind a row.
        row_pins: how many first and newest tokens of each row stay, [B·K, 2] int32.
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
