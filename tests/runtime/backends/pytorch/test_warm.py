"""A GPU's first session begins warm, and leaves its cache to the next; here without a GPU."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from tools import runtime_of
from uncaptured import Uncaptured

from kvcap.runtime.backends.pytorch import runtime as pytorch
from kvcap.runtime.backends.pytorch import warm
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.errors import MemoryCapExceeded, SessionBroken
from kvcap.runtime.models.arguments import cache_argument


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
        40,
        policy == "keydiff",
    )
    assert runtime.loop().cache.seen == 0


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


class LoopWithGraphs(BlockLoop):
    """A block loop as on a GPU, whose graphs capture nothing."""

    def __init__(self, model, cache, graphs=True, **options):
        given = graphs if isinstance(graphs, Uncaptured) else Uncaptured(model, cache)
        super().__init__(model, cache, graphs=given, **options)


def test_a_session_that_ended_leaves_its_cache_and_its_graphs_to_the_next(monkeypatch):
    monkeypatch.setattr(pytorch, "BlockLoop", LoopWithGraphs)
    model, ids = tiny_model("llama"), torch.arange(3, 60)[None]
    runtime = runtime_of(model)
    first, other = runtime.loop(), runtime.loop()
    cache, graphs, expected = first.cache, first.graphs, first.prefill(ids)
    assert other.cache is not cache
    del first
    second = runtime.loop()
    assert (second.cache, second.graphs, cache.seen) == (cache, graphs, 0)
    assert torch.equal(second.prefill(ids), expected)
    with pytest.raises(SessionBroken, match="has ended"), torch.no_grad():
        model(ids[:, :4], **cache_argument(model, cache), use_cache=True)
    del second, other
    assert runtime.free_idle() == 2 * cache.nbytes
    assert runtime.free_idle() == 0


def test_without_graphs_every_session_has_a_new_cache():
    runtime = runtime_of(tiny_model("llama"))
    loop = runtime.loop()
    first = loop.cache
    del loop
    assert runtime.loop().cache is not first
    assert runtime.free_idle() == 0
