# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Evicts slots of a pool's rows of unequal lengths, with one launch for all rows of a layer.

A row is a KV head of a sequence. Its first slot, its length and the slots that it may have are
numbers on the device, so that one CUDA graph serves while they change. A token evicts at most one
slot of a row, a block all that are too many. Eager code takes dozens of small kernels per layer,
the largest cost of generation besides matrix products. Knows tensors only; Triton is imported when
first needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.kernels.arguments import Pins, aux, strides
from kvcap.kernels.device import INTEGERS, able, bits, power_of_two
from kvcap.kernels.launch import empty, run
from kvcap.kernels.rotate import rotate_rows
from kvcap.policies.base import RowRanges

MOST_AT_ONCE = 8192  # most slots of a row that a program holds in registers
MOST_COPIED = 64 << 20  # most bytes of keys and values that are copied at once
MOST_AUX = 5  # most auxiliary tensors, which have a number per slot, besides positions and shifts


class Pool(NamedTuple):
    """A pool whose slots can move: its buffers, rows, pinned tokens and budgets."""

    buffers: Sequence[Tensor]  # [slots, D] keys and values, [slots] int32 positions and others
    shift: Tensor | None  # the buffer of shifts, [slots] int32
    rows: RowRanges  # first slot and length of each row
    pins: Tensor  # [B·K, 2] int32, how many first and how many newest tokens of each row stay
    targets: Tensor  # [B·K] int32, slots that each row may have


def moving(named: Mapping[str, Tensor]) -> list[Tensor]:
    """Return a pool's buffers in the order and types in which kernels move them.

    Keys and values come first, with equal numbers of columns. A slot's scales of groups become one
    integer, if there is an integer type of that size.
    """
    keys, values = named["keys"], named.get("values")
    rest = [_as_number(x) for name, x in named.items() if name not in ("keys", "values")]
    if values is None:
        return [keys, *rest]
    wider, columns = keys.shape[1] // max(1, values.shape[1]), values.shape[1]
    if wider in INTEGERS and keys.shape[1] == wider * columns and keys.element_size() == 1:
        keys = keys.view(INTEGERS[wider])
    return [keys, values, *rest]


def _as_number(x: Tensor) -> Tensor:
    """View the numbers of each slot [slots, n] as one integer [slots], if a type has that size."""
    size = x[0].numel() * x.element_size()
    return x.view(INTEGERS[size])[:, 0] if x.dim() == 2 and size in INTEGERS else x


def covers(buffers: Sequence[Tensor]) -> bool:
    """Return whether the kernels cover these tensors, on CUDA or on a CPU in Triton's interpreter.

    Args:
        buffers: the result of `moving`.
    """
    dims = [x.dim() for x in buffers]
    alike = dims[:2] == [2, 2] and dims.count(2) == 2 and dims.count(1) <= MOST_AUX + 2
    contiguous = all(x.is_contiguous() for x in buffers)
    return able(buffers[0]) and alike and contiguous


