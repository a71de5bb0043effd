# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Giving up slots on a GPU in one to four launches: which, who moves down, and into the holes.

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

from kvcap.kernels.device import able, bits, power_of_two, told

MOST_ALONE = 4096  # slots of a row that one program looks through
PART = 1024  # slots of a longer one that nominate some to go, where that leaves fewer than half
MOST_SPANS = 8
MOST_COUNT = 1024  # slots given up at once; each is compared with every slot
MOST_COMPARED = 16384  # slots of a row among which a program chooses several
MOST_SIDE = 5  # tensors of a number a slot, besides positions

Spans = Sequence[tuple[int, int]]


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
    dims = [x.dim() for x in buffers]
    if buffers and (dims.count(4) != 2 or dims.count(3) > MOST_SIDE + 1):
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


class Pins(NamedTuple):
    """Slots that do not go, whatever their scores."""

    sinks: int  # positions below this
    recents: int  # and this many below `seen`
    seen: int | Tensor  # tokens read so far, an int or one int64 on the device
    spans: Spans  # [start, stop) positions


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
        buffers: all that moves: two [B, K, n, D] of one type, and [B, K, n] of any; views whose
            rows are `positions.stride(1)` slots apart, that and D contiguous.
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
    wide, side, sizes = _moved(buffers, positions, shift)
    evicted = torch.empty(batch, heads, 1, dtype=torch.int32, device=positions.device)
    where, newer_at, lengths = _where(scores, positions, pins, newer)
    # Few registers: other programs (kernels/linear.py) fill the device meanwhile.
    block = min(2048, power_of_two(slots, 16))
    with torch.cuda.device_of(positions):
        evict_one[batch * heads,](
            scores, evicted, positions, shift, *wide, *side, *where, *newer_at,
            **lengths, **sizes, BLOCK=block, num_warps=max(1, block // 256),
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
    where, newer_at, lengths = _where(scores, positions, pins, newer)
    padded, part = power_of_two(count, 16), _part(count)
    (several, parts), worths, nominees = _compared(slots, count), None, None
    with torch.cuda.device_of(positions):
        if parts:
            worths, nominees = new(rows, several), new(rows, several)
            nominate_slots[parts, rows](
                scores, positions, worths, nominees, *where, count,
                COUNT_PAD=padded, BLOCK=part, num_warps=max(1, part // 128),
            )  # fmt: skip
        block = power_of_two(several, 32)
        choose_slots[rows,](
            scores, positions, *choice, worths, nominees, several, *where, *newer_at, count,
            **lengths, COUNT_PAD=padded, BLOCK=block, num_warps=max(1, min(16, block // 128)),
        )  # fmt: skip
        if shift is not None:
            shift_slots[-(-slots // 32), rows](
                choice.ages, positions, shift, slots, capacity, count,
                COUNT_PAD=padded, BLOCK=32, num_warps=max(1, min(4, padded // 128)),
            )  # fmt: skip
    return choice


def move(choice: Choice, positions: Tensor, buffers: Sequence[Tensor]) -> None:
    """The second half, of a choice among the same slots."""
    from kvcap.kernels.evict_triton import move_slots

    (batch, heads, slots), count = positions.shape, choice.evicted.shape[-1]
    wide, side, sizes = _moved(buffers, positions)
    with torch.cuda.device_of(positions):
        move_slots[-(-count // 16), batch * heads](
            choice.targets, positions, *wide, *side, slots, positions.stride(1), count,
            **sizes, BLOCK=16, num_warps=4,
        )  # fmt: skip


def _where(
    scores: Tensor,
    positions: Tensor,
    pins: Pins,
    newer: Tensor | None,
) -> tuple[list[Any], list[Any], dict[str, int]]:
    """The kernels' arguments from `slots` to `stop_7`, those of `newer`, and its constants."""
    (_, heads, slots), length = positions.shape, 0 if newer is None else newer.shape[-1]
    ends = [end for span in pins.spans for end in span]
    ends += [0] * (2 * MOST_SPANS - len(ends))
    where: list[Any] = [slots, positions.stride(1), heads, *scores.stride(), pins.sinks]
    where += [pins.recents, *told(pins.seen, positions.device), len(pins.spans), *ends]
    newer_at: list[Any] = [newer, *((0, 0) if newer is None else newer.stride()[:2])]
    return where, newer_at, {"NEWER": length, "NEWER_PAD": power_of_two(length)}


def _moved(
    buffers: Sequence[Tensor], positions: Tensor, shift: Tensor | None = None
) -> tuple[list[Any], list[Any], dict[str, int]]:
    """Buffers [B, K, n, D]; others [B, K, n] but those named, and None; sizes.

    As integers: only bits are moved.
    """
    capacity = positions.stride(1)
    apart = {positions.data_ptr(), None if shift is None else shift.data_ptr()}
    found = [bits(x) for x in buffers if x.data_ptr() not in apart]
    wide, side = ([x for x in found if x.dim() == dim] for dim in (4, 3))
    assert len(wide) == 2, "keys and values"
    assert len(side) <= MOST_SIDE, "see `covers`"
    for x in found:
        step = x.shape[-1] if x.dim() == 4 else 1
        assert x.stride(1) == capacity * step, "rows must lie as those of the positions"
        assert x.stride(-1) == 1
    size = wide[0].shape[-1]
    sizes = {"SIZE": size, "SIZE_PAD": power_of_two(size, 16)}
    return wide, side + [None] * (MOST_SIDE - len(side)), sizes
