"""Reads rows of a GGUF file's embedding table, by the library's own conversion of its type."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.llamacpp.library import Library

TABLE = b"token_embd.weight"


class HeaderSettings(ctypes.Structure):
    """The library's structure that says how a file's header is read."""

    _fields_ = (("no_alloc", c_bool), ("context", c_void_p))


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gguf_init_from_file": (c_void_p, (c_char_p, HeaderSettings)),
    "gguf_free": (None, (c_void_p,)),
    "gguf_find_tensor": (c_int64, (c_void_p, c_char_p)),
    "gguf_get_data_offset": (c_size_t, (c_void_p,)),
    "gguf_get_tensor_offset": (c_size_t, (c_void_p, c_int64)),
    "gguf_get_tensor_size": (c_size_t, (c_void_p, c_int64)),
    "gguf_get_tensor_type": (c_int, (c_void_p, c_int64)),
}


def embedding_rows(
    library: Library, file: Path, vocabulary: int
) -> Callable[[Sequence[int]], NDArray[np.float32]] | None:
    """Return a function that reads rows [n, d] of a file's embedding table from the file.

    Args:
        library: that converts them.
        file: the file; of several parts the first.
        vocabulary: how many rows it has.

    Returns:
        None where the file has no such table.
    """
    calls = {name: library.symbol(name, *types) for name, types in SIGNATURES.items()}
    header = calls["gguf_init_from_file"](str(file).encode(), HeaderSettings(True, None))
    try:
        tensor_id = calls["gguf_find_tensor"](header, TABLE)
        if tensor_id < 0:
            return None
        kind = calls["gguf_get_tensor_type"](header, tensor_id)
        start = calls["gguf_get_data_offset"](header)
        start += calls["gguf_get_tensor_offset"](header, tensor_id)
        nbytes = calls["gguf_get_tensor_size"](header, tensor_id)
    finally:
        calls["gguf_free"](header)
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    table = np.frombuffer(mapped, np.uint8, nbytes, start).reshape(vocabulary, -1)
    return lambda ids: library.floats(table[list(ids)], kind)
