"""Meters that a memory test can trust: tensors at their peak, what is left, what a cache holds.

Exact where PyTorch itself counts (its CPU allocator by way of the profiler, its CUDA allocator);
whole processes are measured by `kvcap.runtime.process_peak`. The difference of a warm process's
resident set is no test: the process reuses pages that it already has, so it reads zero and can
never fail.

memray, and pytest-memray on it, hook malloc and its kin for the whole process, so that Python's and
every library's allocations are in their figure: good for finding who allocates, on Linux and macOS.
A bound to the byte needs the figures of PyTorch's allocator alone, hence no dependency on them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kvcap.runtime.budget_cache import BudgetCache


@dataclass
class Peak:
    """What a piece of work took, in bytes of tensors, beyond what there was before."""

    peak_bytes: int = 0  # held at once, at the most
    held_bytes: int = 0  # still held at the end, with the result
    result: Any = None  # of the function that was measured


def cpu_peak(function: Callable[[], Any]) -> Peak:
    """Exact peak of the CPU tensors that `function` allocates, and the bytes it leaves.

    The running sum of every allocation and release that PyTorch's profiler sees. Tensors allocated
    before are not known to it: replacing one counts the new and not the release of the old. A
    function that returns None and leaves bytes behind, leaks.

    >>> import torch
    >>> took = cpu_peak(lambda: torch.ones(1024, dtype=torch.uint8).sum().item())
    >>> took.peak_bytes >= 1024, took.held_bytes
    (True, 0)

    Raises:
        RuntimeError: called while PyTorch's profiler is on, as within another such measurement.
    """
    with cpu_meter() as peak:
        peak.result = function()
    return peak


def allocator_peak(function: Callable[[], Any]) -> int:
    """The most bytes of CPU tensors that `function` holds at once; see `cpu_peak`."""
    return cpu_peak(function).peak_bytes


@contextmanager
def cpu_meter() -> Iterator[Peak]:
    """`cpu_peak` of a `with` block; the figures are there when it has ended."""
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError(
            "PyTorch's profiler is on already and counts once only: measure inside a test without "
            "the memory_budget marker, or after the other measurement"
        )
    gc.collect()
    peak = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield peak
        gc.collect()  # what only a cycle holds is not left behind
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    # Bytes on a GPU are among the events too; they are for `cuda_peak`.
    memory = [e for e in events if e.name() == "[memory]" and e.device_type().name == "CPU"]
    now = 0
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in memory):
        now += change
        peak.peak_bytes = max(peak.peak_bytes, now)
    peak.held_bytes = now


def cuda_peak(function: Callable[[], Any], device: torch.device | str | int = "cuda") -> Peak:
    """Exact peak of what `function` allocates on a GPU, and the bytes it leaves.

    Raises:
        RuntimeError: no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "cuda_peak needs a CUDA device and PyTorch sees none; skip the test where "
            "torch.cuda.is_available() is false, or measure with cpu_peak"
        )
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = function()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    return Peak(peak, torch.cuda.memory_allocated(device) - before, result)


def kv_bytes(cache: Any) -> int:
    """Bytes that a cache really holds: whole storages, each once, however small the views on them.

    For `BudgetCache`, and for transformers' caches of attention (DynamicCache, StaticCache, ...).

    >>> import torch
    >>> from transformers import DynamicCache
    >>> cache = DynamicCache()
    >>> big = torch.zeros(1, 2, 100, 4)
    >>> _ = cache.update(big[:, :, :1], big[:, :, :1], 0)
    >>> kv_bytes(cache) <= big.nbytes
    True
    """
    if isinstance(cache, BudgetCache):
        return cache.nbytes
    tensors: list[Tensor] = []
    for layer in cache.layers:
        tensors += _tensors(vars(layer).values())
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
