"""Moves a model to a GPU by way of pinned memory.

CUDA copies ordinary memory step by step, and other threads can load no kernels as long. A copy from
pinned memory runs by itself: all cores fill one buffer while the GPU reads the other.
"""

from __future__ import annotations

from itertools import chain, cycle
from typing import Any

import torch
from torch import Tensor, nn

from kvcap.runtime.models.fused.decoder import move_products

CHUNK = 16 * 2**20  # bytes of a buffer
LEAST = 2**20  # bytes of a tensor, below which it moves by itself


def moved(model: Any, device: torch.device) -> Any:
    """The model, moved to a device as by `model.to(device)`.

    On a GPU, if memory can be pinned, weights that one product can read lie side by side.
    """
    if device.type != "cuda":
        return model.to(device)
    try:
        uploader = Uploader()
    except RuntimeError:  # the system lets no more memory be pinned
        return model.to(device)
    with torch.no_grad(), torch.cuda.device(device):
        move_products(model, device, uploader.copy)
        for x in chain(model.parameters(), model.buffers()):
            if _is_plain(x):
                target = torch.empty_like(x, device=device)
                uploader.copy(target, x)
                x.data = target
    return model.to(device)


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor of a CPU is large, and just its numbers one after the other."""
    plain = type(x) in (Tensor, nn.Parameter) and x.is_contiguous()
    return plain and x.device.type == "cpu" and x.nbytes >= LEAST


class Uploader:
    """Copies tensors to the current device of CUDA; what reads them there is to run after it.

    Raises:
        RuntimeError: no memory can be pinned.
    """

    def __init__(self) -> None:
        buffers = [_pinned(), _pinned()]
        self._turns = cycle([(buffer, torch.cuda.Event()) for buffer in buffers])

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source`, of a CPU, to `target`, both contiguous and of one type."""
        parts = (x.detach().reshape(-1).view(torch.uint8).split(CHUNK) for x in (target, source))
        for to, piece in zip(*parts, strict=True):
            buffer, read = next(self._turns)
            read.synchronize()
            to.copy_(buffer[: len(piece)].copy_(piece), non_blocking=True)
            read.record()


def _pinned() -> Tensor:
    return torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
