"""Blocks written into slots by the kernel: on CUDA, else in triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401

from kvcap import kernels
from kvcap.kernels import append
from kvcap.runtime.cache.pool import Segment, SlotPool

SIDE = {"shift": torch.int32, "a": torch.float32, "b": torch.bool, "c": torch.float16}


def written(choice: str, held: int, length: int, batch: int, heads: int, size: int, side, dtype):
    """A pool of ones, and what it is after a block was written behind `held` slots."""
    pool = SlotPool(3 + batch * heads * 40, size, dtype, DEVICE, side, new=torch.ones)
    segment = Segment(pool, 3, 30, 10, batch, heads)
    segment.held = held
    g = torch.Generator().manual_seed(0)
    blocks = torch.randn(2, batch, length, heads, size, generator=g).to(DEVICE, dtype)
    keys, values = blocks.transpose(2, 3)  # views, as models make them
    times = torch.arange(100, 100 + length, dtype=torch.int32, device=DEVICE)
    with kernels.use(choice):
        segment.append(keys, values, times)
    assert segment.held == held + length
    return pool.buffers(), segment


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("held", "length", "batch", "heads", "size", "side"),
    [
        (0, 1, 1, 1, 8, ()),
        (29, 1, 1, 3, 80, ("shift",)),
        (23, 17, 2, 2, 64, tuple(SIDE)),
        (0, 40, 1, 2, 128, ("a", "b")),
    ],
)
def test_memory_is_the_eager_codes(held, length, batch, heads, size, side, dtype, monkeypatch):
    calls = []
    plain = append.append
    monkeypatch.setattr(append, "append", lambda *a: (calls.append(1), plain(*a)))
    side = {name: SIDE[name] for name in side}
    found, expected = (
        written(choice, held, length, batch, heads, size, side, dtype)
        for choice in ("triton", "eager")
    )
    assert calls == [1]
    for mine, its in zip(found[0], expected[0], strict=True):
        assert torch.equal(mine, its)
    assert found[1].positions[0, 0, -1] == 99 + length


def test_what_is_covered():
    pool = SlotPool(50, 8, torch.float32, DEVICE)
    segment = Segment(pool, 0, 20, 5, heads=2)
    targets = [segment._view(x, 0, 4) for x in pool.buffers()]
    block = torch.zeros(1, 2, 4, 8, device=DEVICE)
    assert append.covers(block, block, targets)
    assert not append.covers(block.half(), block.half(), targets)  # eager code converts
    assert not append.covers(block.mT.contiguous().mT, block, targets)
    assert not append.covers(block, block, [*targets, *[targets[2]] * 7])
    assert not append.covers(block[:, :, :0], block[:, :, :0], targets)
