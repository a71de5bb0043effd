"""What lies between matrix products, beside the formulas of transformers' modules.

On CUDA where there is one, else in triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, pytestmark, unwritten  # noqa: F401

from kvcap.kernels import elementwise
from kvcap.runtime.models.fused import decoder

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = [pytestmark, pytest.mark.usefixtures("unwritten")]


def near(found: torch.Tensor, formula, *args) -> None:
    """No further from the formula in float64 than that in its own type, but for two units."""
    exact = formula(*(x.double() if isinstance(x, torch.Tensor) else x for x in args))
    eager = formula(*args)
    assert (found.shape, found.dtype) == (eager.shape, eager.dtype)
    unit = torch.finfo(found.dtype).eps * exact.abs()
    off = (eager.double() - exact).abs()
    # triton's interpreter cuts bfloat16 off rather than rounding, after every operation.
    assert ((found.double() - exact).abs() <= 2 * off.max() + 4 * unit + 1e-7).all()


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 33), (2, 640), (2, 2100)])
def test_sums_and_norms(tokens, size, dtype):
    x, y = randn(2, tokens, size, dtype=dtype), randn(2, tokens, size, dtype=dtype)
    gain = randn(size, dtype=dtype)
    total, normed = elementwise.add_norm(x, y, gain, 1e-5)
    near(total, torch.add, x, y)
    near(normed, decoder.norm, total, gain, 1e-5)
    same, normed = elementwise.add_norm(x, None, gain, 1e-5)
    assert same is x
    near(normed, decoder.norm, x, gain, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("each", [False, True])
def test_norms_of_heads_within_a_product(each, dtype):
    heads, size = 3, 20
    product = randn(2, 4, (heads + 2) * size, dtype=dtype)
    x = product.split((size, heads * size, size), dim=-1)[1].unflatten(-1, (heads, size))
    gain = randn(*(heads,) * each, size, dtype=dtype)
    near(elementwise.norm(x, gain, 1e-6), decoder.norm, x, gain, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 24, 64])
@pytest.mark.parametrize("angles", [1, 2])
def test_rotations(angles, size, dtype):
    product = randn(2, 5, 6 * size, dtype=dtype)
    query, key, _ = product.split((3 * size, 2 * size, size), dim=-1)
    query, key = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (query, key))
    cos, sin = randn(angles, 5, size, dtype=dtype), randn(angles, 5, size, dtype=dtype)
    found = elementwise.rotate(query, key, cos, sin)
    for i in range(2):
        near(found[i], lambda *args: decoder.rotate(*args)[i], query, key, cos, sin)  # noqa: B023
        assert found[i].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 40, 1030])
def test_gates(size, dtype):
    gates, up = randn(2, 3, 2 * size, dtype=dtype).split(size, dim=-1)
    gates[0, 0, 0] = -100  # whose exponential would overflow
    near(elementwise.gate(gates, up), decoder.gate, gates, up)
