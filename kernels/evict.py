# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Giving up slots on a GPU in one to three launches: which, who moves down, and into the holes.

The eager code takes dozens of small kernels a layer, most of what generation costs besides matrix
products. Memory comes out the same to the bit. Knows tensors only; triton is imported when first
needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcap.kernels.device import able, power_of_two

MOST_SPANS = 8
MOST_COUNT = 1024  # slots given up at once; each is compared with every slot
MOST_SIDE = 4  # tensors of a number a slot, besides positions and shifts

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Spans = Sequence[tuple[int, int]]


def covers(
    positions: Tensor, count: int, spans: Spans = (), buffers: Sequence[Tensor] = ()
) -> bool:
    """Whether the kernels can do this here: on CUDA, or on a CPU in triton's interpreter.

    Args:
        positions: [B, K, n].
        count: slots of each row to give up.
        spans: as in `lowest`.
        buffers: as in `give_up`, where they are known.
    """
    if not able(positions) or positions.dtype != torch.int32 or positions.stride(-1) != 1:
        return False
    dims = [x.dim() for x in buffers]
    if buffers and (dims.count(4) != 2 or dims.count(3) > MOST_SIDE + 2):
        return False
    return 1 <= count <= min(MOST_COUNT, positions.shape[-1]) and len(spans) <= MOST_SPANS


