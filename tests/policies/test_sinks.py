"""By default the first tokens are pinned where models are run, never more than a budget holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcap.policies import Eviction, Observation, PolicyError, as_eviction, load_policy, policies
from kvcap.policies.base import Policy
from kvcap.policies.keydiff import KeyDiff
from kvcap.policies.streaming_llm import StreamingLLM


def needs_table(eviction: Eviction) -> bool:
    return any("table" in part.options() for part in eviction.components)


EVICTIONS = {name: load_policy(name) for name in policies()}
TABLELESS = [n for n, e in EVICTIONS.items() if e.policy.evicts and not needs_table(e)]


@pytest.mark.parametrize("name", TABLELESS)
def test_every_policy_pins_at_least_four_first_tokens_by_default(name):
    eviction = load_policy(name)
    run = eviction.with_sinks(512, layers=6, kv_heads=2)
    assert run.sinks() == max(4, eviction.policy.sinks_pinned())
    assert run.recents(512) == eviction.recents(512)
    assert run.components == eviction.components


@pytest.mark.parametrize("name", TABLELESS)
@settings(max_examples=40, deadline=None)
@given(budget=st.integers(1, 80), layers=st.integers(1, 8), heads=st.sampled_from([1, 2, 4]))
def test_the_default_refuses_no_budget_that_the_policy_alone_accepts(name, budget, layers, heads):
    eviction = load_policy(name)
    try:
        eviction.check(budget, layers, heads)
    except PolicyError:
        return
    run = eviction.with_sinks(budget, layers, heads)
    run.check(budget, layers, heads)
    most = max(0, budget - eviction.recents(budget)) // 8
    assert run.sinks() <= max(eviction.sinks(), min(4, most))
    assert eviction.least(layers, heads) <= budget


@pytest.mark.parametrize(
    ("policy", "budget", "sinks"),
    [
        ("keydiff", 256, 4), ("keydiff", 32, 4), ("keydiff", 31, 3), ("keydiff", 8, 1),
        ("keydiff", 7, 0), ("keydiff", 1, 0), ("snapkv", 64, 4), ("snapkv", 48, 2),
        ("snapkv", 32, 0), ("h2o", 64, 4), ("h2o", 32, 2), ("streaming_llm", 256, 4),
        ("streaming_llm", 5, 4), ("calidrop-streaming_llm", 256, 32), ("full", 256, 0),
    ],
)  # fmt: skip
def test_how_many_are_pinned(policy, budget, sinks):
    assert load_policy(policy).with_sinks(budget).sinks() == sinks


def test_a_number_that_is_given_stays_and_may_be_too_many():
    for count in (0, 2, 9):
        eviction = load_policy("keydiff", sink_tokens=count)
        assert eviction.with_sinks(256) is eviction
        assert eviction.plain() is eviction
        assert eviction.sinks() == count
    with pytest.raises(PolicyError, match=r"keydiff pins 9 sinks.*at least 9"):
        load_policy("keydiff", sink_tokens=9).with_sinks(8).check(8)
    assert load_policy("obcache-h2o").with_sinks(8).sinks() == 4  # of its paper
    assert load_policy("obcache-h2o").plain().sinks() == 4


def test_without_a_run_a_policy_is_as_its_paper_has_it():
    eviction = load_policy("keydiff")
    assert (eviction.sinks(), eviction.plain().sinks()) == (0, 0)
    assert eviction.plain().with_sinks(256).sinks() == 0
    keys = torch.randn(1, 2, 12, 4)
    positions = torch.arange(12).expand(1, 2, 12)
    obs = Observation(keys=keys, values=keys, positions=positions, num_tokens=12, budget=8)
    assert eviction.pins_of(obs) == (0, 0)
    assert eviction.pinned(obs).sum() == 0
    assert eviction.with_sinks(64).pinned(obs).sum() == 2 * 4


def test_the_usual_ones_yield_to_what_a_user_pins():
    def pins(eviction: Eviction, spans: tuple[tuple[int, int], ...]) -> int:
        none = torch.empty(1, 1, 0)
        obs = Observation(none, none, none, num_tokens=99, budget=64, pinned_spans=spans)
        return eviction.pins_of(obs)[0]

    usual = load_policy("keydiff").with_sinks(64)
    cases = {(10, 70): 4, (10, 71): 3, (10, 74): 0, (10, 80): 0, (0, 64): 4, (2, 65): 1, (2, 66): 0}
    assert {span: pins(usual, (span,)) for span in cases} == cases
    assert pins(usual, ((10, 40), (50, 82))) == 2
    window = load_policy("keydiff", recent_tokens=8).with_sinks(64)
    assert pins(window, ((10, 64),)) == 2
    for eviction in (load_policy("keydiff", sink_tokens=4), load_policy("streaming_llm")):
        assert pins(eviction.with_sinks(64), ((10, 74),)) == 4  # asked for, or its own


@dataclass(frozen=True)
class Newest(Policy):
    observes: ClassVar = frozenset({"positions"})

    def score(self, obs: Observation) -> Tensor:
        return obs.positions.float()


def test_policies_that_are_objects_are_treated_alike():
    for policy in (Newest(), KeyDiff(), StreamingLLM(2)):
        assert as_eviction(policy).with_sinks(64).sinks() == 4
        assert as_eviction(policy, 0).with_sinks(64).sinks() == policy.sinks_pinned()
        assert as_eviction(Eviction(policy), 3).with_sinks(64).sinks() == 3
    assert as_eviction("keydiff", 0).with_sinks(64).sinks() == 0
    assert as_eviction(load_policy("keydiff", sink_tokens=7)).with_sinks(64).sinks() == 7


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "four"])
def test_what_is_no_number_of_tokens_is_refused(wrong):
    with pytest.raises(PolicyError, match="sink_tokens"):
        as_eviction("keydiff", wrong)


def test_what_is_no_policy_is_refused():
    with pytest.raises(PolicyError, match=r"policy=3: use a name such as 'keydiff'"):
        as_eviction(3)
