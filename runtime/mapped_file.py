"""A file of a fixed size that tensors are mapped into memory from.

Every byte is written when it is made, so that a full disk is an error then and never a crash later;
`check` sees a file that was cut short before it is touched. Removed with the last tensor's owner.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from typing import Any

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
            descriptor, self.path = tempfile.mkstemp(".evicted", "kvcap-", directory)
        except OSError as error:
            raise StoreFailed(
                f"the store for evicted tokens cannot be made in {directory!r} "
                f"({error.strerror}); give a directory that exists and can be written"
            ) from error
        self._finalizer = weakref.finalize(self, _remove, descriptor, self.path)
        self._descriptor = descriptor
        try:
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
        mapped = np.memmap(self.path, np.uint8, "r+", offset=self._next, shape=(length,))
        self._next += length
        return torch.from_numpy(mapped).view(dtype).view(shape)

    def check(self) -> None:
        """Refuse a file that no longer has its size: reading past its end would end the process.

        Raises:
            StoreFailed: it was cut short.
        """
        size = os.fstat(self._descriptor).st_size
        if size < self.nbytes:
            raise StoreFailed(
                f"the store for evicted tokens, {self.path}, was cut from {self.nbytes:,} to "
                f"{size:,} bytes by someone else; put the file back to its size, or reset the "
                "session and start again"
            )


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _remove(descriptor: int, path: str) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)
    with contextlib.suppress(OSError):
        os.unlink(path)
