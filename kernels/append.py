# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Writes a block's keys, values and positions into its slots, in one launch.

Auxiliary tensors become zero there. Eagerly it is a copy for each. Knows tensors only; triton is
imported when first needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcap.kernels.arguments import MOST_AUX, aux, strides
from kvcap.kernels.device import able, overlaps, power_of_two
from kvcap.kernels.launch import run
from kvcap.policies.base import Rows


def covers(keys: Tensor, values: Tensor, buffers: Sequence[Tensor]) -> bool:
    """Whether the kernel can do this here: on CUDA, or on a CPU in triton's interpreter.

    Arguments as in `append`, `buffers` being all that is written.
    """
    alike = all(x.dtype == buffers[0].dtype and x.stride(-1) == 1 for x in (keys, values))
    alike = alike and keys.shape == values.shape and keys.device == buffers[0].device
    return able(keys) and alike and len(buffers) <= 3 + MOST_AUX and keys.numel() > 0


def append(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    buffers: Sequence[Tensor],
    after: Tensor | None = None,
    rows: Rows | None = None,
) -> None:
    """Write a block.

    Args:
        keys: [b, k, T, D], any strides but of the last dimension.
        values: [b, k, T, D] likewise.
        positions: [T] int32.
        buffers: the slots that are written, views: of keys and of values [b, k, T, D], of
            positions [b, k, T] int32, and [b, k, T] of auxiliary tensors, which become 0. Rows are
            equally far apart in all.
        after: an integer on the device [], by how many slots what is written lies behind these.
        rows: where heads lie that hold unequally many slots, behind which is written; the buffers
            are the pool's then, [slots, D] and [slots].
    """
    from kvcap.kernels.append_triton import write

    batch, heads, length, size = keys.shape
    row = 0 if rows is not None else buffers[2].stride(1)  # slots from one to the next
    for x in () if rows is not None else (*buffers[2:], *buffers[:2]):
        step = size if x.dim() == 4 else 1
        assert x.stride()[:3] == (heads * row * step, row * step, step), "rows side by side"
    block = 16
    with torch.cuda.device_of(keys):
        run(
            write, (-(-length // block), batch * heads),
            keys, values, positions, *buffers[:3], **aux(buffers[3:]),
            length=length, row_slots=row, after=after,
            starts=None if rows is None else rows.starts,
            lengths=None if rows is None else rows.lengths,
            **strides("bht", key=keys, value=values),
            HEADS=heads, SIZE=size, SIZE_PAD=power_of_two(size, 16), BLOCK=block,
            OVERLAP=overlaps(keys.device), num_warps=4,
        )  # fmt: skip
