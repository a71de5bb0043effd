# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""The triton functions of `kernels/quantised_token.py`, which imports this when first needed."""

import triton
import triton.language as tl

from kvcap.kernels.append_triton import clear
from kvcap.kernels.decode_triton import dot
from kvcap.kernels.quantise_triton import store
from kvcap.kernels.token_triton import added
from kvcap.kernels.turn_triton import (
    halves,
    made,
    quantised_halves,
    turned,
    turned_in_steps,
    turned_on,
)

# Where a token goes differs from segment to segment, which must not compile anew.
_PLACES = ["key_scale", "key_low", "value_scale", "value_low", "positions", "shift"]
_PLACES += [*(f"aux_{i}" for i in range(6)), "time", "slots", "chunk"]


@triton.jit
def _turned_at(x, real, cos, sin, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Halves of rows at x [N, 1] that are `real`, rotated as the model does it."""
    a, b = halves(x, real, HALF, HALF_PAD)
    h = tl.arange(0, HALF_PAD)[None, :]
    return turned_in_steps(a, b, tl.load(cos + h, h < HALF, 0.0), tl.load(sin + h, h < HALF, 0.0))


@triton.jit
def _centre(mean, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Halves of what keys are held without, [1, HALF_PAD] float32; of none zeros."""
    a, b = tl.zeros([1, HALF_PAD], tl.float32), tl.zeros([1, HALF_PAD], tl.float32)
    if mean is not None:
        a, b = halves(mean + tl.arange(0, 1)[:, None], True, HALF, HALF_PAD)
    return a, b


@triton.jit
def _held(
    keys, values, key_scale, key_low, value_scale, value_low, shift, centre_a, centre_b, table,
    like,  # points at numbers as they are computed with
    first_slot,  # of the row
    first, end,
    SIZE: tl.constexpr,
    HALF_PAD: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Some slots: halves of keys where they count now, and of values, [BLOCK, HALF_PAD] each."""
    kind = like.dtype.element_ty
    slot = first + tl.arange(0, BLOCK)
    held = slot < end
    # All that waits for nothing is on its way before the first of it is there.
    a, b = quantised_halves(
        keys, key_scale, key_low, first_slot, slot, held, SIZE, HALF_PAD, KEY_GROUP
    )
    v_a, v_b = quantised_halves(
        values, value_scale, value_low, first_slot, slot, held, SIZE, HALF_PAD, VALUE_GROUP
    )
    a, b = a + centre_a, b + centre_b
    if table is not None:
        ranks = -tl.load(shift + first_slot + slot, held, 0)
        a, b = turned_on(a, b, ranks, table, held, SIZE // 2, HALF_PAD)
    a, b, v_a, v_b = a.to(kind), b.to(kind), v_a.to(kind), v_b.to(kind)
    # Values too: where they are used, each of their bytes would take a register until then.
    return made(a, WIDEN), made(b, WIDEN), made(v_a, WIDEN), made(v_b, WIDEN)


@triton.jit
def _fold(
    top, total, acc_a, acc_b, q_a, q_b, k_a, k_b, v_a, v_b, first, end, factor,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Attention over one block of slots more, the first of which are before `end`."""
    z = tl.zeros([top.shape[0], BLOCK], tl.float32)
    z = dot(q_b, k_b.T, dot(q_a, k_a.T, z, WIDEN), WIDEN) * factor
    z = tl.where((first + tl.arange(0, BLOCK) < end)[None, :], z, float("-inf"))
    higher = tl.maximum(top, tl.max(z, 1))
    p, fade = tl.exp2(z - higher[:, None]), tl.exp2(top - higher)
    total = total * fade + tl.sum(p, 1)
    p, fade = p.to(v_a.dtype), fade[:, None]
    return higher, total, dot(p, v_a, acc_a * fade, WIDEN), dot(p, v_b, acc_b * fade, WIDEN)


# Long and branching, as it is one launch: branches on None and constants are gone once compiled.
@triton.jit(do_not_specialize=_PLACES)
def attend_quantised(
    query,  # [B, H, D]
    key,  # [B, K, D]
    value,  # likewise
    cos, sin,  # [B, D] where the token is rotated to
    time,  # [1], which token it is
    keys,  # of slot 0 of row 0, rows `row_slots` slots apart, as what follows
    values,
    key_scale, key_low, value_scale, value_low,  # lows: None in 8 bits
    positions,
    shift,  # minus the ranks of keys, or None: they are not moved
    aux_0, aux_1, aux_2, aux_3, aux_4, aux_5,  # integers that become 0, or None
    mean,  # [B, K, D] float32, which keys are held without, or None
    table,  # [span, 2, D/2], from which keys are rotated on, or None: they are held rotated
    queries,  # [B, H, D], as they are attended with
    sums,  # [B·K, S, D] float32, of keys as they are attended to, or None
    part_out,  # [B·K, S, GROUP, D] float32
    part_lse,  # [B·K, S, GROUP] float32, log-sum-exp in base 2
    used,  # slots of every row before the token, one integer, or None: `slots`
    slots,
    row_slots,
    chunk,  # slots of a part, a multiple of BLOCK
    factor,  # of the logits, in base 2
    query_b, query_h,
    key_b, key_h,
    value_b, value_h,
    mean_b, mean_h,
    angle_b,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, padded
    SIZE: tl.constexpr,
    HALF_PAD: tl.constexpr,
    KEY_GROUP: tl.constexpr,  # numbers that share a scale; 0: all, in 8 bits
    VALUE_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    MORE: tl.constexpr,  # a part has several blocks
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,  # launched before the query is there, and what follows before it ends
    WIDEN: tl.constexpr,  # dot products of float32, as triton's interpreter has none of bfloat16
):  # fmt: skip
    """A token's queries of one KV head over a part of its slots; the first part is the token."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = SIZE // 2
    part, parts, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    batch, head = row // KV_HEADS, row % KV_HEADS
    if used is not None:
        slots = tl.load(used).to(tl.int32)
    begin = (part - 1) * chunk
    if begin >= slots:
        return
    first_slot, written = row * row_slots, row * parts + part
    query += batch * query_b + head * GROUP * query_h
    cos += batch * angle_b
    sin += batch * angle_b
    if mean is not None:
        mean += batch * mean_b + head * mean_h
    m, h, one = tl.arange(0, ROWS), tl.arange(0, HALF_PAD)[None, :], tl.arange(0, 1)
    real, inside = (m < GROUP)[:, None], h < HALF
    if part == 0:
        slot, is_token = first_slot + slots + one, one == 0
        # All is read before anything is written, which what is read later would wait for.
        centre_a, centre_b = _centre(mean, HALF, HALF_PAD)
        if table is not None:
            at = table + (slots + one)[:, None] * SIZE
            rank_cos, rank_sin = halves(at, True, HALF, HALF_PAD)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        now = tl.load(time + one)
        own_key = key + batch * key_b + head * key_h + one[:, None]
        own_value = value + batch * value_b + head * value_h + one[:, None]
        v_a, v_b = halves(own_value, True, HALF, HALF_PAD)
        q_a, q_b = _turned_at(query + m[:, None] * query_h, real, cos, sin, HALF, HALF_PAD)
        # The key as the model rotates it, and from there to position 0, as those of a block are.
        a, b = _turned_at(own_key, True, cos, sin, HALF, HALF_PAD)
        a, b = a.to(tl.float32), b.to(tl.float32)
        if table is not None:
            a, b = turned(a, b, rank_cos, -rank_sin)
        if mean is not None:
            empty = (slots + one)[:, None] == 0  # the first token of all is the mean of its block
            centre_a, centre_b = tl.where(empty, a, centre_a), tl.where(empty, b, centre_b)
            tl.store(mean + h, centre_a, inside & empty)
            tl.store(mean + HALF + h, centre_b, inside & empty)
            a, b = a - centre_a, b - centre_b
        a, b = store(a, b, keys, key_scale, key_low, slot, is_token, h, SIZE, KEY_GROUP)
        a, b = a + centre_a, b + centre_b
        if table is not None:
            a, b = turned(a, b, rank_cos, rank_sin)
        a, b = a.to(q_a.dtype), b.to(q_a.dtype)
        v_a, v_b = store(
            v_a.to(tl.float32), v_b.to(tl.float32), values, value_scale, value_low,
            slot, is_token, h, SIZE, VALUE_GROUP,
        )  # fmt: skip
        target = queries + (row * GROUP + m[:, None]) * SIZE + h
        tl.store(target, q_a, real & inside)
        tl.store(target + HALF, q_b, real & inside)
        tl.store(positions + slot, now)
        if shift is not None:
            tl.store(shift + slot, -(slots + one))
        clear(slot, is_token, aux_0, aux_1, aux_2, aux_3, aux_4, aux_5)
        z = q_a.to(tl.float32) * a.to(tl.float32) + q_b.to(tl.float32) * b.to(tl.float32)
        tl.store(part_lse + written * GROUP + m, tl.sum(z, 1) * factor, m < GROUP)
        # What attention reads of the slot, in the type that it reads others in.
        to = part_out + (written * GROUP + m[:, None]) * SIZE + h
        tl.store(to, v_a.to(q_a.dtype).to(tl.float32), real & inside)
        tl.store(to + HALF, v_b.to(q_a.dtype).to(tl.float32), real & inside)
        if sums is not None:
            tl.store(sums + written * SIZE + h, a.to(tl.float32), inside)
            tl.store(sums + written * SIZE + HALF + h, b.to(tl.float32), inside)
        return
    end = tl.minimum(begin + chunk, slots)
    # Slots do not wait for the query: the first are on their way before it is there.
    centre_a, centre_b = _centre(mean, HALF, HALF_PAD)
    k_a, k_b, v_a, v_b = _held(
        keys, values, key_scale, key_low, value_scale, value_low, shift, centre_a, centre_b, table,
        query, first_slot, begin, end, SIZE, HALF_PAD, KEY_GROUP, VALUE_GROUP, BLOCK, WIDEN,
    )  # fmt: skip
    if sums is not None:
        sum_a, sum_b = added(k_a, BLOCK, HALF_PAD), added(k_b, BLOCK, HALF_PAD)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    q_a, q_b = _turned_at(query + m[:, None] * query_h, real, cos, sin, HALF, HALF_PAD)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc_a, acc_b = tl.zeros([ROWS, HALF_PAD], tl.float32), tl.zeros([ROWS, HALF_PAD], tl.float32)
    top, total, acc_a, acc_b = _fold(
        top, total, acc_a, acc_b, q_a, q_b, k_a, k_b, v_a, v_b, begin, end, factor, BLOCK, WIDEN
    )  # fmt: skip
    if MORE:
        for first in tl.range(begin + BLOCK, end, BLOCK, num_stages=STAGES):
            k_a, k_b, v_a, v_b = _held(
                keys, values, key_scale, key_low, value_scale, value_low, shift, centre_a, centre_b,
                table, query, first_slot, first, end,
                SIZE, HALF_PAD, KEY_GROUP, VALUE_GROUP, BLOCK, WIDEN,
            )  # fmt: skip
            if sums is not None:
                sum_a += added(k_a, BLOCK, HALF_PAD)
                sum_b += added(k_b, BLOCK, HALF_PAD)
            top, total, acc_a, acc_b = _fold(
                top, total, acc_a, acc_b, q_a, q_b, k_a, k_b, v_a, v_b, first, end, factor,
                BLOCK, WIDEN,
            )  # fmt: skip
    tl.store(part_lse + written * GROUP + m, top + tl.log2(total), m < GROUP)
    to = part_out + (written * GROUP + m[:, None]) * SIZE + h
    tl.store(to, acc_a / total[:, None], real & inside)
    tl.store(to + HALF, acc_b / total[:, None], real & inside)
    if sums is not None:
        tl.store(sums + written * SIZE + h, tl.sum(sum_a, 0)[None, :], inside)
        tl.store(sums + written * SIZE + HALF + h, tl.sum(sum_b, 0)[None, :], inside)
