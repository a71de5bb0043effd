"""One row times a matrix, and what lies between two of them.

On CUDA where there is one, else in triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import pytestmark, unwritten  # noqa: F401
from torch.nn.functional import linear, rms_norm, silu
from twins import DTYPES, randn, twin_equals_eager

from kvcap.kernels.linear import covers, matvec

pytestmark = [pytestmark, pytest.mark.usefixtures("unwritten")]


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 33), (64, 512), (130, 1030), (12, 4096)])
@pytest.mark.parametrize("biased", [True, False])
def test_no_further_from_the_truth_than_the_library(rows, columns, dtype, biased):
    weight = randn(rows, columns + 5, dtype=dtype)[:, :columns]
    x, bias = randn(1, 1, columns, dtype=dtype), randn(rows, dtype=dtype) if biased else None
    assert covers(x, weight)
    twin_equals_eager(matvec, linear, x, weight, bias)


@pytest.mark.slow(keep=10)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns"), [(2, 1), (14, 33), (64, 1024), (36, 4096), (70, 1030)]
)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_what_lies_before_and_behind_comes_along(rows, columns, dtype, gated, biased):
    def formula(x, weight, bias, gain, plus):
        y = linear(rms_norm(x, (columns,), gain, 1e-5), weight, bias)
        y = silu(y[..., : rows // 2]) * y[..., rows // 2 :] if gated else y
        return y + plus

    def kernel(x, weight, bias, gain, plus, gated=gated):
        return matvec(x, weight, bias, gain, 1e-5, gated, plus)

    shapes = (1, 1, columns), (rows, columns), (rows,), (columns,), (1, 1, rows)
    x, weight, bias, gain, plus = (randn(*shape, dtype=dtype) for shape in shapes)
    inputs = x, weight, bias if biased else None, gain, plus[..., : rows // 2] if gated else plus
    # A GPU's reciprocal roots and exponentials are right to two units.
    out = twin_equals_eager(kernel, formula, *inputs, units=4)
    *some, gain, plus = inputs
    left_out = [(None, plus, gated), (gain, None, gated), *[(gain, plus, False)] * gated]
    for other in left_out if columns > 1 else ():  # each matters
        without = kernel(*some, *other)
        assert without.shape != out.shape or not torch.allclose(without, out)


def test_what_is_not_covered():
    weight = torch.ones(4, 8)
    assert not covers(torch.ones(1, 2, 8), weight)
    assert not covers(torch.ones(1, 1, 8, dtype=torch.bfloat16), weight)
    assert not covers(torch.ones(1, 1, 4), weight.T)
    assert not covers(torch.ones(1, 1, 9), weight)
    assert covers(torch.ones(1, 1, 8), torch.ones(4, 16)[:, :8])
    assert not covers(torch.ones(1, 1, 8, dtype=torch.int8), weight.to(torch.int8))
