"""The watch over kernels' reads and writes, and what saves their interpreter time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreted import DEVICE, OPERATORS, pytestmark  # noqa: F401

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


@triton.jit
def nothing():
    pass


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU interprets nothing")
@pytest.mark.parametrize("name", OPERATORS)
def test_shortened_operators_find_what_the_interpreter_does(name):
    from triton.runtime import interpreter

    rng = np.random.default_rng(0)
    address = tl.pointer_type(tl.float32)
    kinds = [tl.int1, tl.int32, tl.int64, tl.float32, tl.float16, tl.uint32, address]
    shapes = [(), (1,), (8,), (4, 8), (4, 1), (1, 8)]

    def block(kind, shape):
        data = rng.integers(0, 5, shape or (1,)) - 2 * (kind not in (tl.int1, tl.uint32, address))
        data = data.astype(interpreter._get_np_dtype(kind))
        handle = interpreter.TensorHandle(data, kind)
        return tl.core.tensor(handle, tl.block_type(kind, [*shape]) if shape else kind)

    numbers = [0, 1, -3, 2**31, 2**40, 0.5, -0.0, 1e-40, float("inf"), float("nan"), True]
    operands = [block(kind, shape) for kind in kinds for shape in shapes]

    def outcome(function, *given):
        try:
            found = function(*given)
        except Exception as error:
            return type(error)
        handle = found.handle
        return str(found.type), handle.dtype, handle.data.dtype, handle.data.tolist()

    scope = interpreter._patch_lang(nothing.fn)
    try:
        slow = {called: was for at, called, was in scope._changes if at is tl.core.tensor}
        turned = [f"__r{name}__"] if name in ("add", "sub", "mul") else []
        for called in (f"__{name}__", *turned):
            quick = getattr(tl.core.tensor, called)
            assert quick is not slow[called]
            for one in operands:
                for other in (*operands, *numbers, *map(tl.constexpr, numbers)):
                    found, expected = outcome(quick, one, other), outcome(slow[called], one, other)
                    assert repr(found) == repr(expected), (called, one, other)
    finally:
        scope.restore()