def padded(x: Tensor, rows: RowRanges, batch: int, *, positions: bool = False) -> Tensor:
    """Copy numbers of slots [slots] to [B, K, longest], with 0 behind a row's slots.

    Behind positions there are numbers above all of them.
    """
    from kvcap.kernels.rows_triton import copy_rows

    out = x.new_empty(batch, len(rows.lengths) // batch, rows.longest)
    _copy(copy_rows, x, out, rows, BLOCK=512, POSITIONS=positions)
    return out


def _copy(kernel: Any, x: Tensor, out: Tensor, rows: RowRanges, **sizes: int) -> None:
    """Launch a kernel that copies rows of `x` to `out`, so many slots in a program."""
    grid = -(-rows.longest // sizes["BLOCK"]), len(rows.lengths)
    with torch.cuda.device_of(x):
        run(kernel, grid, bits(x), bits(out), *rows, **sizes, num_warps=4)


def weigh(scores: Tensor, positions: Tensor, regions: Tensor) -> Tensor:
    """Return scores [B, K, n] in which regions rank below or above all else, by their tier.

    As `policies.base.eviction.by_tier`, but that each sequence has regions of its own.

    Args:
        scores: [B, K, n], any strides.
        positions: [B, K, n] int32, contiguous.
        regions: [B, 1 + 3 m] int32, contiguous: how many a sequence has, then start, stop and tier
            of each. Where a token is in several, the last counts.
    """
    from kvcap.kernels.rows_triton import weigh_regions

    (batch, heads, slots), block = scores.shape, 512
    out = empty(batch, heads, slots, device=scores.device)
    with torch.cuda.device_of(scores):
        run(
            weigh_regions,
            (-(-slots // block), batch * heads),
            scores,
            positions,
            regions,
            out,
            slots,
            heads,
            regions.shape[1],
            **strides("bhn", score=scores),
            BLOCK=block,
            num_warps=4,
        )
    return out


def copied(
    x: Tensor,
    rows: RowRanges,
    shift: Tensor | None = None,
    table: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Copy keys or values [slots, D] to [B·K · longest, D], arbitrary behind a row's slots.

    Args:
        x: keys or values of a pool.
        rows: the rows of one layer.
        shift: [slots] int32, how far keys are rotated back; None: not at all.
        table: see `rotate.rotate_back`.
        interleaved: see `rotate.rotate_back`.
    """
    from kvcap.kernels.rows_triton import copy_wide

    if shift is not None and table is not None:
        return rotate_rows(x, shift, table, rows, interleaved=interleaved)
    out = x.new_empty(len(rows.lengths) * rows.longest, x.shape[1])
    size = {"SIZE": x.shape[1], "SIZE_PAD": power_of_two(x.shape[1])}
    _copy(copy_wide, x, out, rows, BLOCK=32, **size)
    return out


def put(new: Tensor, x: Tensor, rows: RowRanges, before: Tensor | None = None) -> None:
    """Write one number per slot into `x`: for all slots of each row, or for those behind `before`.

    Args:
        new: [B, K, n] of the type of `x`, contiguous; numbers behind a row's slots are ignored.
        x: [slots], is written.
        rows: first slot and length of each row, with the slots that are written.
        before: slots of each row that come before the written ones, [B·K] int32; None: 0.
    """
    from kvcap.kernels.rows_triton import put_rows

    assert new.is_contiguous()
    assert new.dtype == x.dtype
    count, block = new.shape[-1], 512
    with torch.cuda.device_of(x):
        run(
            put_rows,
            (-(-count // block), len(rows.lengths)),
            bits(new),
            bits(x),
            rows.starts,
            before,
            rows.lengths,
            count,
            BLOCK=block,
            num_warps=4,
        )


def evict_one(
    scores: Tensor, pins: Pins, pool: Pool, left: Tensor, newer: Tensor | None = None
) -> None:
    """Evict one slot of each row that has more slots than it may have, in place.

    The unpinned slot with the lowest score goes, of equal scores that of the older token. Scores
    are made finite as by `torch.nan_to_num`, NaN as the lowest. The shifts of newer slots grow by
    one, and the row's last slot moves into the hole.

    Args:
        scores: [B, K, longest], arbitrary behind a row's slots, as `pins.mark` returns them.
        pins: pinned slots, besides those of `pool.pins`.
        pool: the rows.
        left: [B·K] int32, is written: slots of each row afterwards.
        newer: further shifts [B, K, w] int32 with last stride 1, such as those of an observation
            window's queries, which grow by the number of evicted slots. Their tokens are newer
            than all that go, or pinned.
    """
    from kvcap.kernels.rows_triton import evict_one

    (batch, heads, slots), (keys, values, positions, *rest) = scores.shape, pool.buffers
    # Few registers, so that programs of other kernels (kernels/linear.py) fit beside these.
    size, block = keys.shape[-1], min(2048, power_of_two(slots, 16))
    rest = [x for x in rest if x is not pool.shift]
    with torch.cuda.device_of(positions):
        run(
            evict_one,
            (batch * heads,),
            scores,
            positions,
            pool.shift,
            bits(keys),
            bits(values),
            **aux(rest, MOST_AUX),
            **_where(scores, pins, newer, pool),
            left=left,
            SIZE=size,
            SIZE_PAD=power_of_two(size, 16),
            BLOCK=block,
            num_warps=max(1, block // 256),
        )


def evict(
    scores: Tensor,
    pins: Pins,
    pool: Pool,
    left: Tensor,
    newer: Tensor | None = None,
    starts: Tensor | None = None,
) -> None:
    """Evict all slots of each row above the number that it may have.

    If rows stay in place, their last slots move into the holes.

    Args:
        scores: see `evict_one`.
        pins: see `evict_one`.
        pool: see `evict_one`.
        left: see `evict_one`.
        newer: see `evict_one`.
        starts: [B·K + 1] int32, where rows begin afterwards, and where the last one ends; None:
            they stay in place. Rows are neighbours, each with room for the slots it may have.
    """
    from kvcap.kernels.rows_triton import choose_rows, fill_holes, shift_rows

    (batch, heads, slots), positions = scores.shape, pool.buffers[2]
    new, count = partial(torch.empty, dtype=torch.int32, device=positions.device), batch * heads
    ages, counts, moves = new(len(positions)), new(count), new(count)
    source, holes = new(len(positions)), None
    if starts is None:
        holes = new(len(positions))
    else:  # slots beside these rows stay, as other layers may hold them in the same pool
        torch.arange(len(positions), out=source)
    with torch.cuda.device_of(positions):
        run(
            choose_rows,
            (count,),
            scores,
            positions,
            source,
            holes,
            ages,
            counts,
            moves,
            **_where(scores, pins, newer, pool),
            left=left,
            new_starts=starts,
            **tile_of_row(slots),
        )
        if pool.shift is not None:
            run(
                shift_rows,
                (-(-slots // 32), batch * heads),
                ages,
                counts,
                positions,
                pool.shift,
                pool.rows.starts,
                pool.rows.lengths,
                CHUNK=128,
                BLOCK=32,
                num_warps=4,
            )
        if holes is not None:
            keys, values, *rest = map(bits, pool.buffers)
            run(
                fill_holes,
                (16, count),
                source,
                holes,
                moves,
                pool.rows.starts,
                keys,
                values,
                **aux(rest, MOST_AUX + 2),
                SIZE=keys.shape[1],
                SIZE_PAD=power_of_two(keys.shape[1], 16),
                BLOCK=16,
                num_warps=4,
            )
    if holes is None:
        _gather(pool.buffers, source)


def _gather(buffers: Sequence[Tensor], source: Tensor) -> None:
    """Move the slot `source` [slots] of all buffers to every slot, by way of copies."""
    from kvcap.kernels.rows_triton import carry

    keys, values, *rest = (bits(x) for x in buffers)
    assert keys.shape == values.shape
    (slots, size), block = keys.shape, 32
    # For many slots, only some columns are copied at once, so that the copies stay small.
    most = max(16, MOST_COPIED // max(1, 2 * slots * keys.element_size()))
    width = min(power_of_two(size, 16), power_of_two(most + 1) // 2)
    key_copy, value_copy = (x.new_empty(slots, width) for x in (keys, values))
    copies = [torch.empty_like(x) for x in rest]
    with torch.cuda.device_of(keys):
        for first in range(0, size, width):
            narrow = (rest, copies) if first == 0 else ((), ())
            moved, kept = (aux(x, MOST_AUX + 2) for x in narrow)
            copied_to = {name.replace("aux", "copy"): x for name, x in kept.items()}
            for back in (False, True):
                run(
                    carry,
                    (-(-slots // block),),
                    source,
                    slots,
                    first,
                    keys,
                    values,
                    key_copy,
                    value_copy,
                    **moved,
                    **copied_to,
                    SIZE=size,
                    WIDTH=width,
                    BACK=back,
                    BLOCK=block,
                    num_warps=4,
                )


def tile_of_row(slots: int) -> dict[str, Any]:
    """Return the kernel's options for reading a row's slots: all at once if they fit.

    Args:
        slots: slots of the longest row.
    """
    whole = power_of_two(slots, 32) <= MOST_AT_ONCE
    block = power_of_two(slots, 32) if whole else 2048
    return {"BLOCK": block, "WHOLE": whole, "num_warps": max(1, block // 256)}


def _where(scores: Tensor, pins: Pins, newer: Tensor | None, pool: Pool) -> dict[str, Any]:
    """Return scores, pins, rows and budgets as arguments of the kernels."""
    rows = {"starts": pool.rows.starts, "lengths": pool.rows.lengths, "row_pins": pool.pins}
    arguments = {
        **pins.arguments(scores.device),
        **_newer_at(newer),
        **strides("bhn", score=scores),
    }
    return {"heads": scores.shape[1], **arguments, **rows, "targets": pool.targets}


def _newer_at(newer: Tensor | None) -> dict[str, Any]:
    """Return the shifts `newer` of `evict_one` as arguments of `grow`."""
    length = 0 if newer is None else newer.shape[-1]
    sizes = {"NEWER": length, "NEWER_PAD": power_of_two(length)}
    return {"newer": newer, **strides("bh", newer=newer), **sizes}
