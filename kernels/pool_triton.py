# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton functions of `kernels/pool.py`: put scores in time order, and pool them.

Importing this imports triton; `pool.py` does so when a kernel is first needed. No number and no
pointer is specialised. So a call in a CUDA graph needs no kernel that the same call outside did not
compile, and a growing row compiles none once it is longer than a tile.
"""

import triton
import triton.language as tl

_TENSORS = ["scores", "tiles", "whose", "ranks", "counted", "in_time"]
_SIZES = ["slots", "heads", "groups"]
_STRIDES = ["score_b", "score_h", "score_g", "score_n"]


@triton.jit
def _bisect(
    mine,
    tiles,
    slots,
    HIGHEST: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG_TILE: tl.constexpr,
):
    """Count the positions in ascending `tiles` that are smaller than each of `mine` [BLOCK]."""
    earlier = tl.zeros([CHUNK, BLOCK], tl.int32)
    for begin in range(0, slots, CHUNK << LOG_TILE):
        first = begin + (tl.arange(0, CHUNK) << LOG_TILE)[:, None]
        exists = first < slots
        index = first + tl.zeros([CHUNK, BLOCK], tl.int32)  # becomes the last earlier one's place
        for halved in tl.static_range(1, LOG_TILE + 1):
            step = (1 << LOG_TILE) >> halved
            its = tl.load(tiles + index + step, exists, HIGHEST)
            index += tl.where(its < mine[None, :], step, 0)
        its = tl.load(tiles + index, exists, HIGHEST)  # the first place is still to be compared
        earlier += index - first + (its < mine[None, :]).to(tl.int32)
    return tl.sum(earlier, 0)


@triton.jit(
    do_not_specialize=["positions", "tiles", "whose", *_SIZES[:2], "position_b", "position_h"]
)
def sort_tiles(
    positions,  # [B, K, n]; all of a row differ, and a row is contiguous
    tiles,  # [B·K, T, 2^LOG_TILE], is written: ascending, the last filled up with HIGHEST
    whose,  # [B·K, T, 2^LOG_TILE] int32, is written: slots of these positions; fillers: n and more
    slots,  # n
    heads,  # K
    position_b,
    position_h,
    HIGHEST: tl.constexpr,  # the largest number of the type of positions
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG_TILE: tl.constexpr,
):
    """Write some slots of a tile to their places in time within it."""
    row = tl.program_id(1).to(tl.int64)
    positions += row // heads * position_b + row % heads * position_h
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = slot < slots
    mine = tl.load(positions + slot, held, HIGHEST)
    first = ((tl.program_id(0) * BLOCK) >> LOG_TILE) << LOG_TILE
    end = tl.minimum(first + (1 << LOG_TILE), slots)
    earlier = tl.zeros([BLOCK, CHUNK], tl.int32)
    for begin in range(first, end, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        its = tl.load(positions + other, other < end, HIGHEST)  # a filler is earlier than none
        earlier += (its[None, :] < mine[:, None]).to(tl.int32)
    index = first + tl.sum(earlier, 1)
    index = tl.where(held, index, slot) + row * (tl.num_programs(0) * BLOCK)
    tl.store(tiles + index, mine)
    tl.store(whose + index, slot)


@triton.jit(do_not_specialize=[*_TENSORS, "clock", *_SIZES, *_STRIDES, "seen", "window"])
def rank_slots(
    scores,  # [B, K, G, n]
    tiles,  # result of `sort_tiles`
    whose,  # result of `sort_tiles`
    ranks,  # [B·K, n] int32, is written: each slot's place in time
    counted,  # [B·K, n] int8, is written in time order: 0 for a token that does not count, else 1
    in_time,  # [B·K, G, n] float32, is written: scores in time order
    slots,  # n
    heads,  # K
    groups,  # G
    score_b,
    score_h,
    score_g,
    score_n,
    seen,  # -1: the number is at `clock`
    clock,  # [] int64
    window,
    HIGHEST: tl.constexpr,  # the largest number of the type of positions
    GROUPS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,  # tiles that are searched at once
    LOG_TILE: tl.constexpr,
):
    """Write the places in time of some slots of a row, and their scores at these places."""
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    at = row * (tl.num_programs(0) * BLOCK) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine, slot = tl.load(tiles + at), tl.load(whose + at)
    held = slot < slots
    tiles += row * (tl.num_programs(0) * BLOCK)
    # A tile's slots are neighbours in time, and search nearly the same places.
    rank = _bisect(mine, tiles, slots, HIGHEST, BLOCK, CHUNK, LOG_TILE)
    tl.store(ranks + row * slots + slot, rank, held)
    now = tl.where(seen < 0, tl.load(clock, seen < 0, 0), seen)
    tl.store(counted + row * slots + rank, (mine < now - window).to(tl.int8), held)
    g = tl.arange(0, GROUPS_PAD)[:, None]
    inside = held[None, :] & (g < groups)
    source = scores + batch * score_b + head * score_h + g * score_g + slot[None, :] * score_n
    target = in_time + (row * groups + g) * slots + rank[None, :]
    tl.store(target, tl.load(source, inside, 0.0), inside)


@triton.jit(do_not_specialize=["ranks", "counted", "in_time", "out", "slots", "groups"])
def pool_ranks(
    ranks,  # [B·K, n] int32
    counted,  # [B·K, n] int8
    in_time,  # [B·K, G, n] float32
    out,  # likewise
    slots,  # n
    groups,  # G
    KERNEL: tl.constexpr,
    MAXIMUM: tl.constexpr,  # else the mean
    BLOCK: tl.constexpr,
):
    """Write, for some slots of a row, the maximum or mean over neighbours that count."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = slot < slots
    rank = tl.load(ranks + row // groups * slots + slot, held, 0)
    first = rank - KERNEL // 2
    counted += row // groups * slots
    in_time += row * slots
    pooled = tl.full([BLOCK], float("-inf") if MAXIMUM else 0.0, tl.float32)
    neighbours = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(KERNEL):  # in time order
        index = first + i
        counts = tl.load(counted + index, held & (index >= 0) & (index < slots), 0) != 0
        if MAXIMUM:
            x = tl.load(in_time + index, counts, float("-inf"))
            pooled = tl.where((x > pooled) | (x != x), x, pooled)  # NaN stays, as in torch
        else:
            pooled += tl.load(in_time + index, counts, 0.0)
            neighbours += counts.to(tl.int32)
    if not MAXIMUM:  # computed in the order of eager code, to round like it
        size = tl.full([BLOCK], KERNEL, tl.float32)
        share = tl.div_rn(tl.maximum(neighbours, 1).to(tl.float32), size)
        pooled = tl.div_rn(tl.div_rn(pooled, size), share)
    left_out = tl.load(counted + rank, held, 0) == 0
    pooled = tl.where(left_out, tl.load(in_time + rank, held, 0.0), pooled)
    tl.store(out + row * slots + slot, pooled, held)
