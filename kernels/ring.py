# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Appends a block's queries to the observation window and drops its oldest, in one launch.

Eager code takes five small kernels per layer and block. Knows tensors only; triton is imported when
first needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.kernels.device import able, bits, power_of_two
from kvcap.kernels.launch import run

MOST_LENGTH, MOST_HEAD_SIZE = 64, 256  # a program holds a head's whole ring


def covers(ring: Tensor, shift: Tensor, queries: Tensor) -> bool:
    """Return whether the kernel covers these arguments of `append`, on CUDA or interpreted."""
    if not able(queries) or queries.dtype != ring.dtype or queries.device != ring.device:
        return False
    alike = queries.shape[:2] == ring.shape[:2] and queries.shape[3] == ring.shape[3]
    whole = ring.is_contiguous() and shift.is_contiguous() and queries.stride(-1) == 1
    small = ring.shape[2] <= MOST_LENGTH and ring.shape[3] <= MOST_HEAD_SIZE
    return alike and whole and small and ring.numel() > 0 and queries.numel() > 0


def append(ring: Tensor, shift: Tensor, queries: Tensor, count: Tensor | None = None) -> None:
    """Drop the oldest queries and append the block's newest, with shifts of 0.

    Args:
        ring: queries [B, H, w, D], oldest first, contiguous; changed in place.
        shift: their shifts [B, K, w] int32, contiguous; changed in place.
        queries: [B, H, T, D]; the last stride is 1, others are free.
        count: how many of the T are the block's and no fillers, int32 [] on the device; None: all.
    """
    from kvcap.kernels.ring_triton import push

    batch, heads, length, size = ring.shape
    with torch.cuda.device_of(ring):
        run(
            push,
            (batch * heads,),
            bits(ring),
            shift,
            bits(queries),
            queries.shape[2],
            count,
            *queries.stride()[:3],
            HEADS=heads,
            GROUP=heads // shift.shape[1],
            LENGTH=length,
            LENGTH_PAD=power_of_two(length),
            SIZE=size,
            SIZE_PAD=power_of_two(size, 16),
            num_warps=4,
        )
