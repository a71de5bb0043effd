# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton functions of `kernels/rows.py`, which imports this when first needed.

A row is a head's slots in a pool. Programs loop over as many slots as it has, and end at once if it
has none.
"""

import triton
import triton.language as tl

from kvcap.kernels.choose_triton import (
    HIGHEST,
    NEWER_AT,
    NO_SLOT,
    PINNED,
    PINS,
    ROWS,
    cut_of,
    grow,
    pins_of_row,
    worth_of,
)

_POINTERS = ["positions", "starts", "lengths"]
_AUX = [f"aux_{i}" for i in range(7)]


@triton.jit(do_not_specialize=["slots", "heads", "width", "score_b", "score_h"])
def weigh_regions(
    scores,  # [B, K, n]
    positions,  # [B, K, n]
    regions,  # [B, width], a count, then start, stop and tier of each region
    out,  # [B, K, n] float32
    slots,  # n
    heads,  # K
    width,
    score_b,
    score_h,
    score_n,
    BLOCK: tl.constexpr,
):
    """Copy some of a row's scores; where a region has the token, write the score of its tier."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = slot < slots
    batch, head = row // heads, row % heads
    score = tl.load(scores + batch * score_b + head * score_h + slot * score_n, held, 0.0)
    score = score.to(tl.float32)
    position = tl.load(positions + row * slots + slot, held, 0)
    mine = regions + batch * width
    for i in range(0, tl.load(mine)):
        start, stop = tl.load(mine + 3 * i + 1), tl.load(mine + 3 * i + 2)
        tier = tl.load(mine + 3 * i + 3)
        worth = tier.to(tl.float32) * tl.where(tier < 0, HIGHEST / 2, HIGHEST / 4)  # as in `TIERS`
        worth = tl.where(tier > 2, float("inf"), worth)
        score = tl.where((position >= start) & (position < stop), worth, score)
    tl.store(out + row * slots + slot, score, held)


