"""A file of a fixed size that tensors are mapped into memory from.

Every byte is written when it is made, so that a full disk is an error then and never a crash later.
Where the system allows, it has no name from then on: nobody can cut it short, which would end the
process, and nothing is left of it after this process, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from kvcap.runtime.errors import StoreFailed

PIECE = 1 << 20


class MappedFile:
    """`nbytes` of zeros in a new file of `directory`.

    Raises:
        StoreFailed: no such directory, not writable, or not enough room.
    """

    def __init__(self, directory: str, nbytes: int) -> None:
        self.nbytes, self._next = nbytes, 0
        try:
            descriptor, path = tempfile.mkstemp(".evicted", "kvcap-", directory)
        except OSError as error:
            raise StoreFailed(
                f"the store for evicted tokens cannot be made in {directory!r} "
                f"({error.strerror}); give a directory that exists and can be written"
            ) from error
        self._file = os.fdopen(descriptor, "r+b")
        self._finalizer = weakref.finalize(self, _remove, self._file, path)
        try:
            if os.name == "posix":
                os.unlink(path)
            for start in range(0, nbytes, PIECE):
                _write_all(descriptor, bytes(min(PIECE, nbytes - start)))
        except OSError as error:
            self._finalizer()
            raise StoreFailed(
                f"the store for evicted tokens needs {nbytes:,} bytes in {directory!r} "
                f"({error.strerror}); free some, give another directory, or a smaller "
                "calibration_size"
            ) from error

    def new(self, *shape: int, dtype: torch.dtype, **_: Any) -> Tensor:
        """The next tensor of the file, as `torch.zeros` makes one."""
        length = int(np.prod(shape)) * dtype.itemsize
        assert self._next + length <= self.nbytes, "the file was made too small"
        mapped = np.memmap(self._file, np.uint8, "r+", offset=self._next, shape=(length,))
        self._next += length
        return torch.from_numpy(mapped).view(dtype).view(shape)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _remove(file: BinaryIO, path: str) -> None:
    file.close()
    with contextlib.suppress(OSError):
        os.unlink(path)
