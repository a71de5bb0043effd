"""Pinned tokens: in every layer and head after any number of evictions, or refused beforehand."""

from __future__ import annotations

import warnings

import pytest
from conftest import in_turn, small_policy, tiny_model
from tools import runtime_of

import kvcap
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.pinned_slots import covered
from kvcap.runtime.errors import PinsTooLarge

MODELS = {family: tiny_model(family) for family in ("llama", "gemma3_text", "smollm3")}


def cache_of(model, policy, budget=40, positions="compact"):
    eviction = small_policy(policy, model.config, beta=2)  # pyramidkv: no layer of a few slots
    return kvcap.BudgetCache(model.config, budget, 8, eviction, positions=positions).allocate(
        1, model.dtype, "cpu"
    )


def held_everywhere(cache, spans):
    wanted = {p for start, stop in spans for p in range(start, stop)}
    for layer in cache.capped_layers:
        for segment in layer.segments:
            for row in segment.positions[0]:
                assert wanted <= set(row.tolist()), (layer.index, segment.head)


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(("policy", "positions", "first"), in_turn(
    ["adakv", "cake", "criticalkv-adakv", "h2o", "snapkv"],
    [("compact", 0), ("true", 30), ("compact", 30), ("true", 0)], 2,
))  # fmt: skip
def test_most_of_the_budget_pinned_where_slots_move(first, policy, positions, tokens):
    """A layer or a head that wants little still has room for its pins."""
    model, ids = MODELS["smollm3"], tokens(300)
    cache = cache_of(model, policy, positions=positions)
    loop = BlockLoop(model, cache)
    if first:
        loop.prefill(ids[:, :first])
    pins = cache.eviction.pins(40)
    spans = [(first, first + 39 - pins)]
    cache.pin(spans)
    for i in range(first, 300, 15):
        loop.prefill(ids[:, i : i + 15])
        held_everywhere(cache, [(first, min(spans[0][1], cache.seen))])
    held_everywhere(cache, spans)


def test_the_number_named_would_do():
    model = MODELS["llama"]
    with pytest.raises(PinsTooLarge, match="needs 35 slots"):
        cache_of(model, "streaming_llm", 34).pin([(1, 34), (20, 35)])  # 2 sinks, one within
    cache_of(model, "streaming_llm", 35).pin([(1, 34), (20, 35)])


def test_what_was_announced_but_not_read_is_not_pinned(tokens):
    """A Ctrl-C between blocks leaves a span that other tokens must not fill."""
    model, ids = MODELS["llama"], tokens(60)
    cache = cache_of(model, "keydiff")
    cache.pin([(0, 30)])
    BlockLoop(model, cache).prefill(ids[:, :16])
    cache.pin([])
    assert cache.pinned_spans == [(0, 16)]
    cache.reset()
    assert cache.pinned_spans == []


def test_covered():
    assert covered([]) == 0
    assert covered([(0, 4), (2, 6), (8, 9), (8, 9)]) == 7


def test_a_warning_once_beyond_the_trained_length(tokens):
    """Only true positions leave what the model was trained on."""
    model = tiny_model("llama", max_position_embeddings=64)
    for positions, expected in (("true", 1), ("compact", 0)):
        session = runtime_of(model, positions=positions).session()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                session.loop.prefill(tokens(40))
                session._decoding._warn_beyond()
        assert len(caught) == expected
        assert all("beyond the 64 tokens" in str(w.message) for w in caught)
