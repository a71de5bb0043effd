# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton functions of `kernels/window.py`, which imports this when needed.

Letters are those of `window.py`. Tiles are [slots, rows], as the matrix unit wants its first side
large. Padded rows see no slot: their `p` is 0.
"""

import math
import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOWEST = tl.constexpr(-1e30)  # in place of -inf, whose differences would be NaN
NOWHERE = tl.constexpr(2**31 - 1)  # a position that no query sees
NEVER = tl.constexpr(-(2**30))  # the time of a query that sees nothing; sums do not overflow
LOG2E = tl.constexpr(1 / math.log(2))


@triton.jit
def _dot(a, b):
    """Return `a · b`, summed in float32."""
    if INTERPRETED:  # the interpreter's product misreads the bits of a bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _dot_fine(a, b):
    """Return `a · b` for a float32 `b`, as a sum of two products in the type of `a`."""
    if a.dtype == tl.float32:
        return _dot(a, b)
    high = b.to(a.dtype)
    return _dot(a, high) + _dot(a, (b - high.to(tl.float32)).to(a.dtype))


@triton.jit
def _rows(block, G, w, GP: tl.constexpr, WB: tl.constexpr, HEADS: tl.constexpr):
    """Return each row's query head in its group, time in the window, and whether it exists, [R]."""
    r = tl.arange(0, GP * WB)
    if HEADS > 0:
        head, time = (block * WB + r) % HEADS, (block * WB + r) // HEADS
    else:
        head, time = r // WB, block * WB + r % WB
    return head, time, (head < G) & (time < w)


