"""What a memory test needs; see docs/memory.md. The pytest marker and fixture come by themselves.

- `cpu_peak(function)`, `cpu_meter()`: exact peak of CPU tensors, and what is left.
- `cuda_peak(function)`: the same on a GPU.
- `process_peak(target, *args)`: peak resident set of a fresh process.
- `kv_bytes(cache)`: what a cache really holds, by storage.
"""

from kvcap.runtime.memory_meter import Peak, cpu_meter, cpu_peak, cuda_peak, kv_bytes
from kvcap.runtime.process_peak import ProcessPeak, process_peak

__all__ = ["Peak", "ProcessPeak", "cpu_meter", "cpu_peak", "cuda_peak", "kv_bytes", "process_peak"]
