"""`kvcap bench serve` at toy sizes, against true servers."""

from __future__ import annotations

import sys

import pytest

from kvcap.evals.bench import BenchmarkOptions, load


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are timed by /proc")
def test_nothing_is_lost_under_load_or_by_kills():
    found = load("serve")(
        BenchmarkOptions(
            budgets=(64,), steps=4, repeats=1, conversations=6, kills=1, model="pocket"
        )
    )
    overhead, together, shared, loaded, killed = found.rows
    assert overhead["loop_us"] > 0
    assert together["requests"] == 8
    assert shared["ratio_low"] <= shared["ratio"] <= shared["ratio_high"]
    assert shared["shared_tokens"] >= 128
    assert (loaded["lost"], loaded["foreign"], loaded["not_refused"]) == (0, 0, 0), loaded["why"]
    assert loaded["peak_mib"] < loaded["cap_mib"]
    assert (killed["foreign"], killed["dropped"]) == (0, 0)
