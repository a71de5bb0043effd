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
        The threads that do it. Python waits for them when it ends.
    """
    where = torch.device(device)
    if where.type != "cuda":
        return []
    works = partial(_begin, where, multiplies), know_triton
    threads = [Thread(target=_tried, args=(work,), name="kvcap-wake") for work in works]
    for thread in threads:
        thread.start()
    return threads


def _tried(work: Callable[[], None]) -> None:
    with suppress(Exception):
        work()


def _begin(device: torch.device, multiplies: bool) -> None:
    """CUDA's context, and a first product."""
    torch.empty(0, device=device)
    if multiplies:
        x = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(x, x)
