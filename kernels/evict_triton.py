# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Triton functions of `kernels/evict.py`: the lowest slots that nothing pins, and giving slots up.

Importing this imports triton; `evict.py` does so when a kernel is first needed. What changes from
block to block, or from segment to segment, is not specialised: whatever is replayed in a CUDA graph
has been compiled by the same call outside of one.
"""

import triton
import triton.language as tl

HIGHEST = tl.constexpr(3.4028234663852886e38)  # the largest finite float32

_PINS = ["slots", "capacity", "heads", "score_b", "score_h", "sinks", "recents", "seen", "spans"]
_PINS += [f"{end}_{i}" for i in range(8) for end in ("start", "stop")]
_NARROW = ["positions", "shift", "side_0", "side_1", "side_2", "side_3"]


@triton.jit
def _worth(
    scores, positions, slot, slots, score_n, sinks, recents, seen, clock, spans,
    start_0, stop_0, start_1, stop_1, start_2, stop_2, start_3, stop_3,
    start_4, stop_4, start_5, stop_5, start_6, stop_6, start_7, stop_7,
):  # fmt: skip
    """Scores of a row's slots, made finite; +inf: pinned, or no slot. float32."""
    held = slot < slots
    x = tl.load(scores + slot * score_n, held, 0.0).to(tl.float32)
    p = tl.load(positions + slot, held, 0)
    now = tl.where(seen < 0, tl.load(clock, seen < 0, 0), seen)
    pinned = (slot >= slots) | (p < sinks) | (p >= (now - recents).to(tl.int32))
    if spans > 0:
        pinned = pinned | (p >= start_0) & (p < stop_0) | (p >= start_1) & (p < stop_1)
        pinned = pinned | (p >= start_2) & (p < stop_2) | (p >= start_3) & (p < stop_3)
        pinned = pinned | (p >= start_4) & (p < stop_4) | (p >= start_5) & (p < stop_5)
        pinned = pinned | (p >= start_6) & (p < stop_6) | (p >= start_7) & (p < stop_7)
    x = tl.minimum(tl.maximum(tl.where(x != x, -HIGHEST, x), -HIGHEST), HIGHEST)
    return tl.where(pinned, float("inf"), x)


@triton.jit
def _key(x, slot):
    """Integers ordered as the floats are and, where these are equal, as the slots. int64."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is no lower than 0.0
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | slot


@triton.jit(do_not_specialize=[*_PINS, *_NARROW])
def evict_one(
    scores,  # [B, K, n]
    evicted,  # [B·K] int64, written, or read where there is nothing to CHOOSE
    positions,  # this and the others: slot 0 of row 0, the next row `capacity` slots behind
    shift,  # or None
    keys,  # [..., SIZE] integers
    values,
    side_0, side_1, side_2, side_3,  # integers, or None
    slots,  # n
    capacity,
    heads,  # K
    score_b, score_h, score_n,
    sinks, recents,
    seen,  # -1: at `clock`
    clock,  # [] int64
    spans,  # how many of these
    start_0, stop_0, start_1, stop_1, start_2, stop_2, start_3, stop_3,
    start_4, stop_4, start_5, stop_5, start_6, stop_6, start_7, stop_7,
    CHOOSE: tl.constexpr,
    MOVE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A whole row: find its slot of least worth, and put its last one there."""
    row = tl.program_id(0).to(tl.int64)
    positions += row * capacity
    last = row * capacity + slots - 1
    d = tl.arange(0, SIZE_PAD)
    if MOVE:
        # The last slot moves wherever it goes: read before that is known.
        key = tl.load(keys + last * SIZE + d, d < SIZE)
        value = tl.load(values + last * SIZE + d, d < SIZE)
        position = tl.load(positions + slots - 1)
        if shift is not None:
            shifted = tl.load(shift + last)
        if side_0 is not None:
            x_0 = tl.load(side_0 + last)
        if side_1 is not None:
            x_1 = tl.load(side_1 + last)
        if side_2 is not None:
            x_2 = tl.load(side_2 + last)
        if side_3 is not None:
            x_3 = tl.load(side_3 + last)
    if CHOOSE:
        scores += row // heads * score_b + row % heads * score_h
        least = tl.full([BLOCK], 0x7FFFFFFFFFFFFFFF, tl.int64)
        for begin in range(0, slots, BLOCK):
            slot = begin + tl.arange(0, BLOCK)
            x = _worth(
                scores, positions, slot, slots, score_n, sinks, recents, seen, clock, spans,
                start_0, stop_0, start_1, stop_1, start_2, stop_2, start_3, stop_3,
                start_4, stop_4, start_5, stop_5, start_6, stop_6, start_7, stop_7,
            )  # fmt: skip
            least = tl.minimum(least, _key(x, slot))
        target = tl.min(least, 0) & 0xFFFFFFFF
        tl.store(evicted + row, target)
    else:
        target = tl.load(evicted + row)
    if MOVE:
        if shift is not None:
            gone = tl.load(positions + target)
            shifted += (gone < position).to(tl.int32)
            tl.debug_barrier()  # the last shift is read
            for begin in range(0, slots, BLOCK):
                slot = begin + tl.arange(0, BLOCK)
                held = slot < slots
                at = shift + row * capacity + slot
                newer = gone < tl.load(positions + slot, held, 0)
                moved = tl.load(at, held, 0) + newer.to(tl.int32)
                tl.store(at, tl.where(slot == target, shifted, moved), held)
        tl.debug_barrier()  # all positions are read
        tl.store(positions + target, position)
        at = row * capacity + target
        tl.store(keys + at * SIZE + d, key, d < SIZE)
        tl.store(values + at * SIZE + d, value, d < SIZE)
        if side_0 is not None:
            tl.store(side_0 + at, x_0)
        if side_1 is not None:
            tl.store(side_1 + at, x_1)
        if side_2 is not None:
            tl.store(side_2 + at, x_2)
        if side_3 is not None:
            tl.store(side_3 + at, x_3)


