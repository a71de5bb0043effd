# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Shares a layer's slots out among its heads by their scores, and computes where heads then lie.

The host reads nothing, so a CUDA graph can capture it. The tensor code of Ada-KV takes some hundred
tiny launches a layer; kernels of the same formula take two. Triton is imported when first needed.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcap.kernels.arguments import Pins, strides
from kvcap.kernels.device import power_of_two
from kvcap.kernels.launch import run
from kvcap.policies.base import HeadBudget, RowRanges, evenly
from kvcap.policies.base.eviction import LOWEST

MOST_HEADS = 64
MOST_AT_ONCE = 32768  # slots of a layer, and one more, that a program holds in registers


class Division(NamedTuple):
    """A division of a layer's slots among its heads; all numbers are int32."""

    kept: Tensor  # [B·K], slots of each row that stay
    budgets: Tensor  # [B·K], slots that each row may have from now on
    starts: Tensor  # [B·K + 1], where rows begin then, and where the last one ends


def by_split(
    budget: HeadBudget,
    scores: Tensor,
    positions: Tensor,
    pins: Pins,
    rows: RowRanges,
    row_pins: Tensor,
    targets: Tensor,
    average: int,
    block: int,
) -> Division:
    """Divide a layer's slots by the tensor code of any budget, if a row has too many.

    `as_adakv` explains the other arguments.
    """
    (batch, heads), lengths = scores.shape[:2], rows.lengths
    pinned = pins.of_rows(positions, row_pins)
    due = (lengths > targets).any()
    scores = scores.nan_to_num(nan=LOWEST)
    kept = budget.split(scores, pinned, positions, lengths.view(batch, heads), average)
    head_index = torch.arange(heads, device=scores.device)
    budgets = kept + evenly(heads * average - kept.sum(-1, keepdim=True), heads, head_index)
    kept, budgets = (torch.where(due, x.flatten(), targets).int() for x in (kept, budgets))
    first = rows.starts[:1]
    starts = torch.cat((first, first + (budgets + block).cumsum(0)))
    return Division(kept, budgets, torch.where(due, starts, rows.starts).int())


def as_adakv(
    safeguard: Fraction,
    scores: Tensor,
    positions: Tensor,
    pins: Pins,
    rows: RowRanges,
    row_pins: Tensor,
    targets: Tensor,
    average: int,
    block: int,
) -> Division:
    """Divide a layer's slots as `AdaKV.split` does, if a row has too many.

    Args:
        safeguard: share of the unpinned slots that is divided evenly.
        scores: [B, K, longest], arbitrary behind a row's slots.
        positions: [B, K, longest] int32, contiguous.
        pins: pinned slots, besides those of `row_pins`.
        rows: first slot and length of each row.
        row_pins: how many first and newest tokens of each row stay, [B·K, 2] int32.
        targets: slots that each row may have so far, [B·K] int32.
        average: mean number of slots of a head.
        block: further slots behind each row's, for a block.
    """
    from kvcap.kernels.division_triton import divide_layer, rank_worths

    scores = pins.mark(scores, positions)
    (batch, heads, slots), device = scores.shape, scores.device
    assert positions.is_contiguous()
    count, new = batch * heads, partial(torch.empty, dtype=torch.int32, device=device)
    worths, row_pinned = new(count, slots), new(count)
    # The result if no row has too many slots: nothing changes.
    division = Division(targets.clone(), targets.clone(), rows.starts.clone())
    tile = min(2048, power_of_two(slots, 32))
    layer_tile = power_of_two(slots * heads + 1, 32)
    whole = layer_tile <= MOST_AT_ONCE
    layer_tile = layer_tile if whole else 8192
    with torch.cuda.device_of(scores):
        run(
            rank_worths,
            (count,),
            scores,
            positions,
            worths,
            row_pinned,
            slots=slots,
            heads=heads,
            **strides("bhn", score=scores),
            **pins.arguments(device),
            lengths=rows.lengths,
            row_pins=row_pins,
            BLOCK=tile,
            num_warps=max(1, tile // 256),
        )
        run(
            divide_layer,
            (batch,),
            worths,
            positions,
            row_pinned,
            rows.lengths,
            targets,
            rows.starts,
            *division,
            slots=slots,
            average=average,
            block=block,
            part=safeguard.numerator,
            whole=safeguard.denominator,
            rows=count,
            heads=heads,
            HEADS=power_of_two(heads),
            ALL=power_of_two(count),
            BLOCK=layer_tile,
            WHOLE=whole,
            ROW_BLOCK=min(8192, power_of_two(slots, 32)),
            num_warps=min(32, max(1, layer_tile // 256)),
        )
    return division
