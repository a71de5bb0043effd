"""`kvcap policies`: what the list says of every policy is what the policy is."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from conftest import tiny_config

from kvcap import cli
from kvcap.policies import Eviction, companions, load_policy, policies
from kvcap.policies.base import Policy
from kvcap.runtime.cache.settings import BLOCK_SIZE
from kvcap.runtime.cli.tables import describe, describe_companions
from kvcap.runtime.planning.plan import MemoryPlan

NAMES = list(policies())
COLUMNS = 80


@pytest.fixture(scope="module")
def document() -> Any:
    rows = [describe(name, load_policy(name)) for name in NAMES]
    return {"policies": {row["name"]: row for row in rows}, "companions": describe_companions()}


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a terminal of 80 columns shows, without its colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    assert cli.run(["policies"]) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


def blocks(text: str) -> dict[str, str]:
    """The block of every policy on one line; its heading begins the line, the rest is indented."""
    by_name = {}
    for block in re.split(r"\n\s*\n", text):
        heading, *lines = block.strip("\n").splitlines()
        by_name[heading.split(" ")[0].strip(",")] = " ".join(" ".join([heading, *lines]).split())
    return by_name


def has(block: str, part: dict[str, Any]) -> bool:
    """Formula, source and options of a part, wherever the lines were broken."""
    bare = re.sub(r"\s", "", block)
    given = [part["formula"], part["paper"]]
    given += [f"{k}={v!r}" if v == "" else f"{k}={v}" for k, v in part["options"].items()]
    return all(re.sub(r"\s", "", words) in bare for words in given)


def test_eighty_columns_are_enough(text):
    assert max(len(line.rstrip()) for line in text.splitlines()) <= COLUMNS
    assert not any("…" in line for line in text.splitlines())  # nothing is cut off


def test_every_policy_is_listed_with_its_parts(text, document):
    listed = blocks(text)
    assert [name for name in listed if name in NAMES] == NAMES
    for name, row in document["policies"].items():
        assert all(has(listed[name], part) for part in row["parts"]), name
        assert (f"{name} = {row['composition']}" in listed[name]) == (len(row["parts"]) > 1)
        assert all(view in listed[name] for view in row["observes"]), name
        assert f"{row['state_bytes_per_slot']} bytes a slot" in listed[name]


@pytest.mark.parametrize(
    ("name", "costs"),
    [
        ("keydiff", "costs 0 bytes a slot, workspace 0"),
        ("h2o", "costs 4 bytes a slot, workspace 3 · block"),
        ("tova", "costs 0 bytes a slot, workspace 3 · 1"),
        ("dropkv", "costs 0 bytes a slot, 8 queries a head, workspace 3 · 8"),
        ("criticalkv", "costs 4 bytes a slot, 32 queries a head, workspace 3 · 32"),
        ("calidrop-h2o", "512 evicted tokens a head, workspace 3 · block"),
    ],
)
def test_costs(name, costs, text):
    assert costs in blocks(text)[name]


def test_a_preset_shows_its_own_settings(text):
    assert "recent=0.2" in blocks(text)["keydiff-window"]
    assert "sink_tokens=4" in blocks(text)["obcache-h2o"]
    assert "sink_tokens" not in blocks(text)["h2o"]
    assert blocks(text)["criticalkv-adakv"].startswith(
        "criticalkv-adakv = snapkv + adakv + criticalkv"
    )


def test_companions_stand_below_the_policies(text, document):
    below = blocks(text)["companions"]
    assert text.index("\ncompanions") > text.index(f"\n{NAMES[-1]}")
    assert {part["name"] for part in document["companions"]} == set(companions())
    for part in document["companions"]:
        assert part["name"] in below
        assert has(below, part), part["name"]


def test_json_holds_everything(kvcap, document):
    printed = kvcap.document("policies")
    assert printed["policies"] == [document["policies"][name] for name in NAMES]
    assert printed["companions"] == document["companions"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_what_the_policies_are(name, document):
    row, eviction = document["policies"][name], load_policy(name)
    assert [part["formula"] for part in row["parts"]] == [c.formula for c in eviction.components]
    assert [part["paper"] for part in row["parts"]] == [c.paper for c in eviction.components]
    assert all(part["formula"] and part["paper"] for part in row["parts"])
    assert row["observes"] == sorted(eviction.observes)
    assert row["state_bytes_per_slot"] == sum(d.itemsize for d in eviction.state.values())
    assert row["evicts"] == eviction.policy.evicts
    names = [part["name"] for part in row["parts"]]
    if len(names) > 1:  # the composition can be typed, and is the same
        again = load_policy("+".join(names), **row["options"])
        assert again.components == eviction.components
    usual = 4 if eviction.policy.evicts else 0  # as many first tokens as are pinned by default
    run = replace(eviction, sink_tokens=usual) if eviction.sink_tokens is None else eviction
    assert load_policy(name, **row["options"]) == run


@pytest.mark.parametrize("name", NAMES)
def test_the_workspace_is_the_plans(name, document):
    """Per slot and query head, wherever the slots are."""
    eviction = replace(load_policy(name), head_budget=None, layer_budget=None)

    def workspace(groups: int) -> int:
        config = tiny_config("llama", num_key_value_heads=2, num_attention_heads=2 * groups)
        return MemoryPlan.of(config, policy=eviction, budget_tokens=100).workspace

    slots = 2 * (100 + BLOCK_SIZE)  # of a layer
    floats = (workspace(2) - workspace(1)) / 4 / slots  # of one more query head
    assert floats == document["policies"][name]["workspace_floats"]


def test_a_policy_of_another_package_is_listed_by_its_name(monkeypatch):
    @dataclass(frozen=True)
    class Theirs(Policy):
        paper: ClassVar = "none"
        formula: ClassVar = "none"
        state: ClassVar = {"x": torch.int16, "y": torch.float32}

    from kvcap import policies
    from kvcap.policies import Recipe

    monkeypatch.setattr(policies, "policies", lambda: {"theirs": Recipe({"policy": Theirs}, {})})
    row = describe("theirs", Eviction(Theirs(), name="theirs"))
    assert row["composition"] == "theirs"
    assert row["state_bytes_per_slot"] == 6
    assert row["workspace_floats"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_says_when_to_use_it(name, document):
    assert re.match(r"(to|as|for|where|first)\b", document["policies"][name]["when"])
    assert all(part["when"] for part in document["policies"][name]["parts"])


@pytest.mark.parametrize("name", ["snapkv", "keydiff-window", "criticalkv-adakv", "h2o+criticalkv"])
def test_one_policy_is_shown_by_its_name(name, capsys, kvcap):
    row = describe(name, load_policy(name))
    assert cli.run(["policies", name]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(name)
    assert row["when"] in shown
    assert all(has(shown, part) for part in row["parts"])
    for arguments in ([name], ["show", name]):
        assert kvcap.document("policies", *arguments) == json.loads(json.dumps(row))


def test_a_policy_that_is_none_is_answered_with_the_nearest(capsys, kvcap):
    assert "did you mean 'snapkv'?" in kvcap.refused("policies", "snapk")
    assert cli.run(["policies", "calibrate", "--help"]) == 0
    assert "table of headkv" in capsys.readouterr().out
