# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Tells launches apart by the machine code that they need, and compiles it ahead of them.

Triton compiles a kernel anew for constants, types, and what it specialises an argument's value
for: integers that are 1 or a multiple of 16, and addresses that are. What is compiled goes where
Triton keeps it (`TRITON_CACHE_DIR`), and every process finds it there. Knows no kernel.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, wraps
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.kernels.device import address

# Kernels that are compiled at the same time. More are not done sooner, as compilers share Python's
# lock, and leave the thread that somebody waits for little of it.
MOST_AT_ONCE = 6
LIST = "launches.json"


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

    @classmethod
    def of(cls, x: Any) -> Any:
        """That of a tensor; anything else as it is."""
        return cls(x.dtype, address(x) % 16) if isinstance(x, Tensor) else x


class Launch(NamedTuple):
    """A kernel with moulds in place of tensors."""

    kernel: Any
    args: Sequence[Any]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Launch:
        """One with these arguments, tensors or not."""
        moulds = {name: Mould.of(x) for name, x in options.items()}
        return cls(kernel, [Mould.of(x) for x in args], moulds)

    @property
    def variant(self) -> tuple[Hashable, ...]:
        """What tells its machine code from that of the kernel's other launches."""
        kernel, args, options = self
        known = parameters(kernel)
        given = {**{p.name: x for p, x in zip(known, args, strict=False)}, **options}
        own = [(p.name, _kind(given.pop(p.name), p)) for p in known if p.name in given]
        return (kernel.fn.__module__, kernel.fn.__name__, *own, *sorted(given.items()))

    def compile(self) -> None:
        """Compile it, or load what was compiled, for the current device.

        On a GPU also what Triton leaves to the first launch: the launcher in C, for which it starts
        another compiler, and loading the code.
        """
        compiled = self.kernel.run(*self.args, grid=(1,), warmup=True, **self.options)
        if torch.cuda.is_available():
            with nullcontext() if launchers_apart() else _loading:
                compiled.run  # noqa: B018  # which makes both

    def written(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "module": self.kernel.fn.__module__,
            "kernel": self.kernel.fn.__name__,
            "args": [_written(x) for x in self.args],
            "options": {name: _written(x) for name, x in self.options.items()},
        }

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Launch:
        """The one that was `written`."""
        kernel = getattr(import_module(found["module"]), found["kernel"])
        options = {name: _read(x) for name, x in found["options"].items()}
        return cls(kernel, [_read(x) for x in found["args"]], options)


_loading, _knowing = Lock(), Lock()


def know_triton() -> None:
    """Have Triton tell which build it is, under which it keeps what it compiles.

    It reads all of its own library, half a second's work, and would in every thread that compiles.
    """
    from triton.runtime import cache

    if not hasattr(cache, "triton_key"):  # before Triton 3.5
        from triton.compiler import compiler as cache
    with _knowing:
        cache.triton_key()  # which remembers it


def launchers_apart() -> bool:
    """Let threads load launchers at once; the answer is whether that is safe from now on.

    Up to Triton 3.6 each launcher is a C module, and all have one name. Python writes one that it
    loads again into the module that has the name, which another thread may have just loaded: its
    kernel would be launched as another kernel. Each gets a namespace of its own here.
    """
    from triton.runtime import build

    load = getattr(build, "_load_module_from_path", None)  # none before Triton 3.4
    if load is None or hasattr(load, "__wrapped__"):
        return load is not None

    @wraps(load)
    def load_apart(*args: Any) -> SimpleNamespace:
        with _loading:
            return SimpleNamespace(**vars(load(*args)))

    build._load_module_from_path = load_apart
    return True


def _written(x: Any) -> Any:
    return {"dtype": str(x.dtype).split(".")[-1], "start": x.start} if isinstance(x, Mould) else x


def _read(x: Any) -> Any:
    return Mould(getattr(torch, x["dtype"]), x["start"]) if isinstance(x, dict) else x


@lru_cache(maxsize=256)
def parameters(kernel: Any) -> tuple[Parameter, ...]:
    """Of a function that is decorated with `triton.jit`, compiled or interpreted."""
    made_with = getattr(kernel, "kwargs", {})  # interpreted
    plain = getattr(kernel, "do_not_specialize", made_with.get("do_not_specialize")) or ()
    return tuple(
        Parameter(name, "constexpr" in str(p.annotation), name not in plain)
        for name, p in inspect.signature(kernel.fn).parameters.items()
    )


