"""Counts the caches and slots that are alive, while Python's cyclic collector rests."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.pool import SlotPool


class Alive:
    """A count of the caches that were made, and the storages of their slots, which still exist."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[BudgetCache]] = []
        self.storages: list[StorageWeakRef] = []
        self.most = 0  # pools' storages that existed when another was made

    @property
    def count(self) -> tuple[int, int]:
        """Return how many caches and storages were made so far."""
        return len(self.made), len(self.storages)

    @property
    def caches(self) -> int:
        return self.since(0, 0)[0]

    @property
    def buffers(self) -> int:
        return self.since(0, 0)[1]

    def since(self, caches: int, storages: int) -> tuple[int, int]:
        """Return how many still exist of those that were made after so many."""
        return (
            sum(cache() is not None for cache in self.made[caches:]),
            sum(not storage.expired() for storage in self.storages[storages:]),
        )

    def none(self) -> None:
        """Assert that something was made, and everything that was made is gone."""
        assert self.made
        assert self.storages
        assert self.since(0, 0) == (0, 0)


@contextmanager
def watched() -> Iterator[Alive]:
    """Return what is alive, while the cyclic collector rests."""
    counted, make, allocate = Alive(), BudgetCache.__init__, SlotPool.__init__

    def made(self: BudgetCache, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        counted.made.append(weakref.ref(self))

    def allocated(self: SlotPool, *args: Any, **options: Any) -> None:
        allocate(self, *args, **options)
        counted.storages += [StorageWeakRef(x.untyped_storage()) for x in self.buffers()]
        counted.most = max(counted.most, counted.buffers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BudgetCache, "__init__", made)
        patch.setattr(SlotPool, "__init__", allocated)
        gc.collect()
        gc.disable()
        try:
            yield counted
        finally:
            gc.enable()
