# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Evicts slots in one to four launches: chooses them, counts shifts up, and fills the holes.

The eager code takes dozens of small kernels a layer, most of what generation costs besides matrix
products. Memory comes out the same to the bit. Knows tensors only; triton is imported when first
needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.kernels.arguments import MOST_SPANS, Spans, aux, strides
from kvcap.kernels.arguments import Pins as Pins
from kvcap.kernels.device import able, bits, power_of_two
from kvcap.kernels.launch import run

MOST_ALONE = 4096  # slots of a row that one program looks through
PART = 1024  # slots of a longer one that nominate some to go, where that leaves fewer than half
COUNTS = 16, 128, 512, 1024  # slots given up at once, filled up; each is compared with every slot
MOST_COUNT = COUNTS[-1]
MOST_COMPARED = 16384  # slots of a row among which a program chooses several
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_AUX = 5  # auxiliary tensors: a number a slot, besides positions and shifts


def covers(
    positions: Tensor, count: int, spans: Spans = (), buffers: Sequence[Tensor] = ()
) -> bool:
    """Whether the kernels can do this here: on CUDA, or on a CPU in triton's interpreter.

    Args:
        positions: [B, K, n].
        count: slots of each row to give up.
        spans: as in `Pins`.
        buffers: as in `give_up`, where they are known.
    """
    if not able(positions) or positions.dtype != torch.int32 or positions.stride(-1) != 1:
        return False
    wide, narrow = _wide(buffers)
    if buffers and (len(wide) != 2 or len(narrow) > MOST_AUX + 1):
        return False
    slots = positions.shape[-1]
    if not 1 <= count <= min(MOST_COUNT, slots) or len(spans) > MOST_SPANS:
        return False
    return count == 1 or _compared(slots, count)[0] <= MOST_COMPARED


