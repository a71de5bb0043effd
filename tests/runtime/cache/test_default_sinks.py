"""Whatever runs a model keeps the first tokens of a conversation, unless it is said otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import tiny_model
from torch import Tensor

import kvcap
from kvcap.policies import PolicyError
from kvcap.policies.keydiff import KeyDiff
from kvcap.policies.knorm import Knorm
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime

POLICIES = ["keydiff", kvcap.load_policy("keydiff"), KeyDiff(), kvcap.Eviction(Knorm())]


def kept_first(cache: kvcap.BudgetCache, count: int) -> bool:
    """Whether every head of every layer holds the first `count` tokens."""
    rows = [row for layer in cache.kept_tokens() for row in layer.heads]
    return all(set(range(count)) <= set(row.tolist()) for row in rows)


def read(cache: kvcap.BudgetCache, model: Any, ids: Tensor) -> kvcap.BudgetCache:
    """Read a text whose first tokens are those that keydiff evicts first: all alike."""
    BlockLoop(model, cache).prefill(ids)
    return cache


@pytest.fixture
def ids() -> Tensor:
    found = 3 + torch.randperm(90, generator=torch.Generator().manual_seed(0))[None, :70]
    found[:, :20] = 5
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_cache_keeps_the_first_tokens_whatever_names_the_policy(policy, ids):
    model = tiny_model("llama")
    cache = read(kvcap.BudgetCache(model.config, 32, 8, policy), model, ids)
    assert cache.sinks == cache.eviction.sinks() == 4
    assert kept_first(cache, 4)
    assert cache.held == 32
    plain = read(kvcap.BudgetCache(model.config, 32, 8, policy, sink_tokens=0), model, ids)
    assert plain.sinks == 0
    assert not kept_first(plain, 4)


@pytest.mark.parametrize("budget", [1, 7, 8, 15, 16, 31])
def test_a_small_budget_is_never_refused_for_the_default(budget, ids):
    model = tiny_model("llama")
    cache = read(kvcap.BudgetCache(model.config, budget, 4), model, ids)
    assert cache.held == budget
    assert cache.sinks == budget // 8
    assert kept_first(cache, budget // 8)
    with pytest.raises(PolicyError, match=f"pins {budget + 1} sinks.*at least {budget + 1} or"):
        kvcap.BudgetCache(model.config, budget, 4, sink_tokens=budget + 1)


def test_a_capped_model_keeps_them(ids):
    model = tiny_model("llama")
    for sinks, kept in ((None, 4), (0, 0), (6, 6)):
        with kvcap.cap(model, 32, 8, "keydiff", sink_tokens=sinks) as capped:
            model.generate(ids, max_new_tokens=3, do_sample=False)
            assert capped.cache is not None
            assert capped.cache.sinks == kept
            assert kept_first(capped.cache, kept)


def test_a_runtime_takes_the_number_and_smaller_budgets_keep_fewer():
    runtime = Runtime.from_pretrained("pocket", budget_tokens=64, block_size=16, device="cpu")
    assert runtime.session().cache.sinks == 4
    assert runtime.with_budget(16).session().cache.sinks == 2
    assert runtime.with_budget(7).session().cache.sinks == 0
    assert runtime.with_policy_name("obcache-h2o", {}).session().cache.sinks == 4
    assert runtime.with_policy_name("knorm", {"sink_tokens": 1}).session().cache.sinks == 1
    plain = Runtime.from_pretrained("pocket", KeyDiff(), budget_tokens=64, sink_tokens=0)
    assert plain.session().cache.sinks == plain.with_budget(128).session().cache.sinks == 0
