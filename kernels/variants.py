# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Tells launches apart by the machine code that they need, and compiles it ahead of them.

Triton compiles a kernel anew for constants, types, and what it specialises an argument's value
for: integers that are 1 or a multiple of 16, and addresses that are. What is compiled goes where
Triton keeps it (`TRITON_CACHE_DIR`), and every process finds it there.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.kernels.device import address

MOST_AT_ONCE = 16  # kernels that are compiled at the same time


class Parameter(NamedTuple):
    """Of a kernel."""

    name: str
    constant: bool
    specialised: bool


@dataclass(frozen=True)
class Mould:
    """What Triton asks of a tensor when it compiles for it: no memory is needed."""

    dtype: torch.dtype
    start: int  # in bytes, within 16

    def data_ptr(self) -> int:
        """An address."""
        return self.start


@lru_cache(maxsize=256)
def parameters(kernel: Any) -> tuple[Parameter, ...]:
    """Of a function that is decorated with `triton.jit`, compiled or interpreted."""
    plain = getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get(
        "do_not_specialize"
    )
    return tuple(
        Parameter(name, "constexpr" in str(p.annotation), name not in (plain or ()))
        for name, p in inspect.signature(kernel.fn).parameters.items()
    )


def variant(kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """What tells the machine code of a launch from that of the kernel's others."""
    known = parameters(kernel)
    given = {**{p.name: x for p, x in zip(known, args, strict=False)}, **options}
    own = [(p.name, _kind(given.pop(p.name), p)) for p in known if p.name in given]
    return (kernel.fn.__module__, kernel.fn.__name__, *own, *sorted(given.items()))


def _kind(x: Any, parameter: Parameter) -> Hashable:
    """As what a value counts."""
    if parameter.constant or x is None:
        return ("constant", str(x))
    if isinstance(x, (Tensor, Mould)):
        start = x.start if isinstance(x, Mould) else address(x) % 16
        return str(x.dtype), parameter.specialised and start % 16 == 0
    if isinstance(x, bool) or not isinstance(x, int):
        return type(x).__name__
    width = "int32" if -(2**31) <= x < 2**31 else "int64"
    if parameter.specialised:
        return ("constant", "1") if x == 1 else (width, x % 16 == 0)
    return width


class Compiler:
    """Compiles what launches need, in threads, each variant once.

    Args:
        device: that is to run it.
        on_done: called after each with how many are compiled, and how many are known of.
    """

    def __init__(
        self, device: torch.device, on_done: Callable[[int, int], None] | None = None
    ) -> None:
        self.device, self.on_done = device, on_done
        self.variants: dict[Hashable, Future[Any]] = {}
        most = min(MOST_AT_ONCE, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="kvcap-compile")
        self._done = 0

    def __call__(self, kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Listens to launches (see `launch.heard`), none of which happens."""
        found = variant(kernel, args, options)
        if found not in self.variants:
            moulds = [_mould(x) for x in args]
            named = {name: _mould(x) for name, x in options.items()}
            self.variants[found] = self._threads.submit(self._compile, kernel, moulds, named)
        return False

    def _compile(self, kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        kernel.run(*args, grid=(1,), warmup=True, **options)
        self._done += 1
        if self.on_done is not None:
            self.on_done(self._done, len(self.variants))

    def wait(self) -> None:
        """Until all that was heard of is compiled.

        Raises:
            Exception: the first that a compiler raised.
        """
        self._threads.shutdown(wait=True)
        for future in self.variants.values():
            future.result()

    def stop(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _mould(x: Any) -> Any:
    return Mould(x.dtype, address(x) % 16) if isinstance(x, Tensor) else x