def _kind(x: Any, parameter: Parameter) -> Hashable:
    """As what a value counts."""
    if parameter.constant or x is None:
        return ("constant", str(x))
    if isinstance(x, Mould):
        return str(x.dtype), parameter.specialised and x.start % 16 == 0
    if isinstance(x, bool) or not isinstance(x, int):
        return type(x).__name__
    width = "int32" if -(2**31) <= x < 2**31 else "int64"
    if not parameter.specialised:
        return width
    return ("constant", "1") if x == 1 else (width, x % 16 == 0)


class Stopped(Exception):
    """Nothing more is compiled ahead: the process ends."""


class Compiler:
    """Compiles what launches need, in threads, each variant once.

    Args:
        device: that is to run it.
        on_done: called after each, in its thread, with how many are compiled, and how many are
            known of.
    """

    def __init__(
        self, device: torch.device, on_done: Callable[[int, int], None] | None = None
    ) -> None:
        self.device, self.on_done = device, on_done
        self.launches: dict[Hashable, Launch] = {}
        """Of every variant one."""
        self._futures: dict[Hashable, Future[None]] = {}
        self._waiting: SimpleQueue[Hashable] = SimpleQueue()
        self._threads: list[Thread] = []
        self._done, self._lock, self._stopped = 0, Lock(), False

    def hear(self, kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Listens to launches (see `launch.heard`), none of which happens."""
        self.add(Launch.of(kernel, args, options))
        return False

    def add(self, launch: Launch) -> None:
        """Compile it, unless its like was added before.

        Raises:
            Stopped: it will not be.
        """
        if self._stopped:
            raise Stopped
        variant = launch.variant
        if variant in self.launches:
            return
        self.launches[variant], self._futures[variant] = launch, Future()
        self._waiting.put(variant)
        if len(self._threads) < min(MOST_AT_ONCE, os.cpu_count() or 1):
            # A daemon does not keep a process from ending: `stop` waits only for what has begun.
            self._threads.append(Thread(target=self._work, name="kvcap-compile", daemon=True))
            self._threads[-1].start()

    def _work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        while (variant := self._waiting.get()) is not None:
            future = self._futures[variant]
            if self._stopped:
                future.cancel()
                continue
            try:
                if self.device.type == "cuda":
                    know_triton()
                self.launches[variant].compile()
            except Exception as error:
                future.set_exception(error)
                continue
            future.set_result(None)
            with self._lock:
                self._done += 1
                if self.on_done is not None:
                    self.on_done(self._done, len(self.launches))

    def join(self, kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Wait for the variant that a launch needs, if it is being compiled."""
        if self._done == len(self._futures):
            return  # without a look at its arguments, which takes longer than to launch it
        future = self._futures.get(Launch.of(kernel, args, options).variant)
        if future is not None:
            wait([future])

    def finish(self) -> None:
        """Wait for all that was added.

        Raises:
            Exception: the first that a compiler raised.
        """
        wait(self._futures.values())
        self._end()
        for future in self._futures.values():
            future.result()

    def stop(self) -> None:
        """Begin nothing more, and wait for what has begun."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


class Saved(NamedTuple):
    """What was kept of a plan."""

    launches: list[Launch]
    further: list[Any]  # as JSON has it


def saved(key: str) -> Saved | None:
    """What was saved under `key`, if anything was; see `save`."""
    path = _place(key).get_file(LIST)
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text())
        return Saved([Launch.read(x) for x in found["launches"]], found["further"])
    except (OSError, ValueError, KeyError, AttributeError, ImportError, TypeError):
        return None  # not whole


def save(key: str, launches: Iterable[Launch], further: Sequence[Any] = ()) -> None:
    """Keep, beside what Triton keeps, of which launches it has the code, and something further."""
    told = {"launches": [x.written() for x in launches], "further": further}
    _place(key).put(json.dumps(told), LIST, binary=False)


def _place(key: str) -> Any:
    from triton.runtime.cache import get_cache_manager

    told = f"{_sources()} {version('triton')} {torch.__version__} {key}"
    return get_cache_manager(hashlib.sha256(told.encode()).hexdigest())


@lru_cache
def _sources() -> str:
    """A hash of what decides which kernels are launched, and how."""
    root, found = Path(__file__).resolve().parents[1], hashlib.sha256()
    for folder in ("kernels", "policies", "runtime"):
        for path in sorted((root / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()
