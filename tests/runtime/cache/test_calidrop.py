"""CaliDrop: evicted tokens kept aside, what they add remembered, merged, and bounded."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any

import pytest
import torch
from conftest import tiny_model
from make import in_python

import kvcap
from kvcap.policies.base import Logits
from kvcap.runtime.attention.functions import attend_with_lse, causal, merge
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache import evicted_store as mapped_file
from kvcap.runtime.errors import StoreFailed

BASES: dict[str, dict[str, Any]] = {
    "streaming_llm": {"sinks": 2},
    "h2o": {},
    "snapkv": {"window": 4, "kernel": 3, "pool": "avg"},
}


def loop_of(model: Any, base: str = "snapkv", **options: Any) -> BlockLoop:
    """Budget 12, block 6, true positions unless `positions` says otherwise."""
    positions = options.pop("positions", "true")
    eviction = kvcap.load_policy(f"{base}+calidrop", **{**BASES[base], **options}).plain()
    return BlockLoop(model, kvcap.BudgetCache(model.config, 12, 6, eviction, positions=positions))


def test_merge_is_attention_over_both():
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    whole, whole_lse = attend_with_lse(q, k, v, Logits(0.3))
    a = attend_with_lse(q, k[:, :, :4], v[:, :, :4], Logits(0.3))
    b = attend_with_lse(q, k[:, :, 4:], v[:, :, 4:], Logits(0.3))
    merged, lse = merge(*a, *b)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(lse, whole_lse)
    nothing, _ = merge(*a, torch.zeros_like(a[0]), torch.full_like(a[1], float("-inf")))
    torch.testing.assert_close(nothing, a[0])


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_log_sum_exp_of_a_causal_block(softcap):
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    out, lse = attend_with_lse(q, k, v, Logits(0.3, softcap), causal(3, 7, q))
    for h in range(4):
        for t in range(3):
            z = (k[0, h // 2, : 5 + t] @ q[0, h, t]) * 0.3
            z = z if softcap is None else softcap * torch.tanh(z / softcap)
            torch.testing.assert_close(lse[0, h, t], z.logsumexp(0))
            torch.testing.assert_close(out[0, h, t], z.softmax(0) @ v[0, h // 2, : 5 + t])


def test_what_is_remembered_grows_with_what_is_evicted(tokens):
    """Without a recomputation it is still the old query's attention over all that is gone."""
    loop = loop_of(tiny_model("llama"), theta1=-1.0, theta2=-1.0, calibration_size=1000)
    ids = tokens(60)
    loop.prefill(ids[:, :30])
    calibration = loop.cache.layers[1].engine.evicted_store
    before = calibration._query.clone()
    loop.prefill(ids[:, 30:])
    for token in ids[:, :5].split(1, 1):
        loop.read(token)
    assert torch.equal(calibration._query, before)
    evicted = calibration.evicted[0]
    assert evicted.held == 65 - 12
    out, lse = attend_with_lse(calibration._query, evicted.keys, evicted.values, Logits(0.25))
    torch.testing.assert_close(calibration._out, out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(calibration._lse, lse, rtol=1e-4, atol=1e-5)
    assert loop.cache.recomputed == [0.0, 0.0]


def test_thresholds_decide_per_query_head():
    corrector = kvcap.load_policy("snapkv+calidrop").corrector
    cached = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2)
    angles = torch.tensor([0.75, 0.8, 0.3]).acos()[None, :, None]  # below θ1 only the last
    query = torch.stack((angles.cos(), angles.sin()), -1)
    anew, corrected = corrector.decide(query, cached)
    assert anew.flatten().tolist() == [False, False, True]
    assert corrected.flatten().tolist() == [False, False, True]
    close = torch.tensor([[[[0.9, (1 - 0.81) ** 0.5]]]])
    assert [m.item() for m in corrector.decide(close, cached[:, :1])] == [False, True]


def test_the_store_keeps_the_best_and_never_grows(tokens):
    loop = loop_of(tiny_model("llama"), "h2o", calibration_size=10)
    calibrations = []
    for part in tokens(90).split(6, 1):
        loop.read(part)
        calibrations = [layer.engine.evicted_store for layer in loop.cache.layers]
        assert all(c.evicted[0].held <= 10 for c in calibrations)
    plan = kvcap.MemoryPlan.of(
        loop.model.config,
        policy=loop.cache.eviction,
        budget_tokens=12,
        block_size=6,
        positions="true",
    )
    assert loop.cache.nbytes == plan.cache_bytes
    # (size + block) slots of keys, values, time, score, position, for two heads of two layers
    assert plan.evicted_store == 2 * 2 * 16 * (2 * 16 * 4 + 12)
    everything = loop_of(tiny_model("llama"), "h2o", calibration_size=1000)
    everything.prefill(tokens(90)[:, :36])
    bounded = loop_of(tiny_model("llama"), "h2o", calibration_size=10, theta1=-1.0, theta2=1.0)
    unbounded = loop_of(tiny_model("llama"), "h2o", calibration_size=1000, theta1=-1.0, theta2=1.0)
    for other in (bounded, unbounded):
        other.prefill(tokens(90)[:, :36])
    few, all_ = (x.cache.layers[0].engine.evicted_store.evicted[0] for x in (bounded, unbounded))
    best = all_.aux("score").topk(10).values.sort().values
    torch.testing.assert_close(few.aux("score").sort().values, best)


def test_generation_recomputes_now_and_then(tokens):
    loop = loop_of(tiny_model("llama"), calibration_size=64, theta1=0.0)
    loop.prefill(tokens(60))
    for i in range(20):
        loop.read(torch.tensor([[i + 3]]))
    assert all(0 < share < 1 for share in loop.cache.recomputed)
    loop.cache.reset()
    assert loop.cache.recomputed == [0.0, 0.0]
    assert loop.cache.layers[0].engine.evicted_store.evicted[0].held == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_gives_what_memory_gives(dtype, tokens, tmp_path):
    ids, logits = tokens(60, batch=2), []
    for store in ("device", str(tmp_path)):
        loop = loop_of(tiny_model("llama", dtype=dtype), store=store, calibration_size=20)
        loop.prefill(ids)
        logits.append(loop.read(ids[:, :1]))
    assert torch.equal(*logits)
    assert not list(tmp_path.iterdir()), "nothing that others could cut, or that would be left"
    file = loop.cache.allocation._file._file
    rows = loop.cache.layout.nbytes(2, dtype)["evicted_store"]
    assert os.fstat(file.fileno()).st_size == rows
    assert loop.cache.nbytes == sum(loop.cache.layout.nbytes(2, dtype).values())
    loop.cache.allocation._file._finalizer()
    assert file.closed


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_process_leaves_no_file(tmp_path):
    code = (
        "import os, signal, sys; from kvcap.runtime.cache.evicted_store import MappedFile\n"
        "MappedFile(sys.argv[1], 1 << 16)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = in_python(code, tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_take_the_file(tmp_path, monkeypatch, tokens):
    with pytest.raises(StoreFailed, match="exists and can be written"):
        loop_of(tiny_model("llama"), store=str(tmp_path / "none")).prefill(tokens(8))

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(mapped_file.os, "write", full)
    with pytest.raises(StoreFailed, match="No space left"):
        loop_of(tiny_model("llama"), store=str(tmp_path)).prefill(tokens(8))
    assert not list(tmp_path.iterdir())
