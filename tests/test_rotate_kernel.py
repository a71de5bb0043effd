"""Keys rotated by the kernel: on CUDA where there is one, else in triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kvcap import kernels
from kvcap.runtime.rope import Rotation, rotate_back_eagerly

tl = pytest.importorskip("triton.language", reason="needs triton")

from kvcap.kernels.rotate import rotate_back  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and type(tl.sum).__name__ == "JITFunction",
    reason="triton was imported before TRITON_INTERPRET=1 was set",
)
SPAN = 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (80, 32), (96, 96), (128, 128), (24, 12)])
@pytest.mark.parametrize("slots", [1, 31, 137])
def test_rotated_as_by_the_formula(slots, size, rotated, dtype, monkeypatch):
    frequencies = 10000.0 ** -(torch.arange(0, rotated, 2) / rotated)
    rotation = Rotation(frequencies, SPAN, DEVICE)
    pool = torch.randn(2, 3, slots + 9, size, device=DEVICE).to(dtype)
    x = pool[:, :, :slots]  # a view with gaps, as a pool's slots are
    shift = torch.randint(SPAN, (2, 3, slots + 9), dtype=torch.int32, device=DEVICE)[:, :, :slots]
    expected = rotate_back_eagerly(x.double(), rotation.table[shift.long()].double())
    wide = torch.full((2, 3, slots + 70, size), float("nan"), dtype=dtype, device=DEVICE)
    found = wide[:, :, :slots]
    rotate_back(x, shift, rotation.table, found)
    # One rounding to the dtype; triton's interpreter cuts bfloat16 off rather than rounding.
    allowed = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert wide[:, :, slots:].isnan().all()
    torch.testing.assert_close(found.double(), expected, rtol=allowed, atol=allowed)
    # Some first, the others when they are there.
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: x.new_full(a, 7, **k))
    with kernels.use("triton"):
        assert torch.equal(rotation.back(x, shift), found)
        for first in {1, slots // 2, slots}:
            begun = rotation.begin(x[:, :, :first], shift[:, :, :first], slots - first, sums=True)
            assert torch.equal(rotation.finish(begun, x, shift), found)
            assert begun.sums.is_contiguous()
            sums = begun.sums.sum(2)
            torch.testing.assert_close(sums, found.float().sum(2), rtol=1e-4, atol=1e-4)


def test_a_wrong_shift_would_be_seen():
    rotation = Rotation(1.0 / torch.arange(1, 17), SPAN, DEVICE)
    x = torch.randn(1, 1, 5, 32, device=DEVICE)
    shift = torch.arange(5, dtype=torch.int32, device=DEVICE).view(1, 1, 5)
    a, b = (rotation.back(x, s) for s in (shift, shift + 1))
    assert (a - b).abs().max() > 1e-2
