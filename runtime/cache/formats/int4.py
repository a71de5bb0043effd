"""Quantises groups of a vector to 4 bits: `q = round((x - l) / s)`, `l = min x`.

The scale `s` is `(max x - l) / 15` of a group. Both are float16, and `q` is made with them as they
are stored: D/2 + 4 D/32 bytes. A group is 32 neighbouring numbers, or the largest divisor of D
below. Byte i of a vector holds number i in its low bits and number i + D/2 in its high ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvcap.runtime.cache.slot_numbers import Numbers, Shapes, divisor

GROUP = 32  # the most numbers that share a scale


def _group_of(size: int) -> int:
    return next(n for n in range(min(GROUP, size), 0, -1) if size % n == 0)


def _shapes(size: int) -> Shapes:
    groups = (size // _group_of(size),)
    return {
        "": ((size // 2,), torch.uint8),
        "scale": (groups, torch.float16),
        "low": (groups, torch.float16),
    }


def _quantise(x: Tensor) -> dict[str, Tensor]:
    groups = x.float().unflatten(-1, (-1, _group_of(x.shape[-1])))  # [..., D/32, 32]
    least, most = groups.aminmax(dim=-1)
    low = least.half()
    scale = ((most - low.float()) / 15).half()
    q = (groups - low.float()[..., None]).div_(divisor(scale)[..., None]).round_().clamp_(0, 15)
    a, b = q.flatten(-2).to(torch.uint8).chunk(2, dim=-1)
    return {"": a | (b << 4), "scale": scale, "low": low}


def _dequantise(parts: Mapping[str, Tensor], out: Tensor, plus: Tensor | None = None) -> None:
    packed, scale, low = parts[""], parts["scale"].float(), parts["low"].float()
    half = packed.shape[-1]
    out[..., :half], out[..., half:] = packed & 15, packed >> 4
    groups = out.unflatten(-1, (scale.shape[-1], -1))  # a view
    groups.mul_(scale[..., None]).add_(low[..., None])
    if plus is not None:
        out.add_(plus[..., None, :])


def _weigh(parts: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    packed = parts[""]
    out = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], device=packed.device)
    _dequantise(parts, out)  # products by group would take longer
    return torch.matmul(weights, out)


NUMBERS = Numbers(
    _shapes, _quantise, _dequantise, _weigh, in_pairs=True, unrotated=True, by_kernels=True
)
