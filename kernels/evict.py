# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Giving up slots on a GPU in one or two launches: which, who moves down, and into the holes.

The eager code takes dozens of small kernels a layer, most of what generation costs besides matrix
products. Memory comes out the same to the bit. Knows tensors only; triton is imported when first
needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

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
        spans: as in `give_up`.
        buffers: likewise, where they are known.
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


def give_up(
    scores: Tensor,
    positions: Tensor,
    count: int,
    sinks: int,
    recents: int,
    seen: int | Tensor,
    spans: Spans,
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
        sinks: positions below this are pinned.
        recents: and this many below `seen`.
        seen: tokens read so far, an int or one int64 on the device.
        spans: [start, stop) positions that are pinned.
        shift: [B, K, n] int32, another of the buffers, or None.
        buffers: all that moves: two [B, K, n, D] of one type, and [B, K, n] of any; views whose
            rows are `positions.stride(1)` slots apart, that and D contiguous.
        newer: [B, K, w] int32, the last stride 1: shifts of tokens that are newer than all which
            go, or pinned with them, and so grow by `count`.

    Returns:
        [B, K, count] int32, the slots that were given up.
    """
    from kvcap.kernels.evict_triton import choose_slots, evict_one, move_slots

    batch, heads, slots = positions.shape
    rows, capacity = batch * heads, positions.stride(1)
    apart = {positions.data_ptr(), None if shift is None else shift.data_ptr()}
    others = [x for x in buffers if x.data_ptr() not in apart]
    wide, side = _integers(positions, others)
    size = wide[0].shape[-1]
    sizes = {"SIZE": size, "SIZE_PAD": power_of_two(size, 16)}
    new = partial(torch.empty, dtype=torch.int32, device=positions.device)
    evicted = new(batch, heads, count)
    pins = _pins(sinks, recents, seen, spans, positions.device)
    where = (slots, capacity, heads, *scores.stride(), *pins)
    where += (newer, *((0, 0) if newer is None else newer.stride()[:2]))
    length = 0 if newer is None else newer.shape[-1]
    lengths = {"NEWER": length, "NEWER_PAD": power_of_two(length)}
    with torch.cuda.device_of(positions):
        if count == 1:
            # Few registers: other programs (kernels/linear.py) fill the device meanwhile.
            block = min(2048, power_of_two(slots, 16))
            evict_one[rows,](
                scores, evicted, positions, shift, *wide, *side, *where,
                **lengths, **sizes, BLOCK=block, num_warps=max(1, block // 256),
            )  # fmt: skip
            return evicted
        block = power_of_two(slots, 32)
        ages, targets = new(rows, count), new(rows, slots)
        choose_slots[rows,](
            scores, positions, evicted, ages, targets, *where, count,
            **lengths, BLOCK=block, num_warps=max(1, min(16, block // 128)),
        )  # fmt: skip
        first = slots - count if shift is None else 0
        move_slots[-(-(slots - first) // 16), rows](
            ages, targets, positions, shift, *wide, *side, slots, capacity, count, first,
            COUNT_PAD=power_of_two(count, 16), **sizes, BLOCK=16, num_warps=4,
        )  # fmt: skip
    return evicted


def _pins(
    sinks: int, recents: int, seen: int | Tensor, spans: Spans, device: torch.device
) -> list[Any]:
    """The kernels' arguments of that name."""
    ends = [end for span in spans for end in span]
    ends += [0] * (2 * MOST_SPANS - len(ends))
    return [sinks, recents, *told(seen, device), len(spans), *ends]


def _integers(positions: Tensor, buffers: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
    """Buffers [B, K, n, D], and [B, K, n] and None, as integers: only bits are moved."""
    capacity = positions.stride(1)
    found = [bits(x) for x in buffers]
    wide, side = ([x for x in found if x.dim() == dim] for dim in (4, 3))
    assert len(wide) == 2, "keys and values"
    assert len(side) <= MOST_SIDE, "see `covers`"
    for x in found:
        step = x.shape[-1] if x.dim() == 4 else 1
        assert x.stride(1) == capacity * step, "rows must lie as those of the positions"
        assert x.stride(-1) == 1
    return wide, side + [None] * (MOST_SIDE - len(side))
