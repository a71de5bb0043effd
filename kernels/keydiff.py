# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
# Triton has no annotations, and what it compiles can have none.
"""Computes KeyDiff's scores in two passes over the keys, or in one if their sum is known.

`_sum` leaves a sum of each part of the slots; `_cosine` adds the parts up in its prologue and reads
the keys once more, from the end, where the cache of the chip still holds them. Letters as in
`Observation`, and `N` slots of a tile.
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
from kvcap.policies.base import Rows

MOST_FEW = 2**17  # rows of keys, below which shorter programs are faster
EPSILON = tl.constexpr(1e-8)  # of torch's cosine_similarity


@triton.jit
def _tile(base, slots, begin, stop, stride, D: tl.constexpr, DP: tl.constexpr):
    """Load keys of `slots` from `begin` to `stop` in float32, [N, DP]."""
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
    """Write the sum of one part of a head's keys, each of length 1 if UNIT. [D]."""
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
    """Write `-cos(k_j, μ)` of one part of a head's slots; `n·μ` is the sum of [B·K, parts, D]."""
    part, row = tl.program_id(0), tl.program_id(1)
    base = k_ptr + (row // K).to(tl.int64) * k_b + (row % K).to(tl.int64) * k_h
    row_n = n  # from a row of scores to the next
    if starts is not None:
        base, n = base + tl.load(starts + row).to(tl.int64) * k_n, tl.load(lengths + row)
    begin, stop = part * chunk, tl.minimum(part * chunk + chunk, n)
    tiles = tl.cdiv(stop - begin, N)
    slots = begin + (tiles - 1) * N + tl.arange(0, N)
    k = _tile(base, slots, begin, stop, k_n, D, DP)  # under way while the parts are added up
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
    """Write `_cosine` of keys that are rotated back as they are read, for `N` slots of a head."""
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
    # All that waits for nothing is on its way before the first of it is there.
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
    keys: Tensor, shift: Tensor, table: Tensor, key_sums: Tensor, rows: Rows | None = None
) -> Tensor:
    """Return `scores` of keys that are rotated back as they are read. [B, K, n], float32.

    Args:
        keys: [B, K, n, D], as they are stored.
        shift: [B, K, n] int32, how far each is rotated back; the last stride is 1.
        table: [span, 2, D/2], contiguous, cosines and sines.
        key_sums: of the rotated keys, as in `scores`.
        rows: as in `scores`; shifts are [B, K, slots] views then, too.
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
    rows: Rows | None = None,
) -> Tensor:
    """Return `-cos(k_j, μ)`, `μ` the mean of the keys (KeyDiff, Eq. 8). [B, K, n], float32.

    Args:
        keys: [B, K, n, D], whatever its strides but the last.
        unit: `μ` is the mean of the keys' directions.
        key_sums: float32 [B, K, P, D], contiguous: sums of P parts of these keys where they are
            known, which spares the pass that makes them.
        rows: where heads lie that hold unequally many slots; keys are [B, K, slots, D] views of a
            pool then, and scores [B, K, longest], of which those behind a row are not written.
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
    # Of few, short programs begin with a tile in hand; of many, long ones fetch several ahead.
    share, stages = (4 * tile, 1) if few else (chunk, 4)
    launch(
        _cosine,
        (-(-n // share), B * K, 1),
        (key, most, key_sums.data_ptr() % 16),
        (keys, key_sums, out, starts, lengths, *strides, share, added, *sizes, most, stages),
        num_warps=4 if few else 8,
    )
    return out
