"""One row times a matrix, and what lies between two of them.

On CUDA where there is one, else in triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401
from torch.nn.functional import linear, rms_norm, silu

from kvcap.kernels.linear import covers, matvec


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 33), (64, 512), (130, 1030), (12, 4096)])
@pytest.mark.parametrize("biased", [True, False])
def test_no_further_from_the_truth_than_the_library(rows, columns, dtype, biased, monkeypatch):
    weight = torch.randn(rows, columns + 5, device=DEVICE).to(dtype)[:, :columns]
    x = torch.randn(1, 1, columns, device=DEVICE).to(dtype)
    bias = torch.randn(rows, device=DEVICE).to(dtype) if biased else None
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    eager = (linear(x, weight, bias).double() - exact).abs().max()
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(a, float("nan"), **k))
    assert covers(x, weight)
    found = matvec(x, weight, bias)
    assert found.shape == (1, 1, rows)
    # triton's interpreter cuts bfloat16 off rather than rounding: one unit more.
    unit = torch.finfo(dtype).eps * exact.abs().max()
    assert (found.double() - exact).abs().max() <= 2 * eager + unit
    assert torch.equal(found, matvec(x, weight, bias))


@pytest.mark.slow(keep=10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "columns"), [(2, 1), (14, 33), (64, 1024), (36, 4096), (70, 1030)]
)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_what_lies_before_and_behind_comes_along(rows, columns, dtype, gated, biased, monkeypatch):
    def formula(x, weight, bias, gain, plus):
        y = linear(rms_norm(x, (columns,), gain, 1e-5), weight, bias)
        y = silu(y[..., : rows // 2]) * y[..., rows // 2 :] if gated else y
        return y + plus

    inputs = [
        torch.randn(shape, device=DEVICE).to(dtype)
        for shape in ((1, 1, columns), (rows, columns), (rows,), (columns,), (1, 1, rows))
    ]
    x, weight, bias, gain, plus = inputs
    plus = plus[..., : rows // 2] if gated else plus
    bias = bias if biased else torch.zeros_like(bias)
    inputs = [x, weight, bias, gain, plus]
    exact = formula(*[t.double() for t in inputs])
    eager = (formula(*inputs).double() - exact).abs().max()
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(a, float("nan"), **k))
    further = {"gain": gain, "epsilon": 1e-5, "gated": gated, "plus": plus}
    found = matvec(x, weight, bias if biased else None, **further)
    assert found.shape == plus.shape
    # A GPU's reciprocal roots and exponentials are right to two units.
    unit = torch.finfo(dtype).eps * exact.abs().max()
    assert (found.double() - exact).abs().max() <= 2 * eager + 4 * unit
    for left_out in further if columns > 1 else ():  # each matters
        rest = {k: v for k, v in further.items() if k != left_out}
        rest |= {"gain": None} if left_out == "epsilon" else {}
        other = matvec(x, weight, bias if biased else None, **rest)
        assert (
            other.shape != found.shape
            or not torch.allclose(other, found)
            or (left_out == "gated" and not gated)
        )


def test_what_is_not_covered():
    weight = torch.ones(4, 8)
    assert not covers(torch.ones(1, 2, 8), weight)
    assert not covers(torch.ones(1, 1, 8, dtype=torch.bfloat16), weight)
    assert not covers(torch.ones(1, 1, 4), weight.T)
    assert not covers(torch.ones(1, 1, 9), weight)
    assert covers(torch.ones(1, 1, 8), torch.ones(4, 16)[:, :8])
    assert not covers(torch.ones(1, 1, 8, dtype=torch.int8), weight.to(torch.int8))
