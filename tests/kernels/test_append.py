"""Blocks written into slots by the kernel: on CUDA, else in triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401
from twins import DTYPES

from kvcap.kernels import append
from kvcap.policies.base import RowRanges
from kvcap.runtime.cache.pool import Segment, SlotPool

SIDE = {"shift": torch.int32, "a": torch.float32, "b": torch.bool, "c": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("held", "length", "size", "side"),
    [
        ([0], 1, 8, ()),
        ([29, 0, 7], 1, 80, ("shift",)),
        ([23, 30, 1, 12], 17, 64, tuple(SIDE)),
        ([0, 33], 40, 128, ("a", "b")),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_memory_is_the_eager_codes(held, length, size, side, dtype, batch):
    """Behind rows of one pool, each with as many slots as it has."""
    heads, g = len(held), torch.Generator().manual_seed(0)
    held = [(n + 5 * b) % 34 for b in range(batch) for n in held]
    blocks = torch.randn(2, batch, length, heads, size, generator=g).to(DEVICE, dtype)
    keys, values = blocks.transpose(2, 3)  # views, as models make them
    times = torch.arange(100, 100 + length, dtype=torch.int32, device=DEVICE)
    kinds = {name: SIDE[name] for name in side}
    mine, its = (
        SlotPool(3 + 75 * len(held), size, dtype, DEVICE, kinds, new=torch.ones) for _ in range(2)
    )
    starts = [3 + 75 * i for i in range(len(held))]
    for i, (start, n) in enumerate(zip(starts, held, strict=True)):
        segment = Segment(its, start, 34, 41, row=i // heads, head=i % heads, layer_heads=heads)
        segment.held = n
        segment.append(segment.rows_of(keys), segment.rows_of(values), times)
        assert segment.positions[0, 0, -1] == 99 + length
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts, held))
    assert append.covers(keys, values, mine.buffers())
    append.append(keys, values, times, mine.buffers(), RowRanges(starts, lengths, 34))
    assert all(map(torch.equal, mine.buffers(), its.buffers()))


def test_what_is_covered():
    kinds = {str(i): torch.float32 for i in range(6)}
    targets = SlotPool(50, 8, torch.float32, DEVICE, kinds).buffers()
    block = torch.zeros(1, 2, 4, 8, device=DEVICE)
    assert append.covers(block, block, targets)
    assert not append.covers(block, block, [*targets, targets[-1]])
    assert not append.covers(block.half(), block.half(), targets)  # eager code converts
    assert not append.covers(block.mT.contiguous().mT, block, targets)
