"""`kvcap bench slots`: rows hold what they say, and ratios are of the same round."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcap.evals.bench import BenchmarkOptions, Result, options_for
from kvcap.lab.bench import slots
from kvcap.runtime.cache.slot_format import SlotFormat

SIZES: dict[str, Any] = {
    "lengths": (40,), "budgets": (48,), "block_size": 16, "steps": 2, "repeats": 2,
    "model": "random-tiny",
}  # fmt: skip


def checked(result: Result) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return rows by kind, positions and what is equal, after what holds of them all."""
    assert len(result.table().splitlines()) == 2 + len(result.rows)
    rows = json.loads(json.dumps(result.as_dict()))["rows"]
    for row in rows:
        for name in ("token_ms", "prefill_tok_s"):
            assert 0 < row[name]["p20"] <= row[name]["p50"] <= row[name]["p80"]
    assert rows[0]["token_ratio"] == rows[0]["prefill_ratio"] == 1
    floats, *others = rows
    for row in others:
        if row["equal"] == "slots":
            assert row["slots"] == floats["slots"]
            assert row["cache_bytes"] < 0.75 * floats["cache_bytes"]
        else:  # less than one slot is left
            assert row["slots"] > 1.5 * floats["slots"]
            assert 0.98 * floats["cache_bytes"] < row["cache_bytes"] <= floats["cache_bytes"]
    return {(row["kv_dtype"], row["positions"], row["equal"]): row for row in rows}


def test_every_type_of_slots_in_pytorch():
    rows = checked(slots.run(BenchmarkOptions(**SIZES)))
    kinds = ("int8", "int8-int4", "int4")
    fewer = [(kind, "compact", equal) for kind in kinds for equal in ("slots", "bytes")]
    assert list(rows) == [("bfloat16", "compact", "slots"), *fewer]
    assert {(row["n"], row["steps"], row["turns"]) for row in rows.values()} == {(40, 2, 2)}
    in_bytes = [rows[kind, "compact", "bytes"]["slots"] for kind in kinds]
    assert in_bytes == sorted(in_bytes)
    assert torch.get_num_threads() == 1 or slots.GPU


def test_a_model_of_a_directory_and_a_policy(tmp_path):
    folder = slots.directory("random-tiny", tmp_path)
    given = {**SIZES, "model": folder, "policies": ("streaming_llm",), "repeats": 1, "steps": 1}
    (first, *_) = slots.run(BenchmarkOptions(**given)).rows
    assert (first["model"], first["policy"]) == (folder, "streaming_llm")
    assert first["kv_dtype"] == "bfloat16"  # as its files have it


@pytest.mark.slow(ci=0)
def test_exports_of_compact_and_true_positions(tmp_path, capsys):
    given = {**SIZES, "files": tmp_path, "backend": "onnxruntime", "weights": ("int8",)}
    rows = checked(slots.run(BenchmarkOptions(**given)))
    fewer = [("int8", kept, equal) for kept in ("compact", "true") for equal in ("slots", "bytes")]
    assert list(rows) == [("float32", "compact", "slots"), *fewer]
    assert {row["steps"] for row in rows.values()} == {16}  # as many as are evicted at once
    assert rows["int8", "true", "bytes"]["slots"] > rows["int8", "compact", "bytes"]["slots"]
    assert capsys.readouterr().err.count("exporting") == 5


def test_every_cache_is_measured_before_the_next_round(monkeypatch):
    """The machine slows down: of the same rounds, the ratios are 2, 4 and 1."""
    log: list[str] = []
    cache = SimpleNamespace(nbytes=7)

    def toy(name: str, times: list[float]) -> Any:
        def measure(steps: int) -> dict[str, float]:
            log.append(name)
            assert steps == 6  # in whole rounds
            took = times[log.count(name) - 1]
            return {"token_ms": took, "prefill_tok_s": 8 / took}

        facts = {"kv_dtype": name, "positions": "compact", "equal": "slots", "slots": 3}
        loop = SimpleNamespace(cache=cache, execution="")
        return SimpleNamespace(measure=measure, fill=lambda: None, every=3, loop=loop, **facts)

    both = [toy("floats", [1, 2, 16]), toy("int8", [2, 8, 16])]
    monkeypatch.setattr(slots, "_in_pytorch", lambda options, device: [both])
    floats, int8 = slots.run(BenchmarkOptions(repeats=3, steps=4)).rows
    assert log == ["floats", "int8"] * 3
    assert (floats["token_ratio"], int8["token_ratio"], int8["prefill_ratio"]) == (1, 2, 0.5)


def test_filled_slots_are_all_in_use():
    """However short a prompt is, and over slots that are full nothing more is filled."""
    options = options_for("slots", {**SIZES, "lengths": (5,)})
    for held in next(slots._in_pytorch(options, "cpu")):
        held.fill()
        assert held.loop.cache.held == held.slots
        assert held.loop.cache.layout.slot_format == SlotFormat.of(
            None if held.kv_dtype == "bfloat16" else held.kv_dtype
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "tvm"}, "no backend is called 'tvm': pytorch or onnxruntime"),
        ({"lengths": (0,)}, "at least 1"),
        ({"budgets": (8, 0)}, "at least 1"),
        ({"steps": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        slots.run(BenchmarkOptions(**{**SIZES, **given}))
