"""Runs a plan and writes what was measured: `python runner.py DIR/plan.json -o result.json`.

Stands alone: needs numpy and onnxruntime, of kvcap nothing, so that one file is copied to a device
(Termux has both packages). The C runner and the page do the same. It does not judge: statistics,
tables and flags are made of its samples later.
"""

from __future__ import annotations

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before anything imports onnxruntime: later is too late

from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"float32": np.float32, "float16": np.float16, "int32": np.int32, "bool": np.bool_}
GENERATOR = (
    "hash11(seed, i) = mix(i + mix(seed)) >> 21, unsigned 32-bit arithmetic that wraps; "
    "mix(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16"
)


def _mix(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A hash of 32 bits (lowbias32, https://github.com/skeeto/hash-prospector)."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def hash11(seed: int, count: int) -> np.ndarray[Any, Any]:
    """Numbers from 0 to 2047, [count] uint32: `GENERATOR` in numpy."""
    start = _mix(np.array([seed], dtype=np.uint32))
    return _mix(np.arange(count, dtype=np.uint32) + start) >> np.uint32(21)


def filled(port: dict[str, Any], folder: Path) -> np.ndarray[Any, Any]:
    """An input of a cell as its `fill` says; files are looked for in `folder`."""
    fill, shape, dtype = port["fill"], port["shape"], DTYPES[port["dtype"]]
    count = int(np.prod(shape, dtype=np.int64))
    if fill["kind"] == "hash":
        numbers = hash11(fill["seed"], count).astype(np.float64)
        return (numbers * fill["scale"] + fill["offset"]).astype(dtype).reshape(shape)
    if fill["kind"] == "constant":
        return np.full(shape, fill["value"], dtype=dtype)
    if fill["kind"] == "permutation":
        j, first = np.arange(shape[-1], dtype=np.int64), fill["first"]
        row = np.where(j < first, j * fill["multiplier"] % max(first, 1), j)
        return np.broadcast_to(row, shape).astype(dtype)
    raw = np.fromfile(folder / fill["file"], dtype=np.dtype(dtype).newbyteorder("<"))
    return raw.astype(dtype).reshape(shape)
