# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Triton functions of `kernels/calidrop.py`, which imports this when it is first needed.

What changes from block to block, or from segment to segment, is not specialised: whatever is
replayed in a CUDA graph has been compiled by the same call outside of one.
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
HIGHEST = tl.constexpr(3.4028234663852886e38)  # the largest finite float32

_AT = ["known_query", "known_out", "known_lse", "query_b", "query_h", "query_t", "other_b",
       "other_h", "other_t", "known_heads", "tokens"]  # fmt: skip


@triton.jit(do_not_specialize=[*_AT, "counts", "out_b", "out_h", "out_t"])
def correct_tokens(
    query,  # [B, H, T, D]
    out,  # likewise: attention over what is held, is changed
    lse,  # [B, H, T]
    other,  # [B, H, T, D] over the evicted tokens
    other_lse,  # [B, H, T]
    asked,  # [B·H, T] int8, is written: who asked anew; None: one tile holds all tokens
    known_query,  # this and the next two: see `correct`
    known_out,
    known_lse,
    counts,  # [.., 2] int64
    query_b, query_h, query_t,
    other_b, other_h, other_t,
    out_b, out_h, out_t,
    known_heads,  # query heads of the layer
    tokens,  # T
    theta1, theta2,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Some tokens of one query head."""
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    t, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE_PAD)
    real, inside = t < tokens, d < SIZE
    wide = real[:, None] & inside[None, :]
    mine = batch * known_heads + head
    q = tl.load(query + batch * query_b + head * query_h + t[:, None] * query_t + d, wide, 0.0)
    f = tl.load(other + batch * other_b + head * other_h + t[:, None] * other_t + d, wide, 0.0)
    out += batch * out_b + head * out_h + t[:, None] * out_t + d
    x = tl.load(out, wide, 0.0).to(tl.float32)
    own = tl.load(lse + row * tokens + t, real, 0.0)
    fresh = tl.load(other_lse + row * tokens + t, real, 0.0)
    known = tl.load(known_query + mine * SIZE + d, inside, 0.0).to(tl.float32)
    kept = tl.load(known_out + mine * SIZE + d, inside, 0.0)
    total = tl.load(known_lse + mine)

    wider = q.to(tl.float32)
    norm = tl.maximum(tl.sqrt(tl.sum(wider * wider, 1)), 1e-8)
    norm *= tl.maximum(tl.sqrt(tl.sum(known * known, 0)), 1e-8)
    rho = tl.sum(wider * known[None, :], 1) / norm
    rho = tl.where(total > float("-inf"), rho, -2.0)  # below any cosine: nothing is remembered
    anew = real & (rho < theta1)
    adds = anew | (rho > theta2)
    added = tl.where(anew[:, None], f.to(tl.float32), kept[None, :])
    share = tl.where(adds, 1 / (1 + tl.exp(own - tl.where(anew, fresh, total))), 0.0)
    y = x + share[:, None] * (added - x)
    tl.store(out, y.to(out.dtype.element_ty), wide)

    if asked is not None:
        tl.store(asked + row * tokens + t, anew.to(tl.int8), real)
        return
    tl.debug_barrier()  # what was remembered is read
    last = t == tl.max(tl.where(anew, t, -1), 0)  # none, if none asked anew
    at, chosen = mine * SIZE + d + 0 * t[:, None], last[:, None] & inside[None, :]
    tl.store(known_query + at, q, chosen)
    tl.store(known_out + at, f.to(tl.float32), chosen)
    tl.store(known_lse + mine + 0 * t, fresh, last)
    if ROWS == 1:
        counts += 2 * mine
        tl.store(counts, tl.load(counts) + 1)
        tl.store(counts + 1, tl.load(counts + 1) + tl.sum(anew.to(tl.int64), 0))


@triton.jit(do_not_specialize=_AT)
def remember_last(
    query, other, other_lse, asked, known_query, known_out, known_lse,  # as above
    query_b, query_h, query_t,
    other_b, other_h, other_t,
    known_heads,
    tokens,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The last of one query head's tokens that asked anew, if any did."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    last = tl.full([], -1, tl.int32)
    for first in range(0, tokens, BLOCK):
        t = first + tl.arange(0, BLOCK)
        one = tl.load(asked + row * tokens + t, t < tokens, 0)
        last = tl.maximum(last, tl.max(tl.where(one != 0, t, -1), 0))
    d = tl.arange(0, SIZE_PAD)
    some = (d < SIZE) & (last + 0 * d >= 0)
    at = tl.maximum(last, 0)
    mine = batch * known_heads + head
    q = tl.load(query + batch * query_b + head * query_h + at * query_t + d, some, 0.0)
    f = tl.load(other + batch * other_b + head * other_h + at * other_t + d, some, 0.0)
    tl.store(known_query + mine * SIZE + d, q, some)
    tl.store(known_out + mine * SIZE + d, f.to(tl.float32), some)
    lse = tl.load(other_lse + row * tokens + at)
    tl.store(known_lse + mine + 0 * d, lse, (d == 0) & some)


@triton.jit(
    do_not_specialize=[
        "query", "out", "lse", "slots", "known_heads", "count", "slot_b", "slot_h",
        "key_b", "key_h", "key_n", "value_b", "value_h", "value_n",
    ]
)  # fmt: skip
def add_evicted(
    query,  # this and the next two: what is remembered, see `correct`
    out,
    lse,
    keys,  # [B, K, n, D]
    values,
    slots,  # [B, K, e]
    known_heads, count,
    factor,  # of the logits, in base 2; with SOFTCAP before tanh
    softcap,  # in base 2
    slot_b, slot_h,
    key_b, key_h, key_n,
    value_b, value_h, value_n,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One query head: its softmax goes on from where it was."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    mine, kv_head = batch * known_heads + head, head // GROUP
    before = tl.load(lse + mine)
    if before > float("-inf"):
        i, d = tl.arange(0, BLOCK), tl.arange(0, SIZE_PAD)
        inside = d < SIZE
        q = tl.load(query + mine * SIZE + d, inside, 0.0).to(tl.float32)
        acc = tl.load(out + mine * SIZE + d, inside, 0.0)
        top = before * LOG2_E
        total = tl.full([], 1.0, tl.float32)
        slots += batch * slot_b + kv_head * slot_h
        keys += batch * key_b + kv_head * key_h
        values += batch * value_b + kv_head * value_h
        for first in range(0, count, BLOCK):
            real = first + i < count
            slot = tl.load(slots + first + i, real, 0).to(tl.int64)
            wide = real[:, None] & inside[None, :]
            k = tl.load(keys + slot[:, None] * key_n + d, wide, 0.0).to(tl.float32)
            v = tl.load(values + slot[:, None] * value_n + d, wide, 0.0).to(tl.float32)
            z = tl.sum(k * q[None, :], 1) * factor
            if SOFTCAP:
                z = softcap * (1 - 2 / (tl.exp2(z) + 1))  # tanh, of half of what z is now
            z = tl.where(real, z, float("-inf"))
            higher = tl.maximum(top, tl.max(z, 0))
            p, fade = tl.exp2(z - higher), tl.exp2(top - higher)
            acc = acc * fade + tl.sum(p[:, None] * v, 0)
            total = total * fade + tl.sum(p, 0)
            top = higher
        tl.store(out + mine * SIZE + d, acc / total, inside)
        tl.debug_barrier()  # all have read what was there
        tl.store(lse + mine, (top + tl.log2(total)) / LOG2_E)


@triton.jit(
    do_not_specialize=[
        "slots", "positions", "shift", "stored_positions", "stored_shift", "stored_score",
        "olds", "first", "stop", "count", "held", "heads", "capacity", "room", "slot_b", "slot_h",
        "score_b", "score_h",
    ]
)  # fmt: skip
def take_slots(
    slots,  # [B, K, e]
    scores,  # [B, K, n]
    keys,  # this and the next three: slot 0 of row 0, the next row `capacity` slots behind
    values,
    positions,
    shift,  # or None
    stored_keys,  # this and the next four: likewise, `room` slots
    stored_values,
    stored_positions,
    stored_shift,
    stored_score,  # float32
    olds,  # programs that count shifts up
    first, stop,  # of the slots, which are copied
    count,  # e
    held,  # stored slots in use
    heads,  # K
    capacity, room,
    slot_b, slot_h,
    score_b, score_h, score_n,
    COUNT_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
):  # fmt: skip
    """Some of a row's stored slots grow older, or some of those that go are copied behind them."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slots += row // heads * slot_b + row % heads * slot_h
    source, target = row * capacity, row * room
    if tile < olds:
        if shift is not None:
            i = tl.arange(0, COUNT_PAD)
            gone = tl.load(slots + i, i < count, 0)
            age = tl.load(positions + source + gone, i < count, 0x7FFFFFFF)
            old = tile * 32 + tl.arange(0, 32)
            mine = target + old
            position = tl.load(stored_positions + mine, old < held, 0)
            older = tl.sum((age[None, :] < position[:, None]).to(tl.int32), 1)
            before = tl.load(stored_shift + mine, old < held, 0)
            tl.store(stored_shift + mine, before + older, old < held)
    else:
        place = (tile - olds) * 16 + tl.arange(0, 16)
        real, d = first + place < stop, tl.arange(0, SIZE_PAD)
        slot = tl.load(slots + first + place, real, 0).to(tl.int64)
        at, to = source + slot, target + held + place
        wide = real[:, None] & (d < SIZE)[None, :]
        key = tl.load(keys + at[:, None] * SIZE + d, wide, 0)
        value = tl.load(values + at[:, None] * SIZE + d, wide, 0)
        tl.store(stored_keys + to[:, None] * SIZE + d, key, wide)
        tl.store(stored_values + to[:, None] * SIZE + d, value, wide)
        tl.store(stored_positions + to, tl.load(positions + at, real, 0), real)
        if shift is not None:
            tl.store(stored_shift + to, tl.load(shift + at, real, 0), real)
        scores += row // heads * score_b + row % heads * score_h
        x = tl.load(scores + slot * score_n, real, 0.0).to(tl.float32)
        x = tl.minimum(tl.maximum(tl.where(x != x, -HIGHEST, x), -HIGHEST), HIGHEST)
        tl.store(stored_score + to, x, real)
