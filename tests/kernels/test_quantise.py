"""Slots of fewer bits written by the kernel: on CUDA where there is one, else interpreted."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401

from kvcap import kernels
from kvcap.kernels import quantise
from kvcap.runtime.cache.pool import SHIFT, Segment, SlotPool
from kvcap.runtime.cache.slot_format import SlotFormat
from kvcap.runtime.cache.storage import LayerStorage
from kvcap.runtime.models.rope import Rotation

SPAN = 40
SIZES = [(16, 16), (64, 64), (80, 32), (96, 0), (128, 128), (24, 12), (15, 8)]
KINDS = ["int8", "int8-int4", "int4"]


def storage(kind: str, size: int, rotated: int, interleaved: bool, centred: bool) -> LayerStorage:
    """A layer of two sequences and three heads, whose slots are full of ones."""
    aux = {SHIFT: torch.int32} if rotated else {}
    pool = SlotPool(
        6 * 30 + 7, size, torch.float32, DEVICE, {**aux, "seen": torch.float32},
        slot_format=SlotFormat.of(kind),
    )  # fmt: skip
    for buffer in pool.buffers():
        buffer.fill_(1)
    segment, rotation = Segment(pool, 4, 20, 10, batch=2, heads=3), None
    if rotated:
        frequencies = 10000.0 ** -(torch.arange(0, rotated, 2) / rotated)
        rotation = Rotation(frequencies, SPAN, DEVICE, interleaved=interleaved)
    mean = torch.full((2, 3, size), 0.5, device=DEVICE) if centred else None
    return LayerStorage([segment], None, None, rotation, mean)


CASES = [
    (kind, size, rotated, i % 2 == 1, i % 3 < 2)
    for i, (kind, (size, rotated)) in enumerate(product(KINDS, SIZES))
    if size % 2 == 0 or kind == "int8"
]


@pytest.mark.slow(keep=7)
@pytest.mark.parametrize(("kind", "size", "rotated", "interleaved", "centred"), CASES)
def test_written_as_by_pytorch(kind, size, rotated, interleaved, centred, monkeypatch):
    """Three blocks, the first with its mean."""
    found, calls, write = [], [], quantise.append
    monkeypatch.setattr(quantise, "append", lambda *a, **k: (calls.append(1), write(*a, **k)))
    for choice in ("eager", "triton"):
        layer, g = storage(kind, size, rotated, interleaved, centred), torch.Generator()
        (segment,) = layer.segments
        calls.clear()
        for length in (9, 1, 10):
            g.manual_seed(length)
            keys, values = torch.randn(2, 2, 3, length, size, generator=g).to(DEVICE)
            values[0, 0] = 2.0  # equal numbers have no span
            seen = segment.held
            times = torch.arange(seen, seen + length, dtype=torch.int32, device=DEVICE)
            with kernels.use(choice):
                layer.append(keys, values, times, seen, seen == 0)
        assert segment.held == 20
        assert len(calls) == (3 if choice == "triton" else 0)
        found.append({**segment.pool.named(), "mean": layer.key_mean})
    expected, slots = found
    for name, own in expected.items():
        if own is None:
            continue
        other = slots[name]
        if own.dtype == torch.uint8:
            own, other = (torch.stack((x & 15, x >> 4)).int() for x in (own, other))
        if name in ("keys", "values"):  # numbers in between two steps may become either
            off = (own.int() - other.int()).abs()
            assert int(off.max()) <= 1, name
            assert float(off.float().mean()) < 0.002, name
        else:
            torch.testing.assert_close(other, own, rtol=2e-3, atol=1e-5)


def test_what_is_not_covered():
    layer = storage("int8", 16, 16, False, True)
    slots, keys = layer.segments[0].behind(3), torch.randn(2, 3, 3, 16, device=DEVICE)
    assert quantise.covers(keys, keys, slots)
    assert not quantise.covers(keys.mT.contiguous().mT, keys, slots)
    assert not quantise.covers(keys[:, :, :0], keys[:, :, :0], slots)
    assert not quantise.covers(keys.double(), keys.double(), slots)
