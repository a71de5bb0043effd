"""Exports pin the first tokens as runs do: in the graph, or as a run beside it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from kvcap.export.adopted.adopt import pins
from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.spec import Spec, recalled, recipe
from kvcap.policies import load_policy
from kvcap.runtime.backends.onnxruntime.runtime import ExportedPolicy, PolicyRequest

SHAPE = Shape(kv_heads=2, heads=4, head_dim=8, block=8, budget=64)


def test_a_graph_that_scores_has_none():
    assert Spec(load_policy("keydiff"), SHAPE).recipe()["parameters"]["sink_tokens"] == 0


def test_a_manifest_says_what_its_graph_was_made_with():
    """Those of earlier versions pin none, and are checked so."""
    made = Spec(load_policy("keydiff"), SHAPE, "evict")
    shape = {"kv_heads": 2, "heads": 4, "head_dim": 8, "block": 8, "budget": 64}
    assert recalled(made.recipe(), shape, stage="evict").eviction.sinks() == 4
    earlier = {"parts": "keydiff", "parameters": {"sink_tokens": 0, "recent_tokens": 0}}
    assert recalled(earlier, shape, stage="evict").eviction.sinks() == 0


@pytest.mark.parametrize(("exported", "asked", "budget", "found"), [
    ({}, None, 64, 4), ({}, None, 20, 2), ({}, 0, 64, 0), ({}, 6, 64, 6),
    ({"sink_tokens": 0}, None, 64, 0),  # of an earlier version, or asked for when it was made
    ({"sink_tokens": 0}, 3, 64, 3),
    ({"sink_tokens": 2}, None, 64, 2), ({"sink_tokens": 2}, 0, 64, 2),
])  # fmt: skip
def test_beside_a_decoder_of_others_a_run_pins(exported, asked, budget, found):
    eviction = load_policy("keydiff", **exported)
    entry: dict[str, Any] = {"policy": {**recipe(eviction), "pins": pins(eviction)}}
    assert ("sink_tokens" in entry["policy"]["parameters"]) == bool(exported)
    counts = entry["policy"]["pins"]
    policy = ExportedPolicy("keydiff", entry, PolicyRequest(sink_tokens=asked), **counts)
    assert policy.pins(budget) == (found, 0)
    assert policy.least <= max(1, exported.get("sink_tokens", 0), asked or 0)
