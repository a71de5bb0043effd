"""A file replaced whole or not at all, and what killed processes left of doing so removed.

The new content is written beside the old and takes its name at last. Who writes holds a lock on it,
which the system lets go with the process, however that ends: an unlocked part is nobody's.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUFFIX = ".part"


@contextmanager
def replacing(target: Path) -> Iterator[int]:
    """A descriptor to write the new content of `target` to, which is in its place afterwards.

    After an error within, or Ctrl-C, the old content is as it was and nothing is left beside it.

    Raises:
        OSError: it cannot be written.
    """
    _sweep(target)
    descriptor, part = _new(target)
    try:
        try:
            yield descriptor
            os.fsync(descriptor)
            if os.name == "posix":  # while it is locked; elsewhere an open file keeps its name
                os.replace(part, target)
        finally:
            os.close(descriptor)
        if os.name != "posix":
            os.replace(part, target)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    if os.name == "posix":  # the new name, too, must survive a power cut
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _new(target: Path) -> tuple[int, str]:
    """A part of `target`, locked: its descriptor and its path."""
    while True:
        descriptor, part = tempfile.mkstemp(SUFFIX, f".{target.name}.", target.parent)
        _lock(descriptor, wait=True)
        if os.path.exists(part):  # else another's sweep came between
            return descriptor, part
        os.close(descriptor)


def _sweep(target: Path) -> None:
    """Remove parts of `target` that nobody holds a lock on."""
    if os.name != "posix":
        return  # without such locks, nobody knows whose they are
    ours = re.compile(re.escape(f".{target.name}.") + "[a-z0-9_]{8}" + re.escape(SUFFIX))
    for name in filter(ours.fullmatch, os.listdir(target.parent)):
        with contextlib.suppress(OSError):  # locked, or gone already
            part = target.parent / name
            descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                _lock(descriptor, wait=False)
                os.unlink(part)
            finally:
                os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> None:
    """Lock a file until it is closed, or its process has ended.

    Raises:
        BlockingIOError: another process has, and this is not to wait.
    """
    if os.name == "posix":
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
