# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton functions of `kernels/decode.py`, which attend to slots and merge parts.

Importing this imports triton; `decode.py` does so when the kernel is first needed. Arguments have
no annotations, as newer versions of Triton evaluate them.
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def dot(a, b, c, WIDEN: tl.constexpr):
    """Return `a @ b + c` in float32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def _fold(
    top,
    total,
    acc,  # largest logit, sum and output over all slots before
    q,  # [ROWS, SIZE_PAD]
    keys,
    values,
    first,
    end,
    visible,
    key_n,
    value_n,
    factor,
    softcap,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,  # some rows do not see all slots of the block, or it is not full
    WIDEN: tl.constexpr,
):
    """Attend to one more block of slots; return the new `top`, `total` and `acc`."""
    d = tl.arange(0, SIZE_PAD)
    slot = first + tl.arange(0, BLOCK)
    held = (slot < end)[:, None] if MASKED else True
    k = tl.load(keys + slot[:, None] * key_n + d, mask=held & (d < SIZE), other=0.0)
    v = tl.load(values + slot[:, None] * value_n + d, mask=held & (d < SIZE), other=0.0)
    z = dot(q, k.T, tl.zeros([top.shape[0], BLOCK], tl.float32), WIDEN)
    if SOFTCAP:
        z = softcap * (1 - 2 / (tl.exp2(z * factor) + 1))  # tanh, of half of what z is now
        factor = 1.0
    if MASKED:
        z = tl.where(slot[None, :] < visible[:, None], z, float("-inf"))
    higher = tl.maximum(top, tl.max(z, 1) * factor)
    base = higher
    if MASKED:
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: nothing visible so far
    p = tl.exp2(z * factor - base[:, None])  # product and sum are one instruction
    fade = tl.exp2(top - base)
    acc = dot(p.to(v.dtype), v, acc * fade[:, None], WIDEN)
    return higher, total * fade + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["starts", "lengths", "length", "tokens", "own"])
def attend_part(
    query,  # [B, H, T, D]
    keys,  # [B, K, n, D], or [slots, D] with `starts`
    values,  # likewise
    starts,  # [B·K] int32, the first slot of every row, or None
    lengths,  # [B·K] int32, slots of every row, or None: `length`
    part_out,  # [B·K, S, M, D] float32, M = GROUP · T query rows of a KV head
    part_lse,  # [B·K, S, M] float32, log-sum-exp in base 2
    out,  # [B, T, H, D] if there is one part, else None
    lse,  # [B, H, T] float32 log-sum-exp, written with `out`, or None
    sinks,  # [H] sink logits, used with `out`, or None
    length,
    chunk,  # slots of a part, a multiple of BLOCK
    tokens,  # T
    own,  # how many of the last slots are the tokens' own, T or 0
    factor,  # factor of the logits, in base 2; with SOFTCAP before tanh
    softcap,  # softcap in base 2
    query_b,
    query_h,
    query_t,
    key_b,
    key_h,
    key_n,
    value_b,
    value_h,
    value_n,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # rows of M that a program attends at once
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,  # may start before its inputs are written, and the merge before its end
    WIDEN: tl.constexpr,  # dot products of float32, as triton's interpreter has none of bfloat16
):
    """Attend with some of a KV head's query rows to one part of its slots."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, parts, row = tl.program_id(0), tl.num_programs(0), tl.program_id(2).to(tl.int64)
    batch, head = row // KV_HEADS, row % KV_HEADS
    if lengths is not None:
        length = tl.load(lengths + row)
    begin = part * chunk
    if begin >= length:
        return
    end = tl.minimum(begin + chunk, length)
    if starts is None:
        keys += batch * key_b + head * key_h
        values += batch * value_b + head * value_h
    else:
        start = tl.load(starts + row).to(tl.int64)
        keys += start * key_n
        values += start * value_n

    count = GROUP * tokens
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = (m < count)[:, None]
    query += batch * query_b + (head * GROUP + m // tokens) * query_h + m % tokens * query_t
    newer = tl.maximum(own - 1 - m % tokens, 0)  # slots of later tokens, which a row does not see
    visible = tl.minimum(length - newer, end)  # end of the slots that a row sees
    end = tl.max(visible, 0)
    d = tl.arange(0, SIZE_PAD)
    q = tl.load(query[:, None] + d, mask=real & (d < SIZE), other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, SIZE_PAD], tl.float32)
    # Blocks of which every row sees every slot need no mask.
    plain = begin + tl.maximum(tl.min(visible, 0) - begin, 0) // BLOCK * BLOCK
    for first in tl.range(begin, plain, BLOCK, num_stages=STAGES):
        top, total, acc = _fold(
            top,
            total,
            acc,
            q,
            keys,
            values,
            first,
            end,
            visible,
            key_n,
            value_n,
            factor,
            softcap,
            SIZE,
            SIZE_PAD,
            SOFTCAP,
            BLOCK,
            False,
            WIDEN,
        )
    for first in tl.range(plain, end, BLOCK, num_stages=STAGES):
        top, total, acc = _fold(
            top,
            total,
            acc,
            q,
            keys,
            values,
            first,
            end,
            visible,
            key_n,
            value_n,
            factor,
            softcap,
            SIZE,
            SIZE_PAD,
            SOFTCAP,
            BLOCK,
            True,
            WIDEN,
        )

    total = tl.where(total == 0.0, 1.0, total)
    if out is not None:
        head = head * GROUP + m // tokens
        at = (batch * tokens + m % tokens) * KV_HEADS * GROUP + head
        if sinks is not None:
            sink = tl.load(sinks + head, mask=m < count, other=0.0).to(tl.float32) * LOG2_E
            higher = tl.maximum(top, sink)
            fade = tl.exp2(top - higher)
            total = total * fade + tl.exp2(sink - higher)
            acc *= fade[:, None]
        y = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * SIZE + d, y, mask=real & (d < SIZE))
        if lse is not None:
            at = (batch * KV_HEADS * GROUP + head) * tokens + m % tokens
            tl.store(lse + at, (top + tl.log2(total)) / LOG2_E, mask=m < count)
        return
    part_out += row * parts * count * SIZE
    part_lse += row * parts * count
    at = part * count + m
    tl.store(part_lse + at, top + tl.log2(total), mask=m < count)
    tl.store(part_out + at[:, None] * SIZE + d, acc / total[:, None], mask=real & (d < SIZE))


