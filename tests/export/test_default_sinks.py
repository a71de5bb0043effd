"""Exports pin the first tokens as runs do: in the graph, or as a run beside it asks for."""

from __future__ import annotations

from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.spec import Spec, recalled
from kvcap.policies import load_policy

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
