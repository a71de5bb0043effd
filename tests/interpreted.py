"""Runs kernels for tests, on CUDA if there is a GPU, else in Triton's interpreter.

The interpreter reads any address, even outside of tensors, where a GPU may fail, or not, or not
always. So it is watched: an access outside of the tensors that a kernel got is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

tl = pytest.importorskip("triton.language", reason="needs triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = type(tl.sum).__name__ == "JITFunction"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and COMPILED, reason="triton was imported before TRITON_INTERPRET=1 was set"
)


class Watch:
    """A watch over the memory of the arguments of the running kernel."""

    def __init__(self) -> None:
        self.starts, self.ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def given(self, values: list[Any]) -> None:
        """Note the arguments of a kernel."""
        storages = [x.untyped_storage() for x in values if isinstance(x, torch.Tensor)]
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages})
        self.starts, self.ends = np.array(spans or [(0, 0)], np.uint64).T

    def check(self, pointers: Any, mask: Any, what: str) -> None:
        """Check that all addresses that are not masked lie within the arguments."""
        element = pointers.get_element_ty().primitive_bitwidth // 8 or 1
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        if not at.size:
            return
        # All addresses lie within a tensor if the first and the last one do.
        least, most = int(at.min()), int(at.max()) + element
        first = int(np.searchsorted(self.starts, least, side="right")) - 1
        if first >= 0 and most <= self.ends[first]:
            return
        at = at.astype(np.uint64)
        which = np.searchsorted(self.starts, at, side="right").astype(np.int64) - 1
        inside = (which >= 0) & (at + np.uint64(element) <= self.ends[which])
        assert inside.all(), f"a kernel {what} {(~inside).sum()} elements that are in no tensor"


def _watch() -> None:
    """Watch the interpreter from now on."""
    from triton.runtime import interpreter

    watch, builder = Watch(), interpreter.InterpreterBuilder
    given = interpreter.GridExecutor._init_args_hst
    load, store = builder.create_masked_load, builder.create_masked_store

    def noted(self: Any, args: Any, kwargs: Any) -> Any:
        result = given(self, args, kwargs)
        watch.given([*result[0], *result[1].values()])
        return result

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watch.check(pointers, mask, "reads")
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.check(pointers, mask, "writes")
        return store(self, pointers, value, mask, *rest)

    interpreter.GridExecutor._init_args_hst = noted
    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store


OPERATORS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and,
    "or": np.bitwise_or, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
INTEGERS = ("int32", "int64")


def shortened() -> dict[str, Any]:
    """Return quick operators for Triton's tensors, by name, which call numpy directly.

    They do so for two tensors of common types, or one and a number of such a type; all else goes
    to the interpreter's own operators, which follow many rules of types.
    """
    from triton.language import core
    from triton.runtime import interpreter

    tensor, handle, builder = core.tensor, interpreter.TensorHandle, interpreter.interpreter_builder
    own = {f"__{name}__": getattr(tensor, f"__{name}__") for name in OPERATORS}
    own |= {f"__r{name}__": getattr(tensor, f"__r{name}__") for name in ("add", "sub", "mul")}
    known = dict[Any, Any]()

    def number(x: Any, dtype: Any) -> Any:
        """Return the handle of a number if the type represents it exactly; else None."""
        x = x.value if type(x) is core.constexpr else x
        if dtype.name in INTEGERS:
            most = 1 << dtype.primitive_bitwidth - 1
            fits = type(x) is int and -most <= x < most
        else:
            fits = type(x) is int or (type(x) is float and 1e-30 < abs(x) < 1e30)
        if fits and (x, dtype.name) not in known:
            data = np.full(1, x, interpreter._get_np_dtype(dtype))
            known[x, dtype.name] = handle(data, dtype)
        return known[x, dtype.name] if fits else None

    def operands(one: Any, other: Any, types: Any) -> Any:
        """Return both handles in one type, and that type; None if there is no quick way."""
        dtype = one.dtype
        if dtype.name not in types:
            return None
        if type(other) is not tensor:
            result = None if dtype.name == "int1" else number(other, dtype)
            return None if result is None else (one.handle, result, dtype)
        if other.dtype.name == dtype.name:
            return one.handle, other.handle, dtype
        if dtype.name not in INTEGERS or other.dtype.name not in INTEGERS:
            return None
        wide = (handle(x.handle.data.astype(np.int64), core.int64) for x in (one, other))
        return *wide, core.int64

    def kind_of(one: Any, other: Any, dtype: Any, result: Any) -> Any:
        """Return the type of a result."""
        if type(other) is tensor and other.type.is_block() and other.type is not one.type:
            return core.block_type(dtype, [*result.data.shape])
        return one.type if dtype is one.dtype else one.type.with_element_ty(dtype)

    def of(name: str, slow: Any) -> Any:
        turned = name.startswith("__r")
        what = name.strip("_")[turned:]
        operation, compares = OPERATORS[what], what in COMPARISONS
        types = ("int1",) if what in ("and", "or") else (*INTEGERS, "fp32")

        def quick(self: Any, other: Any) -> Any:
            given = operands(self, other, types)
            if given is None:
                return slow(self, other)
            one, another, dtype = given
            result = builder.binary_op(*((another, one) if turned else (one, another)), operation)
            return tensor(result, kind_of(self, other, core.int1 if compares else dtype, result))

        def further(self: Any, other: Any) -> Any:
            """Return the sum, or an address moved on by so many elements."""
            if not self.dtype.is_ptr():
                return quick(self, other)
            if type(other) is tensor:
                far = other.handle if other.dtype.name in INTEGERS else None
            else:
                far = number(other, core.int32)
            if far is None:
                return slow(self, other)
            result = builder.create_addptr(self.handle, far)
            return tensor(result, kind_of(self, other, self.dtype, result))

        return further if what == "add" else quick

    return {name: of(name, slow) for name, slow in own.items()}


def _quicken() -> None:
    """Replace parts of the interpreter that repeat work for every operation, most of its time.

    At every call of a function it patches all of triton; it computes each sum of integers again in
    64 bits, for an assertion that it then drops; it makes new types for each result; and it follows
    many rules for the type of a sum.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    prepare, prepared = interpreter._patch_lang, set[int]()

    def once(fn: Any) -> Any:
        outermost, known = not prepared, id(fn.__globals__)
        if known in prepared:
            return interpreter._LangPatchScope()  # a scope with nothing to restore
        scope = prepare(fn)
        prepared.add(known)
        if outermost:
            for name, operator in shortened().items():
                scope.set_attr(core.tensor, name, operator)
            restore = scope.restore
            scope.restore = lambda: (restore(), prepared.clear())
        return scope

    interpreter._patch_lang = once
    options = interpreter.interpreter_builder.options
    if not options.debug:
        object.__setattr__(options, "sanitize_overflow", False)

    find, kinds = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(kind: Any) -> Any:
        if kind.name not in kinds:
            kinds[kind.name] = find(kind)
        return kinds[kind.name]

    interpreter._get_np_dtype = numpy_type
    new_type, types = core.block_type.__init__, dict[Any, dict[str, Any]]()

    def block_type(self: Any, element: Any, shape: Any) -> None:
        where = getattr(element, "address_space", "")
        key = (element.name, where, *(getattr(x, "value", x) for x in shape))
        if key not in types:
            new_type(self, element, shape)
            types[key] = self.__dict__
        self.__dict__ = types[key]

    core.block_type.__init__ = block_type
    new_tensor = core.tensor.__init__

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if "facts" not in type.__dict__:
            new_tensor(self, handle, type)
            type.facts = {**self.__dict__, "handle": None}
        self.__dict__.update(type.facts)
        self.handle, self.type = handle, type

    core.tensor.__init__ = tensor
    fit, cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast

    def broadcast(self: Any, one: Any, other: Any) -> Any:
        blocks = one.type.is_block(), other.type.is_block()
        alike = all(blocks) and one.type.shape.values == other.type.shape.values
        return (one, other) if alike or not any(blocks) else fit(self, one, other)

    def cast_once(self: Any, x: Any, kind: Any, *rest: Any, **more: Any) -> Any:
        return x if x.dtype is kind else cast(self, x, kind, *rest, **more)

    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast, cast_once


if DEVICE == "cpu" and not COMPILED:
    _watch()
    _quicken()


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory that is asked for with NaN, or whole numbers far off, until it is written."""

    def filled(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            return x.fill_(float("nan"))
        return x.fill_(max(torch.iinfo(x.dtype).min, -(2**30)))

    empty, like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: filled(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: filled(like(*a, **k)))


@pytest.fixture
def multiprocessors(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let a GPU have as many multiprocessors as the test's case has it, or else 4."""
    from kvcap.kernels import decode

    given = getattr(request.node, "callspec", None)
    case = given and given.params.get("case")
    count = case.processors if case else 4
    monkeypatch.setattr(decode, "multiprocessors", lambda device: count)
