"""Measures memory in tests; see docs/memory.md. The pytest marker and fixture come by themselves.

- `cpu_peak(function)`, `cpu_meter()`: exact peak of CPU tensors in every thread, and what is left.
- `cuda_peak(function)`, `cuda_meter()`: likewise on a GPU.
- `host_peak(function)`, `host_meter()`: likewise of Python's objects and NumPy's arrays.
- `process_peak(target, *args)`: peak resident set of a fresh process.
- `kv_bytes(cache)`: what a cache really holds, by storage.
"""

from kvcap.runtime.testing.memory_meter import (
    Allocations,
    Peak,
    cpu_meter,
    cpu_peak,
    cuda_meter,
    cuda_peak,
    host_meter,
    host_peak,
    kv_bytes,
)
from kvcap.runtime.testing.process_peak import ProcessPeak, process_peak
from kvcap.runtime.testing.stacks import Place
from kvcap.runtime.testing.threads import ThreadsNotCounted

__all__ = [
    "Allocations",
    "Peak",
    "Place",
    "ProcessPeak",
    "ThreadsNotCounted",
    "cpu_meter",
    "cpu_peak",
    "cuda_meter",
    "cuda_peak",
    "host_meter",
    "host_peak",
    "kv_bytes",
    "process_peak",
]
