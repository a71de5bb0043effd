"""Arguments of Triton kernels by their names: concepts that a kernel takes one number at a time.

Triton 3.2 passes no tuples to kernels. What is one thing here (a tensor's strides, a cache's
auxiliary tensors, pinned spans) has a parameter for each of its numbers there, called alike.
Knows tensors only; imports no triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.kernels.device import bits, seen_and_clock

MOST_AUX = 6  # auxiliary tensors: a number a slot, besides positions
MOST_SPANS = 8

Spans = Sequence[tuple[int, int]]


class Pins(NamedTuple):
    """Slots that stay, whatever their scores."""

    sinks: int  # positions below this
    recents: int  # and this many below `seen`
    seen: int | Tensor  # tokens read so far, an int or one int64 on the device
    spans: Spans  # [start, stop) positions, at most `MOST_SPANS`

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Return `sinks` to `stop_7` as `worth_of` takes them; missing spans are empty."""
        seen, clock = seen_and_clock(self.seen, device)
        ends = {f"{end}_{i}": 0 for i in range(MOST_SPANS) for end in ("start", "stop")}
        for i, (start, stop) in enumerate(self.spans):
            ends |= {f"start_{i}": start, f"stop_{i}": stop}
        pinned = {"sinks": self.sinks, "recents": self.recents, "seen": seen, "clock": clock}
        return {**pinned, "spans": len(self.spans), **ends}


def aux(tensors: Sequence[Tensor], most: int = MOST_AUX) -> dict[str, Tensor | None]:
    """Return `aux_0` and so on up to `most`: the tensors as integers, then None."""
    assert len(tensors) <= most, "see `covers`"
    return {f"aux_{i}": bits(tensors[i]) if i < len(tensors) else None for i in range(most)}


def strides(dims: str, **tensors: Tensor | None) -> dict[str, int]:
    """Return the first strides of every tensor, by its name and a letter for the dimension.

    >>> strides("bh", key=torch.zeros(2, 3, 4), other=None)
    {'key_b': 12, 'key_h': 4, 'other_b': 0, 'other_h': 0}
    """
    return {
        f"{name}_{dim}": 0 if x is None else x.stride(i)
        for name, x in tensors.items()
        for i, dim in enumerate(dims)
    }
