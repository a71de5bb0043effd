"""Slots of fewer bits read by the kernel: on CUDA where there is one, else in the interpreter."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from interpreted import DEVICE, pytestmark  # noqa: F401

import kvcap
from kvcap import kernels
from kvcap.kernels.dequantise import read
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.slot_format import NUMBERS
from kvcap.runtime.models.rope import Rotation, rotate

SPAN = 60


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(
    ("size", "rotated"), [(16, 16), (64, 64), (80, 32), (96, 0), (128, 128), (24, 12)]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_read_as_by_the_formula(interleaved, size, rotated, kind, dtype, monkeypatch):
    slots, parts = 37, NUMBERS[kind].quantise(torch.randn(2, 3, 46, size))
    held = {name: x[:, :, :slots].to(DEVICE) for name, x in parts.items()}  # views with gaps
    expected = torch.empty(2, 3, slots, size)
    NUMBERS[kind].dequantise({name: x.cpu() for name, x in held.items()}, expected, None)
    mean, table, shift = torch.randn(2, 3, size), None, None
    expected += mean[:, :, None]
    if rotated:
        frequencies = 10000.0 ** -(torch.arange(0, rotated, 2) / rotated)
        table = Rotation(frequencies, SPAN, DEVICE).table
        shift = -torch.randint(SPAN, (2, 3, 46), dtype=torch.int32)[:, :, :slots]
        rows = table.cpu()[-shift.long()]
        expected = rotate(expected, rows, interleaved=interleaved)
        shift = shift.to(DEVICE)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(a, float("nan"), **k))
    given = {"mean": mean.to(DEVICE), "shift": shift, "table": table, "interleaved": interleaved}
    found = read(held, size, dtype, **given)
    allowed = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.float().cpu(), expected, rtol=allowed, atol=allowed)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kind", ["int8", "int8-int4", "int4"])
def test_a_cache_by_kernels_holds_and_answers_as_one_without(kind, tokens):
    """Scales move with their slots in the eviction's kernel too, where that covers them."""
    model, ids, found = tiny_model("llama").to(DEVICE), tokens(28).to(DEVICE), []
    for choice in ("eager", "triton"):
        cache = kvcap.BudgetCache(model.config, 10, 8, kv_dtype=kind)
        loop = BlockLoop(model, cache, graphs=False)
        with kernels.use(choice):
            logits = [loop.prefill(ids[:, :26]), *(loop.read(x) for x in ids[:, 26:].split(1, 1))]
        layer = cache.capped_layers[0]
        (segment,) = layer.segments
        order, named = segment.positions.argsort(-1), segment.named(0, segment.held)
        found.append((torch.stack(logits), {name: sort(x, order) for name, x in named.items()}))
    (expected, eager), (logits, slots) = found
    assert slots.keys() == eager.keys()
    for name, own in eager.items():  # of the first layer, to which both give the same
        assert torch.equal(slots[name], own), name
    # Later keys differ by rounding, so that one or another becomes the next number of 8 or 4 bits.
    torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)


def sort(x, order):
    """What slots [B, K, n, ...] have, in that order [B, K, n] of each row."""
    wide = order.view(*order.shape, *(1 for _ in x.shape[3:])).expand(x.shape)
    return x.gather(2, wide)
