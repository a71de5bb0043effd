"""What lies between matrix products, beside the formulas of transformers' modules.

On CUDA where there is one, else in triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import pytestmark, unwritten  # noqa: F401
from twins import DTYPES, randn, twin_equals_eager

from kvcap.kernels import elementwise
from kvcap.runtime.models.fused import decoder

pytestmark = [pytestmark, pytest.mark.usefixtures("unwritten")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 33), (2, 640), (2, 2100)])
def test_sums_and_norms(tokens, size, dtype):
    x, y = randn(2, 2, tokens, size, dtype=dtype)
    gain = randn(size, dtype=dtype)
    total = twin_equals_eager(
        lambda x, y: elementwise.add_norm(x, y, gain, 1e-5)[0], torch.add, x, y
    )
    twin_equals_eager(
        lambda _, gain, epsilon: elementwise.add_norm(x, y, gain, epsilon)[1],
        decoder.norm,
        total,
        gain,
        1e-5,
        units=4,
    )
    assert elementwise.add_norm(x, None, gain, 1e-5)[0] is x
    twin_equals_eager(
        lambda x, *given: elementwise.add_norm(x, None, *given)[1],
        decoder.norm,
        x,
        gain,
        1e-5,
        units=4,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("each", [False, True])
def test_norms_of_heads_within_a_product(each, dtype):
    heads, size = 3, 20
    product = randn(2, 4, (heads + 2) * size, dtype=dtype)
    x = product.split((size, heads * size, size), dim=-1)[1].unflatten(-1, (heads, size))
    gain = randn(*(heads,) * each, size, dtype=dtype)
    twin_equals_eager(elementwise.norm, decoder.norm, x, gain, 1e-6, units=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 24, 64])
@pytest.mark.parametrize("angles", [1, 2])
@pytest.mark.parametrize("i", [0, 1])
def test_rotations(i, angles, size, dtype):
    product = randn(2, 5, 6 * size, dtype=dtype)
    query, key, _ = product.split((3 * size, 2 * size, size), dim=-1)
    query, key = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (query, key))
    cos, sin = randn(2, angles, 5, size, dtype=dtype)
    kernel, eager = (lambda *x, f=f: f(*x)[i] for f in (elementwise.rotate, decoder.rotate))
    rotated = twin_equals_eager(kernel, eager, query, key, cos, sin, units=2)
    assert rotated.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 40, 1030])
def test_gates(size, dtype):
    gates, up = randn(2, 3, 2 * size, dtype=dtype).split(size, dim=-1)
    gates[0, 0, 0] = -100  # whose exponential would overflow
    twin_equals_eager(elementwise.gate, decoder.gate, gates, up, units=2)
