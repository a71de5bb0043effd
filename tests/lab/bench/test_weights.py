"""What weights of fewer bits cost: the figures are of the weights that they name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tools import operations  # noqa: F401

from kvcap.cli import run
from kvcap.evals.bench import BenchmarkOptions, load
from kvcap.export.decoder import write
from kvcap.lab.bench import weights
from kvcap.runtime.cli import kept_exports


@pytest.fixture
def exports_here(monkeypatch):
    """Make exports in this process, and trace once, as weights are a graph's inputs.

    One whose slots are int8 has others, their scales.
    """
    commands = []

    def run_here(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=run(command[command.index("kvcap") + 1 :]))

    def once(trace):
        by_request = {}

        def copied(what):
            inputs = len(what.inputs)
            if inputs not in by_request:
                graph = trace(what)
                by_request[inputs] = type(graph), graph.SerializeToString()
            kind, data = by_request[inputs]
            return kind.FromString(data)

        return copied

    monkeypatch.setattr(kept_exports, "subprocess", SimpleNamespace(run=run_here, DEVNULL=None))
    for name in ("trace", "trace_evictor"):
        monkeypatch.setattr(write, name, once(getattr(write, name)))
    return commands


@pytest.mark.slow(ci=0)
def test_fewer_bits_predict_less_alike(monkeypatch, tmp_path, exports_here):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "SENTENCES", 400)
    monkeypatch.setattr(weights, "TEXTS", 3)
    rows = load("weights")(BenchmarkOptions(lengths=(64,), budgets=(64,), repeats=1)).rows
    by = {row["weights"]: row for row in rows}
    four, better = ["int4"], ["int4, calibrated"]
    by_torch = ["int8, PyTorch", "int4, PyTorch"]
    slots = "int8, int8 slots"
    assert list(by) == ["float32", "bfloat16", "int8", slots, *four, *better, *by_torch]
    assert len(exports_here) == 4
    assert 0 < by[slots]["kl"] < by["int4"]["kl"]
    assert by["float32"]["kl"] == 0
    assert by["float32"]["same_token"] == 1
    assert all(by[name]["kl"] > 2 * by["int8"]["kl"] > 0 for name in four)
    assert by[by_torch[1]]["kl"] > 2 * by[by_torch[0]]["kl"] > 0
    pairs = zip(four, better, strict=True)
    assert all(by[name]["kl"] > by[other]["kl"] > by["int8"]["kl"] for name, other in pairs)
    sizes = [by[name]["bytes"] for name in ("int4", "int8", "bfloat16", "float32")]
    assert sizes == sorted(sizes)
    assert all(row["recall"] in (0, 1) for row in rows)
