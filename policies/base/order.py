"""Orders slots by worth; of slots that are worth the same, the older one goes first.

One rule for every device and backend, so that all keep the same slots where scores tie, as pooling
by a maximum makes them do. Positions of a head are distinct.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ordered(worth: Tensor, positions: Tensor) -> Tensor:
    """Return integers that sort as (worth, position) does, -0.0 as 0.0. [..., n] int64.

    Args:
        worth: [..., n] float32 without NaN.
        positions: [..., n] int, below 2^31.
    """
    bits = (worth + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    return (bits.long() << 32) | positions


def lowest(worth: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return the `count` slots of each head that are worth least. [..., count], unordered.

    Args:
        worth: [..., n] float32 without NaN.
        positions: [..., n] int.
        count: at most n.
    """
    if count == 1:  # the oldest of the least, whose positions become negative
        least = worth == worth.amin(-1, keepdim=True)
        return positions.add(least, alpha=-(2**31)).argmin(-1, keepdim=True)
    if worth.device.type == "mps":  # its topk takes no 64-bit integers
        return sequence(worth, positions)[..., :count]
    return ordered(worth, positions).topk(count, dim=-1, largest=False, sorted=False).indices


def sequence(worth: Tensor, positions: Tensor) -> Tensor:
    """Return all slots of each head, the least worthy first, by two sorts. [..., n] int64."""
    by_age = positions.argsort(dim=-1)
    return by_age.gather(-1, worth.gather(-1, by_age).argsort(dim=-1, stable=True))


def best(worth: Tensor, positions: Tensor, counts: Tensor) -> Tensor:
    """Mark the slots of each head that are worth most, of equal ones the newer. [..., n] bool.

    Args:
        worth: [..., n] float without NaN; of float32 with its bits at hand, one sort is enough.
        positions: [..., n] int, below 2^31.
        counts: [..., 1], how many to mark in each head, rounded down; all if a head has fewer.
    """
    slots = worth.shape[-1]
    others = slots - counts.floor()  # [..., 1], how many go
    if torch.compiler.is_compiling() or worth.dtype != torch.float32 or worth.device.type == "mps":
        # By two sorts, which can be traced for ONNX, where a float has no bits.
        least = _nth(worth, others)
        older = others - (worth < least).sum(-1, keepdim=True)  # of the equal ones, those that go
        equal = positions.masked_fill(worth != least, torch.iinfo(torch.int32).max)
        stays = (worth > least) | ((worth == least) & (positions >= _nth(equal, older)))
    else:
        order = ordered(worth, positions)
        stays = order >= _nth(order, others)
    return stays & (others < slots)


def ranks(numbers: Tensor) -> Tensor:
    """Return how many of its row come before each number, of equal ones the earlier. [..., n]."""
    return numbers.argsort(dim=-1, stable=True).argsort(dim=-1)


def _nth(numbers: Tensor, index: Tensor) -> Tensor:
    """Return the number of each row that has `index` smaller ones before it. [..., 1]."""
    return numbers.sort(dim=-1).values.gather(-1, index.long().clamp(0, numbers.shape[-1] - 1))
