"""Begins in the background what any model's first answer on a GPU needs.

CUDA and its library of products take part of a second to begin, and Triton as long to tell which
build it is; meanwhile transformers is imported and a plan is made. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread

import torch

from kvcap.kernels.variants import know_triton


def wake(device: str | torch.device, multiplies: bool = True) -> list[Thread]:
    """Begin, on a device of CUDA; what fails says so where it is needed.

    Args:
        device: of CUDA; on any other nothing is to be begun.
        multiplies: also the library of products, which takes memory of the GPU.

    Returns:
        The threads that do it. When Python ends it waits for CUDA's, which cannot be left alone.
    """
    where = torch.device(device)
    if where.type != "cuda":
        return []
    cuda = Thread(target=_tried, args=(partial(_begin, where, multiplies),), name="kvcap-cuda")
    triton = Thread(target=_tried, args=(know_triton,), name="kvcap-triton", daemon=True)
    for thread in (cuda, triton):
        thread.start()
    return [cuda, triton]


def _tried(work: Callable[[], None]) -> None:
    with suppress(Exception):
        work()


def _begin(device: torch.device, multiplies: bool) -> None:
    """CUDA's context, and a first product."""
    torch.empty(0, device=device)
    if multiplies:
        x = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(x, x)
