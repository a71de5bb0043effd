# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Triton functions of `kernels/evict.py` that move a row's last slots into evicted ones.

As in `choose_triton.py`, nothing is specialised that changes from block to block.
"""

import triton
import triton.language as tl

from kvcap.kernels.choose_triton import (
    NEWER_AT,
    PINS,
    ROWS,
    grow,
    ordered,
    pins_of_row,
    worth_of,
)

_NARROW = ["positions", "shift", *(f"aux_{i}" for i in range(5))]


# Long and branching, as it is one launch: branches on None and constants are gone once compiled.
@triton.jit(do_not_specialize=[*PINS, *_NARROW, *NEWER_AT, *ROWS, "targets", "left"])
def evict_one(
    scores,  # [B, K, n]
    evicted,  # [B·K] int32
    positions,  # this and the others: slot 0 of row 0, the next row `capacity` slots behind
    shift,  # or None
    keys,  # [..., SIZE] integers
    values,  # [..., VALUE_SIZE] likewise
    aux_0, aux_1, aux_2, aux_3, aux_4,  # integers, or None
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
    newer,  # [B, K, NEWER], or None
    newer_b, newer_h,
    starts,  # [B·K] int32, the first slot of every row of a pool, or None
    lengths,  # [B·K] int32, likewise its slots
    row_pins,  # [B·K, 2] int32, likewise `sinks` and `recents`
    targets,  # [B·K] int32, likewise the slots that it may have: the others go, one at most
    left,  # [B·K] int32, is written: the slots that it has after this
    NEWER: tl.constexpr,
    NEWER_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,  # at least both
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A whole row: find its slot of least worth, and put its last one there."""
    row = tl.program_id(0).to(tl.int64)
    first, goes = row * capacity, 1
    if starts is not None:
        first, slots = tl.load(starts + row).to(tl.int64), tl.load(lengths + row)
        sinks, recents = pins_of_row(row_pins, row)
        goes = (slots > tl.load(targets + row)).to(tl.int32)  # else its last slot stays in place
        tl.store(left + row, slots - goes)
    if newer is not None:
        grow(newer, row // heads, row % heads, newer_b, newer_h, goes, NEWER, NEWER_PAD)
    positions += first
    last = first + slots - 1
    d = tl.arange(0, SIZE_PAD)
    # The last slot moves wherever it goes: read before that is known.
    key = tl.load(keys + last * SIZE + d, d < SIZE)
    value = tl.load(values + last * VALUE_SIZE + d, d < VALUE_SIZE)
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
    place = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, slots, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        x, its = worth_of(
            scores, positions, slot, slots, score_n, sinks, recents, seen, clock, spans,
            start_0, stop_0, start_1, stop_1, start_2, stop_2, start_3, stop_3,
            start_4, stop_4, start_5, stop_5, start_6, stop_6, start_7, stop_7,
        )  # fmt: skip
        worth = (ordered(x).to(tl.int64) << 32) | its  # of equal scores the older goes
        place = tl.where(worth < least, slot, place)
        least = tl.minimum(least, worth)
    lowest = tl.min(least, 0)
    target = tl.max(tl.where(least == lowest, place, 0), 0)
    gone = (lowest & 0xFFFFFFFF).to(tl.int32)
    if starts is not None:
        target = tl.where(goes == 1, target, slots - 1)
        gone = tl.where(goes == 1, gone, 0x7FFFFFFF)  # nothing is newer
    tl.store(evicted + row, target)
    if shift is not None:
        shifted += (gone < position).to(tl.int32)
        tl.debug_barrier()  # the last shift is read
        for begin in range(0, slots, BLOCK):
            slot = begin + tl.arange(0, BLOCK)
            held = slot < slots
            at = shift + first + slot
            later = gone < tl.load(positions + slot, held, 0)
            moved = tl.load(at, held, 0) + later.to(tl.int32)
            tl.store(at, tl.where(slot == target, shifted, moved), held)
    tl.debug_barrier()  # all positions are read
    tl.store(positions + target, position)
    at = first + target
    tl.store(keys + at * SIZE + d, key, d < SIZE)
    tl.store(values + at * VALUE_SIZE + d, value, d < VALUE_SIZE)
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


@triton.jit(do_not_specialize=["positions", "shift", "slots", "capacity", "count"])
def shift_slots(
    ages,  # [B·K, count] int32: positions of slots that go
    positions,  # this and `shift`: slot 0 of row 0, the next row `capacity` slots behind
    shift,
    slots, capacity, count,
    COUNT_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some of a row's slots: each moves down by as many as go and are older."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = slot < slots
    at = row * capacity + slot
    i = tl.arange(0, COUNT_PAD)
    age = tl.load(ages + row * count + i, i < count, 0x7FFFFFFF)
    position = tl.load(positions + at, held, 0)
    older = tl.sum((age[None, :] < position[:, None]).to(tl.int32), 1)
    tl.store(shift + at, tl.load(shift + at, held, 0) + older, held)


@triton.jit(do_not_specialize=[*_NARROW, "slots", "capacity", "count"])
def move_slots(
    targets,  # [B·K, count] int32: where the last slots go, -1: nowhere
    positions,  # this and the others: slot 0 of row 0, the next row `capacity` slots behind
    keys,  # [..., SIZE] integers
    values,  # [..., VALUE_SIZE] likewise
    aux_0, aux_1, aux_2, aux_3, aux_4,  # integers, or None
    slots, capacity, count,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,  # at least both
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some of a row's last slots, into holes before all that stay."""
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row * count + i, i < count, -1)
    moves = target >= 0
    source = row * capacity + slots - count + i
    to = row * capacity + tl.where(moves, target, 0)
    d = tl.arange(0, SIZE_PAD)[None, :]
    there = (i < count)[:, None]  # read before it is known who moves
    key = tl.load(keys + source[:, None] * SIZE + d, there & (d < SIZE))
    value = tl.load(values + source[:, None] * VALUE_SIZE + d, there & (d < VALUE_SIZE))
    tl.store(keys + to[:, None] * SIZE + d, key, moves[:, None] & (d < SIZE))
    at = values + to[:, None] * VALUE_SIZE + d
    tl.store(at, value, moves[:, None] & (d < VALUE_SIZE))
    tl.store(positions + to, tl.load(positions + source, moves), moves)
    if aux_0 is not None:
        tl.store(aux_0 + to, tl.load(aux_0 + source, moves), moves)
    if aux_1 is not None:
        tl.store(aux_1 + to, tl.load(aux_1 + source, moves), moves)
    if aux_2 is not None:
        tl.store(aux_2 + to, tl.load(aux_2 + source, moves), moves)
    if aux_3 is not None:
        tl.store(aux_3 + to, tl.load(aux_3 + source, moves), moves)
    if aux_4 is not None:
        tl.store(aux_4 + to, tl.load(aux_4 + source, moves), moves)
