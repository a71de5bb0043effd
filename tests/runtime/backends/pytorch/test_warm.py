"""The conversation by which a GPU compiles and loads what answers launch, here without one."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from tools import runtime_of

from kvcap.runtime.backends.pytorch import warm
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.errors import MemoryCapExceeded


@pytest.mark.parametrize("policy", ["keydiff", "full"])
def test_a_conversation_fills_the_cache_and_leaves_it_empty(policy, monkeypatch):
    runtime, most, read = runtime_of(tiny_model("llama"), policy, budget=40), [], BlockLoop.read

    def noted(loop, ids, **further):
        logits = read(loop, ids, **further)
        most.append((ids.shape[1], loop.cache.seen, loop.cache.held))
        return logits

    monkeypatch.setattr(BlockLoop, "read", noted)
    runtime.warm()
    assert {length for length, _, _ in most} >= {1, 2, 8}
    assert (max(held for _, _, held in most), any(n > 40 for _, n, _ in most)) == (
        40, policy == "keydiff")  # fmt: skip
    first, second = runtime.loop(), runtime.loop()
    assert (first.cache.seen, first.cache.held, second.cache.seen) == (0, 0, 0)
    assert first.cache is not second.cache


def test_a_first_session_answers_as_any_other():
    model, ids = tiny_model("llama"), torch.arange(3, 60)[None]
    runtime = runtime_of(model, "keydiff")
    runtime.warm()
    first, second = (runtime.loop().prefill(ids) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("error", [MemoryCapExceeded("no room"), torch.OutOfMemoryError("none")])
def test_a_conversation_without_memory_ends_early(error, monkeypatch):
    runtime = runtime_of(tiny_model("llama"))

    def refuse(*_):
        raise error

    monkeypatch.setattr(warm.BlockLoop, "prefill", refuse)
    runtime.warm()
    assert runtime.loop().cache.seen == 0


def test_another_error_is_not_hidden(monkeypatch):
    def fail(*_):
        raise RuntimeError("a kernel is wrong")

    monkeypatch.setattr(warm.BlockLoop, "prefill", fail)
    with pytest.raises(RuntimeError, match="a kernel is wrong"):
        runtime_of(tiny_model("llama")).warm()