def _compared(slots: int, count: int) -> tuple[int, int]:
    """Among how many slots of a row `count` are chosen, and how many parts nominate them.

    No parts: all slots are compared.
    """
    parts = -(-slots // _part(count))
    nominated = parts * count
    return (nominated, parts) if slots > MOST_ALONE and nominated < slots // 2 else (slots, 0)


def _part(count: int) -> int:
    """Slots of a part that nominates `count`."""
    return max(PART, 2 * power_of_two(count, 16))


class Choice(NamedTuple):
    """What `choose` leaves for `move`."""

    evicted: Tensor  # [B, K, count] int32
    ages: Tensor  # [B·K, count] int32, their positions
    targets: Tensor  # [B·K, count] int32, where the last slots go, -1: nowhere


def give_up(
    scores: Tensor,
    positions: Tensor,
    count: int,
    pins: Pins,
    shift: Tensor | None,
    buffers: Sequence[Tensor],
    newer: Tensor | None = None,
) -> Tensor:
    """Give up the `count` slots of each row with the lowest scores that nothing pins, in place.

    Every slot's shift grows by the number of evicted tokens that are older than its own, and
    survivors behind those that stay move into the holes before. Scores are made finite as
    `torch.nan_to_num` does it, NaN as the lowest; of equal scores the older tokens go.

    Args:
        scores: [B, K, n].
        positions: [B, K, n] int32, one of the buffers.
        count: at most as many as are not pinned.
        pins: slots that stay.
        shift: [B, K, n] int32, another of the buffers, or None.
        buffers: all that moves: two [B, K, n, D], each with a D of its own, and [B, K, n] of any
            type, or [B, K, n, G] of up to 8 bytes; views whose rows are `positions.stride(1)` slots
            apart, that and D contiguous.
        newer: [B, K, w] int32, the last stride 1: shifts of tokens that are newer than all which
            go, or pinned with them, and so grow by `count`.

    Returns:
        [B, K, count] int32, the slots that were given up.
    """
    if count > 1:
        choice = choose(scores, positions, count, pins, shift, newer)
        move(choice, positions, buffers)
        return choice.evicted
    from kvcap.kernels.evict_triton import evict_one

    batch, heads, slots = positions.shape
    evicted = torch.empty(batch, heads, 1, dtype=torch.int32, device=positions.device)
    # Few registers: other programs (kernels/linear.py) fill the device meanwhile.
    block = min(2048, power_of_two(slots, 16))
    with torch.cuda.device_of(positions):
        run(
            evict_one, (batch * heads,),
            scores, evicted, positions, shift, **_moved(buffers, positions, shift),
            **_rows(scores, positions), **pins.arguments(positions.device), **newer_at(newer),
            starts=None, lengths=None, row_pins=None, targets=None, left=None,
            BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
    return evicted


def choose(
    scores: Tensor,
    positions: Tensor,
    count: int,
    pins: Pins,
    shift: Tensor | None,
    newer: Tensor | None = None,
) -> Choice:
    """The first half of `give_up`, of several slots: which, and what fills their places.

    Shifts grow; nothing moves.
    """
    from kvcap.kernels.choose_triton import choose_slots, nominate_slots
    from kvcap.kernels.evict_triton import shift_slots

    batch, heads, slots = positions.shape
    rows, capacity = batch * heads, positions.stride(1)
    new = partial(torch.empty, dtype=torch.int32, device=positions.device)
    choice = Choice(new(batch, heads, count), new(rows, count), new(rows, count))
    where = {**_rows(scores, positions), **pins.arguments(positions.device)}
    # Few sizes: each other would be compiled when a message ends in a shorter block.
    padded, part = next(size for size in COUNTS if count <= size), _part(count)
    (several, parts), worths, nominees = _compared(slots, count), None, None
    with torch.cuda.device_of(positions):
        if parts:
            worths, nominees = new(rows, several), new(rows, several)
            run(
                nominate_slots, (parts, rows),
                scores, positions, worths, nominees, **where, count=count,
                COUNT_PAD=padded, BLOCK=part, num_warps=max(1, part // 128),
            )  # fmt: skip
        block = power_of_two(several, 32)
        run(
            choose_slots, (rows,),
            scores, positions, *choice, worths, nominees, several, **where, **newer_at(newer),
            count=count, COUNT_PAD=padded, BLOCK=block,
            num_warps=max(1, min(16, block // 128)),
        )  # fmt: skip
        if shift is not None:
            run(
                shift_slots, (-(-slots // 32), rows),
                choice.ages, positions, shift, slots, capacity, count,
                COUNT_PAD=padded, BLOCK=32, num_warps=max(1, min(4, padded // 128)),
            )  # fmt: skip
    return choice


def move(choice: Choice, positions: Tensor, buffers: Sequence[Tensor]) -> None:
    """The second half, of a choice among the same slots."""
    from kvcap.kernels.evict_triton import move_slots

    (batch, heads, slots), count = positions.shape, choice.evicted.shape[-1]
    with torch.cuda.device_of(positions):
        run(
            move_slots, (-(-count // 16), batch * heads),
            choice.targets, positions, **_moved(buffers, positions),
            slots=slots, capacity=positions.stride(1), count=count, BLOCK=16, num_warps=4,
        )  # fmt: skip


def _rows(scores: Tensor, positions: Tensor) -> dict[str, int]:
    """Where the rows of scores and slots lie."""
    _, heads, slots = positions.shape
    rows = {"slots": slots, "capacity": positions.stride(1), "heads": heads}
    return {**rows, **strides("bhn", score=scores)}


def newer_at(newer: Tensor | None) -> dict[str, Any]:
    """Shifts of tokens that are newer than all which go, as `grow` takes them."""
    length = 0 if newer is None else newer.shape[-1]
    sizes = {"NEWER": length, "NEWER_PAD": power_of_two(length)}
    return {"newer": newer, **strides("bh", newer=newer), **sizes}


def _moved(
    buffers: Sequence[Tensor], positions: Tensor, shift: Tensor | None = None
) -> dict[str, Any]:
    """Keys, values and auxiliary tensors, but those named: as integers, only bits are moved."""
    capacity = positions.stride(1)
    apart = {_place(x) for x in (positions, shift) if x is not None}
    found = [x for x in buffers if _place(x) not in apart]
    (keys, values), rest = _wide(found)
    for x in (keys, values, *rest):
        step = x.shape[-1] if x.dim() == 4 else 1
        assert x.stride(1) == capacity * step, "rows must lie as those of the positions"
        assert x.stride(-1) == 1
    size, other = keys.shape[-1], values.shape[-1]
    sizes = {"SIZE": size, "VALUE_SIZE": other, "SIZE_PAD": power_of_two(max(size, other), 16)}
    return {"keys": bits(keys), "values": bits(values), **aux(rest, MOST_AUX), **sizes}


def _wide(buffers: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Buffers with many numbers a slot, and those with one: several of up to 8 bytes become one."""
    wide, narrow = list[Tensor](), list[Tensor]()
    for x in buffers:
        together = WHOLE.get(x.shape[-1] * x.element_size()) if x.dim() == 4 else None
        if x.dim() == 3:
            narrow.append(x)
        elif together is not None and len(wide) >= 2:  # the first are keys and values
            narrow.append(x.view(together)[..., 0])
        else:
            wide.append(x)
    return wide, narrow


def _place(x: Tensor) -> tuple[int, int]:
    """Which memory a tensor is a view of, and where in it it begins."""
    return x.untyped_storage()._cdata, int(x.storage_offset())
