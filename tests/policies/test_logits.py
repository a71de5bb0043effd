"""The rule by which products become attention weights, and what happens to one that is new."""

from __future__ import annotations

import pytest
import torch
from observations import observe

from kvcap import kernels
from kvcap.kernels import choice
from kvcap.policies import load_policy
from kvcap.policies.base import Logits, RowRanges
from kvcap.runtime.attention.functions import attend, attend_rows, takes_slots
from kvcap.runtime.errors import UnsupportedModel


def test_kernels_leave_or_refuse_what_they_do_not_know(monkeypatch):
    monkeypatch.setattr("kvcap.policies.base.logits.FURTHER", ("softcap",))
    obs = observe()
    obs.rule = Logits(0.5, softcap=3.0)
    given = obs.queries, obs.keys, obs.values
    expected = attend(*given, obs.rule)
    policy = load_policy("snapkv").policy
    with choice.use("triton"):
        assert not takes_slots(*given, obs.rule)
        torch.testing.assert_close(attend(*given, obs.rule), expected)
        torch.testing.assert_close(kernels.score(policy, obs), policy.score(obs))
        with pytest.raises(UnsupportedModel, match=r"not know softcap.*KVCAP_KERNELS=eager"):
            attend_rows(*given, RowRanges(obs.positions, obs.positions, 0), obs.rule)
