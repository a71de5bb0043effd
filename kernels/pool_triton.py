# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Triton functions of `kernels/pool.py`: scores put in time order, and pooled there.

Importing this imports triton; `pool.py` does so when a kernel is first needed. No number and no
pointer is specialised: whatever is replayed in a CUDA graph has been compiled by the same call
outside of one, and a row that grows compiles nothing.
"""

import triton
import triton.language as tl

_SIZES = ["slots", "heads", "groups"]
_STRIDES = ["score_b", "score_h", "score_g", "score_n", "position_b", "position_h"]


@triton.jit(do_not_specialize=["scores", "positions", "ranks", "in_time", *_SIZES, *_STRIDES])
def rank_slots(
    scores,  # [B, K, G, n]
    positions,  # [B, K, n], those of a row contiguous and distinct
    ranks,  # [B·K, n] int32
    in_time,  # [B·K, G, n] float32
    slots,  # n
    heads,  # K
    groups,  # G
    score_b, score_h, score_g, score_n,
    position_b, position_h,
    HIGHEST: tl.constexpr,  # of the type of positions
    GROUPS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Some slots of a row: how many of its slots are earlier, and their scores at that place."""
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    positions += batch * position_b + head * position_h
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = slot < slots
    mine = tl.load(positions + slot, held, HIGHEST)
    earlier = tl.zeros([BLOCK, CHUNK], tl.int32)
    for begin in range(0, slots, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        its = tl.load(positions + other, other < slots, HIGHEST)  # earlier than none
        earlier += (its[None, :] < mine[:, None]).to(tl.int32)
    rank = tl.sum(earlier, 1)
    tl.store(ranks + row * slots + slot, rank, held)
    g = tl.arange(0, GROUPS_PAD)[:, None]
    inside = held[None, :] & (g < groups)
    source = scores + batch * score_b + head * score_h + g * score_g + slot[None, :] * score_n
    target = in_time + (row * groups + g) * slots + rank[None, :]
    tl.store(target, tl.load(source, inside, 0.0), inside)


@triton.jit(do_not_specialize=["ranks", "in_time", "out", "slots", "groups"])
def pool_ranks(
    ranks,  # [B·K, n] int32
    in_time,  # [B·K, G, n] float32
    out,  # likewise
    slots,  # n
    groups,  # G
    KERNEL: tl.constexpr,
    MAXIMUM: tl.constexpr,  # else the mean
    BLOCK: tl.constexpr,
):
    """Some slots of a row of scores: the maximum or mean of their neighbours that exist."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = slot < slots
    first = tl.load(ranks + row // groups * slots + slot, held, 0) - KERNEL // 2
    in_time += row * slots
    pooled = tl.full([BLOCK], float("-inf") if MAXIMUM else 0.0, tl.float32)
    for i in tl.static_range(KERNEL):  # in time order
        place = first + i
        exists = held & (place >= 0) & (place < slots)
        if MAXIMUM:
            x = tl.load(in_time + place, exists, float("-inf"))
            pooled = tl.where((x > pooled) | (x != x), x, pooled)  # NaN stays, as in torch
        else:
            pooled += tl.load(in_time + place, exists, 0.0)
    if not MAXIMUM:
        count = tl.minimum(first + KERNEL, slots) - tl.maximum(first, 0)
        pooled = tl.div_rn(pooled, count.to(tl.float32))
    tl.store(out + row * slots + slot, pooled, held)