def lowest(
    scores: Tensor,
    positions: Tensor,
    count: int,
    sinks: int,
    recents: int,
    seen: int | Tensor,
    spans: Spans = (),
) -> Tensor:
    """The `count` slots of each row with the lowest scores that nothing pins, unordered.

    Scores are made finite as `torch.nan_to_num` does it, NaN as the lowest. Of equal scores the
    first slot goes; of several slots those that `torch.topk` prefers.

    Args:
        scores: [B, K, n].
        positions: [B, K, n] int32, rows equally far apart.
        count: at most as many as are not pinned.
        sinks: positions below this are pinned.
        recents: and this many below `seen`.
        seen: tokens read so far, an int or one int64 on the device.
        spans: [start, stop) positions that are pinned.

    Returns:
        [B, K, count] int64
    """
    if count == 1:
        return _one(scores, positions, None, (), sinks, recents, seen, spans)
    from kvcap.kernels.evict_triton import worths

    batch, heads, slots = scores.shape
    worth = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    unread = worth.view(-1)[:2].view(torch.int64)
    with torch.cuda.device_of(scores):
        worths[-(-slots // 1024), batch * heads](
            scores, positions, worth, slots, positions.stride(1), heads, *scores.stride(),
            *_pins(sinks, recents, seen, unread, spans), BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return worth.topk(count, dim=-1, largest=False, sorted=False).indices


def give_up(
    evicted: Tensor, positions: Tensor, shift: Tensor | None, buffers: Sequence[Tensor]
) -> None:
    """Give up slots in place: survivors behind those that stay move into the holes before.

    First every slot's shift grows by the number of evicted tokens that are older than its own.

    Args:
        evicted: [B, K, e] int64, distinct slots of a row.
        positions: [B, K, n] int32, one of the buffers.
        shift: [B, K, n] int32, another of them, or None.
        buffers: all that moves: two [B, K, n, D] of one type, and [B, K, n] of any; views whose
            rows are `positions.stride(1)` slots apart, that and D contiguous.
    """
    from kvcap.kernels.evict_triton import move_slots, pair_slots

    batch, heads, count = evicted.shape
    if count == 1:
        _one(None, positions, shift, buffers, evicted=evicted)
        return
    wide, side = _integers(positions, buffers, MOST_SIDE + 2)
    slots, capacity, size = positions.shape[-1], positions.stride(1), wide[0].shape[-1]
    rows = batch * heads
    pairs = torch.empty(rows, 2, count, dtype=torch.int32, device=evicted.device)
    block = 16
    with torch.cuda.device_of(evicted):
        pair_slots[-(-slots // 32), rows](
            evicted.contiguous(), positions, shift, pairs, slots, capacity, count,
            STEP=min(512, power_of_two(count, 16)), BLOCK=32, num_warps=4,
        )  # fmt: skip
        move_slots[-(-count // block), rows](
            pairs, *wide, *side, capacity, count,
            SIZE=size, SIZE_PAD=power_of_two(size, 16), BLOCK=block, num_warps=4,
        )  # fmt: skip


def evict_one(
    scores: Tensor,
    positions: Tensor,
    sinks: int,
    recents: int,
    seen: int | Tensor,
    spans: Spans,
    shift: Tensor | None,
    buffers: Sequence[Tensor],
) -> Tensor:
    """`lowest` with a count of one, and `give_up` of what it finds, in one launch.

    Returns:
        [B, K, 1] int64, the slot of each row that was given up.
    """
    return _one(scores, positions, shift, buffers, sinks, recents, seen, spans)


def _one(
    scores: Tensor | None,
    positions: Tensor,
    shift: Tensor | None,
    buffers: Sequence[Tensor],
    sinks: int = 0,
    recents: int = 0,
    seen: int | Tensor = 0,
    spans: Spans = (),
    evicted: Tensor | None = None,
) -> Tensor:
    """Finds a slot of each row if there are scores; gives it up if there are buffers."""
    from kvcap.kernels.evict_triton import evict_one

    batch, heads, slots = positions.shape
    if evicted is None:
        evicted = torch.empty(batch, heads, 1, dtype=torch.int64, device=positions.device)
    evicted = evicted.contiguous()
    wide: list[Tensor | None] = [None, None]
    side: list[Tensor | None] = [None] * MOST_SIDE
    if buffers:
        apart = {positions.data_ptr(), None if shift is None else shift.data_ptr()}
        others = [x for x in buffers if x.data_ptr() not in apart]
        wide, side = _integers(positions, others, MOST_SIDE)
    size = 1 if wide[0] is None else wide[0].shape[-1]
    block = min(4096, power_of_two(slots, 16))
    with torch.cuda.device_of(positions):
        evict_one[(batch * heads,)](
            scores, evicted, positions, shift, *wide, *side, slots, positions.stride(1), heads,
            *((0, 0, 0) if scores is None else scores.stride()),
            *_pins(sinks, recents, seen, evicted, spans),
            CHOOSE=scores is not None, MOVE=bool(buffers),
            SIZE=size, SIZE_PAD=power_of_two(size, 16), BLOCK=block,
            num_warps=max(1, min(16, block // 128)),
        )  # fmt: skip
    return evicted


def _pins(sinks: int, recents: int, seen: int | Tensor, unread: Tensor, spans: Spans) -> list[Any]:
    """The kernels' arguments of that name, alike in type for an int and a tensor.

    `unread`, int64 on the device, is for where no tensor is.
    """
    on_device = isinstance(seen, Tensor)
    ends = [end for span in spans for end in span]
    ends += [0] * (2 * MOST_SPANS - len(ends))
    where = [-1, seen] if on_device else [seen, unread]
    return [sinks, recents, *where, len(spans), *ends]


def _integers(
    positions: Tensor, buffers: Sequence[Tensor], most: int
) -> tuple[list[Any], list[Any]]:
    """Buffers [B, K, n, D] and up to `most` [B, K, n], as integers: only bits are moved."""
    capacity = positions.stride(1)
    found = [x.view(_INTEGERS[x.element_size()]) for x in buffers]
    wide, side = ([x for x in found if x.dim() == dim] for dim in (4, 3))
    assert len(wide) == 2, "keys and values"
    assert len(side) <= most, "see `covers`"
    for x in found:
        step = x.shape[-1] if x.dim() == 4 else 1
        assert x.stride(1) == capacity * step, "rows must lie as those of the positions"
        assert x.stride(-1) == 1
    return wide, side + [None] * (most - len(side))
