# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton function of `kernels/token.py`, which imports this when first needed."""

import triton
import triton.language as tl

from kvcap.kernels.append_triton import clear
from kvcap.kernels.decode_triton import dot
from kvcap.kernels.turn_triton import halves, made, turned, turned_by

# These arguments differ between layers; specialising them would compile the kernel for each.
_UNSPECIALISED = ["positions", *(f"aux_{i}" for i in range(6)), "shift", "time", "chunk"]
_UNSPECIALISED += ["starts", "lengths", "read_at"]


@triton.jit
def _held(
    keys,
    values,
    shift,
    table,
    first,
    end,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Load some slots: both halves of their rotated keys [BLOCK, HALF_PAD], and their values."""
    slot = first + tl.arange(0, BLOCK)
    held = slot < end
    d = tl.arange(0, 2 * HALF_PAD)[None, :]
    at = keys + slot[:, None] * SIZE
    # Keys depend on nothing, so their loads are issued first, and shifts are read meanwhile.
    a, b = halves(at, held[:, None], HALF, HALF_PAD)
    if shift is None:
        a, b = made(a, WIDEN), made(b, WIDEN)
    else:
        back = tl.load(shift + slot, held, 0)
        a, b = turned_by(a, b, back, table, held, HALF, HALF_PAD, WIDEN)
    v = tl.load(values + slot[:, None] * SIZE + d, held[:, None] & (d < SIZE), 0.0)
    return a, b, v


@triton.jit
def added(k, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Sum keys [BLOCK, SIZE] to 16 rows [16, SIZE] float32, each sum within one thread."""
    return tl.sum(tl.reshape(k.to(tl.float32), [BLOCK // 16, 16, SIZE]), 0)


@triton.jit
def _fold(
    top,
    total,
    acc,
    q_a,
    q_b,
    k_a,
    k_b,
    v,
    first,
    end,
    factor,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend to one more block of slots, of which those before `end` count."""
    z = tl.zeros([top.shape[0], BLOCK], tl.float32)
    z = dot(q_b, k_b.T, dot(q_a, k_a.T, z, WIDEN), WIDEN) * factor
    z = tl.where((first + tl.arange(0, BLOCK) < end)[None, :], z, float("-inf"))
    higher = tl.maximum(top, tl.max(z, 1))
    p, fade = tl.exp2(z - higher[:, None]), tl.exp2(top - higher)
    acc = dot(p.to(v.dtype), v, acc * fade[:, None], WIDEN)
    return higher, total * fade + tl.sum(p, 1), acc


# One long kernel, as it is one launch; the compiler removes branches on None and constants.
@triton.jit(do_not_specialize=_UNSPECIALISED)
def attend_part(
    query,  # [B, H, D]
    key,  # [B, K, D]
    value,  # likewise
    cos,
    sin,  # [B, D] of the position that the token is rotated to
    time,  # [1], the token's position
    keys,
    values,  # [slots, D]
    positions,  # [slots]
    aux_0,
    aux_1,
    aux_2,
    aux_3,
    aux_4,
    aux_5,  # integers that become 0, or None
    shift,  # the auxiliary tensor by which keys are rotated back, or None
    table,  # [span, 2, D/2], or None
    queries,  # [B, H, D], is written: rotated queries
    sums,  # [B·K, S, D] float32, is written: sums of keys as they are attended to, or None
    part_out,  # [B·K, S, GROUP, D] float32
    part_lse,  # [B·K, S, GROUP] float32, log-sum-exp in base 2
    starts,  # [B·K] int32, each row's first slot
    lengths,  # [B·K] int32, each row's slots before the token
    read_at,  # [B], the position of `cos` and `sin`, which becomes the row's length; or None
    chunk,  # slots of a part, a multiple of BLOCK
    factor,  # factor of the logits, in base 2
    query_b,
    query_h,
    key_b,
    key_h,
    value_b,
    value_h,
    angle_b,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, padded
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    MORE: tl.constexpr,  # a part has several blocks
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,  # may start before the query is written, and the merge before its end
    WIDEN: tl.constexpr,  # dot products of float32, as triton's interpreter has none of bfloat16
):
    """Attend with a token's queries of one KV head to a part of its slots; part 0 is the token."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    part, parts, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    batch, head = row // KV_HEADS, row % KV_HEADS
    first_slot, slots = tl.load(starts + row).to(tl.int64), tl.load(lengths + row)
    begin = (part - 1) * chunk
    if begin >= slots:
        return
    m, h, d = tl.arange(0, ROWS), tl.arange(0, HALF_PAD)[None, :], tl.arange(0, 2 * HALF_PAD)
    one, real = tl.arange(0, 1)[:, None], (m < GROUP)[:, None]
    query += batch * query_b + (head * GROUP + m[:, None]) * query_h
    key += batch * key_b + head * key_h + one
    i, second = tl.arange(0, HALF_PAD)[None, :, None], tl.arange(0, 2)[None, None, :]
    at = tl.where(second == 0, cos + batch * angle_b, sin + batch * angle_b)
    turn_cos, turn_sin = tl.split(tl.load(at + i, i < HALF, 0.0))
    if read_at is not None:
        past = tl.load(read_at + batch).to(tl.int64) - slots
        at = table + past * (2 * HALF) + second * HALF
        past_cos, past_sin = tl.split(tl.load(at + i, i < HALF, 0.0).to(tl.float32))
        wide_cos, wide_sin = turn_cos.to(tl.float32), turn_sin.to(tl.float32)
        turn_cos = wide_cos * past_cos + wide_sin * past_sin
        turn_sin = wide_sin * past_cos - wide_cos * past_sin
    part_lse += (row * parts + part) * GROUP + m
    part_out += ((row * parts + part) * GROUP + m[:, None]) * SIZE + d[None, :]
    if part == 0:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        q_a, q_b = halves(query, real, HALF, HALF_PAD)
        new_a, new_b = halves(key, one == 0, HALF, HALF_PAD)
        new_v = tl.load(value + batch * value_b + head * value_h + d, d < SIZE, 0.0)
        q_a, q_b = turned(q_a, q_b, turn_cos, turn_sin)
        new_a, new_b = turned(new_a, new_b, turn_cos, turn_sin)
        both = q_a.to(tl.float32) * new_a.to(tl.float32) + q_b.to(tl.float32) * new_b.to(tl.float32)
        tl.store(part_lse, tl.sum(both, 1) * factor, m < GROUP)
        tl.store(part_out, new_v.to(tl.float32)[None, :], real & (d < SIZE)[None, :])
        target = queries + (row * GROUP + m[:, None]) * SIZE + h
        tl.store(target, q_a, real & (h < HALF))
        tl.store(target + HALF, q_b, real & (h < HALF))
        if sums is not None:
            sums += (row * parts + part) * SIZE
            tl.store(sums + h, new_a.to(tl.float32), h < HALF)
            tl.store(sums + HALF + h, new_b.to(tl.float32), h < HALF)
        slot = first_slot + slots
        tl.store(keys + slot * SIZE + h, new_a, h < HALF)
        tl.store(keys + slot * SIZE + HALF + h, new_b, h < HALF)
        tl.store(values + slot * SIZE + d, new_v, d < SIZE)
        tl.store(positions + slot, tl.load(time))
        it = tl.arange(0, 1)
        clear(slot + it, it == 0, aux_0, aux_1, aux_2, aux_3, aux_4, aux_5)
        return
    end = tl.minimum(begin + chunk, slots)
    keys += first_slot * SIZE
    values += first_slot * SIZE
    if shift is not None:
        shift += first_slot
    # Slots do not depend on the query, so the first are loaded before it is written.
    k_a, k_b, v = _held(keys, values, shift, table, begin, end, SIZE, HALF, HALF_PAD, BLOCK, WIDEN)
    if sums is not None:
        sum_a, sum_b = added(k_a, BLOCK, HALF_PAD), added(k_b, BLOCK, HALF_PAD)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    q_a, q_b = halves(query, real, HALF, HALF_PAD)
    q_a, q_b = turned(q_a, q_b, turn_cos, turn_sin)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, 2 * HALF_PAD], tl.float32)
    top, total, acc = _fold(
        top, total, acc, q_a, q_b, k_a, k_b, v, begin, end, factor, BLOCK, WIDEN
    )
    if MORE:
        for first in tl.range(begin + BLOCK, end, BLOCK, num_stages=STAGES):
            k_a, k_b, v = _held(
                keys, values, shift, table, first, end, SIZE, HALF, HALF_PAD, BLOCK, WIDEN
            )
            if sums is not None:
                sum_a += added(k_a, BLOCK, HALF_PAD)
                sum_b += added(k_b, BLOCK, HALF_PAD)
            top, total, acc = _fold(
                top, total, acc, q_a, q_b, k_a, k_b, v, first, end, factor, BLOCK, WIDEN
            )
    tl.store(part_lse, top + tl.log2(total), m < GROUP)
    tl.store(part_out, acc / total[:, None], real & (d < SIZE)[None, :])
    if sums is not None:
        sums += (row * parts + part) * SIZE
        tl.store(sums + h, tl.sum(sum_a, 0)[None, :], h < HALF)
        tl.store(sums + HALF + h, tl.sum(sum_b, 0)[None, :], h < HALF)
