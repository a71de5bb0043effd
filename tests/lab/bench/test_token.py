"""What the variants of a token's kernel are measured on; by triton's interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401

from kvcap import kernels
from kvcap.lab.bench import token
from kvcap.lab.bench.token import Layer, Variant


def test_the_runtimes_variant_comes_first_and_each_once():
    variants = token.variants(DEVICE)
    tile = kernels.token.tile_of(token.SIZE * token.DTYPE.itemsize, torch.device(DEVICE))
    assert variants[0] == Variant(*tile[:3])
    assert len(set(variants)) == len(variants)
    for name in vars(variants[0]):
        assert len({getattr(variant, name) for variant in variants}) > 1


@pytest.mark.parametrize("batch", [1, 2])
def test_every_variant_attends_and_evicts_alike(batch):
    torch.manual_seed(1)
    layer = Layer(batch, 100, 4, 2, 32, torch.float32, DEVICE)
    slots = [x.clone() for x in layer.segment.pool.buffers()]
    states = []
    for variant in (Variant(64, 3, 4), Variant(32, 5, 4, parts=2), Variant(32, 2, 4)):
        for mine, before in zip(layer.segment.pool.buffers(), slots, strict=True):
            mine.copy_(before)
        out, sums = layer.attend(variant)
        with kernels.use("triton"):
            layer.evict(sums)
        states.append((out, layer.segment.positions.sort().values))
        assert not torch.equal(layer.segment.pool.keys, slots[0])
        layer.reset()
        assert torch.equal(layer.segment.aux("shift"), layer.before)
    for out, gone in states[1:]:
        torch.testing.assert_close(out, states[0][0], rtol=1e-5, atol=1e-5)
        assert torch.equal(gone, states[0][1])
