"""Defines where a session looks for copies of caches that have read a prompt's first tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from kvcap.runtime.session.engine import CacheCopy
from kvcap.runtime.types import Span


class Prefixes(Protocol):
    """A protocol of stores of cache copies, by the tokens read and pinned in them."""

    def find(self, key: bytes) -> CacheCopy | None:
        """Return the copy of a cache that has read the prefix of that key, and nothing else."""

    def keep(self, key: bytes, copied: Callable[[], CacheCopy]) -> None:
        """Keep a copy of such a cache, which `copied` makes, if there is a place for it."""


def prefix_key(ids: Sequence[int], pins: Sequence[Span]) -> bytes:
    """Return a digest of tokens, and of the spans of the conversation that are never evicted."""
    digest = hashlib.sha256(repr(list(pins)).encode())
    digest.update(array("i", ids).tobytes())
    return digest.digest()
