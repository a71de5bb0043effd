"""A saved session goes on with as many first tokens pinned as it had, whatever is usual today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import together
from conftest import tiny_model
from tools import runtime_of
from toy_engine import session_of, tiny

import kvcap
from kvcap.runtime.session.session import Session

MODEL = tiny_model("llama")
BUDGET = 32


def runtime(sinks: int | None = None, policy: str = "keydiff", budget: int = BUDGET) -> Any:
    options = {} if sinks is None else {"sink_tokens": sinks}
    return runtime_of(MODEL, kvcap.load_policy(policy, **options), budget)


def saved(folder: Path, sinks: int | None, tokens: Any, policy: str = "keydiff") -> Session:
    """A session of a runtime that was asked for so many sinks, or for none; saved in `s`."""
    session: Session = runtime(sinks, policy).session(seed=1)
    session.loop.prefill(tokens(60))
    session.save(folder / "s")
    return session


@pytest.mark.parametrize(("before", "given", "policy", "budget", "after"), [
    (0, None, "keydiff", BUDGET, 0),  # of an earlier version, which pinned none
    (None, None, "keydiff", BUDGET, 4), (2, None, "keydiff", BUDGET, 2),
    (0, 4, "keydiff", BUDGET, 4), (None, 0, "keydiff", BUDGET, 0), (2, 0, "keydiff", BUDGET, 0),
    (0, None, "knorm", BUDGET, 4), (None, None, "keydiff", 16, 4), (None, None, "keydiff", 3, 3),
])  # fmt: skip
def test_how_many_are_pinned_after_loading(before, given, policy, budget, after, tokens, tmp_path):
    session = saved(tmp_path, before, tokens)
    loaded = Session.load(runtime(given, policy, budget), tmp_path / "s")
    assert loaded.cache.sinks == after
    assert loaded.cache.seen == 60
    if (policy, budget, after) == ("keydiff", BUDGET, session.cache.sinks):  # to the bit
        more = tokens(9, seed=3)
        assert torch.equal(loaded.loop.prefill(more), session.loop.prefill(more))
        assert loaded.cache.kept_tokens()[0].heads[0].equal(session.cache.kept_tokens()[0].heads[0])


def test_a_cleared_conversation_has_the_usual_ones(tokens, tmp_path):
    saved(tmp_path, 0, tokens)
    session = Session.load(runtime(), tmp_path / "s")
    session.on_full = "error"
    session.clear()
    assert session.cache.sinks == 4
    assert session.cache.seen == 0
    assert session.on_full == "error"
    session.loop.prefill(tokens(20))
    assert session.cache.held == 20


def test_another_file_brings_its_own(tokens, tmp_path):
    saved(tmp_path, 0, tokens)
    session = Session.load(runtime(), tmp_path / "s")
    saved(tmp_path, None, tokens)
    session.restore(tmp_path / "s")
    assert session.cache.sinks == 4


def test_sessions_of_both_kinds_are_answered_together(tmp_path, chat_model):
    usual = tiny(chat_model)
    plain = usual.with_policy(kvcap.load_policy("lagkv", sink_tokens=0))
    old = session_of(plain)
    list(old.send("A long story about a door. " * 8))
    old.save(tmp_path / "s")
    sessions = [Session.load(usual, tmp_path / "s"), session_of(usual)]
    assert [session.cache.sinks for session in sessions] == [0, 4]
    answers = together(usual.batch(2), sessions, ["And then?"] * 2)
    assert answers[0] == "".join(old.send("And then?"))
