# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton functions of `kernels/critical.py`, which imports this when needed."""

import triton
import triton.language as tl

from kvcap.kernels.choose_triton import (
    HIGHEST,
    PINNED,
    PINS,
    ROWS,
    ordered,
    pins_of_row,
    worth_of,
)
from kvcap.kernels.decode_triton import dot
from kvcap.kernels.rows_triton import cut


@triton.jit(do_not_specialize=["values", "count", "length", "columns"])
def project(
    values,  # [B, K, T, D]
    weights,  # [K, G, D, hidden]
    out,  # [B, K, T, G, parts]
    count,  # B·T
    length,  # T
    hidden,
    group,
    parts,
    columns,  # columns of a part, a multiple of COLUMNS
    value_b,
    value_h,
    value_t,
    weight_k,
    weight_g,
    weight_d,
    weight_c,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    ROWS: tl.constexpr,  # tokens of a program
    COLUMNS: tl.constexpr,  # columns of the projection that are multiplied at once
    WIDEN: tl.constexpr,  # see `dot`
):
    """Write the sums of absolute values of some columns of one query head's projected tokens."""
    part, query_head = tl.program_id(0), tl.program_id(2)
    head, its = query_head // group, query_head % group
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    batch, t = (m // length).to(tl.int64), m % length
    d, c = tl.arange(0, SIZE_PAD), tl.arange(0, COLUMNS)
    at = values + batch * value_b + head * value_h + t * value_t
    v = tl.load(at[:, None] + d[None, :], (m < count)[:, None] & (d < SIZE)[None, :], 0.0)
    weights += head.to(tl.int64) * weight_k + its * weight_g
    total = tl.zeros([ROWS], tl.float32)
    first = part * columns
    for begin in tl.range(first, tl.minimum(first + columns, hidden), COLUMNS, num_stages=3):
        column = begin + c
        offset = column.to(tl.int64)[:, None] * weight_c + d[None, :] * weight_d
        w = tl.load(weights + offset, (column < hidden)[:, None] & (d < SIZE)[None, :], 0.0)
        x = dot(v, w.T, tl.zeros([ROWS, COLUMNS], tl.float32), WIDEN)
        total += tl.sum(tl.abs(x), 1)
    row = (batch * KV_HEADS + head) * length + t
    tl.store(out + (row * group + its) * parts + part, total, m < count)


@triton.jit(do_not_specialize=[*PINS, *ROWS, "positions", "norm", "budgets"])
def rescore_rows(
    scores,  # [B, K, n]
    positions,  # [B, K, n]
    norm,  # [slots]
    out,  # [B, K, n]
    slots,  # n
    heads,  # K
    score_b,
    score_h,
    score_n,
    position_b,
    position_h,
    sinks,
    recents,
    seen,
    clock,
    spans,
    start_0,
    stop_0,
    start_1,
    stop_1,
    start_2,
    stop_2,
    start_3,
    stop_3,
    start_4,
    stop_4,
    start_5,
    stop_5,
    start_6,
    stop_6,
    start_7,
    stop_7,
    starts,
    lengths,  # [B·K] int32
    row_pins,  # as in `pins_of_row`
    budgets,  # [B·K] int32
    alpha,
    epsilon,
    queries,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # see `cut`
):
    """Rescore a whole row: its best slots rank above all others, which rank by score and norm."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    scores += batch * score_b + head * score_h
    positions += batch * position_b + head * position_h
    norm += tl.load(starts + row).to(tl.int64)
    out += row * slots
    slots, budget = tl.load(lengths + row), tl.load(budgets + row)
    sinks, recents = pins_of_row(row_pins, row)
    lowest, free = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)  # free: not pinned
    for begin in range(0, slots, BLOCK):
        worth, _ = worth_of(
            scores,
            positions,
            begin + tl.arange(0, BLOCK),
            slots,
            score_n,
            sinks,
            recents,
            seen,
            clock,
            spans,
            start_0,
            stop_0,
            start_1,
            stop_1,
            start_2,
            stop_2,
            start_3,
            stop_3,
            start_4,
            stop_4,
            start_5,
            stop_5,
            start_6,
            stop_6,
            start_7,
            stop_7,
        )
        lowest = tl.minimum(lowest, tl.min(worth, 0))
        free += tl.sum((worth < float("inf")).to(tl.int32), 0)
    pinned = slots - free
    best = tl.floor(alpha * (budget - pinned).to(tl.float32)).to(tl.int32)
    count = tl.maximum(free - tl.maximum(best, 0), 0)
    low, oldest = cut(
        scores,
        positions,
        count,
        slots,
        score_n,
        sinks,
        recents,
        seen,
        clock,
        spans,
        start_0,
        stop_0,
        start_1,
        stop_1,
        start_2,
        stop_2,
        start_3,
        stop_3,
        start_4,
        stop_4,
        start_5,
        stop_5,
        start_6,
        stop_6,
        start_7,
        stop_7,
        BLOCK,
        WHOLE,
    )
    for begin in range(0, slots, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        worth, position = worth_of(
            scores,
            positions,
            slot,
            slots,
            score_n,
            sinks,
            recents,
            seen,
            clock,
            spans,
            start_0,
            stop_0,
            start_1,
            stop_1,
            start_2,
            stop_2,
            start_3,
            stop_3,
            start_4,
            stop_4,
            start_5,
            stop_5,
            start_6,
            stop_6,
            start_7,
            stop_7,
        )
        x = ordered(worth)
        behind = (x < low) | ((x == low) & (position < oldest))
        held = slot < slots
        score = tl.where(x == PINNED, 0.0, worth)
        weight = tl.load(norm + slot, held, 0.0)
        each = tl.div_rn(score - lowest, tl.full([BLOCK], 0.0, tl.float32) + queries)
        other = (each + epsilon) * weight
        tl.store(out + slot, tl.where(behind, other, HIGHEST), held)
