"""Figures and advice that people act on: what was read and evicted, what room there is, reprs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import tiny_chat
from toy_engine import session_of, tiny
from transformers import AutoTokenizer

from kvcap import pocket
from kvcap.runtime.backends.onnxruntime.tokenizer import Tokenizer
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cli.answer import print_answer
from kvcap.runtime.cli.options import Output
from kvcap.runtime.errors import (
    MemoryCapExceeded,
    ModelFilesBroken,
    PlanInfeasible,
)

LONG = "Seven kinds of mosses survive the cold near Porto, and tall grasses attract many bees. " * 4


@pytest.fixture(scope="module")
def torch_runtime(chat_model):
    return tiny(chat_model)


def shown(session: Any, capsys: Any, text: str | None = None) -> dict[str, Any]:
    """The JSON of one answer."""
    say = session.regenerate if text is None else lambda: session.send(text)
    print_answer(session, say, Output(json=True, quiet=True))
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_no_figures_of_an_answer_that_never_was(runtime, capsys):
    session = session_of(runtime)
    assert session.stats.turn is None
    assert json.loads(json.dumps(session.stats.as_dict()))["turn"] is None
    assert session.stats.peak_bytes == session.cache.nbytes > 0
    session.on_full = "error"
    refused = shown(session, capsys, LONG)
    assert refused["finish_reason"] == "cap"
    assert set(refused["usage"].values()) == {0}
    assert set(refused["timing"].values()) == {None}
    assert session.stats.turn is None
    session.on_full = "evict"
    document = shown(session, capsys, "Hi.")
    assert document["finish_reason"] == "length"
    assert min(document["timing"].values()) > 0
    last = session.turn
    session.on_full = "error"
    shown(session, capsys, LONG)
    assert session.turn is last  # what was refused is no answer
    session.clear()
    assert session.stats.turn is None


@pytest.mark.parametrize("on_full", ["error", "stop"])
@pytest.mark.parametrize("limit", [1, 5, 40])
def test_a_budget_that_is_advised_is_enough(runtime, on_full, limit):
    """Whether the prompt or the answer passes the budget, the advice holds prompt and answer."""

    def say(budget: int) -> Any:
        session = session_of(runtime, budget=budget)
        session.on_full = on_full
        session.set_generation(max_new_tokens=limit)
        list(session.send("Hi, I am Ada."))
        return session

    length = say(200).turn.prompt_tokens
    for budget in (8, length, length + limit - 2):
        if budget >= length and (on_full == "stop" or limit == 1):
            reason = "full" if budget < length + limit - 1 else "length"
            assert say(budget).turn.finish_reason == reason
            continue
        says = r"nothing may be evicted .on-full is .*which holds an answer of"
        with pytest.raises(MemoryCapExceeded, match=says) as caught:
            say(budget)
        assert "on_full" not in str(caught.value)
        (advised,) = re.findall(r"raise the budget to (\d+),", str(caught.value))
        assert int(advised) == length + limit
        enough = say(int(advised))
        assert enough.turn.finish_reason == "length"
        assert enough.stats.evicted_tokens == 0


def test_a_policy_that_never_evicts_advises_a_budget_that_is_enough(torch_runtime):
    full = torch_runtime.with_policy_name("full", {}).with_budget(24)
    session = session_of(full)
    session.set_generation(max_new_tokens=40)
    with pytest.raises(MemoryCapExceeded, match="policy 'full' never evicts: 24 of 24") as caught:
        list(session.send("Hi."))
    (advised,) = re.findall(r"raise the budget to (\d+),", str(caught.value))
    session = session_of(full, budget=int(advised))
    session.set_generation(max_new_tokens=40)
    list(session.send("Hi."))
    assert session.turn.finish_reason == "length"


def test_unequal_heads_are_advised_a_budget_for_the_smallest(torch_runtime):
    runtime = torch_runtime.with_policy_name("pyramidkv", {})
    session = session_of(runtime, budget=64)
    session.on_full = "error"
    with pytest.raises(MemoryCapExceeded) as caught:
        session.send(LONG[:170])
    (advised,) = re.findall(r"raise the budget to (\d+),", str(caught.value))
    assert int(advised) > 200  # the smallest layer gets less than a sixth of what is added
    session = session_of(runtime, budget=int(advised))
    session.on_full = "error"
    list(session.send(LONG[:170]))
    assert session.stats.evicted_tokens == 0


def test_another_budget_of_the_same_model(torch_runtime, tmp_path):
    other = torch_runtime.with_budget(40)
    assert other.model is torch_runtime.model
    assert (other.plan.budget_tokens, other.plan.policy) == (40, "lagkv")
    session = session_of(other)
    list(session.send(LONG))
    assert session.stats.held_tokens == 40
    assert session.stats.peak_bytes == other.cap_bytes
    for wrong in (0, -3, 2.5, True, "64", None):
        with pytest.raises(PlanInfeasible, match="a whole number of tokens from 1"):
            torch_runtime.with_budget(wrong)
    in_bytes = Runtime.from_pretrained(
        tiny_chat.save(tmp_path), kv_budget="48KiB", device="cpu", memory_cap="4GiB"
    )
    assert in_bytes.with_budget(30).cap_bytes == in_bytes.with_budget(30).plan.cache_bytes
    in_bytes.memory_cap = in_bytes.plan.total_bytes + (1 << 20)
    in_bytes.with_budget(100)
    with pytest.raises(PlanInfeasible, match="more than the cap"):
        in_bytes.with_budget(100_000)


def test_reprs_are_one_short_line(runtime, torch_runtime):
    session = session_of(runtime)
    list(session.send("Hi."))
    held = session.stats.held_tokens
    for thing in (session, session.stats, torch_runtime, torch_runtime.plan, runtime.plan):
        assert len(repr(thing)) < 250
        assert "\n" not in repr(thing)
    assert f"holds {held} of 64 slots" in repr(session.stats)
    assert f"2 messages, {runtime.plan.policy} holds {held} of 64 slots" in repr(session)
    assert "lagkv keeps 64 slots in 47.6 KiB" in repr(torch_runtime)
    assert "in all" in repr(torch_runtime.plan)


def test_execution_says_nothing_where_there_is_nothing_to_say(torch_runtime):
    assert torch_runtime.session().stats.execution == ""


def test_a_model_without_its_tokenizer_is_named_as_such(tmp_path):
    tiny_chat.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelFilesBroken, match=r"has no tokenizer: there is no tokenizer\.json"):
        Runtime.from_pretrained(tmp_path, device="cpu")
    with pytest.raises(ModelFilesBroken, match=r"there is no tokenizer\.json"):
        Tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(pocket.path())
    tokenizer.chat_template = None
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(tmp_path)
    session = Runtime.from_pretrained(tmp_path, device="cpu").session()
    with pytest.raises(ValueError, match=r"no chat template; give one by .*complete"):
        session.send("Hi.")
