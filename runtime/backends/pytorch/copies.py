"""Copies what a cache holds within memory, so that another cache of its kind goes on from there.

A copy has what a session's file has of the cache, and is put back in the same way, unchecked.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from kvcap.runtime.backends.pytorch.restore import Refill, SavedLayers, held_by
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.session.engine import CacheCopy
from kvcap.runtime.session.file import SessionFile


class CopiedFile(SessionFile):
    """A session's file that is a copy in memory, of the cache alone."""

    def __init__(self, of: CacheCopy) -> None:
        self.path, self.facts = "a copy in memory", dict(of.facts)
        self.names, self._tensors = frozenset(of.tensors), of.tensors

    def tensor(self, name: str) -> Tensor:
        """Return a copy of one tensor."""
        tensor: Tensor = self._tensors[name].clone()
        return tensor


def copied(cache: BudgetCache) -> CacheCopy:
    """Return a copy of what a cache holds, on the cache's device."""
    pieces, figures = held_by(cache)
    tensors = {name: torch.cat(some) for name, some in pieces.items()}
    facts = {**copy.deepcopy(figures), "pinned_spans": list(cache.pinned_spans)}
    return CacheCopy(facts, tensors, sum(tensor.nbytes for tensor in tensors.values()))


def go_on_from(cache: BudgetCache, of: CacheCopy) -> None:
    """Fill a cache from a copy of one with the same settings; if that fails, it is left empty."""
    pins = list(cache.pinned_spans)
    Refill(SavedLayers(cache, CopiedFile(of), exact=True)).run()
    cache.set_pins(pins)
