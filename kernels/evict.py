# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Giving up slots on a GPU in one or two launches: which, who moves down, and into the holes.

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

MOST_SPANS = 8
MOST_COUNT = 1024  # slots given up at once; each is compared with every slot
MOST_SLOTS = 16384  # of a row, if more than one goes: a program holds them all
MOST_SIDE = 4  # tensors of a number a slot, besides positions and shifts

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
    if buffers and (dims.count(4) != 2 or dims.count(3) > MOST_SIDE + 2):
        return False
    slots = positions.shape[-1]
    if count > 1 and slots > MOST_SLOTS:
        return False
    return 1 <= count <= min(MOST_COUNT, slots) and len(spans) <= MOST_SPANS


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
    targets: Tensor  # [B·K, n] int32, where a slot goes, -1: nowhere


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
    `torch.nan_to_num` does it, NaN as the lowest; of equal scores the first slots go.

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
        choice = choose(scores, positions, count, pins, newer)
        move(choice, positions, shift, buffers)
        return choice.evicted
    from kvcap.kernels.evict_triton import evict_one

    batch, heads, slots = positions.shape
    wide, side, sizes = _moved(positions, shift, buffers)
    evicted = torch.empty(batch, heads, 1, dtype=torch.int32, device=positions.device)
    where, lengths = _where(scores, positions, pins, newer)
    # Few registers: other programs (kernels/linear.py) fill the device meanwhile.
    block = min(2048, power_of_two(slots, 16))
    with torch.cuda.device_of(positions):
        evict_one[batch * heads,](
            scores, evicted, positions, shift, *wide, *side, *where,
            **lengths, **sizes, BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
    return evicted


def choose(
    scores: Tensor,
    positions: Tensor,
    count: int,
    pins: Pins,
    newer: Tensor | None = None,
) -> Choice:
    """The first half of `give_up`, of several slots: which, and what fills their places."""
    from kvcap.kernels.evict_triton import choose_slots

    batch, heads, slots = positions.shape
    rows = batch * heads
    new = partial(torch.empty, dtype=torch.int32, device=positions.device)
    choice = Choice(new(batch, heads, count), new(rows, count), new(rows, slots))
    where, lengths = _where(scores, positions, pins, newer)
    block = power_of_two(slots, 32)
    with torch.cuda.device_of(positions):
        choose_slots[rows,](
            scores, positions, *choice, *where, count,
            **lengths, BLOCK=block, num_warps=max(1, min(16, block // 128)),
        )  # fmt: skip
    return choice


def move(
    choice: Choice, positions: Tensor, shift: Tensor | None, buffers: Sequence[Tensor]
) -> None:
    """The second half, of a choice among the same slots."""
    from kvcap.kernels.evict_triton import move_slots

    (batch, heads, slots), count = positions.shape, choice.evicted.shape[-1]
    wide, side, sizes = _moved(positions, shift, buffers)
    first, padded = slots - count if shift is None else 0, power_of_two(count, 16)
    with torch.cuda.device_of(positions):
        move_slots[-(-(slots - first) // 16), batch * heads](
            choice.ages, choice.targets, positions, shift, *wide, *side,
            slots, positions.stride(1), count, first,
            COUNT_PAD=padded, **sizes, BLOCK=16, num_warps=max(1, min(4, padded // 128)),
        )  # fmt: skip


def _where(
    scores: Tensor,
    positions: Tensor,
    pins: Pins,
    newer: Tensor | None,
) -> tuple[list[Any], dict[str, int]]:
    """The kernels' arguments from `slots` to `newer_h`, and constants."""
    (_, heads, slots), length = positions.shape, 0 if newer is None else newer.shape[-1]
    ends = [end for span in pins.spans for end in span]
    ends += [0] * (2 * MOST_SPANS - len(ends))
    where: list[Any] = [slots, positions.stride(1), heads, *scores.stride(), pins.sinks]
    where += [pins.recents, *told(pins.seen, positions.device), len(pins.spans), *ends]
    where += [newer, *((0, 0) if newer is None else newer.stride()[:2])]
    return where, {"NEWER": length, "NEWER_PAD": power_of_two(length)}


def _moved(
    positions: Tensor, shift: Tensor | None, buffers: Sequence[Tensor]
) -> tuple[list[Any], list[Any], dict[str, int]]:
    """Buffers [B, K, n, D], others [B, K, n] and None, as integers: only bits are moved; sizes."""
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
