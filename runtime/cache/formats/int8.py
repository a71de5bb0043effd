"""Quantises a vector to 8 bits with one scale: `q = round(x / s)`, `s = max |x| / 127`.

It takes D + 2 bytes. `s` is float16, and `q` is made with it as it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvcap.runtime.cache.slot_numbers import Numbers, Shapes, divisor


def _shapes(size: int) -> Shapes:
    return {"": ((size,), torch.int8), "scale": ((), torch.float16)}


def _quantise(x: Tensor) -> dict[str, Tensor]:
    x = x.float()
    scale = (x.abs().amax(-1) / 127).half()
    q = (x / divisor(scale)[..., None]).round_().clamp_(-127, 127)
    return {"": q.to(torch.int8), "scale": scale}


def _dequantise(parts: Mapping[str, Tensor], out: Tensor, plus: Tensor | None = None) -> None:
    scale = parts["scale"].float()[..., None]
    out.copy_(parts[""])
    if plus is None:
        out.mul_(scale)
    else:
        torch.addcmul(plus[..., None, :], out, scale, out=out)


def _weigh(parts: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    return torch.matmul(weights * parts["scale"].float()[..., None, :], parts[""].float())


NUMBERS = Numbers(_shapes, _quantise, _dequantise, _weigh, by_kernels=True)
