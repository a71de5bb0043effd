"""Families whose RoPE rotates neighbours, and those without positions in their full layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import as_cache
from families import model_of as tiny_model
from tools import distinct, runtime_of
from torch import Tensor
from transformers import DynamicCache

from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.rope import Rope, Rotation, moved_by, rotate, rotations
from kvcap.runtime.session.session import Session

# --- keys that are moved --------------------------------------------------------------------------


def test_what_no_table_moves_is_refused_by_name():
    with pytest.raises(ValueError, match="dynamic"):
        moved_by(Rope("dynamic", None), torch.zeros(1, 8), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("size", "rotated"), [(16, 16), (10, 6), (17, 12), (6, 2)])
def test_neighbours_rotate_by_the_plain_formula(size, rotated, dtype):
    """Whatever lies behind R, whatever the strides, one table row each or one for all."""
    frequencies = 100.0 ** -(torch.arange(0, rotated, 2) / rotated)
    x = torch.randn(2, 3, 9, size + 1).to(dtype)[:, :, 2:7, 1:]  # gaps, and an odd start
    shift = torch.randint(40, (2, 3, 5))
    expected = x.double().clone()
    for i, frequency in enumerate(frequencies.double().tolist()):
        cos, sin = (shift * frequency).cos(), (shift * frequency).sin()
        a, b = x[..., 2 * i].double(), x[..., 2 * i + 1].double()
        expected[..., 2 * i], expected[..., 2 * i + 1] = a * cos + b * sin, b * cos - a * sin
    close = (
        {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    rotation = Rotation(frequencies, 40, "cpu", interleaved=True)
    turned_back = rotation.back(x, shift)
    assert turned_back.dtype == dtype
    torch.testing.assert_close(turned_back.double(), expected, **close)
    rope = Rope("default", frequencies, interleaved=True)
    torch.testing.assert_close(moved_by(rope, x, -shift), turned_back)
    torch.testing.assert_close(moved_by(rope, turned_back, shift), x, **close)
    one = rotation.back_by(x, rotation.rows([7]))
    torch.testing.assert_close(one, moved_by(rope, x, -7))
    each = rotation.back_by(x, rotation.rows(range(6)))
    torch.testing.assert_close(each, moved_by(rope, x, -torch.arange(6).view(2, 3, 1)))


def test_exported_graphs_rotate_the_same():
    """They have no complex numbers; what is traced is another expression of the same."""

    class Turned(torch.nn.Module):
        def forward(self, x: Tensor, rows: Tensor) -> Tensor:
            return rotate(x, rows, interleaved=True)

    x, rows = torch.randn(1, 2, 5, 10), rotations(torch.rand(4).double(), torch.arange(5))
    program = torch.export.export(Turned(), (x, rows))
    assert "complex" not in str(program.graph)
    torch.testing.assert_close(program.module()(x, rows), Turned()(x, rows))


# --- whole models past the budget -----------------------------------------------------------------


def stand_by_rank(model: Any, layer: Any, ids: Tensor) -> None:
    """The keys that the first layer attends to are those of the same tokens read at their ranks."""
    cache = DynamicCache()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        model(ids, position_ids=torch.zeros_like(ids), **as_cache(cache))
        model.set_attn_implementation("kvcap")
    raw, rope = cache.layers[0].keys[0], ModelShape.of(model.config).layers[0].rope
    for segment in layer.segments:
        seen = layer.engine.positions.rotation.back(segment.keys, segment.aux("shift"))
        for k in range(segment.heads):
            times = segment.positions[0, k].long()
            expected = moved_by(rope, raw[segment.head + k, times], times.argsort().argsort())
            torch.testing.assert_close(seen[0, k], expected, rtol=1e-4, atol=1e-4)


# --- what surrounds a cache -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["glm", "cohere"])
def test_a_session_loaded_into_a_smaller_cache_rotates_what_its_table_cannot(name, tmp_path):
    model, ids = tiny_model(name), distinct(56, of=56)
    session = runtime_of(model, "keydiff", 48).session()
    session.loop.prefill(ids)
    session.save(tmp_path / "s")
    cache = Session.load(runtime_of(model, "keydiff", 6, block=2), tmp_path / "s").cache
    assert cache.held == 6
    stand_by_rank(model, cache.capped_layers[0], ids)