@triton.jit
def _queries(
    base,
    stride_h,
    stride_t,
    block,
    G,
    w,
    D: tl.constexpr,
    DP: tl.constexpr,
    GP: tl.constexpr,
    WB: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Load the queries of a block in time [R, DP], and their times in the window [R]."""
    head, time, there = _rows(block, G, w, GP, WB, HEADS)
    d = tl.arange(0, DP)
    at = base + head[:, None] * stride_h + time[:, None] * stride_t + d[None, :]
    q = tl.load(at, mask=there[:, None] & (d < D)[None, :], other=0.0)
    return q, tl.where(there, time, NEVER)


@triton.jit
def _tile(base, slots, stop, stride, D: tl.constexpr, DP: tl.constexpr):
    """Load keys or values of `slots` below `stop`, [N, DP]."""
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
    """Return `tanh x`, by its series where the quotient would lose digits."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))  # at most 1, so nothing overflows
    large = (1 - e) / (1 + e)
    s = x * x
    small = x * (1 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    return tl.where(s < 0.04, small, tl.where(x < 0, -large, large))


@triton.jit
def _first(seen, clock, w):
    """Return the position of the window's first query; a `seen` below 0 is read at `clock`."""
    now = tl.where(seen < 0, tl.load(clock, seen < 0, 0), seen)
    return (now - w).to(tl.int32)


@triton.jit
def _logits(q, k, scaling, softcap, CAPPED: tl.constexpr):
    """Return the logits `z = scaling · k·q` [N, R], softcapped if CAPPED."""
    z = _dot(k, tl.trans(q)) * scaling
    if CAPPED:
        z = softcap * _tanh(z / softcap)
    return z


@triton.jit
def _placed(k_base, v_base, k_n, v_n, starts, lengths, row):
    """Return pointers to keys and values, and the length, of a row of a pool."""
    first = tl.load(starts + row).to(tl.int64)
    return k_base + first * k_n, v_base + first * v_n, tl.load(lengths + row)


@triton.jit(do_not_specialize=["starts", "lengths", "w", "n", "seen", "clock", "chunk"])
def forward(
    q_ptr,
    k_ptr,
    v_ptr,
    pos_ptr,
    starts,
    lengths,
    part_ptr,
    sum_ptr,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    p_b,
    p_h,
    K,
    G,
    w,
    n,
    seen,
    clock,
    chunk,
    scaling,
    softcap,
    D: tl.constexpr,
    DP: tl.constexpr,
    HEADS: tl.constexpr,
    GP: tl.constexpr,
    WB: tl.constexpr,
    N: tl.constexpr,
    CAPPED: tl.constexpr,
    WITH_OUTPUT: tl.constexpr,
):
    """Write attention of one part of the slots for one KV head and block in time.

    It writes `a` [R, DP], the largest logit and the sum of `exp(z - largest)` [R]. If no slot of
    the part is visible, the largest logit is so low that the arbitrary `a` has no weight.
    """
    R: tl.constexpr = GP * WB
    part, row = tl.program_id(0), tl.program_id(1)
    block, b, h = tl.program_id(2), (row // K).to(tl.int64), (row % K).to(tl.int64)
    q_base = q_ptr + b * q_b + h * G * q_h
    q, time = _queries(q_base, q_h, q_t, block, G, w, D, DP, GP, WB, HEADS)
    k_base, v_base = k_ptr + b * k_b + h * k_h, v_ptr + b * v_b + h * v_h
    if starts is not None:
        k_base, v_base, n = _placed(k_base, v_base, k_n, v_n, starts, lengths, row)
    pos_base, first = pos_ptr + b * p_b + h * p_h, _first(seen, clock, w)
    top = tl.full([R], LOWEST, tl.float32)
    total = tl.full(
        [N, R], 0.0, tl.float32
    )  # summed once at the end, as each sum here would cost a barrier
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
            a = a * shrink[None, :] + _dot_fine(tl.trans(v), p)
        top = higher
    rows = tl.num_programs(1) * tl.num_programs(2)
    row = row * tl.num_programs(2) + block
    at = (row * tl.num_programs(0) + part) * R + tl.arange(0, R)
    each = tl.sum(total, 0)
    tl.store(sum_ptr + at, top)
    tl.store(sum_ptr + rows * tl.num_programs(0) * R + at, each)
    if WITH_OUTPUT:
        d = tl.arange(0, DP)
        each = tl.where(each == 0.0, 1.0, each)  # 0: a part behind all slots of its row
        tl.store(part_ptr + at[None, :] * DP + d[:, None], a / each[None, :])


@triton.jit(do_not_specialize=["parts", "K", "G", "blocks"])
def merge(
    part_ptr,
    sum_ptr,
    a_ptr,
    out_ptr,
    sinks_ptr,
    parts,
    K,
    G,
    blocks,
    R: tl.constexpr,
    WB: tl.constexpr,
    HEADS: tl.constexpr,
    DP: tl.constexpr,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    A_PARTS: tl.constexpr,
):
    """Merge all parts of some rows: `a` [DP], largest logits and sums of exponentials.

    `a` is written as `A_PARTS` numbers of the keys' type that sum to it, and `|a|²`. A query head's
    sink logit, of [K·G], counts as a part without an output.
    """
    row, rows = tl.program_id(0), tl.num_programs(0)
    r = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    part, d = tl.arange(0, PARTS), tl.arange(0, DP)
    at, there = (row * parts + part)[:, None] * R + r[None, :], (part < parts)[:, None]
    tops = tl.load(sum_ptr + at, mask=there, other=LOWEST)
    top = tl.max(tops, 0)
    if sinks_ptr is not None:
        # The result of a padded row is never read.
        head = (row % blocks * R + r) % HEADS if HEADS > 0 else tl.minimum(r // WB, G - 1)
        sink = tl.load(sinks_ptr + row // blocks % K * G + head)
        top = tl.maximum(top, sink)
    sums = tl.load(sum_ptr + rows * parts * R + at, mask=there, other=0.0)
    weight = _exp(tops - top[None, :]) * sums
    total = tl.sum(weight, 0)
    if sinks_ptr is not None:
        total += _exp(sink - top)
    tl.store(out_ptr + row * R + r, top)
    tl.store(out_ptr + (rows + row) * R + r, total)
    if A_PARTS > 0:
        at = part_ptr + at[:, :, None] * DP + d[None, None, :]
        a = tl.sum(tl.load(at, mask=there[:, :, None], other=0.0) * weight[:, :, None], 0)
        a = a / total[:, None]
        tl.store(out_ptr + (2 * rows + row) * R + r, tl.sum(a * a, 1))
        for i in tl.static_range(A_PARTS):
            each = a.to(a_ptr.dtype.element_ty)
            tl.store(a_ptr + ((i * rows + row) * R + r)[:, None] * DP + d[None, :], each)
            a -= each.to(tl.float32)


@triton.jit
def _merged(a_ptr, sum_ptr, at, held, DP: tl.constexpr, A_PARTS: tl.constexpr):
    """Load the results of `merge` for rows `at` [R], of `held` rows in all.

    They are `a` in three parts [R, DP], `|a|²` [R], largest logits [R] and sums [R]; parts that do
    not exist are arbitrary.
    """
    top, total = tl.load(sum_ptr + at), tl.load(sum_ptr + held + at)
    high, low, lowest, squares = top, top, top, top
    if A_PARTS > 0:
        squares = tl.load(sum_ptr + 2 * held + at)
        wide = a_ptr + at[:, None] * DP + tl.arange(0, DP)[None, :]
        high = tl.load(wide)
        if A_PARTS > 1:
            low = tl.load(wide + held * DP)
        if A_PARTS > 2:
            lowest = tl.load(wide + 2 * held * DP)
    return high, low, lowest, squares, top, total


@triton.jit
def _of_rows(
    a_ptr,
    a_base,
    sum_ptr,
    a_h,
    a_t,
    at,
    held,
    block,
    G,
    w,
    D: tl.constexpr,
    DP: tl.constexpr,
    GP: tl.constexpr,
    WB: tl.constexpr,
    HEADS: tl.constexpr,
    A_PARTS: tl.constexpr,
    KNOWN: tl.constexpr,
):
    """Load the merged rows of a block by `_merged`; if KNOWN, load `a` from attention's output."""
    high, low, lowest, squares, top, total = _merged(
        a_ptr, sum_ptr, at, held, DP, 0 if KNOWN else A_PARTS
    )
    if KNOWN:
        high, _ = _queries(a_base, a_h, a_t, block, G, w, D, DP, GP, WB, HEADS)
        squares = tl.sum(high.to(tl.float32) * high.to(tl.float32), 1)
    return high, low, lowest, squares, top, total


@triton.jit
def _cost(
    q,
    time,
    merged,
    k,
    v,
    position,
    first,
    scaling,
    softcap,
    epsilon,
    KIND: tl.constexpr,
    CAPPED: tl.constexpr,
    ROUNDED: tl.constexpr,
    A_PARTS: tl.constexpr,
):
    """Return the epilogue's value for every slot and query [N, R], 0 where masked."""
    high, low, lowest, lengths, top, total = merged
    z = _logits(q, k, scaling, softcap, CAPPED)
    visible = position[:, None] <= (first + time)[None, :]
    p = _exp(tl.where(visible, z - top[None, :], LOWEST)) * (1 / total)[None, :]
    if KIND == "attention" or KIND == "cake" or KIND == "variance":
        cost = p
    elif KIND == "entropy":
        cost = tl.where(p > 0, -p * tl.log(tl.where(p > 0, p, 1.0)), 0.0)
    else:
        wide = v.to(tl.float32)
        squares = tl.sum(wide * wide, 1)[:, None]
        if KIND == "value":
            cost = p * p * squares
        else:
            along = _dot(v, tl.trans(high))
            if A_PARTS > 1:
                along += _dot(v, tl.trans(low))
            if A_PARTS > 2:
                along += _dot(v, tl.trans(lowest))
            distance = tl.maximum(lengths[None, :] + squares - 2 * along, 0.0)
            if KIND == "dropkv":
                most = tl.where(p > 0.5, 1.0, 0.0)  # 1 for at most one slot per query
                if tl.max(most) > 0:  # for that slot the distance is computed from differences
                    own = _dot(tl.trans(most).to(v.dtype), v)  # that slot's v, or 0. [R, DP]
                    a = high.to(tl.float32)
                    if A_PARTS > 1:
                        a += low.to(tl.float32)
                    if A_PARTS > 2:
                        a += lowest.to(tl.float32)
                    near = tl.sum((a - own) * (a - own), 1)
                    distance = tl.where(p > 0.5, near[None, :], distance)
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


@triton.jit
def _spread(
    p, time, w, gamma, N: tl.constexpr, GP: tl.constexpr, WB: tl.constexpr, MEAN: tl.constexpr
):
    """Return `mean + gamma · variance` of p over a query head's window, split over its queries.

    The shares [N, R] of a query head's queries sum to that number.
    """
    there = (time >= 0)[None, :]  # False for padded rows
    heads = tl.reshape(p, [N, GP, WB])
    mean = tl.sum(heads, 2) / w
    off = tl.reshape(heads - mean[:, :, None], [N, GP * WB])
    variance = gamma * tl.where(there, off * off, 0.0)
    return (p + variance if MEAN else variance) / w


# The compiler removes branches on constants.
@triton.jit(
    do_not_specialize=["starts", "lengths", "w", "n", "seen", "clock", "chunk", "blocks", "held"]
)
def score(
    q_ptr,
    k_ptr,
    v_ptr,
    pos_ptr,
    starts,
    lengths,
    a_ptr,
    sum_ptr,
    out_ptr,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    p_b,
    p_h,
    a_b,
    a_h,
    a_t,
    K,
    G,
    w,
    n,
    seen,
    clock,
    chunk,
    scaling,
    softcap,
    epsilon,
    blocks,
    held,
    D: tl.constexpr,
    DP: tl.constexpr,
    HEADS: tl.constexpr,
    GP: tl.constexpr,
    WB: tl.constexpr,
    N: tl.constexpr,
    SEVERAL: tl.constexpr,
    KNOWN: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    A_PARTS: tl.constexpr,
    CAPPED: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Write the scores of one part of a KV head's slots: [n], or [G, n] of its query heads.

    They are computed from the results of `merge` for `held` rows of each KV head and, if KNOWN,
    from attention's output [B, H, w, D] at `a_ptr`.
    """
    R: tl.constexpr = GP * WB
    part, row, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h = (row // K).to(tl.int64), (row % K).to(tl.int64)
    q_base = q_ptr + b * q_b + h * G * q_h
    k_base, v_base = k_ptr + b * k_b + h * k_h, v_ptr + b * v_b + h * v_h
    row_n = n  # from a row of scores to the next
    if starts is not None:
        k_base, v_base, n = _placed(k_base, v_base, k_n, v_n, starts, lengths, row)
    pos_base, first = pos_ptr + b * p_b + h * p_h, _first(seen, clock, w)
    a_base, heads = a_ptr + b * a_b + h * G * a_h, tl.arange(0, GP)
    all_held, own = rows * held, row * held + tl.arange(0, R)
    if not SEVERAL:
        q, time = _queries(q_base, q_h, q_t, 0, G, w, D, DP, GP, WB, HEADS)
        merged = _of_rows(
            a_ptr,
            a_base,
            sum_ptr,
            a_h,
            a_t,
            own,
            all_held,
            0,
            G,
            w,
            D,
            DP,
            GP,
            WB,
            HEADS,
            A_PARTS,
            KNOWN,
        )
    begin, stop = part * chunk, tl.minimum(part * chunk + chunk, n)
    tiles = tl.cdiv(stop - begin, N)
    for i in range(tiles):
        slots = begin + (tiles - 1 - i) * N + tl.arange(0, N)
        k = _tile(k_base, slots, stop, k_n, D, DP)
        v = k
        if KIND != "attention" and KIND != "cake" and KIND != "variance" and KIND != "entropy":
            v = _tile(v_base, slots, stop, v_n, D, DP)
        position = tl.load(pos_base + slots, mask=slots < stop, other=NOWHERE)
        if not SEVERAL:
            cost = _cost(
                q,
                time,
                merged,
                k,
                v,
                position,
                first,
                scaling,
                softcap,
                epsilon,
                KIND,
                CAPPED,
                ROUNDED,
                A_PARTS,
            )
        else:
            cost = tl.full([N, R], 0.0, tl.float32)
            for block in range(blocks):
                q, time = _queries(q_base, q_h, q_t, block, G, w, D, DP, GP, WB, HEADS)
                merged = _of_rows(
                    a_ptr,
                    a_base,
                    sum_ptr,
                    a_h,
                    a_t,
                    own + block * R,
                    all_held,
                    block,
                    G,
                    w,
                    D,
                    DP,
                    GP,
                    WB,
                    HEADS,
                    A_PARTS,
                    KNOWN,
                )
                cost += _cost(
                    q,
                    time,
                    merged,
                    k,
                    v,
                    position,
                    first,
                    scaling,
                    softcap,
                    epsilon,
                    KIND,
                    CAPPED,
                    ROUNDED,
                    A_PARTS,
                )
        if KIND == "cake" or KIND == "variance":  # this program has all queries of a query head
            cost = _spread(cost, time, w, epsilon, N, GP, WB, KIND == "cake")
        if GROUP == "sum" or GROUP == "mean":
            summed = tl.sum(cost, 1)
            summed = summed / G if GROUP == "mean" else summed
            tl.store(out_ptr + row.to(tl.int64) * row_n + slots, summed, mask=slots < stop)
        else:
            each = tl.sum(tl.reshape(cost, [N, GP, WB]), 2)  # [N, GP]
            if GROUP == "max":
                most = tl.max(tl.where((heads < G)[None, :], each, LOWEST), 1)
                tl.store(out_ptr + row.to(tl.int64) * row_n + slots, most, mask=slots < stop)
            else:
                at = (row.to(tl.int64) * G + heads)[None, :] * row_n + slots[:, None]
                tl.store(out_ptr + at, each, mask=(slots < stop)[:, None] & (heads < G)[None, :])