@triton.jit(do_not_specialize=["length", "chunk", "parts", "more", "tokens"])
def merge_parts(
    part_out,  # [B·K, S, M, D] float32
    part_lse,  # [B·K, S, M] float32
    out,  # [B, T, H, D]
    whole_lse,  # [B, H, T] float32 log-sum-exp, is written, or None
    sinks,  # [H] sink logits, or None
    lengths,  # [B·K] slots of every row, or one integer for all, or None: `length`
    length,
    chunk,
    parts,  # S
    more,  # parts besides those of the slots
    tokens,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge one query row's attention over parts of the slots, in their order."""
    m, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # waits until all parts are written
    if lengths is not None:
        length = tl.load(lengths + row).to(tl.int32)
    live = more + tl.cdiv(length, chunk)  # parts that exist
    count = GROUP * tokens
    s, step, d = tl.arange(0, PARTS_PAD), tl.arange(0, STEP), tl.arange(0, SIZE_PAD)
    part_lse += row * parts * count + m
    part_out += (row * parts * count + m) * SIZE
    lse = tl.load(part_lse + s * count, mask=s < live, other=float("-inf"))
    # The first outputs are fetched before anything waits for `lse`, the others one step ahead.
    at = part_out + step[:, None] * count * SIZE + d
    x = tl.load(at, mask=(step < live)[:, None] & (d < SIZE), other=0.0)
    weight = tl.load(part_lse + step * count, mask=step < live, other=float("-inf"))
    top = tl.max(lse, 0)
    query_head = row % KV_HEADS * GROUP + m // tokens
    if sinks is not None:
        sink = tl.load(sinks + query_head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    total = tl.sum(tl.exp2(lse - top), 0)
    if sinks is not None:
        total += tl.exp2(sink - top)
    acc = tl.zeros([SIZE_PAD], tl.float32)
    for first in range(STEP, live + STEP, STEP):
        acc += tl.sum(x * tl.exp2(weight - top)[:, None], 0)
        ahead = first + step
        at += STEP * count * SIZE
        x = tl.load(at, mask=(ahead < live)[:, None] & (d < SIZE), other=0.0)
        weight = tl.load(part_lse + ahead * count, mask=ahead < live, other=float("-inf"))
    heads = KV_HEADS * GROUP
    if whole_lse is not None:
        at_lse = (row // KV_HEADS * heads + query_head) * tokens + m % tokens
        tl.store(whole_lse + at_lse, (top + tl.log2(total)) / LOG2_E)
    out += ((row // KV_HEADS * tokens + m % tokens) * heads + query_head) * SIZE
    tl.store(out + d, acc / total, mask=d < SIZE)
