"""`kvcap bench serve` at toy sizes, against true servers."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvcap import pocket
from kvcap.evals.bench import BenchmarkOptions, load
from kvcap.lab.bench import serve

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="threads are timed by /proc"
)


def unhurt(loaded: dict[str, Any], killed: dict[str, Any]) -> None:
    assert (loaded["lost"], loaded["foreign"], loaded["not_refused"]) == (0, 0, 0), loaded["why"]
    assert loaded["peak_mib"] < loaded["cap_mib"]
    assert (killed["foreign"], killed["dropped"]) == (0, 0)


@pytest.mark.slow
def test_nothing_is_lost_under_load_or_by_kills(tmp_path):
    model = str(pocket.path())
    unhurt(serve._load(model, 64, 6), serve._killed(model, 64, 1, tmp_path))


@pytest.mark.slow(ci=0)  # seven servers, one after the other
def test_every_kind_of_row():
    sizes: Any = {"budgets": (64,), "steps": 4, "repeats": 1, "conversations": 6, "kills": 1}
    result = load("serve")(BenchmarkOptions(**sizes, model="pocket"))
    overhead, together, shared, loaded, killed = result.rows
    assert overhead["loop_us"] > 0
    assert together["requests"] == 8
    assert shared["ratio_low"] <= shared["ratio"] <= shared["ratio_high"]
    assert shared["shared_tokens"] >= 128
    unhurt(loaded, killed)
