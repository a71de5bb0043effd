# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines Triton functions by which kernels choose which slots of a row are evicted.

Those go that have the lowest scores and that nothing pins; of equal ones the older, as
`policies.base.order` has it.

Importing this imports triton. What changes from block to block, or from layer to layer, is not
specialised: whatever is replayed in a CUDA graph has been compiled by the same call outside of one.
"""

import triton
import triton.language as tl

HIGHEST = tl.constexpr(3.4028234663852886e38)  # the largest finite float32
PINNED = tl.constexpr(0x7F800000)  # +inf, as `ordered` has it
NO_SLOT = tl.constexpr(1 << 30)  # with a slot's number in place of a position: all are distinct

PINS = ["slots", "heads", "score_b", "score_h", "sinks", "recents", "seen", "spans"]
PINS += [f"{end}_{i}" for i in range(8) for end in ("start", "stop")]
NEWER_AT = ["newer", "newer_b", "newer_h"]
ROWS = ["starts", "lengths", "row_pins"]


@triton.jit
def worth_of(
    scores,
    positions,
    slot,
    slots,
    score_n,
    sinks,
    recents,
    seen,
    clock,
    spans,
    start_0,
    stop_0,
    start_1,
    stop_1,
    start_2,
    stop_2,
    start_3,
    stop_3,
    start_4,
    stop_4,
    start_5,
    stop_5,
    start_6,
    stop_6,
    start_7,
    stop_7,
):
    """Return a row's scores as finite float32, +inf where pinned or no slot, and its positions."""
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
    return tl.where(pinned, float("inf"), x), tl.where(held, p, NO_SLOT | slot)


@triton.jit
def pins_of_row(row_pins, row):
    """Return how many first and newest tokens of a row stay, from a table [B·K, 2]."""
    return tl.load(row_pins + 2 * row), tl.load(row_pins + 2 * row + 1)


@triton.jit
def grow(newer, batch, head, newer_b, newer_h, count, NEWER: tl.constexpr, PAD: tl.constexpr):
    """Add `count` to the shifts [NEWER] of a head's tokens that are newer than all that go."""
    i = tl.arange(0, PAD)
    at = newer + batch * newer_b + head * newer_h + i
    tl.store(at, tl.load(at, i < NEWER, 0) + count, i < NEWER)


@triton.jit
def ordered(x):
    """Return int32 integers that are ordered as the floats are."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is no lower than 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def bound(x, count):
    """Return a bound that the `count` lowest of x [BLOCK] lie below, and how many do. int32, int32.

    Where fewer lie below, the rest equal it. Any value up to the lowest that stays will do: far
    fewer steps than bits find it, at most 21. BLOCK is 2^15 at most, and not all of so many are
    free.
    """
    # Up to `count` are below `low`; more than that, or all that is not pinned, below `high`.
    low = tl.min(x, 0)
    high = tl.max(tl.where(x == PINNED, low, x), 0) + 1
    below = tl.full([], 0, tl.int32)
    while (below < count) & (low + 1 < high):
        # A reduction costs more than comparisons: it counts what is below either third. Two int32
        # can be further apart than an int32 holds.
        third = ((high.to(tl.int64) - low + 2).to(tl.uint32) // 3).to(tl.int64)
        one, two = (low + third).to(tl.int32), (low + 2 * third).to(tl.int32)
        both = tl.sum((x < one).to(tl.int32) + ((x < two).to(tl.int32) << 16), 0)
        below_one, below_two = both & 0xFFFF, both >> 16
        high = tl.where(below_one > count, one, tl.where(below_two > count, two, high))
        low = tl.where(below_two <= count, two, tl.where(below_one <= count, one, low))
        below = tl.where(
            below_two <= count, below_two, tl.where(below_one <= count, below_one, below)
        )
    return low, below


@triton.jit
def cut_of(x, positions, count):
    """Return the worth below which the `count` lowest of x [BLOCK] lie, and a position, as int32.

    Of those that equal that worth, the ones older than the position are among the lowest, too.
    """
    low, below = bound(x, count)
    oldest = tl.full([], 0, tl.int32)
    if below < count:
        last, older = bound(tl.where(x == low, positions, PINNED), count - below)
        oldest = last + (below + older < count).to(tl.int32)
    return low, oldest
