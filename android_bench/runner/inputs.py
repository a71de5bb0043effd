"""Makes the inputs of cells by rules that JavaScript, C and Python follow to the bit."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"float32": np.float32, "float16": np.float16, "int32": np.int32, "bool": np.bool_}
GENERATOR = (
    "hash11(seed, i) = mix(i + mix(seed)) >> 21, unsigned 32-bit arithmetic that wraps; "
    "mix(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16"
)
Array = np.ndarray[Any, Any]
Cell = dict[str, Any]  # a cell of a plan, or a cell's row in a result


def hash11(seed: int, count: int) -> Array:
    """Return pseudorandom numbers from 0 to 2047, [count] uint32, by the rule `GENERATOR`."""
    start = _mix(np.array([seed], dtype=np.uint32))
    numbers: Array = _mix(np.arange(count, dtype=np.uint32) + start) >> np.uint32(21)
    return numbers


def _mix(x: Array) -> Array:
    """Return a hash of 32 bits (lowbias32, https://github.com/skeeto/hash-prospector)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    mixed: Array = x ^ (x >> np.uint32(16))
    return mixed


def filled(port: dict[str, Any], folder: Path) -> Array:
    """Make an input of a cell by its rule `fill`; files lie in `folder`."""
    fill, shape, dtype = port["fill"], port["shape"], DTYPES[port["dtype"]]
    if fill["kind"] == "hash":
        numbers: Array = hash11(fill["seed"], math.prod(shape)) * fill["scale"] + fill["offset"]
        return numbers.astype(dtype).reshape(shape)
    if fill["kind"] == "constant":
        return np.full(shape, fill["value"], dtype=dtype)
    if fill["kind"] == "permutation":
        j, first = np.arange(shape[-1], dtype=np.int64), fill["first"]
        row = np.where(j < first, j * fill["multiplier"] % max(first, 1), j)
        return np.ascontiguousarray(np.broadcast_to(row, shape).astype(dtype))
    raw = np.fromfile(folder / fill["file"], dtype=np.dtype(dtype).newbyteorder("<"))
    return raw.astype(dtype).reshape(shape)


@functools.lru_cache(maxsize=4)  # a cell's large inputs, for the next cell of that size
def _cached(port: str, folder: Path) -> Array:
    return filled(json.loads(port), folder)


def inputs_of(cell: Cell, folder: Path) -> dict[str, Array]:
    """Make every input of a cell, by name."""
    return {p["name"]: _cached(json.dumps(p, sort_keys=True), folder) for p in cell["inputs"]}
