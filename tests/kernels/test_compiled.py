"""Kernels that Triton's compiler accepts, where no GPU would show it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from interpreted import DEVICE
from tools import ROOT

from kvcap.policies import policies

# Between them they launch nearly all kernels.
FEW = ["keydiff", "criticalkv-adakv", "calidrop", "balanced"]
REST = sorted(policies().keys() - {*FEW, "full"})


@pytest.mark.skipif(DEVICE == "cuda", reason="there they are compiled to be run")
@pytest.mark.parametrize("names", [FEW, pytest.param(REST, marks=pytest.mark.slow)], ids=len)
def test_the_compiler_accepts_what_policies_launch(names):
    pytest.importorskip("triton")
    path = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests"))
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "compile_kernels.py", *names],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["refused"] == {}
    assert {"attend_part", "evict_one"} <= set(found["kernels"])
