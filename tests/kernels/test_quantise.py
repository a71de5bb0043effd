"""Slots of fewer bits written and read by kernels, beside the formulas of `slot_format.py`.

On CUDA where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401

from kvcap.kernels import dequantise, quantise
from kvcap.policies.base import RowRanges
from kvcap.runtime.cache.formats import CHOICES
from kvcap.runtime.cache.pool import SHIFT, SlotPool
from kvcap.runtime.cache.slot_format import SlotFormat
from kvcap.runtime.models.rope import Rotation, rotate

SPAN, BATCH, HEADS, ROOM = 60, 2, 3, 30
SIZES = [(16, 16), (64, 64), (80, 32), (96, 0), (128, 128), (24, 12), (15, 8)]
KINDS = ["int8", "int8-int4", "int4"]
CASES = [
    (kind, size, rotated, i % 2 == 1, i % 3 < 2)
    for i, (kind, (size, rotated)) in enumerate(product(KINDS, SIZES))
    if size % 2 == 0 or kind == "int8"
]


class Pool:
    """Rows of unequal lengths in a pool full of ones, and what turns their keys."""

    def __init__(self, kind, size, rotated, interleaved, centred, lengths=(0, 3, 9, 0, 20, 1)):
        aux = {SHIFT: torch.int32} if rotated else {}
        self.format, self.interleaved = SlotFormat.of(kind), interleaved
        self.pool = SlotPool(
            7 + BATCH * HEADS * ROOM,
            size,
            torch.float32,
            DEVICE,
            {**aux, "seen": torch.float32},
            slot_format=self.format,
        )
        for buffer in self.pool.buffers():
            buffer.fill_(1)
        starts = 4 + ROOM * torch.arange(BATCH * HEADS + 1, dtype=torch.int32)
        held = torch.tensor(lengths, dtype=torch.int32)
        self.rows = RowRanges(starts.to(DEVICE), held.to(DEVICE), 32)
        self.mean = torch.full((BATCH, HEADS, size), 0.5, device=DEVICE) if centred else None
        self.rotation = None
        if rotated:
            frequencies = 10000.0 ** -(torch.arange(0, rotated, 2) / rotated)
            self.rotation = Rotation(frequencies, SPAN, DEVICE, interleaved=interleaved)

    def each(self):
        """Sequence, head, first slot and slots in use of every row."""
        rows = zip(self.rows.starts[:-1].tolist(), self.rows.lengths.tolist(), strict=True)
        return [(*divmod(i, HEADS), *row) for i, row in enumerate(rows)]


def written(layer, keys, values, read_at, real):
    """All that the formula writes of one row's block, by slots; of `real` tokens the mean is."""
    expected = {name: x.cpu().clone() for name, x in layer.pool.named().items()}
    mean = None if layer.mean is None else layer.mean.cpu().clone()
    for b, k, start, held in layer.each():
        new = keys[b, k].cpu()
        if layer.rotation is not None:
            offsets = int(read_at[b]) + torch.arange(len(new))
            turn = layer.rotation.table.cpu()[offsets] * torch.tensor([1.0, -1.0])[:, None]
            new = rotate(new, turn, interleaved=layer.interleaved)
        if mean is not None:
            if held == 0:
                mean[b, k] = new[:real].mean(0)
            new = new - mean[b, k]
        slots = slice(start + held, start + held + len(new))
        for name, x in layer.format.written(new, values[b, k].cpu()).items():
            expected[name][slots] = x
        expected["positions"][slots] = torch.arange(len(new), dtype=torch.int32)
        expected["seen"][slots] = 0
        if SHIFT in expected:
            expected[SHIFT][slots] = -(held + torch.arange(len(new), dtype=torch.int32))
    return expected, mean


@pytest.mark.slow(keep=7)
@pytest.mark.parametrize(("kind", "size", "rotated", "interleaved", "centred"), CASES)
def test_written_as_by_the_formula(kind, size, rotated, interleaved, centred):
    layer, length = Pool(kind, size, rotated, interleaved, centred), 9
    keys, values = torch.randn(2, BATCH, HEADS, length, size).to(DEVICE)
    values[0, 0] = 2.0  # equal numbers have no span
    read_at = torch.tensor([3, 40], dtype=torch.int32)
    fillers = size in (16, 64, 128)  # behind the block, of which means know nothing
    real = length - 2 if fillers else length
    expected, mean = written(layer, keys, values, read_at, real)
    quantise.append(
        keys,
        values,
        torch.arange(length, dtype=torch.int32, device=DEVICE),
        layer.pool.named(),
        layer.rows,
        layer.mean,
        None if layer.rotation is None else (read_at.to(DEVICE), layer.rotation.table),
        torch.tensor(real, dtype=torch.int32, device=DEVICE) if fillers else None,
        interleaved=interleaved,
    )
    if mean is not None:
        torch.testing.assert_close(layer.mean.cpu(), mean, rtol=1e-5, atol=1e-6)
    for name, own in expected.items():
        other = layer.pool.named()[name].cpu()
        if own.dtype == torch.uint8:
            own, other = (torch.stack((x & 15, x >> 4)).int() for x in (own, other))
        if name in ("keys", "values"):  # numbers in between two steps may become either
            off = (own.int() - other.int()).abs()
            assert int(off.max()) <= 1, name
            assert float(off.float().mean()) < 0.002, name
        else:
            torch.testing.assert_close(other, own, rtol=2e-3, atol=1e-5)


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "size", "rotated", "interleaved", "centred"), CASES)
def test_read_as_by_the_formula(kind, size, rotated, interleaved, centred, dtype, monkeypatch):
    layer = Pool(kind, size, rotated, interleaved, centred)
    named = layer.pool.named()
    for name, x in layer.format.written(*torch.randn(2, layer.pool.slots, size)).items():
        named[name].copy_(x)
    turn, to = None, 32 * torch.arange(6, dtype=torch.int32, device=DEVICE)
    if rotated:
        named[SHIFT].random_(SPAN).neg_()
        turn = named[SHIFT], layer.rotation.table
    parts = {name: layer.format.parts(name, named) for name in ("key", "value")}
    where = size, dtype, layer.rows, to, 6 * 32, layer.mean, turn
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **k: torch.full(a, float("nan"), **k))
        both = dequantise.read(parts["key"], parts["value"], *where, interleaved=interleaved)
        alone, _ = dequantise.read(parts["key"], None, *where, interleaved=interleaved)
    torch.testing.assert_close(alone, both[0], rtol=0, atol=0, equal_nan=True)
    each = zip(parts, both, (layer.format.keys, layer.format.values), strict=True)
    for name, out, numbers in each:
        mean, angles_of = (layer.mean, turn) if name == "key" else (None, None)
        assert out.dtype == dtype
        for row, (b, k, start, held) in enumerate(layer.each()):
            mine = {part: x[start : start + held].cpu() for part, x in parts[name].items()}
            expected = torch.zeros(held, size)
            numbers.dequantise(mine, expected, None)
            if mean is not None:
                expected += mean[b, k].cpu()
            if angles_of is not None:
                ranks = -named[SHIFT][start : start + held].long().cpu()
                angles = layer.rotation.table.cpu()[ranks]
                expected = rotate(expected, angles, interleaved=interleaved)
            its = out[row * 32 : row * 32 + held].float().cpu()
            allowed = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
            torch.testing.assert_close(its, expected, rtol=allowed, atol=allowed)


def test_every_format_that_kernels_run_is_tested():
    types = {kind: SlotFormat.of(kind).types for kind in CHOICES}
    assert [kind for kind, both in types.items() if all(x.by_kernels for x in both)] == KINDS
