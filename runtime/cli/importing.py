"""Imports large libraries in less time than they would take."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcap.import_hooks import after_import

BETWEEN_COLLECTIONS = 50_000  # objects made and not freed, where Python's own is 700


@contextmanager
def large_imports() -> Iterator[None]:
    """Make Python look for cycles less often while large libraries are imported.

    PyTorch and transformers make half a million objects that stay, all of which Python would look
    through again and again while they grow more.
    """
    usual = gc.get_threshold()
    gc.set_threshold(BETWEEN_COLLECTIONS, *usual[1:])
    try:
        yield
    finally:
        gc.freeze()  # all there is becomes old, without a look at it,
        gc.unfreeze()  # it is collected again when as many objects more have been made
        gc.set_threshold(*usual)


def _known_once_read(import_utils: Any) -> None:
    """Make transformers read the names in its models' files once, and not twice.

    It goes through more than 500 folders in the same order again, and keeps only the last 128.
    """
    read: Any = getattr(import_utils, "create_import_structure_from_path", None)
    if hasattr(read, "cache_info"):
        import_utils.create_import_structure_from_path = functools.cache(read.__wrapped__)


after_import("transformers.utils.import_utils", _known_once_read)
