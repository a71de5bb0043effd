"""Benchmarks at toy sizes: each gives a table and a JSON object, and measures what it says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kvcap.evals.bench import BenchmarkOptions, benchmarks, load, options_for
from kvcap.evals.measure import MIB, allocator_peak, percentiles
from kvcap.runtime.session.encoding import PIECE

TOY = BenchmarkOptions(
    lengths=(64, 128),
    budgets=(32,),
    block_size=16,
    repeats=2,
    steps=16,
    evictions=40,
    layers=2,
    hidden=128,
    model="pocket",
)


ELSEWHERE = (
    "clients",
    "cpu",
    "equal-bytes",
    "passages",
    "perturbation",
    "proxy",
    "saliency",
    "serve",
    "slots",
    "stream",
    "turns",
    "use",
    "weights",
)
"""Benchmarks that have test files of their own."""
ON_CUDA = ("gpu", "kernels", "parts", "throughput", "token")


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", [name for name in benchmarks() if name not in ELSEWHERE + ON_CUDA])
def test_a_benchmark_gives_a_table_and_one_json_object(name):
    result = load(name)(TOY)
    row = json.loads(json.dumps(result.as_dict()))
    assert {"bench", "device", "versions", "threads", "rows"} <= set(row)
    assert len(result.table().splitlines()) == 2 + len(row["rows"])
    for line in row["rows"]:
        times = [value for value in line.values() if isinstance(value, dict)]
        assert times
        assert all(0 < t["p20"] <= t["p50"] <= t["p80"] for t in times)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a CUDA device")
@pytest.mark.parametrize("name", ON_CUDA)
def test_benchmarks_that_need_cuda_say_so(name):
    with pytest.raises(ValueError, match="needs a CUDA device"):
        load(name)(TOY)


@pytest.mark.slow
def test_prefill_memory_is_flat_and_the_peer_grows():
    result = load("prefill")(TOY)
    peak = {(row["runs"], row["tokens"]): row["peak_mib"] for row in result.rows}
    assert peak["kvcap", 64] == peak["kvcap", 128]
    assert peak["transformers", 128] > 1.5 * peak["transformers", 64]
    assert set(result.derived["ratios"]) == {"64", "128"}


def test_scoring_compares_policies_with_keydiff():
    names = ("snapkv", "full", "headkv", "h2o+criticalkv")  # headkv gets a table of its own
    result = load("scoring")(replace(TOY, policies=names, budgets=(40, 48)))
    rows = {(row["policy"], row["budget"]): row for row in result.rows}
    assert {name for name, _ in rows} == {"keydiff", *names} - {"full"}
    assert len(rows) == 8
    assert rows["keydiff", 48]["ratio"] == 1
    assert rows["keydiff", 48]["extra_bytes"] == 0
    assert rows["h2o+criticalkv", 48]["extra_bytes"] == 2 * (48 + 16) * 2 * 4


@pytest.mark.parametrize("name", benchmarks())
def test_defaults_of_benchmarks_are_options(name):
    assert options_for(name, {"repeats": 7, "budgets": (9,)}).repeats == 7
    assert options_for("scoring", {}).policies == ("all",)


def test_a_text_has_the_same_tokens_however_it_is_encoded():
    rows = load("encoding")(replace(TOY, lengths=(60, 8000), repeats=1)).rows
    assert [row["same"] for row in rows] == [True, True]
    assert rows[1]["letters"] > PIECE + PIECE // 2  # in pieces
    assert all(row["ratio_least"] <= row["ratio"] <= row["ratio_most"] for row in rows)


def test_a_turn_recalls_what_is_timed():
    options = replace(TOY, model="pocket", lengths=(1500,), budgets=(256,), repeats=1)
    (row,) = load("recall")(options).rows
    assert 1400 < row["tokens"] <= 1500
    assert row["index_bytes"] > 0
    assert 0 < row["recalled"] <= 128
    assert 0 < row["turn_least"] <= row["turn"] <= row["turn_most"]


def test_keys_rotated_in_place_drift():
    error = {(r["keys"], r["dtype"]): r["error_max"] for r in load("positions")(TOY).rows}
    for dtype in ("float32", "bfloat16"):
        assert error["in place", dtype] > 4 * error["by shift", dtype]


def test_unknown_benchmarks_name_the_known():
    with pytest.raises(ValueError, match=r"known: clients, cpu, decode, .*positions, prefill"):
        load("prefil")


def test_allocator_peak_is_exact():
    def work() -> torch.Tensor:
        a = torch.empty(MIB // 4)
        b = torch.empty(MIB // 2)
        del a
        return torch.cat((b, torch.empty(MIB // 4)))  # 2 + 1 + 3 MiB at once

    assert allocator_peak(work) == 6 * MIB


def test_percentiles():
    assert percentiles([float(i) for i in range(11)]) == {"p20": 2.0, "p50": 5.0, "p80": 8.0}
