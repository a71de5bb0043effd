"""Compiles the kernels that a policy launches on an H100, on machines without a GPU.

Triton's interpreter runs code that its compiler refuses, such as variables whose types change in a
loop or a branch. `tests/kernels/test_compiled.py` runs this in a process of its own, in which
nothing is interpreted. It prints the number of kernels, and the compiler's message for each that it
refuses. Arguments are names of policies, for quantised slots such as 'keydiff:int8'. The argument
'window' compiles the kernels that score by a window completely, and prints their shared memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from conftest import small_policy, tiny_model
from make import data_independent
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from uncaptured import Uncaptured

from kvcap.kernels.choice import use
from kvcap.kernels.device import Target, pretending
from kvcap.kernels.window import scores
from kvcap.policies.base import Observation
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.warm import converse
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.row_table import RowTable

HOPPER = Target(multiprocessors=132, shared_memory=232448, overlaps=True)
CONSUMER = Target(multiprocessors=82, shared_memory=101376, overlaps=False)  # an RTX 3090


class Driver:
    """A stand-in for a GPU's driver, with all that the compiler calls."""

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Read(Exception):
    """Ends a compilation once a kernel is parsed, as later steps are slow and refuse little."""


@contextmanager
def compiling(each: Callable[[Any, Callable[[], Any]], None], gpu: Target) -> Iterator[None]:
    """Compile kernels for `gpu` instead of launching them; their results are undefined.

    Args:
        each: called for every launch, with the kernel's variant and a function that compiles it.
        gpu: the GPU that tiles are chosen for.
    """
    run = JITFunction.run

    def only_compiled(kernel: Any, *args: Any, grid: Any, warmup: Any, **options: Any) -> None:
        each(
            variant(kernel, args, options),
            lambda: run(kernel, *args, grid=(1,), warmup=True, **options),
        )

    JITFunction.run = only_compiled
    try:
        with pretending(gpu), use("triton"):
            yield
    finally:
        JITFunction.run = run


def variant(kernel: Any, args: Any, options: Any) -> tuple[str, ...]:
    """Return a kernel's name and all that its machine code depends on."""
    given = {**dict(zip((p.name for p in kernel.params), args, strict=False)), **options}
    constant = {p.name for p in kernel.params if p.is_constexpr}

    def kind(name: str, x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return f"{x.dtype} {x.data_ptr() % 16 == 0}"
        if name in constant or isinstance(x, bool) or not isinstance(x, int):
            return str(x)
        return f"{x == 1} {x % 16 == 0} {abs(x) < 2**31}"

    return (kernel.fn.__name__, *(f"{name}={kind(name, x)}" for name, x in given.items()))


def shared_by(
    gpu: Target, kind: str, size: int, dtype: torch.dtype, window: int, group: Any
) -> list[int]:
    """Return the bytes of shared memory of the kernels of an epilogue, over 2,560 slots."""
    sizes = list[int]()

    def each(_: tuple[str, ...], compiled: Callable[[], Any]) -> None:
        sizes.append(compiled().metadata.shared)

    queries, keys = (
        torch.zeros(1, *shape, size, dtype=dtype) for shape in ((6, window), (2, 2560))
    )
    positions = torch.zeros(1, 2, 2560, dtype=torch.int32)
    obs = Observation(keys, keys, positions, 2560, 2048, queries=queries)
    with compiling(each, gpu):
        scores(obs, kind, group)
    return sizes


def of_windows() -> None:
    bf16, fp32, sizes = torch.bfloat16, torch.float32, {}
    cases = [("andpro", 128, bf16, 32, "mean"), ("dropkv", 256, bf16, 1, "mean"),
             ("dropkv", 256, fp32, 32, "mean"), ("joint", 128, bf16, 512, "sum"),
             ("joint", 256, bf16, 512, "max"), ("attention", 256, fp32, 32, None)]  # fmt: skip
    for capability, gpu in ((90, HOPPER), (86, CONSUMER)):
        driver.set_active(Driver(capability))
        for case in cases:
            sizes["-".join(map(str, (capability, *case)))] = [
                gpu.shared_memory,
                *shared_by(gpu, *case),
            ]
    print(json.dumps(sizes))


def main(policies: list[str]) -> None:
    read = ASTSource.make_ir

    def only_read(*args: Any, **options: Any) -> None:
        read(*args, **options)
        raise Read

    ASTSource.make_ir = only_read
    driver.set_active(Driver())
    # Results of kernels are undefined, so slots count as if none had moved.
    RowTable.agreed = lambda table, seen, *_: table._agree(seen)
    known, refused = set(), {}

    def each(kernel: tuple[str, ...], compiled: Callable[[], Any]) -> None:
        if kernel not in known:
            known.add(kernel)
            try:
                compiled()
            except Read:
                pass
            except Exception as error:
                refused[kernel[0]] = str(error)

    model = tiny_model("llama", dtype=torch.bfloat16)
    config = model.config
    for name in policies:
        policy, _, kind = name.partition(":")
        with compiling(each, HOPPER):
            eviction = small_policy(policy, config)

            def cache_of(eviction: Any, kind: Any = kind or None) -> BudgetCache:
                cache = BudgetCache(config, 64, 16, eviction, positions="compact", kv_dtype=kind)
                return cache.allocate(1, torch.bfloat16, "cpu")

            cache = cache_of(eviction)
            if not cache.by_rows:
                cache = cache_of(data_independent(eviction))
            loop = BlockLoop(model, cache, graphs=Uncaptured(model, cache))
            converse(loop, config.vocab_size)
    print(json.dumps({"kernels": sorted({x[0] for x in known}), "refused": refused}))


if sys.argv[1:] == ["window"]:
    of_windows()
else:
    main(sys.argv[1:])
