"""One row times a matrix: on CUDA where there is one, else in triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

tl = pytest.importorskip("triton.language", reason="needs triton")

from kvcap.kernels.linear import covers, matvec, matvecs  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and type(tl.sum).__name__ == "JITFunction",
    reason="triton was imported before TRITON_INTERPRET=1 was set",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 33), (64, 512), (130, 1030), (12, 2048)])
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


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [(5, 1), (64, 8, 8), (3, 130, 7)])
def test_several_in_one_launch_are_each_by_itself(rows, biased, monkeypatch):
    x = torch.randn(1, 1, 70, device=DEVICE)
    weights = [torch.randn(n, 70, device=DEVICE) for n in rows]
    biases = [torch.randn(n, device=DEVICE) if biased else None for n in rows]
    expected = [matvec(x, w, b) for w, b in zip(weights, biases, strict=True)]
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(a, float("nan"), **k))
    for found, each in zip(matvecs(x, weights, biases), expected, strict=True):
        assert torch.equal(found, each)
    assert not torch.equal(matvecs(x, weights[::-1], biases[::-1])[0], expected[0])


def test_what_is_not_covered():
    weight = torch.ones(4, 8)
    assert not covers(torch.ones(1, 2, 8), weight)
    assert not covers(torch.ones(1, 1, 8, dtype=torch.bfloat16), weight)
    assert not covers(torch.ones(1, 1, 4), weight.T)
    assert covers(torch.ones(1, 1, 8), weight, weight[1:])
    assert not covers(torch.ones(1, 1, 8), weight, torch.ones(4, 16)[:, :8])  # other strides
    assert not covers(torch.ones(1, 1, 8), *[weight] * 4)
    assert not covers(torch.ones(1, 1, 8, dtype=torch.int8), weight.to(torch.int8))
