"""Keys rotated by the kernel: on CUDA where there is one, else in triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401

from kvcap.kernels.rotate import rotate_back
from kvcap.runtime.models.rope import Rotation, rotate, table_dtype

SPAN = 300


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (80, 32), (96, 96), (128, 128), (24, 12)])
@pytest.mark.parametrize("slots", [1, 31, 137])
def test_rotated_as_by_the_formula(slots, size, rotated, dtype, monkeypatch):
    frequencies = 10000.0 ** -(torch.arange(0, rotated, 2) / rotated)
    rotation = Rotation(frequencies, SPAN, DEVICE)
    pool = torch.randn(2, 3, slots + 9, size, device=DEVICE).to(dtype)
    x = pool[:, :, :slots]  # a view with gaps, as a pool's slots are
    shift = torch.randint(SPAN, (2, 3, slots + 9), dtype=torch.int32, device=DEVICE)[:, :, :slots]
    expected = rotate(x.double(), rotation.table[shift.long()].double(), back=True)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(*a, float("nan"), **k))
    found, no_sums = rotate_back(x, shift, rotation.table)
    # One rounding to the dtype; triton's interpreter cuts bfloat16 off rather than rounding.
    allowed = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert found.dtype == dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=allowed, atol=allowed)
    again, sums = rotate_back(x, shift, rotation.table, sums=True)
    assert torch.equal(found, again)
    assert no_sums is None
    assert sums.shape[:3] == (2, 3, -(-slots // 32))
    torch.testing.assert_close(sums.sum(2), found.float().sum(2), rtol=1e-4, atol=1e-4)


def test_programs_of_long_rows_rotate_several_blocks():
    rotation = Rotation(1.0 / torch.arange(1, 5), SPAN, DEVICE)
    x = torch.randn(1, 1, 4100, 12, device=DEVICE)
    shift = torch.randint(SPAN, (1, 1, 4100), dtype=torch.int32, device=DEVICE)
    found, sums = rotate_back(x, shift, rotation.table, sums=True)
    expected = rotate(x, rotation.table[shift.long()], back=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert sums.shape[2] == -(-4100 // 64)
    torch.testing.assert_close(sums.sum(2), found.sum(2), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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
    found = rotate(x, table[shift.long()], back=True)
    rounded = (truth.to(dtype).double() - truth).abs()
    assert (found.double() - truth).abs().max() <= 1.2 * rounded.max() + 1e-6
    assert (found.double() - truth).abs().mean() <= 1.1 * rounded.mean() + 1e-7


def test_a_wrong_shift_would_be_seen():
    rotation = Rotation(1.0 / torch.arange(1, 17), SPAN, DEVICE)
    x = torch.randn(1, 1, 5, 32, device=DEVICE)
    shift = torch.arange(5, dtype=torch.int32, device=DEVICE).view(1, 1, 5)
    a, b = (rotate_back(x, s, rotation.table)[0] for s in (shift, shift + 1))
    assert (a - b).abs().max() > 1e-2
