# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton functions of `kernels/quantise.py`, which imports this when first needed."""

import triton
import triton.language as tl

NEAREST = tl.constexpr(12582912.0)  # 1.5 · 2²³; adding and subtracting it rounds halves to even


@triton.jit
def _unrotated(x, turn, d, inside, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the numbers of indices `d` [1, P] of some tokens, rotated back to position 0.

    The result is float32 [N, P], read where `inside` [N, P]. `x` points at the tokens [N, 1],
    `turn` at the cosines of their positions; the sines lie behind them.
    """
    own = tl.load(x + d, inside, 0.0).to(tl.float32)
    if HALF > 0:
        turns = inside & (d < 2 * HALF)
        if INTERLEAVED:
            i, second = d // 2, d % 2 == 1
            mate = tl.where(second, d - 1, d + 1)
        else:
            second = d >= HALF
            i = tl.where(second, d - HALF, d)
            mate = tl.where(second, d - HALF, d + HALF)
        cos = tl.load(turn + i, turns, 1.0).to(tl.float32)
        sin = tl.load(turn + HALF + i, turns, 0.0).to(tl.float32)
        other = tl.load(x + mate, turns, 0.0).to(tl.float32) * sin
        own = own * cos + tl.where(second, -other, other)
    return own


@triton.jit
def _mean(
    keys,
    key_t,
    turn,
    real,
    d,
    inside,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the mean over keys at position 0 of the numbers of indices `d` [1, P].

    The result is float32 [1, P], read where `inside` [1, P]. `keys` points at the first of `real`
    tokens of a KV head, `key_t` is the stride to the next, and `turn` points at the cosines of the
    first token's position.
    """
    total = tl.zeros([BLOCK, d.shape[1]], tl.float32)
    for begin in range(0, real, BLOCK):
        t = (begin + tl.arange(0, BLOCK))[:, None]
        x = keys + t.to(tl.int64) * key_t
        its = x  # a stand-in; it is read only if HALF > 0
        if HALF > 0:
            its = turn + t.to(tl.int64) * (2 * HALF)
        total += _unrotated(x, its, d, (t < real) & inside, HALF, INTERLEAVED)
    return tl.sum(total, 0)[None, :] / real


@triton.jit
def _nearest(x):
    """Return the nearest whole number, the even one of two equally near."""
    return (x + NEAREST) - NEAREST


@triton.jit
def _divisor(scale):
    """Return a scale to divide by: 1 in place of 0, which only zeros have."""
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _store_groups(x, scale, low, first, inside, GROUP: tl.constexpr):
    """Store the least number and the step of every group of x [N, P], for 4 bits.

    `first` [N] is where a token's groups begin in `scale` and `low`. Both are also returned for
    every number of x, as float32 [N, P].
    """
    COUNT: tl.constexpr = x.shape[1] // GROUP
    each = tl.reshape(x, [x.shape[0], COUNT, GROUP])
    base = tl.min(each, 2).to(tl.float16)
    span = tl.max(each, 2) - base.to(tl.float32)
    step = tl.div_rn(span, tl.full(span.shape, 15.0, tl.float32)).to(tl.float16)
    at = first[:, None] + tl.arange(0, COUNT)[None, :]
    tl.store(low + at, base, inside[:, None])
    tl.store(scale + at, step, inside[:, None])
    by = _divisor(step.to(tl.float32))[:, :, None]
    lows = tl.broadcast_to(base.to(tl.float32)[:, :, None], each.shape)
    return tl.reshape(lows, x.shape), tl.reshape(tl.broadcast_to(by, each.shape), x.shape)


@triton.jit
def _store(a, b, to, scale, low, slot, inside, i, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Quantise and store the numbers i and i + SIZE/2 of tokens, `a` and `b` [N, P].

    Only i < SIZE/2 are real. If SIZE is odd, which needs 8 bits, `b` has one number more than `a`.
    """
    LOW: tl.constexpr = SIZE // 2
    in_a = inside[:, None] & (i < LOW)
    in_b = inside[:, None] & (i < SIZE - LOW)
    if GROUP == 0:
        most = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1)
        step = tl.div_rn(most, tl.full(most.shape, 127.0, tl.float32)).to(tl.float16)
        tl.store(scale + slot, step, inside)
        by = _divisor(step.to(tl.float32))[:, None] + tl.zeros_like(a)
        a = tl.minimum(tl.maximum(_nearest(tl.div_rn(a, by)), -127.0), 127.0)
        b = tl.minimum(tl.maximum(_nearest(tl.div_rn(b, by)), -127.0), 127.0)
        at = to + slot[:, None] * SIZE + i
        tl.store(at, a.to(tl.int8), in_a)
        tl.store(at + LOW, b.to(tl.int8), in_b)
    else:
        GROUPS: tl.constexpr = SIZE // GROUP
        if a.shape[1] == LOW and LOW % GROUP == 0:  # each group lies in one half
            first = slot * GROUPS
            lows_a, by_a = _store_groups(a, scale, low, first, inside, GROUP)
            lows_b, by_b = _store_groups(b, scale, low, first + LOW // GROUP, inside, GROUP)
        else:
            lows_a, lows_b = tl.zeros_like(a), tl.zeros_like(a)
            by_a, by_b = tl.zeros_like(a) + 1.0, tl.zeros_like(a) + 1.0
            for g in tl.static_range(GROUPS):
                of_a = in_a & (i // GROUP == g)
                of_b = in_b & ((i + LOW) // GROUP == g)
                least = tl.minimum(
                    tl.min(tl.where(of_a, a, float("inf")), 1),
                    tl.min(tl.where(of_b, b, float("inf")), 1),
                )
                most = tl.maximum(
                    tl.max(tl.where(of_a, a, float("-inf")), 1),
                    tl.max(tl.where(of_b, b, float("-inf")), 1),
                )
                least = tl.where(inside, least, 0.0)
                most = tl.where(inside, most, 0.0)
                base = least.to(tl.float16)
                span = most - base.to(tl.float32)
                step = tl.div_rn(span, tl.full(span.shape, 15.0, tl.float32)).to(tl.float16)
                tl.store(low + slot * GROUPS + g, base, inside)
                tl.store(scale + slot * GROUPS + g, step, inside)
                by = _divisor(step.to(tl.float32))[:, None]
                lows_a = tl.where(of_a, base.to(tl.float32)[:, None], lows_a)
                lows_b = tl.where(of_b, base.to(tl.float32)[:, None], lows_b)
                by_a = tl.where(of_a, by, by_a)
                by_b = tl.where(of_b, by, by_b)
        a = tl.minimum(tl.maximum(_nearest(tl.div_rn(a - lows_a, by_a)), 0.0), 15.0)
        b = tl.minimum(tl.maximum(_nearest(tl.div_rn(b - lows_b, by_b)), 0.0), 15.0)
        both = a.to(tl.int32) | (b.to(tl.int32) << 4)
        tl.store(to + slot[:, None] * LOW + i, both.to(tl.uint8), in_a)


# These arguments differ between layers; specialising them would compile the kernel for each.
_UNSPECIALISED = ["to_keys", "to_values", "key_scale", "key_low", "value_scale", "value_low",
           "to_positions", "shift", "state_0", "state_1", "length", "count", "starts", "lengths",
           "read_at"]  # fmt: skip


@triton.jit(do_not_specialize=_UNSPECIALISED)
def write_slots(
    keys,  # [B, K, T, D]
    values,  # likewise
    positions,  # [T]
    mean,  # [B, K, D], or None
    read_at,  # [B] int32, the position of the first token, or None
    table,  # [span, 2, HALF], or None
    to_keys,  # [slots, ...], like all buffers that follow
    to_values,
    key_scale,
    key_low,  # or None
    value_scale,
    value_low,  # or None
    to_positions,
    shift,  # or None
    state_0,
    state_1,  # or None
    length,  # T
    count,  # [] int32, tokens that are no fillers, or None: all
    starts,
    lengths,  # [B·K] int32, first slots of rows, and their slots before the block
    key_b,
    key_h,
    key_t,
    value_b,
    value_h,
    value_t,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,  # pairs that rotate; 0: none
    INTERLEAVED: tl.constexpr,
    PAD: tl.constexpr,  # at least half of SIZE
    KEY_GROUP: tl.constexpr,  # numbers that share a scale; 0: all, in 8 bits
    VALUE_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise some tokens of one KV head, and write them behind the slots in use."""
    LOW: tl.constexpr = SIZE // 2
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < length
    before = tl.load(lengths + row)
    slot = tl.load(starts + row).to(tl.int64) + before + t
    i = tl.arange(0, PAD)[None, :]
    in_a, in_b = inside[:, None] & (i < LOW), inside[:, None] & (i < SIZE - LOW)
    keys += batch * key_b + head * key_h
    x = keys + t.to(tl.int64)[:, None] * key_t
    turn = x  # a stand-in; it is read only if HALF > 0
    if HALF > 0:
        first = table + tl.load(read_at + batch).to(tl.int64) * (2 * HALF)
        turn = first + t.to(tl.int64)[:, None] * (2 * HALF)
    else:
        first = keys
    a = _unrotated(x, turn, i, in_a, HALF, INTERLEAVED)
    b = _unrotated(x, turn, i + LOW, in_b, HALF, INTERLEAVED)
    if mean is not None:
        off = mean + row * SIZE + i
        if before == 0:  # the mean is then that of this block's keys
            real = length
            if count is not None:
                real = tl.load(count)
            off_a = _mean(keys, key_t, first, real, i, i < LOW, HALF, INTERLEAVED, 32)
            off_b = _mean(keys, key_t, first, real, i + LOW, i < SIZE - LOW, HALF, INTERLEAVED, 32)
            if tl.program_id(0) == 0:
                tl.store(off, off_a, i < LOW)
                tl.store(off + LOW, off_b, i < SIZE - LOW)
        else:
            off_a = tl.load(off, i < LOW, 0.0)
            off_b = tl.load(off + LOW, i < SIZE - LOW, 0.0)
        a -= off_a
        b -= off_b
    _store(a, b, to_keys, key_scale, key_low, slot, inside, i, SIZE, KEY_GROUP)
    x = values + batch * value_b + head * value_h + t.to(tl.int64)[:, None] * value_t
    a = tl.load(x + i, in_a, 0.0).to(tl.float32)
    b = tl.load(x + i + LOW, in_b, 0.0).to(tl.float32)
    _store(a, b, to_values, value_scale, value_low, slot, inside, i, SIZE, VALUE_GROUP)
    tl.store(to_positions + slot, tl.load(positions + t, inside), inside)
    if shift is not None:
        tl.store(shift + slot, -(before + t), inside)
    zero = tl.zeros(slot.shape, tl.int8)
    if state_0 is not None:
        tl.store(state_0 + slot, zero.to(state_0.dtype.element_ty), inside)
    if state_1 is not None:
        tl.store(state_1 + slot, zero.to(state_1.dtype.element_ty), inside)
