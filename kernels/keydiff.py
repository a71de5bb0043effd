# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
# Triton has no annotations, and functions that it compiles can have none.
"""Computes KeyDiff's scores in two passes over the keys, or in one if their sum is known.

`_sum` writes the sum of each part of the slots. `_cosine` first adds these up, then reads the keys
again from the end, as the GPU's cache still holds those read last. Letters are those of
`Observation`; `N` is the number of slots of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcap.kernels.device import multiprocessors, on_gpu, power_of_two
from kvcap.kernels.launch import empty, launch, run
from kvcap.kernels.token import REGISTERS
from kvcap.kernels.turn_triton import halves, turned_by
from kvcap.policies.base import RowRanges

MOST_FEW = 2**17  # with fewer rows of keys than this, shorter programs are faster
EPSILON = tl.constexpr(1e-8)  # epsilon of torch's cosine_similarity


@triton.jit
def _tile(base, slots, begin, stop, stride, D: tl.constexpr, DP: tl.constexpr):
    """Load the keys of `slots` that lie from `begin` to `stop`, as float32 [N, DP]."""
    d = tl.arange(0, DP)
    at = base + slots.to(tl.int64)[:, None] * stride + d[None, :]
    there = ((slots >= begin) & (slots < stop))[:, None]
    if DP == D:
        return tl.load(at, mask=there, other=0.0).to(tl.float32)
    return tl.load(at, mask=there & (d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["starts", "lengths", "n", "chunk"])
def _sum(
    k_ptr,
    sum_ptr,
    starts,
    lengths,
    k_b,
    k_h,
    k_n,
    K,
    n,
    chunk,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Write the sum [D] of one part of a head's keys, each scaled to length 1 if UNIT."""
    part, row = tl.program_id(0), tl.program_id(1)
    base = k_ptr + (row // K).to(tl.int64) * k_b + (row % K).to(tl.int64) * k_h
    if starts is not None:
        base, n = base + tl.load(starts + row).to(tl.int64) * k_n, tl.load(lengths + row)
    total = tl.full([N, DP], 0.0, tl.float32)
    stop = tl.minimum(part * chunk + chunk, n)
    for start in tl.range(part * chunk, stop, N, num_stages=3):
        k = _tile(base, start + tl.arange(0, N), start, stop, k_n, D, DP)
        if UNIT:
            k = k / tl.maximum(tl.sqrt(tl.sum(k * k, 1)), 1e-12)[:, None]
        total += k
    d = tl.arange(0, DP)
    tl.store(sum_ptr + (row * tl.num_programs(0) + part) * D + d, tl.sum(total, 0), mask=d < D)


@triton.jit(do_not_specialize=["starts", "lengths", "n", "chunk", "parts"])
def _cosine(
    k_ptr,
    sum_ptr,
    out_ptr,
    starts,
    lengths,
    k_b,
    k_h,
    k_n,
    K,
    n,
    chunk,
    parts,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write `-cos(k_j, μ)` of one part of a head's slots; `sum_ptr` has `n·μ` in parts."""
    part, row = tl.program_id(0), tl.program_id(1)
    base = k_ptr + (row // K).to(tl.int64) * k_b + (row % K).to(tl.int64) * k_h
    row_n = n  # from a row of scores to the next
    if starts is not None:
        base, n = base + tl.load(starts + row).to(tl.int64) * k_n, tl.load(lengths + row)
    begin, stop = part * chunk, tl.minimum(part * chunk + chunk, n)
    tiles = tl.cdiv(stop - begin, N)
    slots = begin + (tiles - 1) * N + tl.arange(0, N)
    k = _tile(base, slots, begin, stop, k_n, D, DP)  # loads while the parts are added up
    d, i = tl.arange(0, DP), tl.arange(0, PARTS)
    at = sum_ptr + (row * parts + i)[:, None] * D + d[None, :]
    sums = tl.load(at, mask=(i < parts)[:, None] & (d < D)[None, :], other=0.0)
    anchor = tl.sum(sums, 0) / n
    anchor = anchor / tl.maximum(tl.sqrt(tl.sum(anchor * anchor, 0)), EPSILON)
    for _ in tl.range(0, tiles, num_stages=STAGES):
        before = slots - N
        ahead = _tile(base, before, begin, stop, k_n, D, DP)
        along = tl.sum(k * anchor[None, :], 1)
        inverse = tl.rsqrt(tl.maximum(tl.sum(k * k, 1), EPSILON * EPSILON))
        tl.store(out_ptr + row.to(tl.int64) * row_n + slots, -along * inverse, mask=slots < stop)
        slots, k = before, ahead


@triton.jit(do_not_specialize=["starts", "lengths", "n", "parts"])
def _cosine_turned(
    k_ptr,
    sum_ptr,
    out_ptr,
    shift_ptr,
    table_ptr,
    starts,
    lengths,
    k_b,
    k_h,
    k_n,
    shift_b,
    shift_h,
    K,
    n,
    parts,
    D: tl.constexpr,
    HALF_PAD: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Write `-cos(k_j, μ)` of `N` slots of a head, rotating keys back as they are read."""
    row = tl.program_id(1)
    batch, head = (row // K).to(tl.int64), (row % K).to(tl.int64)
    k_ptr += batch * k_b + head * k_h
    shift_ptr += batch * shift_b + head * shift_h
    out_ptr += row.to(tl.int64) * n
    if starts is not None:
        first, n = tl.load(starts + row).to(tl.int64), tl.load(lengths + row)
        k_ptr, shift_ptr = k_ptr + first * k_n, shift_ptr + first
        if tl.program_id(0) * N >= n:
            return
    HALF: tl.constexpr = D // 2
    slots = tl.program_id(0) * N + tl.arange(0, N)
    held = (slots < n)[:, None]
    # All loads that depend on nothing are issued before the first result is used.
    a, b = halves(k_ptr + slots.to(tl.int64)[:, None] * k_n, held, HALF, HALF_PAD)
    back = tl.load(shift_ptr + slots, slots < n, 0)
    i = tl.arange(0, PARTS)
    sums = sum_ptr + (row * parts + i)[:, None] * D
    anchor_a, anchor_b = halves(sums, (i < parts)[:, None], HALF, HALF_PAD)
    a, b = turned_by(a, b, back, table_ptr, slots < n, HALF, HALF_PAD, WIDEN)
    anchor_a, anchor_b = tl.sum(anchor_a, 0) / n, tl.sum(anchor_b, 0) / n
    length = tl.sqrt(tl.sum(anchor_a * anchor_a + anchor_b * anchor_b, 0))
    length = tl.maximum(length, EPSILON)
    a, b = a.to(tl.float32), b.to(tl.float32)
    along = tl.sum(a * (anchor_a / length)[None, :] + b * (anchor_b / length)[None, :], 1)
    inverse = tl.rsqrt(tl.maximum(tl.sum(a * a + b * b, 1), EPSILON * EPSILON))
    tl.store(out_ptr + slots, -along * inverse, mask=slots < n)


def scores_turned(
    keys: Tensor, shift: Tensor, table: Tensor, key_sums: Tensor, rows: RowRanges | None = None
) -> Tensor:
    """Return `scores` [B, K, n] float32 of keys that are rotated back as they are read.

    Args:
        keys: [B, K, n, D], as they are stored.
        shift: how far each is rotated back, [B, K, n] int32; the last stride is 1.
        table: cosines and sines [span, 2, D/2], contiguous.
        key_sums: sums of the rotated keys, see `scores`.
        rows: see `scores`; shifts are [B, K, slots] views then, too.
    """
    B, K, n, D = keys.shape
    starts, lengths = None, None
    if rows is not None:
        starts, lengths, n = rows
    tile, parts = 64, key_sums.shape[2]
    out = empty(B, K, n, device=keys.device)
    with torch.cuda.device_of(keys):
        run(
            _cosine_turned,
            (-(-n // tile), B * K),
            keys,
            key_sums,
            out,
            shift,
            table,
            starts,
            lengths,
            *keys.stride()[:3],
            *shift.stride()[:2],
            K,
            n,
            parts,
            D,
            power_of_two(D, 32) // 2,
            tile,
            power_of_two(parts),
            not on_gpu(keys),
            num_warps=4,
            maxnreg=REGISTERS,
        )
    return out


def scores(
    keys: Tensor,
    *,
    unit: bool = False,
    key_sums: Tensor | None = None,
    rows: RowRanges | None = None,
) -> Tensor:
    """Return `-cos(k_j, μ)` [B, K, n] float32, with `μ` the mean of the keys (KeyDiff, Eq. 8).

    Args:
        keys: [B, K, n, D]; the last stride is 1, others are free.
        unit: whether `μ` is the mean of the keys' directions.
        key_sums: sums of P parts of these keys, float32 [B, K, P, D], contiguous; if given, they
            save the first pass.
        rows: first slot and length of heads that hold unequally many slots. Keys are
            [B, K, slots, D] views of a pool then, and scores are [B, K, longest]; those behind a
            row are not written.
    """
    B, K, n, D = keys.shape
    starts, lengths = None, None
    if rows is not None:
        starts, lengths, n = rows
    padded = power_of_two(D, 16)
    few = B * K * n <= MOST_FEW
    most = (8192 if few else 16384) // (padded * keys.element_size())
    tile = max(16, min(128, most))
    chunk = -(-max(2 * tile, n * B * K // (2 * multiprocessors(keys.device))) // tile) * tile
    out = empty(B, K, n, device=keys.device)
    strides, sizes = (*keys.stride()[:3], K, n), (D, padded, tile)
    key = (keys.device, keys.dtype, keys.data_ptr() % 16, strides[:4], sizes, few, starts is None)
    if key_sums is None:
        parts = -(-n // chunk)
        key_sums = empty(B, K, parts, D, device=keys.device)
        launch(
            _sum,
            (parts, B * K, 1),
            (key, unit),
            (keys, key_sums, starts, lengths, *strides, chunk, *sizes, unit),
            num_warps=4,
        )
    assert key_sums.dtype == torch.float32
    assert key_sums.is_contiguous()
    added = key_sums.shape[2]
    most = power_of_two(added)
    # For few rows, short programs load one tile early; for many, long ones fetch several ahead.
    share, stages = (4 * tile, 1) if few else (chunk, 4)
    launch(
        _cosine,
        (-(-n // share), B * K, 1),
        (key, most, key_sums.data_ptr() % 16),
        (keys, key_sums, out, starts, lengths, *strides, share, added, *sizes, most, stages),
        num_warps=4 if few else 8,
    )
    return out
