# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Reads keys or values of 8 or 4 bits from their slots, rotating keys on, in one pass over them.

The format is that of `runtime/cache/slot_format.py`. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvcap.kernels.arguments import strides
from kvcap.kernels.device import able, power_of_two
from kvcap.kernels.launch import run


class QuantisedKeys(NamedTuple):
    """Keys of 8 or 4 bits in their slots, and what makes them keys; see `slot_format.py`."""

    parts: Mapping[str, Tensor]
    """Views of a pool's slots: under '' bytes [B, K, n, D or D/2], 'scale' [B, K, n] or, of groups
    of 4 bits, 'scale' and 'low' [B, K, n, D/g]. Rows are equally far apart in all."""
    size: int  # D
    mean: Tensor | None  # [B, K, D] float32, to be added
    shift: Tensor | None = None  # [B, K, n] int32 likewise, by minus which they are rotated on
    table: Tensor | None = None  # [span, 2, D/2], contiguous, cosines and sines; None: they are not


def covers(parts: Mapping[str, Tensor]) -> bool:
    """Whether the kernel can do this here: on CUDA, or on a CPU in triton's interpreter."""
    return able(parts[""]) and all(x.stride(-1) == 1 for x in parts.values() if x.dim() == 4)


def read(
    parts: Mapping[str, Tensor],
    size: int,
    dtype: torch.dtype,
    mean: Tensor | None = None,
    shift: Tensor | None = None,
    table: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Numbers `q · scale + low + mean`, of keys rotated on by minus their shifts: [B, K, n, D].

    Args:
        parts: bytes under '' and side tensors by name, views of slots. In 8 bits [B, K, n, D] and
            `scale` [B, K, n]; in 4 bits [B, K, n, D/2], number i in the low half of byte i and
            i + D/2 in its high half, and `scale` and `low` [B, K, n, D/g] of g neighbours each.
        size: `D`.
        dtype: of the result.
        mean: [B, K, D] float32, added to every slot of a head.
        shift: [B, K, n] int32, from minus the table's span up to 0; with it:
        table: [span, 2, R/2], contiguous, cosines and sines.
        interleaved: neighbours (2i, 2i + 1) are pairs; else halves (i, i + R/2) are.
    """
    from kvcap.kernels.dequantise_triton import read_slots

    q, scale, low = parts[""], parts["scale"], parts.get("low")
    (batch, heads, slots, _), half = q.shape, 0 if table is None else table.shape[-1]
    out = torch.empty(batch, heads, slots, size, dtype=dtype, device=q.device)
    if not out.numel():
        return out
    block, rest = 32, size - 2 * half
    with torch.cuda.device_of(q):
        run(
            read_slots, (-(-slots // block), batch * heads),
            q, scale, low, mean, shift, table, out, slots,
            **strides("bhn", q=q, scale=scale, low=low, shift=shift), **strides("bh", mean=mean),
            HEADS=heads, SIZE=size, HALF=half, HALF_PAD=power_of_two(half),
            STEP=2 if interleaved else 1, MATE=1 if interleaved else half,
            REST=rest, REST_PAD=power_of_two(rest), BITS=8 if low is None else 4,
            GROUP=size if low is None else size // low.shape[-1], BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out
