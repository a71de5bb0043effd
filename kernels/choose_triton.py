# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines Triton functions by which kernels choose which slots of a row are evicted.

The slots with the lowest scores go, unless they are pinned; of equal ones the older go, as in
`policies.base.order`.

Importing this imports triton. Arguments that differ between blocks or layers are not specialised,
so that a call in a CUDA graph needs no kernel that the same call outside did not compile.
"""

import triton
import triton.language as tl

HIGHEST = tl.constexpr(3.4028234663852886e38)  # the largest finite float32
PINNED = tl.constexpr(0x7F800000)  # the result of `ordered` for +inf
NO_SLOT = tl.constexpr(1 << 30)  # plus a slot's number: a position of no slot, all distinct

PINS = ["slots", "heads", "score_b", "score_h", "seen", "marked"]
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
    newest,
    marked,
):
    """Return scores of a row's slots as ordered integers, and positions.

    They are finite, or `PINNED` for pinned and missing slots.
    A score of +inf pins its slot where `marked` is 1; else it is the largest that is finite.
    """
    held = slot < slots
    x = tl.load(scores + slot * score_n, held, 0.0).to(tl.float32)
    p = tl.load(positions + slot, held, 0)
    pinned = (slot >= slots) | (p < sinks) | (p >= newest)
    pinned = pinned | (x == float("inf")) & (marked > 0)
    x = tl.minimum(tl.maximum(tl.where(x != x, -HIGHEST, x), -HIGHEST), HIGHEST)
    return ordered(tl.where(pinned, float("inf"), x)), tl.where(held, p, NO_SLOT | slot)


@triton.jit
def pins_of_row(row_pins, row, seen, clock):
    """Return below and from which positions a row's tokens stay.

    A table [B·K, 2] says how many first and newest tokens that are; a `seen` below 0 is at `clock`.
    """
    now = tl.where(seen < 0, tl.load(clock, seen < 0, 0), seen)
    newest = (now - tl.load(row_pins + 2 * row + 1)).to(tl.int32)
    return tl.load(row_pins + 2 * row), newest


@triton.jit
def grow(newer, batch, head, newer_b, newer_h, count, NEWER: tl.constexpr, PAD: tl.constexpr):
    """Add `count` to the shifts [NEWER] of a head's tokens that are newer than all that go."""
    i = tl.arange(0, PAD)
    at = newer + batch * newer_b + head * newer_h + i
    tl.store(at, tl.load(at, i < NEWER, 0) + count, i < NEWER)


@triton.jit
def ordered(x):
    """Return int32 integers in the same order as the floats."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is no lower than 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def bound(x, count):
    """Return a bound of the `count` lowest of x [BLOCK], and how many lie below it; both int32.

    If fewer than `count` lie below, the rest equal the bound. As any value up to the lowest that
    stays will do, at most 21 steps find it, fewer than there are bits. BLOCK is at most 2^15, and
    of so many some are pinned or no slot.
    """
    # At most `count` are below `low`; more than that, or all that is not pinned, below `high`.
    low = tl.min(x, 0)
    high = tl.max(tl.where(x == PINNED, low, x), 0) + 1
    below = tl.full([], 0, tl.int32)
    while (below < count) & (low + 1 < high):
        # A reduction costs more than comparisons, so one counts what is below either third. The
        # difference of two int32 can exceed an int32.
        third = ((high.to(tl.int64) - low + 2).to(tl.uint32) // 3).to(tl.int64)
        lower, two = (low + third).to(tl.int32), (low + 2 * third).to(tl.int32)
        both = tl.sum((x < lower).to(tl.int32) + ((x < two).to(tl.int32) << 16), 0)
        below_one, below_two = both & 0xFFFF, both >> 16
        high = tl.where(below_one > count, lower, tl.where(below_two > count, two, high))
        low = tl.where(below_two <= count, two, tl.where(below_one <= count, lower, low))
        below = tl.where(
            below_two <= count, below_two, tl.where(below_one <= count, below_one, below)
        )
    return low, below


@triton.jit
def cut_of(x, positions, count):
    """Return a worth and a position, int32, that bound the `count` lowest of x [BLOCK].

    The lowest are the slots below that worth, and those of that worth before the position.
    """
    low, below = bound(x, count)
    oldest = tl.full([], 0, tl.int32)
    if below < count:
        last, older = bound(tl.where(x == low, positions, PINNED), count - below)
        oldest = last + (below + older < count).to(tl.int32)
    return low, oldest
