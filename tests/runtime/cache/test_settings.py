"""Settings of a cache are one object, with one name each; old names warn."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from conftest import tiny_config, tiny_model

import kvcap
from kvcap.cli import application, run
from kvcap.runtime.cache.settings import CacheSettings, SettingNames
from kvcap.runtime.cli.options import CacheOptions
from kvcap.runtime.errors import PlanInfeasible

NAMES = [field.name for field in fields(CacheSettings)]
SETTINGS = CacheSettings(
    24, 8, "knorm", positions="true", evict_every=3, kv_dtype="int8", sink_tokens=2
)
BY_NAME: Any = {name: getattr(SETTINGS, name) for name in NAMES}


def facts(cache: kvcap.BudgetCache) -> tuple[Any, ...]:
    layout = cache.layout
    sizes = layout.budget_tokens, layout.block_size, layout.positions, layout.slot_format.name
    return *sizes, cache.evict_every, cache.eviction.name, cache.sinks


def test_whole_settings_are_those_by_name():
    config = tiny_config("llama")
    caches = [
        kvcap.BudgetCache(config, SETTINGS),
        kvcap.BudgetCache(config, **BY_NAME),
        kvcap.BudgetCache(config, 24, 8, "knorm", **{n: BY_NAME[n] for n in NAMES[3:]}),
        kvcap.BudgetCache(config, replace(SETTINGS, policy="h2o"), policy="knorm"),
    ]
    assert {facts(cache) for cache in caches} == {(24, 8, "true", "int8", 3, "knorm", 2)}
    plans = [kvcap.MemoryPlan.of(config, SETTINGS), kvcap.MemoryPlan.of(config, **BY_NAME)]
    assert plans[0] == plans[1]
    assert (plans[0].budget_tokens, plans[0].kv_dtype) == (24, "int8")


def test_a_runtime_and_a_cap_pass_them_on_whole():
    runtime = kvcap.Runtime.from_pretrained("pocket", SETTINGS, device="cpu")
    assert facts(runtime.new_cache()) == (24, 8, "true", "int8", 3, "knorm", 2)
    other = runtime.with_budget(30).with_policy(kvcap.load_policy("keydiff", sink_tokens=1))
    assert facts(other.new_cache()) == (30, 8, "true", "int8", 3, "keydiff", 1)
    with kvcap.cap(tiny_model("llama"), SETTINGS) as capped:
        assert "24 slots, blocks of 8" in repr(capped)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget_tokens": 0}, "budget_tokens=0: use a whole number of tokens from 1"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 10**20}, "from 1 to 1,099,511,627,776"),
        ({"block_size": True}, "block_size=True"),
        ({"evict_every": 2.5}, "evict_every=2.5"),
        ({"budget_tokens": "64MiB"}, "kv_budget='64MiB'"),
        ({"budget_tokens": 64, "kv_budget": "1MiB"}, "not both"),
        ({"block_size": 8, "evict_every": 9}, "evict every 1 to block_size"),
        ({"positions": "false"}, "positions='false'.* use 'compact', 'true' or 'auto'"),
    ],
)
def test_what_cannot_be_is_refused_wherever_it_is_given(given, message):
    config = tiny_config("llama")
    for make in (
        CacheSettings,
        lambda **x: kvcap.BudgetCache(config, **x),
        lambda **x: kvcap.MemoryPlan.of(config, **x),
        lambda **x: kvcap.Runtime.from_pretrained("pocket", **x),
        lambda **x: kvcap.cap(tiny_model("llama"), **x),
    ):
        with pytest.raises(PlanInfeasible, match=message):
            make(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enforce": "rlimt"}, "enforce='rlimt': use 'check' or 'rlimit'"),
        ({"dtype": "int3"}, r"one of float32 \(fp32"),
        ({"dtype": 3}, "dtype '3' is not known"),
        ({"dtype": torch.int8}, "dtype 'torch.int8' is not known"),
    ],
)
def test_what_a_runtime_cannot_take_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        kvcap.Runtime.from_pretrained("pocket", memory_cap="4GiB", device="cpu", **given)


def test_a_cache_takes_no_bytes_and_says_what_does():
    with pytest.raises(PlanInfeasible, match="MemoryPlan"):
        kvcap.BudgetCache(tiny_config("llama"), kv_budget="64KiB")
    for wrong in ({"bugdet": 3}, {"evict": 1}):
        with pytest.raises(TypeError, match=f"no setting '{next(iter(wrong))}'.*budget_tokens"):
            kvcap.BudgetCache(tiny_config("llama"), **wrong)
    with pytest.raises(TypeError, match="by their names"):
        kvcap.BudgetCache(tiny_config("llama"), 24, 8, "knorm", "true")


def test_they_have_one_name_in_python_on_the_command_line_and_in_the_documents():
    assert list(SettingNames.__annotations__) == NAMES
    commands: Any = application()
    for command in ("chat", "generate", "serve"):
        options = {o: p.envvar for p in commands.commands[command].params for o in p.opts}
        for name in NAMES:
            assert options[f"--{name.replace('_', '-')}"] == f"KVCAP_{name.upper()}"
    given = kvcap.MemoryPlan.of(tiny_config("llama"), SETTINGS).as_dict()
    for name in ("budget_tokens", "block_size", "policy", "positions", "kv_dtype"):
        assert given[name] == BY_NAME[name]


@pytest.mark.parametrize("name", sorted({*NAMES} - {"policy", "sink_tokens", "evict_every"}))
def test_an_option_reaches_the_settings(name):
    """Commands pass on the three that are left out here."""
    given: Any = {name: BY_NAME[name] or "64KiB"}
    assert CacheOptions(**given).settings() == CacheSettings(**given)


def test_names_of_earlier_versions_are_refused_by_name(capsys, monkeypatch):
    with pytest.raises(TypeError, match="kv_budget_tokens"):
        kvcap.BudgetCache(tiny_config("llama"), kv_budget_tokens=24)  # type: ignore[call-arg]
    assert run(["plan", "pocket", "--kv-budget-tokens", "24"]) == 2
    assert "--budget-tokens" in capsys.readouterr().err
    monkeypatch.setattr(os, "environ", {**os.environ, "KVCAP_KV_BUDGET_TOKENS": "40"})
    assert run(["plan", "pocket", "--json"]) == 2
    assert "is called KVCAP_BUDGET_TOKENS now" in capsys.readouterr().err


def test_evictions_further_apart_than_a_planned_block_are_refused_before_weights(monkeypatch):
    """A block is smaller where bytes are few."""
    monkeypatch.setattr("kvcap.runtime.backends.pytorch.runtime.load_model", None)
    with pytest.raises(PlanInfeasible, match="evict_every=100, block_size=32"):
        kvcap.Runtime.from_pretrained("pocket", kv_budget="500KiB", evict_every=100, device="cpu")
