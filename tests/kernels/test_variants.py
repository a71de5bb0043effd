"""What is compiled ahead is what runs: launches of rehearsed conversations and of real ones."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from conftest import small_policy, tiny_model
from interpreted import DEVICE, pytestmark  # noqa: F401
from torch import nn

import kvcap
from kvcap import kernels
from kvcap.kernels import launch, variants
from kvcap.kernels.device import Target, address
from kvcap.kernels.decode_triton import dot, merge_parts
from kvcap.kernels.linear_triton import dot as matvec
from kvcap.policies import policies
from kvcap.runtime.backends.pytorch import warm_up
from kvcap.runtime.backends.pytorch.cuda_graphs import BlockGraphs
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.warm_up import Rehearsal
from kvcap.runtime.planning.dry_run import data_independent

BUDGET, BLOCK = 40, 16


class Eager(BlockGraphs):
    """Prepares every capture, and captures nothing."""

    def read(self, ids, need_logits=True):
        return None


@pytest.fixture(autouse=True)
def nothing_computes(monkeypatch):
    """Launches are noted; what a kernel would have written stays as it was."""
    with kernels.use("triton"):
        yield


def rehearsed(model, eviction, evict_every=1):
    found = {}
    told = lambda *call: found.setdefault(variants.Launch.of(*call).variant) and False  # noqa: E731
    rehearsal = Rehearsal(
        model.config, eviction, BUDGET, BLOCK, torch.float32, "compact", evict_every
    )
    rehearsal.run(told)
    return set(found)


def launched(model, eviction, lengths, evict_every=1):
    """Variants of conversations that begin with so many tokens, and their answers."""
    found = set()
    cache = kvcap.BudgetCache(
        model.config, BUDGET, BLOCK, eviction, positions="compact", evict_every=evict_every
    )
    loop = BlockLoop(model, cache.allocate(1, torch.float32, "cpu"), graphs=False)
    loop.graphs = Eager(model, cache)

    def told(*call):
        found.add(variants.Launch.of(*call).variant)
        return False  # numbers do not decide what is launched

    ids = torch.zeros(1, max(lengths), dtype=torch.long)
    with launch.heard(told):
        for length in lengths:
            cache.reset()
            if not cache.eviction.policy.evicts:
                length = min(length, BUDGET - 8)
            loop.prefill(ids[:, :length])
            for _ in range(3):
                loop.read(ids[:, :1])
            if cache.eviction.policy.evicts:
                loop.prefill(ids[:, :7])
    return found


@pytest.mark.skipif(DEVICE != "cpu", reason="compares with interpreted runs")
@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("policy", policies())
def test_what_runs_was_rehearsed(policy):
    """A prompt that fills the cache, long ones, messages of odd lengths, and answers."""
    model = tiny_model("llama", num_hidden_layers=2)
    eviction = data_independent(small_policy(policy, model.config))
    found = launched(model, eviction, (3, 16, 37, 90, 101))
    assert found
    assert found <= rehearsed(model, eviction)