@triton.jit
def cut(
    scores,
    positions,
    count,
    slots,
    score_n,
    sinks,
    newest,
    marked,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # no row has more slots than BLOCK
):
    """Return a worth and a position that bound the `count` lowest slots of a row.

    Slots below that worth go, and those of that worth before the position.
    """
    if WHOLE:
        x, position = worth_of(
            scores,
            positions,
            tl.arange(0, BLOCK),
            slots,
            score_n,
            sinks,
            newest,
            marked,
        )
        return cut_of(x, position, count)
    # At most `count` are below `low`; more than that, or all that is not pinned, below `high`.
    low, high = tl.full([], PINNED, tl.int32), tl.full([], -0x7FFFFFFF, tl.int32)
    for begin in range(0, slots, BLOCK):
        x, _ = worth_of(
            scores,
            positions,
            begin + tl.arange(0, BLOCK),
            slots,
            score_n,
            sinks,
            newest,
            marked,
        )
        low = tl.minimum(low, tl.min(x, 0))
        high = tl.maximum(high, tl.max(tl.where(x == PINNED, -0x7FFFFFFF, x), 0))
    high = tl.maximum(high, low) + 1
    below = tl.full([], 0, tl.int32)
    while (below < count) & (low + 1 < high):
        third = ((high.to(tl.int64) - low + 2).to(tl.uint32) // 3).to(tl.int64)
        lower, two = (low + third).to(tl.int32), (low + 2 * third).to(tl.int32)
        below_one, below_two = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for begin in range(0, slots, BLOCK):
            x, _ = worth_of(
                scores,
                positions,
                begin + tl.arange(0, BLOCK),
                slots,
                score_n,
                sinks,
                newest,
                marked,
            )
            both = tl.sum((x < lower).to(tl.int32) + ((x < two).to(tl.int32) << 16), 0)
            below_one += both & 0xFFFF
            below_two += both >> 16
        high = tl.where(below_one > count, lower, tl.where(below_two > count, two, high))
        low = tl.where(below_two <= count, two, tl.where(below_one <= count, lower, low))
        below = tl.where(
            below_two <= count, below_two, tl.where(below_one <= count, below_one, below)
        )
    # Of the slots of worth `low` the oldest go, as many as are still missing.
    oldest, newest = tl.full([], 0, tl.int32), tl.full([], NO_SLOT, tl.int32)
    older = tl.full([], 0, tl.int32)
    while (below + older < count) & (oldest + 1 < newest):
        middle = (oldest + newest) // 2
        counted = tl.full([], 0, tl.int32)
        for begin in range(0, slots, BLOCK):
            x, position = worth_of(
                scores,
                positions,
                begin + tl.arange(0, BLOCK),
                slots,
                score_n,
                sinks,
                newest,
                marked,
            )
            counted += tl.sum(((x == low) & (position < middle)).to(tl.int32), 0)
        fits = below + counted <= count
        oldest, newest = tl.where(fits, middle, oldest), tl.where(fits, newest, middle)
        older = tl.where(fits, counted, older)
    return low, oldest


# One long kernel, as it is one launch; the compiler removes branches on None and constants.
@triton.jit(
    do_not_specialize=[*PINS, *_AUX[:5], *NEWER_AT, *ROWS, "positions", "shift", "targets", "left"]
)
def evict_one(
    scores,  # [B, K, longest]
    positions,  # [slots]
    shift,  # [slots], or None
    keys,  # [slots, SIZE] integers
    values,  # likewise
    aux_0,
    aux_1,
    aux_2,
    aux_3,
    aux_4,  # [slots] integers, or None
    heads,  # K
    score_b,
    score_h,
    score_n,
    seen,  # -1: the number is at `clock`
    clock,  # [] int64
    marked,
    newer,  # [B, K, NEWER], or None
    newer_b,
    newer_h,
    starts,
    lengths,  # [B·K] int32
    row_pins,  # as in `pins_of_row`
    targets,  # [B·K] int32, slots that each row may have; a row above it loses one
    left,  # [B·K] int32, is written: slots of each row afterwards
    NEWER: tl.constexpr,
    NEWER_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Evict the slot of least worth of a whole row, and move the row's last slot there."""
    row = tl.program_id(0).to(tl.int64)
    first, slots = tl.load(starts + row).to(tl.int64), tl.load(lengths + row)
    sinks, newest = pins_of_row(row_pins, row, seen, clock)
    goes = (slots > tl.load(targets + row)).to(tl.int32)  # 0: the last slot stays in place
    tl.store(left + row, slots - goes)
    if newer is not None:
        grow(newer, row // heads, row % heads, newer_b, newer_h, goes, NEWER, NEWER_PAD)
    positions += first
    last = first + slots - 1
    d = tl.arange(0, SIZE_PAD)
    # The last slot moves in any case, so it is read before its new place is known.
    key = tl.load(keys + last * SIZE + d, d < SIZE)
    value = tl.load(values + last * SIZE + d, d < SIZE)
    position = tl.load(positions + slots - 1)
    if shift is not None:
        shifted = tl.load(shift + last)
    if aux_0 is not None:
        x_0 = tl.load(aux_0 + last)
    if aux_1 is not None:
        x_1 = tl.load(aux_1 + last)
    if aux_2 is not None:
        x_2 = tl.load(aux_2 + last)
    if aux_3 is not None:
        x_3 = tl.load(aux_3 + last)
    if aux_4 is not None:
        x_4 = tl.load(aux_4 + last)
    scores += row // heads * score_b + row % heads * score_h
    least = tl.full([BLOCK], 0x7FFFFFFFFFFFFFFF, tl.int64)
    lowest_slot = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, slots, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        x, its = worth_of(
            scores,
            positions,
            slot,
            slots,
            score_n,
            sinks,
            newest,
            marked,
        )
        worth = (x.to(tl.int64) << 32) | its  # the position decides among equal scores
        lowest_slot = tl.where(worth < least, slot, lowest_slot)
        least = tl.minimum(least, worth)
    lowest = tl.min(least, 0)
    target = tl.max(tl.where(least == lowest, lowest_slot, 0), 0)
    evicted = (lowest & 0xFFFFFFFF).to(tl.int32)
    target = tl.where(goes == 1, target, slots - 1)
    evicted = tl.where(goes == 1, evicted, 0x7FFFFFFF)  # a position that nothing is newer than
    if shift is not None:
        shifted += (evicted < position).to(tl.int32)
        tl.debug_barrier()  # the last shift is read before shifts are written
        for begin in range(0, slots, BLOCK):
            slot = begin + tl.arange(0, BLOCK)
            held = slot < slots
            at = shift + first + slot
            later = evicted < tl.load(positions + slot, held, 0)
            moved = tl.load(at, held, 0) + later.to(tl.int32)
            tl.store(at, tl.where(slot == target, shifted, moved), held)
    tl.debug_barrier()  # all positions are read before one is written
    tl.store(positions + target, position)
    at = first + target
    tl.store(keys + at * SIZE + d, key, d < SIZE)
    tl.store(values + at * SIZE + d, value, d < SIZE)
    if aux_0 is not None:
        tl.store(aux_0 + at, x_0)
    if aux_1 is not None:
        tl.store(aux_1 + at, x_1)
    if aux_2 is not None:
        tl.store(aux_2 + at, x_2)
    if aux_3 is not None:
        tl.store(aux_3 + at, x_3)
    if aux_4 is not None:
        tl.store(aux_4 + at, x_4)


@triton.jit
def _rank(marks):
    """Return for each element how many of the `marks` [BLOCK] come before it."""
    return tl.cumsum(marks.to(tl.int32), 0) - 1


@triton.jit
def _moved(x, origin, hole, there):
    """Move numbers of slots [BLOCK] from `origin` to `hole`, where `there`; x may be None."""
    if x is not None:
        tl.store(x + hole, tl.load(x + origin, there), there)


@triton.jit(
    do_not_specialize=[*PINS, *NEWER_AT, *ROWS, *_POINTERS, "targets", "left", "new_starts", "ages",
                       "source", "holes", "gone", "moves"]
)  # fmt: skip
def choose_rows(
    scores,  # [B, K, longest]
    positions,  # [slots]
    source,  # [slots] int32, is written: which slot moves to a place, or fills a row's i-th hole
    holes,  # [slots] int32, is written: each row's holes; None: rows move to `new_starts`
    ages,  # [slots] int32, is written: positions of each row's slots that go
    gone,  # [B·K] int32, is written: how many slots go
    moves,  # [B·K] int32, is written: how many holes are filled
    heads,
    seen,
    clock,
    marked,
    newer,  # [B, K, NEWER], or None
    newer_b,
    newer_h,
    score_b,
    score_h,
    score_n,
    starts,
    lengths,  # [B·K] int32
    row_pins,  # as in `pins_of_row`
    targets,  # [B·K] int32, slots that each row may have
    left,  # [B·K] int32, is written: slots of each row afterwards
    new_starts,  # [B·K + 1] int32, or None
    NEWER: tl.constexpr,
    NEWER_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # as in `cut`
):
    """Choose which slots of a whole row go (of equal ones the older), and where others move."""
    row = tl.program_id(0).to(tl.int64)
    first, slots = tl.load(starts + row).to(tl.int64), tl.load(lengths + row)
    count = tl.maximum(slots - tl.load(targets + row), 0)
    sinks, newest = pins_of_row(row_pins, row, seen, clock)
    tl.store(left + row, slots - count)
    tl.store(gone + row, count)
    if newer is not None:
        grow(newer, row // heads, row % heads, newer_b, newer_h, count, NEWER, NEWER_PAD)
    scores += row // heads * score_b + row % heads * score_h
    positions += first
    low, oldest = cut(
        scores,
        positions,
        count,
        slots,
        score_n,
        sinks,
        newest,
        marked,
        BLOCK,
        WHOLE,
    )
    kept, went = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    moved = tl.full([], 0, tl.int32)
    if new_starts is not None:
        to = tl.load(new_starts + row).to(tl.int64)
    for begin in range(0, slots, BLOCK):
        x, position = worth_of(
            scores,
            positions,
            begin + tl.arange(0, BLOCK),
            slots,
            score_n,
            sinks,
            newest,
            marked,
        )
        slot = begin + tl.arange(0, BLOCK)
        goes = (slot < slots) & ((x < low) | ((x == low) & (position < oldest)))
        stays = (slot < slots) & ((x > low) | ((x == low) & (position >= oldest)))
        tl.store(ages + first + went + _rank(goes), position, goes)
        if new_starts is None:
            # Slots that stay, but lie behind the row's new end, fill the first holes.
            tl.store(holes + first + went + _rank(goes), (first + slot).to(tl.int32), goes)
            is_last = stays & (slot >= slots - count)
            tl.store(source + first + moved + _rank(is_last), (first + slot).to(tl.int32), is_last)
            moved += tl.sum(is_last.to(tl.int32), 0)
        else:
            tl.store(source + to + kept + _rank(stays), (first + slot).to(tl.int32), stays)
            kept += tl.sum(stays.to(tl.int32), 0)
        went += tl.sum(goes.to(tl.int32), 0)
    tl.store(moves + row, moved)


@triton.jit(do_not_specialize=[*_AUX, "source", "holes", "moves", "starts"])
def fill_holes(
    source,  # [slots] int32, each row's slots that move, from its first slot on
    holes,  # [slots] int32, the slots that they move to
    moves,  # [B·K] int32, how many slots of a row move
    starts,  # [B·K] int32
    keys,  # [slots, SIZE] integers
    values,  # likewise
    aux_0,
    aux_1,
    aux_2,
    aux_3,
    aux_4,
    aux_5,
    aux_6,  # [slots] integers, or None
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move some of a row's last slots into the holes before them."""
    row, d = tl.program_id(1).to(tl.int64), tl.arange(0, SIZE_PAD)[None, :]
    first, count = tl.load(starts + row), tl.load(moves + row)
    for begin in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        i = begin + tl.arange(0, BLOCK)
        there = i < count
        origin = tl.load(source + first + i, there, 0).to(tl.int64)
        hole = tl.load(holes + first + i, there, 0).to(tl.int64)
        wide = there[:, None] & (d < SIZE)
        at, to = origin[:, None] * SIZE + d, hole[:, None] * SIZE + d
        tl.store(keys + to, tl.load(keys + at, wide), wide)
        tl.store(values + to, tl.load(values + at, wide), wide)
        _moved(aux_0, origin, hole, there)
        _moved(aux_1, origin, hole, there)
        _moved(aux_2, origin, hole, there)
        _moved(aux_3, origin, hole, there)
        _moved(aux_4, origin, hole, there)
        _moved(aux_5, origin, hole, there)
        _moved(aux_6, origin, hole, there)


@triton.jit(do_not_specialize=[*_POINTERS, "ages", "gone", "shift"])
def shift_rows(
    ages,  # [slots] int32, positions of each row's slots that go, from its first slot on
    gone,  # [B·K] int32, how many slots of a row go
    positions,  # [slots]
    shift,  # [slots]
    starts,
    lengths,  # [B·K] int32
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise the shifts of some of a row's slots, each by the number of older slots that go."""
    row = tl.program_id(1).to(tl.int64)
    first, slots, count = tl.load(starts + row), tl.load(lengths + row), tl.load(gone + row)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = slot < slots
    at = first.to(tl.int64) + slot
    position = tl.load(positions + at, held, 0)
    older = tl.zeros([BLOCK], tl.int32)
    # A program behind all slots has nothing to compare.
    for begin in range(0, tl.where(tl.program_id(0) * BLOCK < slots, count, 0), CHUNK):
        i = begin + tl.arange(0, CHUNK)
        age = tl.load(ages + first + i, i < count, 0x7FFFFFFF)
        older += tl.sum((age[None, :] < position[:, None]).to(tl.int32), 1)
    tl.store(shift + at, tl.load(shift + at, held, 0) + older, held)


@triton.jit(do_not_specialize=["x", "out", "starts", "lengths", "longest"])
def copy_rows(
    x,  # [slots]
    out,  # [B·K, longest]
    starts,
    lengths,  # [B·K] int32
    longest,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy numbers of some of a row's slots; behind them write 0, or if POSITIONS large ones."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = slot < tl.load(lengths + row)
    number = tl.load(x + tl.load(starts + row).to(tl.int64) + slot, held, 0)
    if POSITIONS:
        number = tl.where(held, number, NO_SLOT | slot)
    tl.store(out + row * longest + slot, number, slot < longest)


@triton.jit(do_not_specialize=["starts", "lengths", "longest"])
def copy_wide(
    x,  # [slots, SIZE]
    out,  # [B·K, longest, SIZE]
    starts,
    lengths,  # [B·K] int32
    longest,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy some of a row's keys or values; write nothing behind its slots."""
    row = tl.program_id(1).to(tl.int64)
    slot, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE_PAD)[None, :]
    inside = (slot < tl.load(lengths + row))[:, None] & (d < SIZE)
    x += (tl.load(starts + row).to(tl.int64) + slot)[:, None] * SIZE
    out += (row * longest + slot)[:, None] * SIZE
    tl.store(out + d, tl.load(x + d, inside, 0), inside)


@triton.jit
def _carried(x, copy, origin, slot, moves, BACK: tl.constexpr):
    """Copy numbers of slots [BLOCK] from `origin`, or if BACK write the copies; x may be None."""
    if x is not None:
        if BACK:
            tl.store(x + slot, tl.load(copy + slot, moves), moves)
        else:
            tl.store(copy + slot, tl.load(x + origin, moves), moves)


_CARRIED = [*_AUX, *(f"copy_{i}" for i in range(7))]


@triton.jit(do_not_specialize=[*_CARRIED, "source", "slots", "first"])
def carry(
    source,  # [slots] int32, which slot moves to each place
    slots,
    first,  # the first column that is copied
    keys,  # [slots, SIZE] integers
    values,  # [slots, SIZE] integers
    key_copy,  # [slots, WIDTH] integers
    value_copy,
    aux_0,
    aux_1,
    aux_2,
    aux_3,
    aux_4,
    aux_5,
    aux_6,  # [slots] integers, or None
    copy_0,
    copy_1,
    copy_2,
    copy_3,
    copy_4,
    copy_5,
    copy_6,  # likewise
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy some columns of keys and values, and all numbers, of slots that move; BACK puts them."""
    slot, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)[None, :]
    there = slot < slots
    origin = tl.load(source + slot, there, 0)
    moves = there & (origin != slot)
    wide = moves[:, None] & (first + d < SIZE)
    at = (slot if BACK else origin).to(tl.int64)[:, None] * SIZE + first + d
    kept = slot.to(tl.int64)[:, None] * WIDTH + d
    if BACK:
        key, value = tl.load(key_copy + kept, wide), tl.load(value_copy + kept, wide)
        tl.store(keys + at, key, wide)
        tl.store(values + at, value, wide)
    else:
        key, value = tl.load(keys + at, wide), tl.load(values + at, wide)
        tl.store(key_copy + kept, key, wide)
        tl.store(value_copy + kept, value, wide)
    _carried(aux_0, copy_0, origin, slot, moves, BACK)
    _carried(aux_1, copy_1, origin, slot, moves, BACK)
    _carried(aux_2, copy_2, origin, slot, moves, BACK)
    _carried(aux_3, copy_3, origin, slot, moves, BACK)
    _carried(aux_4, copy_4, origin, slot, moves, BACK)
    _carried(aux_5, copy_5, origin, slot, moves, BACK)
    _carried(aux_6, copy_6, origin, slot, moves, BACK)


@triton.jit(do_not_specialize=["new", "x", "starts", "before", "lengths", "count"])
def put_rows(
    new,  # [B·K, count]
    x,  # [slots], is written
    starts,  # [B·K] int32
    before,  # [B·K] int32, slots of each row before the written ones, or None: 0
    lengths,  # [B·K] int32, all slots of each row
    count,
    BLOCK: tl.constexpr,
):
    """Write the numbers of some of a row's slots."""
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = i
    if before is not None:
        slot += tl.load(before + row)
    inside = (i < count) & (slot < tl.load(lengths + row))
    at = x + tl.load(starts + row).to(tl.int64) + slot
    tl.store(at, tl.load(new + row * count + i, inside, 0), inside)
