"""Keys rotated by the kernel: on CUDA where there is one, else in triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from conftest import SIZES, small_policy
from interpreted import DEVICE, pytestmark  # noqa: F401
from transformers import AutoModelForCausalLM, GlmConfig, LlamaConfig
from twins import DTYPES

import kvcap
from kvcap import kernels
from kvcap.kernels.rotate import rotate_back
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.models.rope import Rotation, rotate, table_dtype

SPAN = 300


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (80, 32), (96, 96), (128, 128), (24, 12)])
@pytest.mark.parametrize("slots", [1, 31, 137])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_as_by_the_formula(interleaved, slots, size, rotated, dtype, monkeypatch):
    frequencies = 10000.0 ** -(torch.arange(0, rotated, 2) / rotated)
    rotation = Rotation(frequencies, SPAN, DEVICE, interleaved=interleaved)
    pool = torch.randn(2, 3, slots + 9, size, device=DEVICE).to(dtype)
    x = pool[:, :, :slots]  # a view with gaps, as a pool's slots are
    shift = torch.randint(SPAN, (2, 3, slots + 9), dtype=torch.int32, device=DEVICE)[:, :, :slots]
    expected = by_formula(x.double(), rotation.table[shift.long()].double(), interleaved)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(*a, float("nan"), **k))
    rotated_back = rotate_back(x, shift, rotation.table, interleaved=interleaved)
    # One rounding to the dtype; triton's interpreter cuts bfloat16 off rather than rounding.
    allowed = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert rotated_back.dtype == dtype
    assert rotated_back.is_contiguous()
    torch.testing.assert_close(rotated_back.double(), expected, rtol=allowed, atol=allowed)


def by_formula(x, rows, interleaved):
    """Rows [..., D] rotated back by cosines and sines [..., 2, R/2], pair by pair."""
    out, (cos, sin), half = x.clone(), rows.unbind(-2), rows.shape[-1]
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = x[..., first], x[..., second]
        out[..., first] = a * cos[..., i] + b * sin[..., i]
        out[..., second] = b * cos[..., i] - a * sin[..., i]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_table_is_as_exact_as_keys_of_the_type_need_it(dtype):
    frequencies = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    x = torch.randn(1, 2, SPAN, 64, device=DEVICE).to(dtype)
    shift = torch.arange(SPAN, dtype=torch.int32, device=DEVICE).expand(1, 2, -1)
    angles = shift.double().cpu()[..., None] * frequencies.double()
    truth = rotate(
        x.double(), torch.stack((angles.cos(), angles.sin()), dim=-2).to(DEVICE), back=True
    )
    table = Rotation(frequencies, SPAN, DEVICE, table_dtype(dtype)).table
    assert table.element_size() <= 4 * (1 if dtype != torch.bfloat16 else 0.5)
    rotated_back = rotate(x, table[shift.long()], back=True)
    rounded = (truth.to(dtype).double() - truth).abs()
    assert (rotated_back.double() - truth).abs().max() <= 1.2 * rounded.max() + 1e-6
    assert (rotated_back.double() - truth).abs().mean() <= 1.1 * rounded.mean() + 1e-7


@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_of_one_token_takes_halves_alone(interleaved, positions):
    """Asked for a layer that rotates neighbours it does nothing, whatever the positions."""
    config = LlamaConfig(**SIZES, head_dim=16) if not interleaved else None
    with kernels.use("triton"):
        cache, loop, ids = glm("keydiff", config, positions)
        loop.prefill(ids)
    query, key = torch.randn(1, 4, 1, 16).to(DEVICE), torch.randn(1, 2, 1, 16).to(DEVICE)
    angles = torch.ones(1, 1, 16).to(DEVICE), torch.zeros(1, 1, 16).to(DEVICE)
    attention = loop.model.model.layers[0].self_attn
    context = ForwardContext(cache.next_position, rows=cache.row_pass(1))
    with cache.passing(context), kernels.use("triton"):
        out = cache.read_token(query, key, key, angles, 0, attention, 0.25)
    assert (out is None) == interleaved
    assert cache.layers[0].seen == 40 + (out is not None)


def glm(policy, config=None, positions="compact"):
    """A cache of 16 slots, its loop around a small random model, and tokens for it."""
    torch.manual_seed(0)
    config = config or GlmConfig(**SIZES, head_dim=16)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="kvcap").eval().to(DEVICE)
    for weight in model.parameters():
        if weight.dim() > 1:  # large enough for attention to pick tokens
            torch.nn.init.normal_(weight, 0.0, 0.15)
    eviction = small_policy(policy, config)
    cache = kvcap.BudgetCache(config, 16, 8, eviction, positions=positions)
    cache.allocate(1, torch.float32, DEVICE)
    ids = 3 + torch.randperm(90, generator=torch.Generator().manual_seed(0))[None, :40]
    return cache, BlockLoop(model, cache, graphs=False), ids.to(DEVICE)
