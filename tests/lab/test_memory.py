"""`kvcap memory`: figures of reading a prompt, beside those of a committed baseline."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvcap.cli import run

ROOT = Path(__file__).parents[2]
SMALL = ["--policies", "keydiff", "--budgets", "32", "--lengths", "256"]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    path = tmp_path_factory.mktemp("baseline") / "memory.json"
    assert run(["memory", "update", "--baseline", str(path), *SMALL]) == 0
    return path


def check(path: Path, *more: str) -> int:
    return run(["memory", "check", "--baseline", str(path), *more])


@pytest.mark.slow
def test_what_did_not_grow_passes(baseline, capsys):
    assert check(baseline, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["regressions"] == []
    assert printed["peaks_not_compared"] is None
    assert printed["cells"] == json.loads(baseline.read_text())["cells"]  # deterministic


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("figure", "factor", "said"),
    [("kv_bytes", 2, "KV bytes"), ("planned_bytes", 2, "planned"), ("peak_bytes", 0.97, "peak")],
)
def test_what_grew_fails_with_the_cell_and_the_figures(
    baseline, tmp_path, capsys, figure, factor, said
):
    document = json.loads(baseline.read_text())
    now = document["cells"][0][figure]
    was = document["cells"][0][figure] = int(now * factor)
    path = tmp_path / "other.json"
    path.write_text(json.dumps(document))
    assert check(path) == 1
    out = capsys.readouterr().out
    assert re.search(rf"keydiff, 32 slots, 256 tokens: {said}.* {now:,}, baseline {was:,}", out)
    if figure == "peak_bytes":
        assert check(path, "--tolerance", "5") == 0
        document["measured_on"]["torch"] = "1.0"
        path.write_text(json.dumps(document))
        assert check(path) == 0
        assert "peaks were not compared: torch 1.0 in the baseline" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"format": 2}', '{"format": 1, "matrix": {}, "cells": [1]}']
)
def test_a_missing_or_malformed_baseline_is_wrong_input(tmp_path, capsys, text):
    path = tmp_path / "memory.json"
    if text is not None:
        path.write_text(text)
    assert check(path) == 2
    assert "kvcap memory update" in capsys.readouterr().err


def test_a_cell_the_baseline_lacks_is_wrong_input(baseline, capsys):
    assert check(baseline, "--budgets", "33") == 2
    assert "lacks keydiff, 33 slots" in capsys.readouterr().err


def test_our_own_bytes_are_those_of_the_committed_baseline():
    assert check(ROOT / "memory-baseline.json", "--lengths", "1024", "--budgets", "64") == 0
