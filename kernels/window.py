# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
# Triton has no annotations, and what it compiles can have none.
"""Scores of a window of queries over the slots, without anything of size window times slots.

Two passes over keys and values: `_forward` splits the slots, and each part leaves its output, the
largest logit and the sum of exponentials; `_merge` puts the parts together; `_score` reads keys and
values once more, from the end, where the cache of the chip still holds them, and adds up over the
window what one epilogue makes of every `p = A_tj`. No atomics: two runs are equal to the bit. Knows
no policy.

Letters as in `Observation`, and of a tile: `N` slots, `R = GP·WB` rows, the `WB` queries of a block
in time of each of `GP` query heads (both padded to powers of two). Tiles lie slots by rows, so that
the larger side is the one the matrix unit wants large. Padded rows see no slot: their `p` is 0.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kvcap.kernels.device import multiprocessors, power_of_two
from kvcap.kernels.launch import empty, launch
from kvcap.policies.base import Group, Observation

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOWEST = tl.constexpr(-1e30)  # for -inf, whose differences would be NaN
NOWHERE = tl.constexpr(2**31 - 1)  # the position of what no query sees
NEVER = tl.constexpr(-(2**30))  # the time of a query that sees nothing; may be added to
LOG2E = tl.constexpr(1 / math.log(2))

NEEDS_OUTPUT = ("dropkv", "andpro", "key", "joint")
"""Epilogues that read `a`; the others are `attention` and `value`."""


@triton.jit
def _dot(a, b):
    """`a · b`, added up in float32."""
    if INTERPRETED:  # its matrix product takes the bits of a bfloat16 for a number
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _dot_fine(a, b, PARTS: tl.constexpr):
    """`a · b` for a float32 `b`, taken as the sum of numbers of the type of `a`.

    Two parts of a bfloat16 hold 17 bits of `b`, three hold it whole.
    """
    if a.dtype == tl.float32:
        return _dot(a, b)
    high = b.to(a.dtype)
    rest = b - high.to(tl.float32)
    low = rest.to(a.dtype)
    found = _dot(a, high) + _dot(a, low)
    if PARTS == 3:
        found += _dot(a, (rest - low.to(tl.float32)).to(a.dtype))
    return found


@triton.jit
def _rows(block, G, w, GP: tl.constexpr, WB: tl.constexpr):
    """Query head within its group, time in the window, and whether there is such a row. [R]."""
    r = tl.arange(0, GP * WB)
    head, time = r // WB, block * WB + r % WB
    return head, time, (head < G) & (time < w)


@triton.jit
def _queries(base, stride_h, stride_t, block, G, w, D: tl.constexpr, DP: tl.constexpr,
             GP: tl.constexpr, WB: tl.constexpr):  # fmt: skip
    """The queries of a block in time, [R, DP], and their places in the window, [R]."""
    head, time, there = _rows(block, G, w, GP, WB)
    d = tl.arange(0, DP)
    at = base + head[:, None] * stride_h + time[:, None] * stride_t + d[None, :]
    q = tl.load(at, mask=there[:, None] & (d < D)[None, :], other=0.0)
    return q, tl.where(there, time, NEVER)


@triton.jit
def _tile(base, slots, stop, stride, D: tl.constexpr, DP: tl.constexpr):
    """Keys or values of `slots` below `stop`, [N, DP]."""
    d = tl.arange(0, DP)
    at = base + slots.to(tl.int64)[:, None] * stride + d[None, :]
    if DP == D:
        return tl.load(at, mask=(slots < stop)[:, None], other=0.0)
    return tl.load(at, mask=(slots < stop)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _tanh(x):
    """`tanh x`, by its series where the quotient would cancel digits."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))  # at most 1: no overflow
    large = (1 - e) / (1 + e)
    s = x * x
    small = x * (1 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    return tl.where(s < 0.04, small, tl.where(x < 0, -large, large))


@triton.jit
def _logits(q, k, scaling, softcap, CAPPED: tl.constexpr):
    """`z = scaling · k·q`, softcapped. [N, R]."""
    z = _dot(k, tl.trans(q)) * scaling
    if CAPPED:
        z = softcap * _tanh(z / softcap)
    return z


@triton.jit(do_not_specialize=["w", "n", "first", "chunk"])
def _forward(
    q_ptr, k_ptr, v_ptr, pos_ptr, part_ptr, sum_ptr,
    q_b, q_h, q_t, k_b, k_h, k_n, v_b, v_h, v_n, p_b, p_h,
    K, G, w, n, first, chunk, scaling, softcap,
    D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, WB: tl.constexpr, N: tl.constexpr,
    CAPPED: tl.constexpr, WITH_OUTPUT: tl.constexpr,
):  # fmt: skip
    """One part of the slots, one KV head and block in time: `a` [R, DP], largest logit, sum [R].

    The sum is that of `exp(z - largest)`. Where no slot of the part is visible, the largest logit
    is so low that the arbitrary `a` counts for nothing.
    """
    R: tl.constexpr = GP * WB
    part, row = tl.program_id(0), tl.program_id(1)
    block, b, h = tl.program_id(2), (row // K).to(tl.int64), (row % K).to(tl.int64)
    q_base = q_ptr + b * q_b + h * G * q_h
    q, time = _queries(q_base, q_h, q_t, block, G, w, D, DP, GP, WB)
    k_base, v_base = k_ptr + b * k_b + h * k_h, v_ptr + b * v_b + h * v_h
    pos_base = pos_ptr + b * p_b + h * p_h
    top = tl.full([R], LOWEST, tl.float32)
    total = tl.full(
        [N, R], 0.0, tl.float32
    )  # added up once, at the end: a sum here costs a barrier
    a = tl.full([DP, R], 0.0, tl.float32)
    stop = tl.minimum(part * chunk + chunk, n)
    for start in range(part * chunk, stop, N):
        slots = start + tl.arange(0, N)
        k = _tile(k_base, slots, stop, k_n, D, DP)
        z = _logits(q, k, scaling, softcap, CAPPED)
        position = tl.load(pos_base + slots, mask=slots < stop, other=NOWHERE)
        z = tl.where(position[:, None] <= (first + time)[None, :], z, LOWEST)
        higher = tl.maximum(top, tl.max(z, 0))
        p = _exp(z - higher[None, :])
        shrink = _exp(top - higher)
        total = total * shrink[None, :] + p
        if WITH_OUTPUT:
            v = _tile(v_base, slots, stop, v_n, D, DP)
            a = a * shrink[None, :] + _dot_fine(tl.trans(v), p, 2)
        top = higher
    rows = tl.num_programs(1) * tl.num_programs(2)
    row = row * tl.num_programs(2) + block
    at = (row * tl.num_programs(0) + part) * R + tl.arange(0, R)
    each = tl.sum(total, 0)
    tl.store(sum_ptr + at, top)
    tl.store(sum_ptr + rows * tl.num_programs(0) * R + at, each)
    if WITH_OUTPUT:
        d = tl.arange(0, DP)
        tl.store(part_ptr + at[None, :] * DP + d[:, None], a / each[None, :])


@triton.jit(do_not_specialize=["parts"])
def _merge(part_ptr, sum_ptr, a_ptr, out_ptr, parts, R: tl.constexpr, DP: tl.constexpr,
           PARTS: tl.constexpr, WITH_OUTPUT: tl.constexpr):  # fmt: skip
    """One row of `a` [DP], its largest logit and its sum of exponentials over all parts."""
    row, r, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    part, d = tl.arange(0, PARTS), tl.arange(0, DP)
    at, there = (row * parts + part) * R + r, part < parts
    tops = tl.load(sum_ptr + at, mask=there, other=LOWEST)
    top = tl.max(tops, 0)
    weight = _exp(tops - top) * tl.load(sum_ptr + rows * parts * R + at, mask=there, other=0.0)
    total = tl.sum(weight, 0)
    tl.store(out_ptr + row * R + r, top)
    tl.store(out_ptr + (rows + row) * R + r, total)
    if WITH_OUTPUT:
        each = tl.load(part_ptr + at[:, None] * DP + d[None, :], mask=there[:, None], other=0.0)
        a = tl.sum(each * weight[:, None], 0) / total
        tl.store(a_ptr + (row * R + r) * DP + d, a)


@triton.jit
def _merged(a_ptr, sum_ptr, row, rows, R: tl.constexpr, DP: tl.constexpr,
            WITH_OUTPUT: tl.constexpr):  # fmt: skip
    """What `_merge` left: `a` [R, DP] where it is needed, largest logits [R], sums [R]."""
    at = row * R + tl.arange(0, R)
    top, total = tl.load(sum_ptr + at), tl.load(sum_ptr + rows * R + at)
    a = top
    if WITH_OUTPUT:
        a = tl.load(a_ptr + at[:, None] * DP + tl.arange(0, DP)[None, :])
    return a, top, total


@triton.jit
def _cost(q, time, top, total, a, k, v, position, first, scaling, softcap, epsilon,
          KIND: tl.constexpr, CAPPED: tl.constexpr, ROUNDED: tl.constexpr):  # fmt: skip
    """What the epilogue makes of every query and slot, 0 where masked. [N, R]."""
    z = _logits(q, k, scaling, softcap, CAPPED)
    visible = position[:, None] <= (first + time)[None, :]
    p = _exp(tl.where(visible, z - top[None, :], LOWEST)) * (1 / total)[None, :]
    if KIND == "attention":
        cost = p
    else:
        wide = v.to(tl.float32)
        squares = tl.sum(wide * wide, 1)[:, None]
        if KIND == "value":
            cost = p * p * squares
        else:
            # |a - v|² is a small difference of large numbers where a query looks at one slot.
            along = _dot_fine(v, tl.trans(a), 3)
            distance = tl.maximum(tl.sum(a * a, 1)[None, :] + squares - 2 * along, 0.0)
            z = tl.where(visible, z, 0.0)
            if KIND == "andpro":
                cost = p * along
            elif KIND == "dropkv":
                if ROUNDED:
                    p = p.to(tl.bfloat16).to(tl.float32)
                ratio = p / (1 - p + epsilon)
                cost = ratio * ratio * distance
            elif KIND == "key":
                cost = p * z * (p * z) * distance
            else:
                cross = 2 * p * p * z * (squares - along)
                cost = cross + p * p * squares + p * z * (p * z) * distance
    return cost


@triton.jit(do_not_specialize=["w", "n", "first", "chunk"])
def _score(
    q_ptr, k_ptr, v_ptr, pos_ptr, a_ptr, sum_ptr, out_ptr,
    q_b, q_h, q_t, k_b, k_h, k_n, v_b, v_h, v_n, p_b, p_h,
    K, G, w, n, first, chunk, scaling, softcap, epsilon,
    D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, WB: tl.constexpr, N: tl.constexpr,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, WITH_OUTPUT: tl.constexpr,
    CAPPED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """The scores of one part of a KV head's slots: [n], or [G, n] of its query heads."""
    R: tl.constexpr = GP * WB
    part, row, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h = (row // K).to(tl.int64), (row % K).to(tl.int64)
    q_base = q_ptr + b * q_b + h * G * q_h
    k_base, v_base = k_ptr + b * k_b + h * k_h, v_ptr + b * v_b + h * v_h
    pos_base = pos_ptr + b * p_b + h * p_h
    heads = tl.arange(0, GP)
    if BLOCKS == 1:
        q, time = _queries(q_base, q_h, q_t, 0, G, w, D, DP, GP, WB)
        a, top, total = _merged(a_ptr, sum_ptr, row, rows, R, DP, WITH_OUTPUT)
    begin, stop = part * chunk, tl.minimum(part * chunk + chunk, n)
    tiles = tl.cdiv(stop - begin, N)
    for i in range(tiles):
        slots = begin + (tiles - 1 - i) * N + tl.arange(0, N)
        k = _tile(k_base, slots, stop, k_n, D, DP)
        v = k
        if KIND != "attention":
            v = _tile(v_base, slots, stop, v_n, D, DP)
        position = tl.load(pos_base + slots, mask=slots < stop, other=NOWHERE)
        if BLOCKS == 1:
            cost = _cost(q, time, top, total, a, k, v, position, first, scaling, softcap, epsilon,
                         KIND, CAPPED, ROUNDED)  # fmt: skip
        else:
            cost = tl.full([N, R], 0.0, tl.float32)
            for block in range(BLOCKS):
                q, time = _queries(q_base, q_h, q_t, block, G, w, D, DP, GP, WB)
                a, top, total = _merged(a_ptr, sum_ptr, row * BLOCKS + block, rows * BLOCKS,
                                        R, DP, WITH_OUTPUT)  # fmt: skip
                cost += _cost(q, time, top, total, a, k, v, position, first, scaling, softcap,
                              epsilon, KIND, CAPPED, ROUNDED)  # fmt: skip
        if GROUP == "sum" or GROUP == "mean":
            summed = tl.sum(cost, 1)
            summed = summed / G if GROUP == "mean" else summed
            tl.store(out_ptr + row.to(tl.int64) * n + slots, summed, mask=slots < stop)
        else:
            each = tl.sum(tl.reshape(cost, [N, GP, WB]), 2)  # [N, GP]
            if GROUP == "max":
                most = tl.max(tl.where((heads < G)[None, :], each, LOWEST), 1)
                tl.store(out_ptr + row.to(tl.int64) * n + slots, most, mask=slots < stop)
            else:
                at = (row.to(tl.int64) * G + heads)[None, :] * n + slots[:, None]
                tl.store(out_ptr + at, each, mask=(slots < stop)[:, None] & (heads < G)[None, :])


class Tiling(NamedTuple):
    """How the work of one call is cut."""

    DP: int  # head size, padded
    GP: int  # query heads of a group, padded
    WB: int  # queries of a block in time, padded
    blocks: int  # of those
    N: int  # slots of a tile
    chunk: int  # slots of a part of `_forward`, a multiple of N
    parts: int
    score_chunk: int  # likewise of `_score`, whose programs do all blocks in time
    score_parts: int
    warps: int
    stages: int


@lru_cache
def tiling(
    rows: int, G: int, w: int, n: int, D: int, itemsize: int, output: bool, sms: int
) -> Tiling:
    """Sizes by a few rules, measured on an H200.

    Args:
        rows: `B·K`, the KV heads there are.
        G: query heads of each.
        w: queries.
        n: slots.
        D: head size.
        itemsize: bytes of a key's element.
        output: whether `a` is needed, which takes registers.
        sms: multiprocessors.
    """
    DP, GP = power_of_two(D, 16), power_of_two(G)
    most = max(1, (64 if output else 128) // GP)
    WB = max(min(power_of_two(w), most), 16 // GP)
    blocks = -(-w // WB)
    N = max(16, min(128, 16384 // (DP * itemsize)))
    # Two programs fit on a multiprocessor; all start at once and end together.
    chunk, score_chunk = (
        -(-max(2 * N, -(-n * programs // (2 * sms))) // N) * N for programs in (rows * blocks, rows)
    )
    warps = 8 if output and GP * WB > 32 else 4
    return Tiling(
        DP, GP, WB, blocks, N, chunk, -(-n // chunk), score_chunk, -(-n // score_chunk), warps, 3
    )  # fmt: skip


def scores(
    seen: Observation,
    kind: str,
    group: Group | None,
    *,
    epsilon: float = 0.0,
    rounded: bool = False,
) -> Tensor:
    """Sum of an epilogue over the observed queries.

    Args:
        seen: queries, keys, values and positions, whatever their strides but the last.
        kind: the epilogue: 'dropkv', 'andpro', 'attention', 'value', 'key' or 'joint'.
        group: how the query heads of a KV head are put together; None: not at all.
        epsilon: of the ratio of 'dropkv'.
        rounded: whether 'dropkv' rounds `p` to bfloat16.

    Returns:
        [B, K, n], or [B, K, G, n] without `group`; float32.
    """
    q, k, v, positions = seen.queries, seen.keys, seen.values, seen.positions
    assert q is not None
    (B, K, n, D), w, device = k.shape, q.shape[2], k.device
    G, output, capped = q.shape[1] // K, kind in NEEDS_OUTPUT, seen.softcap is not None
    t = tiling(B * K, G, w, n, D, k.element_size(), output, multiprocessors(device))
    R, rows = t.GP * t.WB, B * K * t.blocks
    part_sums = empty(2 * rows * t.parts * R, device=device)
    part = empty(rows * t.parts * R * t.DP if output else 0, device=device)
    sums = empty(2 * rows * R, device=device)
    a = empty(rows * R * t.DP if output else 0, device=device)
    out = empty(B, K, n, device=device) if group else empty(B, K, G, n, device=device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *positions.stride()[:2])
    shape, scale = (K, G, w, n, seen.seen - w), (float(seen.scaling), float(seen.softcap or 0))
    sizes, options = (D, t.DP, t.GP, t.WB, t.N), {"num_warps": t.warps, "num_stages": t.stages}
    starts = tuple(x.data_ptr() % 16 for x in (q, k, v, positions))
    static = (K, G, sizes, t.warps, t.stages, output, capped)
    key = (device, k.dtype, positions.dtype, starts, strides, static)
    launch(
        _forward, (t.parts, B * K, t.blocks), key,
        (q, k, v, positions, part, part_sums, *strides, *shape, t.chunk, *scale,
         *sizes, capped, output), **options,
    )  # fmt: skip
    padded = power_of_two(t.parts)
    launch(
        _merge, (rows, R, 1), (device, R, t.DP, padded, output),
        (part, part_sums, a, sums, t.parts, R, t.DP, padded, output), num_warps=2,
    )  # fmt: skip
    variant = (t.blocks, kind, group or "", output, capped, rounded)
    launch(
        _score, (t.score_parts, B * K, 1), (key, variant),
        (q, k, v, positions, a, sums, out, *strides, *shape, t.score_chunk, *scale, epsilon,
         *sizes, *variant), **options,
    )  # fmt: skip
    return out
