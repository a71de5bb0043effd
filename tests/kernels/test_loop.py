"""Every kernel at once: whole runs by kernels against eager ones, in triton's interpreter too."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import small_policy, tiny_model
from interpreted import DEVICE, pytestmark  # noqa: F401
from pretended_graphs import Stream, pretend

import kvcap
from kvcap import kernels
from kvcap.kernels import calidrop, evict, quantised_token, rows, token, window
from kvcap.runtime.attention import functions as attention
from kvcap.runtime.backends.pytorch import cuda_graphs
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache import attend as layer_attention
from kvcap.runtime.cache import step as side_stream
from kvcap.runtime.cache.allocation import LayerStorage
from kvcap.runtime.cache.evictor import Evictor
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.models.rope import Rotation

POLICIES = ("keydiff-window", "dropkv", "h2o", "obcache", "pyramidkv", "headkv", "criticalkv")


def read(policy, positions, choice):
    ids = 3 + torch.randint(90, (1, 47), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    # With 'auto' positions the tokens after these are compact.
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=45).to(DEVICE)
    base, *corrected = policy.split("+")
    eviction = small_policy(base, model.config)
    if corrected:
        eviction = replace(eviction, corrector=small_policy(*corrected, model.config).corrector)
    cache = kvcap.BudgetCache(model.config, 40, 16, eviction, positions=positions)
    with kernels.use(choice):
        loop = BlockLoop(model, cache, graphs=False)
        logits = [loop.prefill(ids[:, :45])]
        assert cache.leaves_window(1) == (positions == "auto")
        cache.pin([(45, 46)])
        logits += [loop.read(ids[:, i : i + 1]) for i in range(45, 47)]
    heads = [h for layer in cache.capped_layers for s in layer.segments for h in s.positions[0]]
    return torch.stack(logits), [sorted(head.tolist()) for head in heads]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("policy", "positions"),
    [*((policy, "auto" if policy == "headkv" else "compact") for policy in POLICIES),
     ("dropkv", "true"), ("keydiff-window", "auto"), ("calidrop", "true"), ("calidrop", "auto"),
     ("calidrop-h2o", "compact"), ("criticalkv+calidrop", "compact"),
     ("headkv+calidrop", "compact")],
)  # fmt: skip
def test_the_same_logits_and_the_same_tokens_kept(policy, positions, monkeypatch):
    eager, kept = read(policy, positions, "eager")
    calls = []

    def counted(function):
        return lambda *a, **k: (calls.append(1), function(*a, **k))[1]

    for module, name in (
        (evict, "give_up"), (rows, "give_up"), (rows, "give_up_one"), (calidrop, "take"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    by_kernels, kept_too = read(policy, positions, "triton")
    assert calls  # kernels did run
    torch.testing.assert_close(by_kernels, eager, rtol=1e-4, atol=1e-4)
    assert kept_too == kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "positions", "choice", "kind"),
    [("dropkv", "compact", "triton", None), ("full", "true", "triton", None),
     ("keydiff-window", "compact", "eager", None), ("dropkv", "true", "eager", None),
     ("keydiff", "compact", "eager", "int4"), ("keydiff", "compact", "triton", "int8-int4"),
     ("keydiff", "true", "triton", "int8"), ("h2o", "compact", "triton", None),
     ("criticalkv", "true", "triton", None), ("obcache-h2o", "true", "triton", None),
     ("calidrop-h2o", "compact", "triton", None), ("calidrop-h2o", "true", "triton", None)],
)  # fmt: skip
def test_a_cache_that_fills_as_a_graph_does_holds_the_same(policy, positions, choice, kind):
    """What is in use is told on the device; read outside of a graph, as when one is prepared."""
    ids = 3 + torch.randint(90, (2, 52), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    model = tiny_model("qwen3", num_hidden_layers=1).to(DEVICE)
    eviction = small_policy(policy, model.config)
    found = []
    for filling in (True, False):
        cache = kvcap.BudgetCache(
            model.config, 40, 16, eviction, positions=positions, kv_dtype=kind
        ).allocate(2, torch.float32, DEVICE)
        logits = []
        with kernels.use(choice if filling else "eager"):
            loop = BlockLoop(model, cache, graphs=False)
            if filling:
                loop.graphs = cuda_graphs.Uncaptured(model, cache)
            for start, stop in ((0, 16), (16, 32), (32, 33), (33, 34)):
                assert cuda_graphs.fills(cache, stop - start) or not filling
                logits.append(loop.read(ids[:, start:stop]))
            assert not cuda_graphs.fills(cache, 7)
            assert not filling or {kind.filling for kind in loop.graphs._warm} == {True}
            if policy != "full":
                logits.append(loop.prefill(ids[:, 34:]))
        found.append((torch.stack(logits), [x.clone() for x in cache.buffers()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_only_what_nothing_was_given_up_of_fills():
    model = tiny_model("llama")
    for policy, fills in (("keydiff", True), ("snapkv", True), ("h2o", False), ("headkv", False)):
        cache = kvcap.BudgetCache(model.config, 40, 16, small_policy(policy, model.config))
        loop = BlockLoop(model, cache)
        assert not cuda_graphs.fills(cache, 1)  # there is no memory yet
        loop.prefill(torch.randint(90, (1, 8)))
        assert cuda_graphs.fills(cache, 1) == fills
        loop.prefill(torch.randint(90, (1, 40)))
        assert not cuda_graphs.fills(cache, 1)
        cache.reset()
        assert cuda_graphs.fills(cache, 8) == fills


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("policy", [*POLICIES, "keydiff", "streaming_llm", "calidrop"])
def test_blocks_in_one_pass_equal_passes_of_their_own(policy, positions):
    ids = 3 + torch.randperm(126, generator=torch.Generator().manual_seed(0))[None].to(DEVICE)
    model = tiny_model("qwen3", vocab_size=130).to(DEVICE)
    found = []
    for several in (True, False):
        eviction = small_policy(policy, model.config)
        cache = kvcap.BudgetCache(model.config, 40, 8, eviction, positions=positions)
        loop = BlockLoop(model, cache, graphs=False)
        loop.prefill(ids[:, :81])  # with an odd end
        cache.pin([(102, 103)])
        assert cuda_graphs.excess(cache) == 0
        logits = [loop.read(ids[:, 81:105]) if several else loop.prefill(ids[:, 81:105])]
        assert cache.context == ForwardContext()
        assert cache.seen == 105
        logits += [loop.read(ids[:, 105:125]) if several else loop.prefill(ids[:, 105:125])]
        logits += [loop.read(ids[:, 125:126])]
        found.append((torch.stack(logits), [x.clone() for x in cache.buffers()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("policy", ["keydiff", "dropkv", "h2o", "criticalkv"])
def test_what_goes_is_chosen_before_a_block_is_attended(policy, monkeypatch):
    """Where another block of the pass waits; the same goes as where nothing is chosen early."""
    ids = 3 + torch.randperm(82, generator=torch.Generator().manual_seed(0))[None].to(DEVICE)
    model, found, log = tiny_model("llama", num_hidden_layers=1).to(DEVICE), [], []
    names = ("choose", evict), ("move", evict), ("attend", layer_attention)
    for name, where in (*names, ("attend_with_lse", layer_attention)):
        done = getattr(where, name)
        name = name.removesuffix("_with_lse")
        noted = partial(lambda done, name, *a, **k: log.append(name) or done(*a, **k), done, name)
        monkeypatch.setattr(where, done.__name__, noted)
    for possible in (True, False):
        if not possible:
            monkeypatch.setattr(Evictor, "select_early", lambda *_: [])
        cache = kvcap.BudgetCache(model.config, 40, 16, small_policy(policy, model.config))
        loop = BlockLoop(model, cache, graphs=False)
        loop.prefill(ids[:, :48])
        log.clear()
        with kernels.use("triton"):
            logits = loop.read(ids[:, 48:80])  # two blocks
        late = ["attend", "choose", "move"]
        first = ["choose", "attend", "move"] if possible else late
        assert log == first + late
        found.append((logits, [x.clone() for x in cache.buffers()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_several_blocks_are_read_at_once_where_all_are_alike(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "PASS", 50)  # three blocks of 16
    model, ids = tiny_model("llama"), torch.randint(90, (1, 32))
    for policy, fills, evicts in (("keydiff", 48, 48), ("h2o", None, 48), ("adakv", None, None)):
        cache = kvcap.BudgetCache(model.config, 64, 16, policy).allocate(1, torch.float32, "cpu")
        loop, graphs = BlockLoop(model, cache), cuda_graphs.BlockGraphs(model, cache)
        assert graphs.pass_length(1, 60) == fills
        assert graphs.pass_length(1, 47) is None  # the prompt ends before
        assert graphs.pass_length(2, 60) is None  # blocks of two sequences are large enough
        loop.prefill(ids)
        assert (
            graphs.pass_length(1, 60) is None
        )  # neither do they all fit, nor does each evict as many
        loop.prefill(ids)
        assert graphs.pass_length(1, 60) == evicts
        assert cuda_graphs.BlockGraphs(model, cache, several=False).pass_length(1, 60) is None


@pytest.fixture
def captured(monkeypatch):
    """What is noted of passes of three blocks of 16, captured without a GPU."""
    monkeypatch.setattr(cuda_graphs, "PASS", 50)
    return pretend(monkeypatch)


def test_a_layer_waits_for_the_one_whose_stream_it_takes(captured, monkeypatch):
    """And what that one read is kept until then."""
    streams = [Stream(name, captured) for name in ("one", "two")]
    monkeypatch.setattr(side_stream, "_streams", lambda _: streams)
    monkeypatch.setattr(side_stream, "LAYERS", 2)
    side, read = side_stream.SideStream(torch.device("cpu")), []
    with side:
        for _ in range(4):
            side.next_layer()
            side.make_room()
            captured.append("layer")
            tensor = torch.zeros(1)
            read.append(weakref.ref(tensor))
            with side.run_async(tensor):
                pass
            del tensor
            captured.append(sum(reference() is not None for reference in read))
    layers = ["layer", "one waits", 1, "layer", "two waits", 2]
    layers += ["main waits", "layer", "one waits", 2, "main waits", "layer", "two waits", 2]
    assert captured == [*layers, "main waits", "main waits"]


def test_nothing_waits_for_layers_that_keep_little_but_the_end(captured, monkeypatch):
    streams = [Stream(name, captured) for name in ("one", "two")]
    monkeypatch.setattr(side_stream, "_streams", lambda _: streams)
    monkeypatch.setattr(side_stream, "LAYERS", 2)
    side = side_stream.SideStream(torch.device("cpu"))
    with side:
        for _ in range(3):
            side.next_layer()
            with side.run_async(None):
                pass
    assert captured == ["one waits", "two waits", "one waits", "main waits", "main waits"]


def test_layers_of_many_sequences_evict_one_at_a_time(captured):
    for batch, streams in ((1, 4), (2, 2), (3, 1), (100, 1)):
        captured.clear()
        side = side_stream.SideStream(torch.device("cpu"), batch)
        with side:
            for _ in range(4):
                side.next_layer()
                side.make_room()
                with side.run_async(None):
                    pass
        assert captured[: streams + 1] == [*["side waits"] * streams, "main waits"]


def test_a_capture_that_fails_is_joined_and_blocks_go_on_eagerly(captured):
    """Torch can end no capture of which a branch is loose. The first is tried in a hurry."""
    model = tiny_model("llama", vocab_size=130)
    ids = 3 + torch.randperm(126, generator=torch.Generator().manual_seed(0))[None, :112]
    cache = kvcap.BudgetCache(model.config, 40, 16, "keydiff").allocate(1, torch.float32, "cpu")
    loop, eager = BlockLoop(model, cache), kvcap.BudgetCache(model.config, 40, 16, "keydiff")
    loop.graphs = cuda_graphs.BlockGraphs(model, cache)
    loop.prefill(ids[:, :64])

    def fail(*_):
        side = cache.context.stream
        if side is not None:
            with side.run_async(None):
                raise RuntimeError("no room")

    handle = model.model.layers[0].register_forward_pre_hook(fail)
    for block, (at_once, told) in enumerate((
        ([True], "CUDA graphs"),
        ([False], "without CUDA graphs: capture failed: no room"),
        ([], "without CUDA graphs: capture failed: no room"),
    )):  # fmt: skip
        captured.clear()
        captured.at_once.clear()
        found = loop.prefill(ids[:, 64 + 16 * block : 80 + 16 * block])
        assert loop.execution == told
        assert captured.at_once == at_once
        assert captured == ["side waits", "main waits"] * len(at_once)
    handle.remove()
    assert cache.seen == 112
    expected = BlockLoop(model, eager, graphs=False).prefill(ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_could_not_be_captured_at_once_is_after_one_of_its_kind_was_read(captured):
    """As what uploads something when it first runs."""
    model, found, failed = tiny_model("llama", vocab_size=130), [], []
    ids = 3 + torch.randperm(126, generator=torch.Generator().manual_seed(0))[None]
    for graphs in (True, False):
        cache = kvcap.BudgetCache(model.config, 40, 16).allocate(1, torch.float32, "cpu")
        loop = BlockLoop(model, cache, graphs=False)
        if graphs:
            loop.graphs = cuda_graphs.BlockGraphs(model, cache)
        warm = set()

        def first(_, given, cache=cache, warm=warm):
            kind = given[0].shape[1], cache.context.filling
            if cache.context.stream is None:
                warm.add(kind)
            elif kind not in warm:
                failed.append(kind)
                raise RuntimeError("it is to be uploaded")

        handle = model.model.layers[0].register_forward_pre_hook(first)
        logits = [loop.read(part) for part in ids[:, :112].split(16, 1)]
        logits += [loop.read(part) for part in ids[:, 112:116].split(1, 1)]
        handle.remove()
        found.append((torch.stack(logits), [x.clone() for x in cache.buffers()]))
        assert loop.execution == ("CUDA graphs" if graphs else "")
    assert failed == [(16, True), (1, False)]
    assert captured.at_once == [True, False] + 4 * [True] + [True, False, False, False]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_within_a_capture(collects):
    """It may be a graph, whose end breaks the capture; afterwards all is as it was."""
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        for error in (None, RuntimeError("capture failed")):
            with suppress(RuntimeError), cuda_graphs._garbage_stays():
                assert not gc.isenabled()
                if error is not None:
                    raise error
            assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_copies_of_few_layers_keys_are_held_at_a_time(captured, monkeypatch):
    """Of blocks, and of tokens over so many slots that they are attended as blocks are."""
    ids = 3 + torch.randint(90, (1, 81), generator=torch.Generator().manual_seed(0))
    model, copies, alive = tiny_model("llama", num_hidden_layers=5), [], []
    monkeypatch.setattr(attention, "MANY_SLOTS", 0)
    beside = side_stream.SideStream.run_async

    def noting(self, kept, **options):
        copies.append(weakref.ref(kept))
        alive.append(sum(copy() is not None for copy in copies))
        return beside(self, kept, **options)

    monkeypatch.setattr(side_stream.SideStream, "run_async", noting)
    for batch, layers in ((1, 4), (2, 2)):
        cache = kvcap.BudgetCache(model.config, 40, 16, "keydiff")
        loop = BlockLoop(model, cache.allocate(batch, torch.float32, "cpu"), graphs=False)
        loop.graphs = cuda_graphs.BlockGraphs(model, cache, several=False)
        loop.prefill(ids[:, :48].expand(batch, -1))
        for length in (16, 1):
            copies.clear()
            alive.clear()
            for start in (48, 64):  # the second is captured
                loop.read(ids[:, start : start + length].expand(batch, -1))
            assert loop.execution == "CUDA graphs"
            assert max(alive) == layers


@pytest.mark.skipif(DEVICE != "cpu", reason="a CPU's kernels are captured")
def test_a_token_over_many_slots_copies_no_keys_to_rotate_them(captured, monkeypatch):
    ids = 3 + torch.randint(90, (2, 66), generator=torch.Generator().manual_seed(0))
    model, rotated = tiny_model("llama"), []
    monkeypatch.setattr(attention, "MANY_SLOTS", 0)
    back = Rotation.back_and_sums

    def noting(self, x, *args, **more):
        rotated.append(x.shape)
        return back(self, x, *args, **more)

    monkeypatch.setattr(Rotation, "back_and_sums", noting)
    cache = kvcap.BudgetCache(model.config, 40, 16, "keydiff", positions="compact")
    loop = BlockLoop(model, cache.allocate(2, torch.float32, "cpu"), graphs=False)
    loop.graphs = cuda_graphs.BlockGraphs(model, cache, several=False)
    with kernels.use("triton"):
        loop.prefill(ids[:, :64])
        assert rotated
        rotated.clear()
        for one in ids[:, 64:].split(1, dim=1):
            loop.read(one)
    assert loop.execution == "CUDA graphs"
    assert not rotated


@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("policy", ["keydiff", "dropkv", "calidrop"])
def test_what_is_captured_is_what_is_read(policy, positions, captured):
    ids = 3 + torch.randperm(216, generator=torch.Generator().manual_seed(1))[None]
    model = tiny_model("qwen3", vocab_size=220)
    found = []
    for graphs in (True, False):
        eviction = small_policy(policy, model.config)
        cache = kvcap.BudgetCache(model.config, 64, 16, eviction, positions=positions)
        cache.allocate(1, torch.float32, "cpu")
        loop = BlockLoop(model, cache, graphs=False)
        loop.graphs = cuda_graphs.BlockGraphs(model, cache) if graphs else None
        logits = [loop.prefill(ids[:, :48])]
        cache.reset()
        logits += [loop.prefill(ids[:, :48]), loop.prefill(ids[:, 48:64])]
        logits += [loop.prefill(ids[:, i : i + 48]) for i in (64, 112)]
        logits += [loop.read(ids[:, i : i + 1]) for i in (160, 161)]
        found.append((torch.stack(logits), [x.clone() for x in cache.buffers()]))
        assert cache.seen == 162
        if graphs:
            assert loop.graphs.refused is None
            kinds = {kind[1:4:2] for kind in captured.kinds}
            wanted = {(16, True), (48, True), (48, False), (1, False)}
            if policy == "calidrop":  # what it keeps of evicted tokens fills with the first of them
                wanted.add((16, False))
            assert kinds == wanted
            assert set(captured.at_once) == {True}
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert {"main waits", "side waits"} == set(captured)


@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("policy", ["keydiff", "dropkv", "h2o"])
def test_a_graph_for_each_token_between_evictions(policy, positions, captured):
    ids = 3 + torch.randperm(216, generator=torch.Generator().manual_seed(2))[None]
    model, every, found = tiny_model("llama", vocab_size=220), 3, []
    for graphs in (True, False):
        cache = kvcap.BudgetCache(
            model.config, 20, 8, small_policy(policy, model.config),
            positions=positions, evict_every=every,
        )  # fmt: skip
        cache.allocate(1, torch.float32, "cpu")
        loop = BlockLoop(model, cache, graphs=False)
        logits = [loop.prefill(ids[:, :20])]  # full, and nothing was evicted
        loop.graphs = cuda_graphs.BlockGraphs(model, cache) if graphs else None
        held = []
        for i in range(20, 20 + 2 * every):
            logits.append(loop.read(ids[:, i : i + 1]))  # each graph serves once
            held.append(cache.held)
        assert held == 2 * [21, 22, 20]
        found.append((torch.stack(logits), [x.clone() for x in cache.buffers()]))
        if graphs:
            assert loop.graphs.refused is None
            made = {(k.length, k.filling, k.excess) for k in captured.kinds}
            assert made == {(1, False, 0), (1, False, 1), (1, False, 2)}
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_heads_of_their_own_budgets_are_not_replayed_between_evictions():
    """Where they lie is told to the device by the pass before, which held fewer."""
    model = tiny_model("llama")
    for every, steady in ((1, True), (2, False)):
        eviction = small_policy("headkv", model.config)
        cache = kvcap.BudgetCache(model.config, 20, 8, eviction, evict_every=every)
        BlockLoop(model, cache, graphs=False).prefill(torch.randint(90, (1, 40)))
        assert len(cache.layers[0].segments) > 1
        assert cuda_graphs.excess(cache) == 0
        assert cuda_graphs.steady(cache, 8)
        assert cuda_graphs.steady(cache, 1) is steady


@pytest.mark.slow(keep=1)
@pytest.mark.skipif(DEVICE == "cuda", reason="test_cuda.py has real graphs")
@pytest.mark.parametrize(("family", "policy", "positions", "layers"), [
    ("llama", "keydiff", "compact", 2),
    ("qwen3", "keydiff", "true", 2),
    ("smollm3", "streaming_llm", "compact", 3),  # its fourth layer has no positions
    ("mistral", "dropkv", "compact", 2),
    ("qwen2", "h2o", "compact", 2),
    ("llama", "pyramidkv", "compact", 2),  # one layer is full while the other fills
    ("llama", "headkv", "compact", 2),  # heads do, in rows that lie anywhere
    ("phi3", "keydiff", "compact", 0),  # runs by its own modules
])  # fmt: skip
def test_a_token_is_rotated_appended_and_attended_at_once(
    family, policy, positions, layers, captured, monkeypatch
):
    ids = 3 + torch.randint(200, (1, 30), generator=torch.Generator().manual_seed(1))
    model = tiny_model(family, vocab_size=220, num_hidden_layers=4 if layers > 2 else 2)
    attend, calls = token.attend, []
    monkeypatch.setattr(token, "attend", lambda *a, **k: calls.append(1) or attend(*a, **k))
    monkeypatch.setattr(LayerStorage, "settles", False)  # keys lie as on a GPU
    found = []
    for choice in ("triton", "eager"):
        eviction = small_policy(policy, model.config)
        cache = kvcap.BudgetCache(model.config, 20, 8, eviction, positions=positions)
        cache.allocate(1, torch.float32, "cpu")
        loop = BlockLoop(model, cache, graphs=False)
        logits = [loop.prefill(ids[:, :24])]
        if choice == "triton":
            loop.graphs = cuda_graphs.BlockGraphs(model, cache)
        with kernels.use(choice):
            logits += [loop.read(ids[:, i : i + 1]) for i in (24, 25)]
        found.append((torch.stack(logits), [x.clone() for x in cache.buffers()]))
    assert len(calls) == 2 * layers
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(keep=3)
@pytest.mark.skipif(DEVICE == "cuda", reason="test_cuda.py has real graphs")
@pytest.mark.parametrize(("family", "policy", "positions", "kind", "batch", "read"), [
    ("llama", "keydiff", "compact", "int8", 1, 24),
    ("qwen3", "keydiff-window", "true", "int8-int4", 2, 24),
    ("mistral", "snapkv", "compact", "int4", 3, 24),
    ("qwen2", "h2o", "compact", "int8-int4", 1, 24),
    ("llama", "criticalkv", "auto", "int8", 1, 24),
    ("llama", "streaming_llm", "compact", "int4", 1, 24),
    ("llama", "keydiff", "compact", "int4", 2, 0),  # the first of all, in an empty cache
    ("smollm3", "keydiff", "true", "int8", 1, 3),  # while slots fill
])  # fmt: skip
def test_a_token_over_quantised_slots_is_attended_at_once(
    family, policy, positions, kind, batch, read, monkeypatch
):
    """As by a kernel that writes it, copies of keys and values, and attention over these."""
    g, attend, calls = torch.Generator().manual_seed(1), quantised_token.attend, []
    ids = 3 + torch.randint(200, (batch, 30), generator=g)
    model, found = tiny_model(family, vocab_size=220), []
    layers = sum(layer.self_attn.layer_idx != 3 for layer in model.model.layers)
    monkeypatch.setattr(
        quantised_token, "attend", lambda *a, **k: calls.append(1) or attend(*a, **k)
    )
    for covered in (True, False):
        if not covered:
            monkeypatch.setattr(quantised_token, "covers", lambda *_: False)
        cache = kvcap.BudgetCache(
            model.config, 20, 8, small_policy(policy, model.config),
            positions=positions, kv_dtype=kind,
        ).allocate(batch, torch.float32, "cpu")  # fmt: skip
        with kernels.use("triton"):
            loop = BlockLoop(model, cache, graphs=False)
            logits = [loop.prefill(ids[:, :read])] if read else []
            loop.graphs = cuda_graphs.Uncaptured(model, cache)
            logits += [loop.read(ids[:, i : i + 1]) for i in range(read, read + 4)]
        segments = [s for layer in cache.capped_layers for s in layer.segments]
        kept = [sorted(head.tolist()) for s in segments for each in s.positions for head in each]
        first = {n: x.clone() for n, x in cache.allocation.buffers.items() if ".0." in n}
        found.append((torch.stack(logits), kept, first))
    assert len(calls) == 4 * layers
    (logits, kept, first), (expected, others, bytes_) = found
    # By another rounding a number of a later layer may become the next one of 8 or 4 bits.
    torch.testing.assert_close(logits, expected, rtol=1e-2, atol=1e-2)
    assert kept == others
    for name, x in first.items():  # of the first layer, to which both give the same
        assert torch.equal(x, bytes_[name]), name


def test_a_token_that_the_kernel_does_not_take_leaves_a_layer_as_it_is():
    """Before there is memory, where heads hold unequally many, and where kernels are not wanted."""
    model = tiny_model("llama").to(DEVICE)
    attention, ids = model.model.layers[0].self_attn, torch.randint(90, (1, 24), device=DEVICE)
    heads = [torch.randn(1, n, 1, 16, device=DEVICE) for n in (4, 2, 2)]
    angles = tuple(torch.randn(1, 1, 16, device=DEVICE) for _ in range(2))
    for policy, choice, taken in (
        ("keydiff", "triton", True),
        ("keydiff", "eager", False),
        ("headkv", "triton", False),
    ):
        cache = kvcap.BudgetCache(model.config, 20, 8, small_policy(policy, model.config))
        layer = cache.layers[0]
        with kernels.use(choice):
            assert layer.read_token(*heads, angles, attention, 0.25) is None
            BlockLoop(model, cache, graphs=False).prefill(ids)
            before = [x.clone() for x in cache.buffers()]
            with cache.passing(ForwardContext(cache.next_position)):
                out = cache.read_token(*heads, angles, 0, attention, 0.25)
            if taken:
                assert out.shape == (1, 4, 1, 16)
                with pytest.raises(kvcap.KvcapError, match="the cache is allocated for"):
                    layer.read_token(*(x.double() for x in heads), angles, attention, 0.25)
        assert (out is not None) == taken
        assert layer.seen == 24 + taken
        changed = any(not torch.equal(a, b) for a, b in zip(before, cache.buffers(), strict=True))
        assert changed == taken


def test_all_memory_is_there_with_the_first_token():
    """Nothing is left to be made while a graph is captured."""
    model = tiny_model("llama")
    for policy in ("keydiff", "dropkv"):
        cache = kvcap.BudgetCache(model.config, 32, 16, small_policy(policy, model.config))
        BlockLoop(model, cache).read(torch.tensor([[5]]))
        planned = cache.layout.nbytes(1, torch.float32)
        assert planned["rotation_table"] > 0
        assert cache.nbytes == sum(planned.values())


def test_what_was_evicted_in_a_graph_is_known_outside():
    """Whether keys have moved decides whether they are rotated."""
    model = tiny_model("llama")
    cache = kvcap.BudgetCache(model.config, 32, 16).allocate(1, torch.float32, "cpu")
    cache.advance(40, kept=True)
    assert (cache.seen, cache.held, cuda_graphs.excess(cache)) == (40, 40, 8)
    assert not any(layer.storage.needs_rotation for layer in cache.capped_layers)
    cache.advance(8, kept=False)
    assert (cache.seen, cache.held, cuda_graphs.excess(cache)) == (48, 32, 0)
    assert all(layer.storage.needs_rotation for layer in cache.capped_layers)


def test_what_is_decided_on_beyond_a_layer_keeps_blocks_in_passes_of_their_own():
    model, ids = tiny_model("llama"), torch.randint(90, (1, 64))
    on_host = kvcap.load_policy("calidrop", calibration_size=8, store="host")
    for policy in ("cake", "adakv", on_host):
        loop = BlockLoop(model, kvcap.BudgetCache(model.config, 40, 8, policy))
        loop.prefill(ids)
        with pytest.raises(kvcap.KvcapError, match="a block of 16 tokens was given"):
            loop.read(ids[:, :16])


@pytest.mark.parametrize(("policy", "reads_output"), [
    ("h2o", False), ("calidrop-h2o", False), ("obcache-h2o", True),
])  # fmt: skip
def test_attention_tells_a_state_of_all_queries_what_spares_a_pass(
    policy, reads_output, monkeypatch
):
    """The log-sum-exp of a block's logits over what is held; the same slots stay as without."""
    model, told, kept = tiny_model("llama", vocab_size=220).to(DEVICE), [], []
    ids = 3 + torch.randint(200, (1, 60), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    scores = window.scores

    def scored(obs, *given, **options):
        if obs.new > 1:
            told.append(obs.lse is not None)
            assert (obs.attended is not None) == reads_output
        return scores(obs, *given, **options)

    monkeypatch.setattr(window, "scores", scored)
    for with_kernels in (True, False):
        cache = kvcap.BudgetCache(model.config, 24, 12, small_policy(policy, model.config))
        cache.allocate(1, torch.float32, DEVICE)
        with kernels.use("triton" if with_kernels else "eager"):
            BlockLoop(model, cache, graphs=False).prefill(ids)
        kept.append([layer.segments[0].positions.sort(-1).values for layer in cache.capped_layers])
    assert told
    assert all(told)
    for mine, plain in zip(*kept, strict=True):
        assert torch.equal(mine, plain)
