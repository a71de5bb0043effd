"""Tests kvcap's export beside optimum's, where optimum is: beside transformers 4.57."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from make import ran

SCRIPT = Path(__file__).parents[3] / "scripts" / "compare-optimum"


@pytest.mark.skipif(
    importlib.util.find_spec("optimum") is None,
    reason="optimum-onnx is not installed here: it needs transformers below 4.58",
)
def test_optimums_decoder_gives_the_logits_of_kvcaps():
    done = ran([sys.executable, "-P", str(SCRIPT), "pocket", "32"])
    assert done.returncode == 0, done.stderr
    assert "of the largest; optimum" in done.stdout