@triton.jit(do_not_specialize=[*_PINS, *_NARROW])
def worths(
    scores,  # [B, K, n]
    positions,  # slot 0 of row 0, the next row `capacity` slots behind
    out,  # [B·K, n] float32
    slots, capacity, heads, score_b, score_h, score_n,
    sinks, recents, seen, clock, spans,
    start_0, stop_0, start_1, stop_1, start_2, stop_2, start_3, stop_3,
    start_4, stop_4, start_5, stop_5, start_6, stop_6, start_7, stop_7,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some of a row's scores, finite but where a slot is pinned."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = _worth(
        scores + row // heads * score_b + row % heads * score_h,
        positions + row * capacity, slot, slots, score_n, sinks, recents, seen, clock, spans,
        start_0, stop_0, start_1, stop_1, start_2, stop_2, start_3, stop_3,
        start_4, stop_4, start_5, stop_5, start_6, stop_6, start_7, stop_7,
    )  # fmt: skip
    tl.store(out + row * slots + slot, x, slot < slots)


@triton.jit(do_not_specialize=["positions", "shift", "slots", "capacity", "count"])
def pair_slots(
    evicted,  # [B·K, count] int64
    positions,  # slot 0 of row 0
    shift,  # likewise, or None
    pairs,  # [B·K, 2, count] int32: to, from
    slots, capacity, count,
    STEP: tl.constexpr,  # evicted slots compared at once with each of the program's
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some of a row's slots: shift them, and place them among those that move or are moved to."""
    row = tl.program_id(1).to(tl.int64)
    evicted += row * count
    positions += row * capacity
    pairs += row * 2 * count
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = slot < slots
    kept = slots - count
    position = tl.load(positions + slot, held, 0)
    before = tl.zeros([BLOCK], tl.int32)  # evicted slots before this one
    hits = tl.zeros([BLOCK], tl.int32)
    older = tl.zeros([BLOCK], tl.int32)
    holes = 0  # evicted slots before `kept`
    for begin in range(0, count, STEP):
        i = begin + tl.arange(0, STEP)
        gone = tl.load(evicted + i, i < count, slots).to(tl.int32)
        before += tl.sum((gone[:, None] < slot[None, :]).to(tl.int32), 0)
        hits += tl.sum((gone[:, None] == slot[None, :]).to(tl.int32), 0)
        holes += tl.sum((gone < kept).to(tl.int32), 0)
        if shift is not None:
            at = tl.load(positions + gone, i < count, 0x7FFFFFFF)
            older += tl.sum((at[:, None] < position[None, :]).to(tl.int32), 0)
    if shift is not None:
        shift += row * capacity + slot
        tl.store(shift, tl.load(shift, held, 0) + older, held)
    # Holes first, in their order, then the tail's evicted slots, which stay where they are; to
    # them, the tail's survivors in their order, then the evicted ones.
    tl.store(pairs + before, slot, held & (hits > 0))
    rank = tl.where(hits > 0, before, slot - kept - (before - holes))
    tl.store(pairs + count + rank, slot, held & (slot >= kept))


@triton.jit(do_not_specialize=[*_NARROW, "side_4", "side_5", "capacity", "count"])
def move_slots(
    pairs,  # [B·K, 2, count] int32
    keys,  # [..., SIZE] integers, slot 0 of row 0
    values,
    side_0, side_1, side_2, side_3, side_4, side_5,  # integers, or None
    capacity, count,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some of a row's moves. What is read lies behind all that is written."""
    row = tl.program_id(1).to(tl.int64)
    pairs += row * 2 * count
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = row * capacity + tl.load(pairs + i, i < count, 0)
    source = row * capacity + tl.load(pairs + count + i, i < count, 0)
    moves = (i < count) & (source != target)
    d = tl.arange(0, SIZE_PAD)
    inside = moves[:, None] & (d < SIZE)[None, :]
    to, of = target[:, None] * SIZE + d[None, :], source[:, None] * SIZE + d[None, :]
    key = tl.load(keys + of, inside)
    value = tl.load(values + of, inside)
    tl.store(keys + to, key, inside)
    tl.store(values + to, value, inside)
    if side_0 is not None:
        tl.store(side_0 + target, tl.load(side_0 + source, moves), moves)
    if side_1 is not None:
        tl.store(side_1 + target, tl.load(side_1 + source, moves), moves)
    if side_2 is not None:
        tl.store(side_2 + target, tl.load(side_2 + source, moves), moves)
    if side_3 is not None:
        tl.store(side_3 + target, tl.load(side_3 + source, moves), moves)
    if side_4 is not None:
        tl.store(side_4 + target, tl.load(side_4 + source, moves), moves)
    if side_5 is not None:
        tl.store(side_5 + target, tl.load(side_5 + source, moves), moves)
