# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton functions of `kernels/division.py`, which imports this when needed."""

import triton
import triton.language as tl

from kvcap.kernels.choose_triton import (
    NO_SLOT,
    PINNED,
    PINS,
    ROWS,
    bound,
    pins_of_row,
    worth_of,
)

_POINTERS = ["worths", "row_pinned", "positions", "lengths"]
_LAYER = [*_POINTERS, "targets", "before", "kept", "budgets", "starts", "slots", "average", "block"]
_LAYER += ["part", "whole", "rows", "heads"]


@triton.jit(do_not_specialize=[*PINS, *ROWS, *_POINTERS])
def rank_worths(
    scores,  # [B, K, longest]
    positions,  # [B, K, longest]
    worths,  # [B·K, longest] int32, is written: in the order of scores, PINNED if not free
    row_pinned,  # [B·K] int32, is written: slots that stay in any case
    slots,  # longest
    heads,  # K
    score_b,
    score_h,
    score_n,
    seen,
    clock,
    marked,
    lengths,  # [B·K] int32
    row_pins,  # as in `pins_of_row`
    BLOCK: tl.constexpr,
):
    """Write the worth of each slot of one whole row, as ordered integers."""
    row = tl.program_id(0).to(tl.int64)
    scores += row // heads * score_b + row % heads * score_h
    positions += row * slots
    worths += row * slots
    held, pinned = tl.load(lengths + row), tl.full([], 0, tl.int32)
    sinks, newest = pins_of_row(row_pins, row, seen, clock)
    for begin in range(0, slots, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        x, _ = worth_of(
            scores,
            positions,
            slot,
            held,
            score_n,
            sinks,
            newest,
            marked,
        )
        pinned += tl.sum(((x == PINNED) & (slot < held)).to(tl.int32), 0)
        tl.store(worths + slot, x, slot < slots)
    tl.store(row_pinned + row, pinned)


@triton.jit
def _layer_cut(worths, positions, all_slots, count, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Return a worth, a position and a number, int32, that bound the `count` lowest of a layer.

    The lowest are the slots below that worth, those of that worth before the position, and so many
    of those of exactly that worth and position.
    """
    if WHOLE:  # the layer fits in registers
        slot = tl.arange(0, BLOCK)
        x = tl.load(worths + slot, slot < all_slots, PINNED)
        low, below = bound(x, count)
        oldest, older = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        if below < count:
            position = tl.load(positions + slot, slot < all_slots, 0)
            oldest, older = bound(tl.where(x == low, position, PINNED), count - below)
        return low, oldest, count - below - older
    low, high = tl.full([], PINNED, tl.int32), tl.full([], -0x7FFFFFFF, tl.int32)
    for begin in range(0, all_slots, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        x = tl.load(worths + slot, slot < all_slots, PINNED)
        low = tl.minimum(low, tl.min(x, 0))
        high = tl.maximum(high, tl.max(tl.where(x == PINNED, -0x7FFFFFFF, x), 0))
    high = tl.maximum(high, low) + 1
    below = tl.full([], 0, tl.int32)
    while (below < count) & (low + 1 < high):
        middle = low + ((high.to(tl.int64) - low) // 2).to(tl.int32)
        counted = tl.full([], 0, tl.int32)
        for begin in range(0, all_slots, BLOCK):
            slot = begin + tl.arange(0, BLOCK)
            x = tl.load(worths + slot, slot < all_slots, PINNED)
            counted += tl.sum((x < middle).to(tl.int32), 0)
        fits = counted <= count
        low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
        below = tl.where(fits, counted, below)
    oldest, newest = tl.full([], 0, tl.int32), tl.full([], NO_SLOT, tl.int32)
    older = tl.full([], 0, tl.int32)
    while (below + older < count) & (oldest + 1 < newest):
        middle = oldest + (newest - oldest) // 2
        counted = tl.full([], 0, tl.int32)
        for begin in range(0, all_slots, BLOCK):
            slot = begin + tl.arange(0, BLOCK)
            x = tl.load(worths + slot, slot < all_slots, PINNED)
            position = tl.load(positions + slot, slot < all_slots, 0)
            counted += tl.sum(((x == low) & (position < middle)).to(tl.int32), 0)
        fits = below + counted <= count
        oldest, newest = tl.where(fits, middle, oldest), tl.where(fits, newest, middle)
        older = tl.where(fits, counted, older)
    return low, oldest, count - below - older


@triton.jit
def _full(shares, left, most, before, self_or_before):
    """Return which heads get their most, if `left` is shared out by `shares`. [HEADS].

    `before[i, j]` says whether head j is full before head i.
    """
    taken = tl.sum(tl.where(before, most[None, :], 0), 1)
    others = tl.sum(tl.where(before, 0, shares[None, :]), 1)
    short = (((left - taken) * shares < most * others) | (shares == 0)).to(tl.int32)
    return tl.sum(tl.where(self_or_before, short[None, :], 0), 1) == 0


@triton.jit
def _filling_order(shares, most, h):
    """Return whether head j is full before head i, and whether it is or j = i. [HEADS, HEADS]."""
    when = most.to(tl.float64) / tl.where(shares > 0, shares, 1).to(tl.float64)
    when = tl.where(shares > 0, when, float("inf"))
    earlier = when[None, :] < when[:, None]
    before = earlier | ((when[None, :] == when[:, None]) & (h[None, :] < h[:, None]))
    return before, before | (h[None, :] == h[:, None])


@triton.jit
def _apportion(shares, left, most, h, real):
    """Apportion slots to heads [HEADS] as the policies' `apportion_rows` does; some are `real`."""
    left = tl.minimum(left, tl.sum(most, 0))
    before, or_self = _filling_order(shares, most, h)
    full = _full(shares, left, most, before, or_self)
    portions = tl.where(full, most, 0)
    left -= tl.sum(portions, 0)
    shares, open_ = tl.where(full, 0, shares), tl.where(full, 0, real.to(tl.int64))
    # Once all others are full, heads without a share get slots, in equal parts.
    equal = tl.sum(shares, 0) == 0
    shares = tl.where(equal, open_, shares)
    before, or_self = _filling_order(shares, most, h)
    more = _full(shares, left, most, before, or_self) & equal
    portions += tl.where(more, most, 0)
    left -= tl.sum(tl.where(more, most, 0), 0)
    shares = tl.where(more, 0, shares)
    whole = tl.maximum(tl.sum(shares, 0), 1)
    floor = left * shares // whole
    rest = tl.where(shares > 0, floor * whole - left * shares, 1)
    first = (rest[None, :] < rest[:, None]) | (
        (rest[None, :] == rest[:, None]) & (h[None, :] < h[:, None])
    )
    rank = tl.sum(first.to(tl.int64), 1)
    return portions + floor + (rank < left - tl.sum(floor, 0)).to(tl.int64)


@triton.jit(do_not_specialize=_LAYER)
def divide_layer(
    worths,  # [B, K, longest] int32 of `rank_worths`
    positions,  # [B, K, longest]
    row_pinned,  # [B·K] int32 of `rank_worths`
    lengths,  # [B·K] int32, slots of each row
    targets,  # [B·K] int32, slots that each row may have
    before,  # [B·K + 1] int32, where rows begin
    kept,  # [B·K] int32, is written if slots are shared out: slots of each row that stay
    budgets,  # [B·K] int32, is written then: slots that each row may have from now on
    starts,  # [B·K + 1] int32, is written then, but for the last: where each row begins
    slots,  # longest
    average,  # mean number of slots of a head
    block,  # slots behind each row's budget
    part,  # the safeguard is part / whole
    whole,
    rows,  # B·K
    heads,  # K
    HEADS: tl.constexpr,  # K, padded
    ALL: tl.constexpr,  # B·K, padded
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # a layer has fewer slots than BLOCK
    ROW_BLOCK: tl.constexpr,  # less than 2^15
):
    """Share a sequence's slots of a layer out among its heads, as `AdaKV.split` does."""
    batch, h, row = tl.program_id(0), tl.arange(0, HEADS), tl.arange(0, ALL)
    real, first = h < heads, tl.program_id(0) * heads
    held = tl.load(lengths + row, row < rows, 0)
    due = tl.max((held > tl.load(targets + row, row < rows, 0)).to(tl.int32), 0)
    if due == 0:
        return
    length = tl.load(lengths + first + h, real, 0)
    pins = tl.load(row_pinned + first + h, real, 0)
    count = tl.sum(length, 0) - tl.maximum(average * heads, tl.sum(pins, 0))
    low, oldest = tl.full([], -0x7FFFFFFF, tl.int32), tl.full([], 0, tl.int32)
    last = tl.full([], 0, tl.int32)
    worths += first.to(tl.int64) * slots
    positions += first.to(tl.int64) * slots
    if count > 0:
        low, oldest, last = _layer_cut(worths, positions, heads * slots, count, BLOCK, WHOLE)
    above, equal = tl.zeros([HEADS], tl.int32), tl.zeros([HEADS], tl.int32)
    for head in range(heads):
        more, same = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for begin in range(0, slots, ROW_BLOCK):
            slot = begin + tl.arange(0, ROW_BLOCK)
            x = tl.load(worths + head * slots + slot, slot < slots, PINNED)
            position = tl.load(positions + head * slots + slot, slot < slots, 0)
            free = x != PINNED
            newer = (x > low) | ((x == low) & (position > oldest))
            there = free & (x == low) & (position == oldest)
            both = tl.sum((free & newer).to(tl.int32) + (there.to(tl.int32) << 16), 0)
            more += both & 0xFFFF
            same += both >> 16
        above, equal = tl.where(h == head, more, above), tl.where(h == head, same, equal)
    # Among slots of the same token and worth, those of the last heads go first.
    index = tl.cumsum(equal, 0) - equal
    won = (above + tl.where(index < tl.sum(equal, 0) - last, equal, 0)).to(tl.int64)
    length, pins = length.to(tl.int64), pins.to(tl.int64)
    left = average.to(tl.int64) * heads - tl.sum(pins, 0)
    sure = tl.maximum(pins, tl.minimum(length, 1))
    shares = (whole - part).to(tl.int64) * heads * won + part.to(tl.int64) * left
    shares -= whole.to(tl.int64) * heads * (sure - pins)
    shares = tl.where(real, tl.maximum(shares, 0), 0)
    left = tl.maximum(left - tl.sum(sure - pins, 0), 0)
    stay = sure + _apportion(shares, left, length - sure, h, real)
    # Slots that heads cannot use are shared out as `evenly` does.
    spare = average * heads - tl.sum(stay, 0)
    budget = stay + (spare + heads - 1 - h) // heads
    tl.store(kept + first + h, stay.to(tl.int32), real)
    tl.store(budgets + first + h, budget.to(tl.int32), real)
    size = tl.where(real, budget.to(tl.int32) + block, 0)
    begin = tl.load(before) + batch * heads * (average + block) + tl.cumsum(size, 0) - size
    tl.store(starts + first + h, begin, real)
