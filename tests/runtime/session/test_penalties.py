"""Tests what an answer's own tokens lose, by a plain count and in both samplers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_engine import drawn, samplers

import kvcap
from kvcap.runtime.session import settings
from kvcap.runtime.session.penalties import ALLOWED, BASE, LONGEST, penalties
from kvcap.runtime.types import ModelKind


@given(st.lists(st.integers(0, 1), max_size=90), st.sampled_from([0.0, 0.5]))
def test_dry_is_by_the_longest_passage_that_would_go_on(ids: list[int], presence: float) -> None:
    expected = dict.fromkeys(ids, presence) if presence else {}
    longest = dict[int, int]()
    for i in range(len(ids)):
        for length in range(ALLOWED, min(i, LONGEST) + 1):
            if ids[i - length : i] == ids[-length:]:
                longest[ids[i]] = max(length, longest.get(ids[i], 0))
    for token, length in longest.items():
        expected[token] = expected.get(token, 0) + 0.8 * BASE ** (length - ALLOWED)
    config = SimpleNamespace(dry_multiplier=0.8, presence_penalty=presence)
    assert penalties(config, ids) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("again", "dry", "token"),
    [(ALLOWED, 0.8, 9), (ALLOWED, 0, ALLOWED), (ALLOWED - 1, 0.8, ALLOWED - 1)],
)
def test_both_samplers_leave_a_passage_that_was_said(again: int, dry: float, token: int) -> None:
    ids = [*range(12), *range(again)]
    logits = np.zeros((1, 16), np.float32)
    logits[0, again], logits[0, 9] = 1.0, 0.9
    both = samplers(dry_multiplier=dry)
    assert drawn(both, logits, np.array([ids]), None, ids) == [token] * 2
    assert [one.recipe for one in both] == [None if dry else ()] * 2


def test_a_chat_by_pytorch_draws_by_all_mild_settings() -> None:
    """Transformers' settings know no DRY of their own."""
    runtime = kvcap.Runtime.from_pretrained("pocket", budget_tokens=64)
    runtime.generation.update(**settings.mild_for(ModelKind("llama", 576)))
    assert settings.drawn(runtime.session().generation)["dry_multiplier"] == 0.8
