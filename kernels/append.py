# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Writes a block's keys, values and positions into its slots, in one launch.

Auxiliary tensors become zero there. Eager code launches a copy for each tensor. Knows tensors only;
triton is imported when first needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcap.kernels.arguments import MOST_AUX, aux, strides
from kvcap.kernels.device import able, overlaps, power_of_two
from kvcap.kernels.launch import run
from kvcap.policies.base import RowRanges


def covers(keys: Tensor, values: Tensor, buffers: Sequence[Tensor]) -> bool:
    """Return whether the kernel covers these tensors, on CUDA or on a CPU in Triton's interpreter.

    Arguments are those of `append`; `buffers` are all tensors that it writes to.
    """
    alike = all(x.dtype == buffers[0].dtype and x.stride(-1) == 1 for x in (keys, values))
    alike = alike and keys.shape == values.shape and keys.device == buffers[0].device
    return able(keys) and alike and len(buffers) <= 3 + MOST_AUX and keys.numel() > 0


def append(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    buffers: Sequence[Tensor],
    rows: RowRanges,
) -> None:
    """Write a block's keys, values and positions behind the slots in use of rows of a pool.

    Args:
        keys: [B, K, T, D]; the last stride is 1, others are free.
        values: [B, K, T, D]; the last stride is 1, others are free.
        positions: [T] int32.
        buffers: the pool's keys and values [slots, D], positions [slots] int32, and auxiliary
            tensors [slots], which become 0.
        rows: first slot and length of each of the B·K rows, without the block.
    """
    from kvcap.kernels.append_triton import write

    batch, heads, length, size = keys.shape
    block = 16
    with torch.cuda.device_of(keys):
        run(
            write,
            (-(-length // block), batch * heads),
            keys,
            values,
            positions,
            *buffers[:3],
            **aux(buffers[3:]),
            length=length,
            starts=rows.starts,
            lengths=rows.lengths,
            **strides("bht", key=keys, value=values),
            HEADS=heads,
            SIZE=size,
            SIZE_PAD=power_of_two(size, 16),
            BLOCK=block,
            OVERLAP=overlaps(keys.device),
            num_warps=4,
        )
