"""Kernels that Triton's compiler accepts, where no GPU would show it."""

from __future__ import annotations

import json
import os
import sys

import pytest
from interpreted import DEVICE
from make import ran
from tools import ROOT

from kvcap.policies import policies

# Between them they launch nearly all kernels.
FEW = ["keydiff", "criticalkv-adakv", "calidrop", "balanced", "keydiff:int8", "snapkv:int4"]
REST = sorted(policies().keys() - {*FEW, "full"})


pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="there they are compiled to be run")


def compiled(*arguments):
    """What `compile_kernels.py` tells."""
    pytest.importorskip("triton")
    path = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests"))
    done = ran(
        [sys.executable, ROOT / "tests" / "compile_kernels.py", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("names", [FEW, pytest.param(REST, marks=pytest.mark.slow(ci=0))], ids=len)
def test_the_compiler_accepts_what_policies_launch(names):
    facts = compiled(*names)
    assert facts["refused"] == {}
    assert {"attend_part", "evict_one"} <= set(facts["kernels"])
    if names == FEW:
        assert {"write_slots", "read_slots"} <= set(facts["kernels"])


@pytest.mark.slow(ci=0)
def test_scores_by_a_window_keep_to_the_shared_memory_there_is():
    """Of wide heads, by few queries and by many, on an H100 and an RTX 3090."""
    facts = compiled("window")
    assert len(facts) == 12
    for room, *taken in facts.values():
        assert len(taken) == 3
        assert max(taken) <= room, facts
