"""The watch over kernels' reads and writes."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401

triton = pytest.importorskip("triton", reason="needs triton")
import triton.language as tl  # noqa: E402


@triton.jit
def copy(x, y, first_read, first_written, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    read = tl.load(x + first_read + i, i < count, 0.0)
    tl.store(y + first_written + i, read, i < count)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is not watched")
def test_what_lies_in_no_tensor_is_neither_read_nor_written():
    x, y = torch.arange(8.0), torch.zeros(20)
    inner = y[5:15]  # a view: all of its storage may be read
    copy[(1,)](x, inner, 0, 0, 8, BLOCK=16)
    assert torch.equal(inner[:8], x)
    copy[(1,)](x, inner, 3, 10, 5, BLOCK=16)
    for read, written, count, what in (
        (-1, 0, 1, "reads 1 "),
        (1, 0, 8, "reads 1 "),
        (0, 13, 4, "writes 2 "),
        (0, -7, 8, "writes 2 "),
    ):
        with pytest.raises(Exception, match=f"a kernel {what}"):
            copy[(1,)](x, inner, read, written, count, BLOCK=16)
