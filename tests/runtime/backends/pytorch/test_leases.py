"""Caches and CUDA graphs that sessions lend each other."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import small_policy, tiny_model

import kvcap
from kvcap.kernels import choice
from kvcap.runtime.backends.pytorch import cuda_graphs
from kvcap.runtime.backends.pytorch import loop as block_loop
from kvcap.runtime.backends.pytorch import runtime as pytorch
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.models.arguments import cache_argument


class Replayed(cuda_graphs.BlockGraph):
    """A graph without a GPU: what was captured is run again, by the state it was captured in."""

    pool = None
    made = 0

    def __init__(self, model, cache, ids, kind, pool=None, at_once=False):
        type(self).made += 1
        self.model, self.cache, self.kind = model, weakref.ref(cache), kind
        cache.advance(kind.length, kept=kind.filling)

    def replay(self, ids, seen):
        cache, kind = self.cache(), self.kind
        counted = cache.seen > seen  # as it was made
        if not counted:
            before = cache.counters
            stays = kind.filling or not cuda_graphs.evicts(cache, kind.length, kind.excess)
            cache.advance(kind.length, kept=stays)
        after = cache.counters
        free = kind.length if kind.filling else 0
        cache.counters = [(seen, [held - free for held in all_held]) for _, all_held in after]
        start, counter = cache.next_position, torch.tensor(seen)
        blocks = cuda_graphs.blocks_of(cache, kind.length)
        with cache.passing(ForwardContext(start, blocks=blocks)) as current:
            current.bind_token_counter(counter, cache.block_size, kind.filling)
            place = cache.places(torch.arange(kind.length))
            out = self.model(
                input_ids=ids,
                position_ids=(start + place).expand(kind.batch, -1),
                **cache_argument(self.model, cache),
                use_cache=True,
                logits_to_keep=torch.full((int(kind.need_logits),), kind.length - 1),
            )
        assert cache.counters == after
        if not counted:
            cache.counters = before
        return out.logits.flatten(0, 1)


@pytest.fixture
def graphs_without_gpu(monkeypatch):
    """Has every loop replay graphs, those of which are counted."""
    make = block_loop.BlockLoop.__init__

    def made(self, model, cache, *args, graphs=True, **options):
        graphs = cuda_graphs.BlockGraphs(model, cache) if graphs is True else graphs
        make(self, model, cache, *args, graphs=graphs, **options)

    monkeypatch.setattr(pytorch.BlockLoop, "__init__", made)
    monkeypatch.setattr(cuda_graphs, "BlockGraph", Replayed)
    monkeypatch.setattr(Replayed, "made", 0)
    return Replayed


def runtime_of(model, policy, tokens=40, block=16):
    eviction = small_policy(policy, model.config)
    plan = kvcap.MemoryPlan.of(
        model.config, policy=eviction, kv_budget_tokens=tokens, block_size=block,
        dtype=torch.float32,
    )  # fmt: skip
    return pytorch.Runtime(model, None, plan, eviction)


def read(loop, ids, pins=()):
    """Logits of a prompt and of tokens one by one, some of them pinned; and every buffer."""
    loop.cache.pin(pins)
    logits = [loop.prefill(ids[:, :-6])]
    logits += [loop.read(ids[:, i : i + 1]) for i in range(ids.shape[1] - 6, ids.shape[1])]
    cache = loop.cache
    views = [
        x.clone() for layer in cache.capped_layers for s in layer.segments for x in s.buffers()
    ]
    return [torch.stack(logits), *views]


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("policy", [
    "keydiff", "snapkv", "h2o", "cake", "calidrop", "obcache", "pyramidkv", "headkv", "adakv",
    "criticalkv", "dropkv",
])  # fmt: skip
def test_a_cache_of_a_session_that_ended_is_as_new(policy, graphs_without_gpu):
    """Equal to the bit, after other tokens, pins and settings; nothing is captured again."""
    model = tiny_model("llama", num_hidden_layers=2)
    ids = 3 + torch.randint(90, (1, 150), generator=torch.Generator().manual_seed(0))
    runtime = runtime_of(model, policy)
    first = runtime.loop()
    read(first, ids.flip(1), pins=[(2, 3)])
    first.on_full, cache = "error", first.cache
    cache.unread = (7, cache.seen)
    captured, place = graphs_without_gpu.made, id(cache)
    del first, cache
    second = runtime.loop()
    assert id(second.cache) == place
    assert (second.on_full, second.cache.unread, second.cache.seen) == ("evict", None, 0)
    assert second.cache.pinned_spans == []
    fresh = runtime_of(model, policy).loop()
    found, expected = read(second, ids), read(fresh, ids)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert second.cache.counters == read_counters(model, policy, ids)
    if second.graphs.refused is None:
        assert captured > 0
        assert second.cache.recomputed == fresh.cache.recomputed
        assert len(second.graphs.captured) >= 1


def read_counters(model, policy, ids):
    loop = runtime_of(model, policy).loop()
    read(loop, ids)
    return loop.cache.counters


def test_a_second_session_captures_nothing(graphs_without_gpu):
    model, ids = tiny_model("llama"), 3 + torch.randint(90, (1, 150))
    runtime = runtime_of(model, "keydiff")
    made = []
    for _ in range(3):
        read(runtime.loop(), ids)
        made.append(graphs_without_gpu.made)
    # What the first read only once, the second captures.
    assert 0 < made[0] <= made[1] == made[2]


def test_sessions_at_once_have_a_cache_each_and_the_pool_holds_no_more(graphs_without_gpu):
    runtime = runtime_of(tiny_model("llama"), "keydiff")
    one, two = runtime.loop(), runtime.loop()
    assert one.cache is not two.cache
    each = one.cache.nbytes
    assert runtime.free_idle() == 0
    places = {id(one.cache), id(two.cache)}
    del one, two
    again = [runtime.loop() for _ in range(2)]
    assert {id(loop.cache) for loop in again} == places
    del again
    assert runtime.free_idle() == 2 * each
    assert runtime.free_idle() == 0


def test_a_cache_that_somebody_holds_is_left_to_them(graphs_without_gpu):
    runtime = runtime_of(tiny_model("llama"), "keydiff")
    loop = runtime.loop()
    held = loop.cache
    del loop
    assert runtime.loop().cache is not held
    del held
    loop = runtime.loop()
    place = id(loop.cache)
    del loop
    assert id(runtime.loop().cache) == place


@pytest.mark.parametrize("policy", ["keydiff", "h2o", "cake", "calidrop"])
def test_a_cache_and_its_graphs_are_freed_when_they_are_dropped(policy, graphs_without_gpu):
    """By counting references, as a GPU's memory is not what Python's cyclic collector looks at."""
    model, ids = tiny_model("llama"), 3 + torch.randint(90, (1, 150))
    runtime = runtime_of(model, policy)
    gc.collect()
    gc.disable()
    try:
        loop = runtime.loop()
        read(loop, ids)
        assert loop.graphs.captured
        made = [loop.cache, loop.graphs, *loop.graphs.captured.values(), *loop.cache.buffers()]
        freed = [weakref.ref(x) for x in made]
        del loop, made
        assert runtime.free_idle() > 0
        assert [gone() for gone in freed] == [None] * len(freed)
    finally:
        gc.enable()


def test_graphs_whose_capture_failed_are_not_lent(graphs_without_gpu):
    runtime = runtime_of(tiny_model("llama"), "keydiff")
    loop = runtime.loop()
    loop.graphs.refused = "capture failed: no room"
    del loop
    assert runtime.loop().execution == "CUDA graphs"


@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "dropkv", "calidrop", "h2o"])
def test_what_is_captured_ahead_is_what_answers_replay(policy, graphs_without_gpu, monkeypatch):
    """Equal to the bit, and of whole blocks and tokens nothing is left to capture."""
    monkeypatch.setattr(cuda_graphs, "PASS", 16)  # a block
    model = tiny_model("llama", num_hidden_layers=2)
    ids = 3 + torch.randint(90, (1, 150), generator=torch.Generator().manual_seed(0))
    fresh = runtime_of(model, policy).loop()
    expected = read(fresh, ids)
    ahead = runtime_of(model, policy).loop()
    ahead.graphs.prepare()
    cache, prepared = ahead.cache, set(ahead.graphs.captured)
    assert (cache.seen, cache.held, cache.counters) == (0, 0, [(0, [0])] * 2)
    assert {(kind.length, kind.filling) for kind in prepared} >= {(16, False), (1, False)}
    found = read(ahead, ids)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    more = {kind for kind in set(ahead.graphs.captured) - prepared if not kind.need_logits}
    assert not more


@pytest.mark.parametrize("found", [True, False])
def test_graphs_are_captured_ahead_where_kernels_were_compiled_before(found, monkeypatch):
    """Compiling, which takes seconds, is not to be waited for as a model is loaded."""
    prepared = []
    monkeypatch.setattr(pytorch, "warm_up", lambda *_, **__: SimpleNamespace(found=found))
    monkeypatch.setattr(pytorch.Runtime, "_prepare", lambda self: prepared.append(self))
    runtime = pytorch.Runtime.from_pretrained("pocket", kv_budget_tokens=64, device="cpu")
    assert prepared == ([runtime] if found else [])


@pytest.mark.parametrize(
    ("policy", "device", "times"),
    [("keydiff", "cuda", 1), ("keydiff", "cpu", 0), ("adakv", "cuda", 0), ("cake", "cuda", 0),
     ("full", "cuda", 0)],
)  # fmt: skip
def test_which_runtimes_capture_ahead(policy, device, times):
    asked = []

    def loop():
        asked.append(policy)
        raise torch.OutOfMemoryError  # which is left to the first session to say

    model = SimpleNamespace(device=torch.device(device))
    eviction = small_policy(policy, tiny_model("llama").config)
    pytorch.Runtime._prepare(SimpleNamespace(model=model, eviction=eviction, loop=loop))
    assert len(asked) == times


def test_without_graphs_every_session_has_a_new_cache():
    runtime = runtime_of(tiny_model("llama"), "keydiff")
    loop = runtime.loop()
    loop.prefill(torch.arange(3, 40)[None])
    del loop
    assert not runtime._idle


def test_kernels_that_are_not_wanted_are_not_compiled_ahead():
    runtime = runtime_of(tiny_model("llama"), "keydiff")
    with choice.use("eager"):
        assert pytorch.warm_up(runtime.model.config, runtime.plan, runtime.eviction, "cpu") is None
