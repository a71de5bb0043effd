"""The same promises on a GPU; skipped where there is none."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from conftest import FAMILIES, small_policy, tiny_model
from families import ALL, ELSEWHERE, model_of
from tools import differing, distinct, runtime_of
from tools import kept as kept_by

import kvcap
from kvcap.policies import policies
from kvcap.runtime.backends.pytorch import cuda_graphs
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import enforce_limit
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.fused.decoder import FAMILIES as OWN
from kvcap.runtime.session.session import Session
from kvcap.testing import cuda_peak

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
EVICTING = [name for name in policies() if name != "full"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_uncapped_model_while_tokens_fit(family, dtype, tokens):
    ids = tokens(60).cuda()
    with torch.no_grad():
        exact = tiny_model(family, "eager").cuda()(ids).logits[:, -1]
        plain = tiny_model(family, "eager", dtype=dtype).cuda()(ids).logits[:, -1].float()
    model = tiny_model(family, dtype=dtype).cuda()
    allowed = 2 * float((plain - exact).abs().max()) + 2e-4
    for block in (1, 16, 60):
        loop = BlockLoop(model, kvcap.BudgetCache(model.config, 64, block))
        assert (loop.prefill(ids).float() - exact).abs().max() <= allowed


@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("policy", EVICTING)
def test_the_same_tokens_stay_as_on_the_cpu(policy, positions):
    kept, logits = [], []
    ids = distinct(80, seed=0)
    for device in ("cpu", "cuda"):
        model = tiny_model("llama").to(device)
        eviction = small_policy(policy, model.config)
        cache = kvcap.BudgetCache(model.config, 40, 16, eviction, positions=positions)
        loop = BlockLoop(model, cache)
        logits.append(loop.prefill(ids.to(device)).cpu())
        logits[-1] = loop.read(torch.tensor([[94]], device=device)).cpu()
        segments = cache.layers[0].segments
        kept.append([sorted(head.tolist()) for s in segments for head in s.positions[0]])
    assert kept[0] == kept[1]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("policy", ["snapkv", "calidrop"])
def test_bytes_on_the_device_equal_the_plan(policy, tokens):
    model = tiny_model("llama", dtype=torch.bfloat16).cuda()
    plan = kvcap.MemoryPlan.of(model.config, policy=policy, budget_tokens=512, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    cache = kvcap.BudgetCache(model.config, 512, 128, policy)
    cache.allocate(1, torch.bfloat16, "cuda")
    allocated = torch.cuda.memory_allocated() - before
    assert cache.nbytes == plan.cache_bytes
    # The allocator rounds every buffer up to 512 bytes; index rows add a little.
    assert plan.cache_bytes <= allocated <= plan.cache_bytes + 64 * 512
    loop = BlockLoop(model, cache)
    loop.prefill(tokens(3000).cuda())
    assert cache.nbytes == plan.cache_bytes


def test_the_meter_counts_the_allocator():
    kept = torch.zeros(1 << 18, device="cuda")  # what was there does not count
    took = cuda_peak(lambda: torch.cat([torch.zeros(1 << 18, device="cuda")] * 2))
    assert took.peak_bytes == 3 << 20
    assert took.held_bytes == 2 << 20
    assert kept.numel() == took.result.numel() // 2


@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "h2o", "headkv", "calidrop"])
def test_a_saved_session_goes_on_exactly(policy, tokens, tmp_path):
    ids = tokens(80)
    model = tiny_model("llama")
    runtimes = [
        runtime_of(copy.deepcopy(model).to(device), policy, 32, 16) for device in ("cuda", "cpu")
    ]
    saved = runtimes[0].session()
    saved.loop.prefill(ids[:, :70].cuda())
    saved.save(tmp_path / "session")
    logits = saved.loop.read(ids[:, 70:].cuda())
    for runtime in runtimes:  # from one device to the other, too
        loaded = Session.load(runtime, tmp_path / "session")
        assert loaded.cache.seen == 70
        again = loaded.loop.read(ids[:, 70:].to(runtime.model.device))
        close = 0 if runtime is runtimes[0] else 1e-3
        torch.testing.assert_close(again.cpu(), logits.cpu(), rtol=close, atol=close)


def test_the_allocator_refuses_and_the_conversation_can_go_on(tokens):
    model = tiny_model("llama", dtype=torch.bfloat16, hidden_size=1024).cuda()
    loop = BlockLoop(model, kvcap.BudgetCache(model.config, 64, 8192), graphs=False)
    ids = tokens(8192).cuda()
    loop.read(ids[:, :8])
    gc.collect()  # graphs of other tests, which would make room
    torch.cuda.empty_cache()
    try:
        enforce_limit(torch.cuda.memory_reserved() + (1 << 20), "cuda")
        with pytest.raises(kvcap.KvcapError, match="the system refused the memory"):
            loop.read(ids)
        assert loop.cache.seen == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    loop.read(ids)
    assert loop.cache.consistent


@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize("policy", EVICTING)
def test_replayed_blocks_equal_eager_ones(policy, positions, tokens):
    # No token twice: in the first layer their keys would have the same norm, and either could go.
    ids = distinct(216, of=216).cuda()
    model = tiny_model("llama", vocab_size=256).cuda()
    kept, logits, replayed = [], [], []
    for graphs in (True, False):
        eviction = small_policy(policy, model.config)
        cache = kvcap.BudgetCache(model.config, 64, 16, eviction, positions=positions)
        loop = BlockLoop(model, cache, graphs=graphs)
        rows = [loop.prefill(ids[:, :176])]
        rows += [loop.read(ids[:, i : i + 1]) for i in range(176, 206)]
        replayed.append(loop.graphs and {kind.length for kind in loop.graphs.captured})
        cache.pin([(206, 207)])
        logits.append(torch.stack([*rows, loop.prefill(ids[:, 206:])]).float())
        kept.append(kept_by(loop))
        assert cache.seen == 216
        if graphs:
            # What only the eager engine does is captured once it is full, unless slots move.
            moves = cache.eviction.heads_move or cache.eviction.layers_move
            assert cache.by_rows or moves or loop.execution == "CUDA graphs"
            assert loop.graphs.failed is None
            assert replayed[0] == ({1, 16} if loop.graphs.refused is None else set())
    assert loop.execution == ""
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "calidrop"])
def test_replayed_tokens_know_what_leaves_first_and_what_last(policy):
    """Graphs are not captured anew when regions change, where rows have them on the device."""
    ids = distinct(216, of=216).cuda()
    model, kept = tiny_model("llama", vocab_size=256).cuda(), []
    for graphs in (True, False):
        cache = kvcap.BudgetCache(model.config, 64, 16, small_policy(policy, model.config))
        loop = BlockLoop(model, cache, graphs=graphs)
        cache.regions.add({"system prompt and tools": [(0, 20)]})
        loop.prefill(ids[:, :176])
        cache.regions.add({"thoughts": [(165, 176)]})
        for i in range(176, 190):
            loop.read(ids[:, i : i + 1])
        made = dict(loop.graphs.captured) if graphs else {}
        cache.regions.add({"tool results": [(178, 188)]})
        for i in range(190, 206):
            loop.read(ids[:, i : i + 1])
        kept.append(kept_by(loop))
        assert all({*range(20)} < set(head) for head in kept[-1])
        assert not any({*range(165, 176)} & set(head) for head in kept[-1])
        if graphs and cache.by_rows:
            assert made
            assert made.items() <= loop.graphs.captured.items()
    assert kept[0] == kept[1]


@pytest.mark.parametrize("positions", ["compact", "true"])
@pytest.mark.parametrize(
    "policy", ["keydiff", "dropkv", "snapkv", "h2o", "headkv", "pyramidkv", "calidrop"]
)
def test_several_blocks_are_replayed_in_one_pass(policy, positions, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "PASS", 50)  # three blocks of 16
    ids = distinct(240, of=240).cuda()
    model = tiny_model("llama", vocab_size=256).cuda()
    kept, logits = [], []
    for graphs in (True, False):
        eviction = small_policy(policy, model.config)
        cache = kvcap.BudgetCache(model.config, 64, 16, eviction, positions=positions)
        loop, rows = BlockLoop(model, cache, graphs=graphs), []
        for _ in range(2):
            cache.reset()
            rows += [loop.prefill(ids[:, :235])]
            rows += [loop.read(ids[:, i : i + 1]) for i in range(235, 240)]
        logits.append(torch.stack(rows))
        kept.append(kept_by(loop))
        if graphs:
            assert 48 in {kind.length for kind in loop.graphs.captured}
            assert loop.execution == "CUDA graphs"
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)
    assert kept[0] == kept[1]
    assert BlockLoop(model, cache).graphs.pass_length(1, 240) == 48  # it is full
    assert BlockLoop(model, cache, several=False).graphs.pass_length(1, 240) is None


@pytest.mark.parametrize("policy", ["adakv", "cake", "criticalkv-adakv", "headkv"])
def test_prompts_that_end_within_a_block_are_replayed(policy):
    """One graph replays them, whatever their lengths."""
    ids = distinct(600, of=600).cuda()
    model = tiny_model("llama", vocab_size=640).cuda()
    kept, logits = [], []
    for graphs in (True, False):
        cache = kvcap.BudgetCache(model.config, 64, 16, small_policy(policy, model.config))
        loop, rows = BlockLoop(model, cache, graphs=graphs), []
        for _ in range(2):
            cache.reset()
            start = 0
            for stop in (200, 201, 207, 209, 225, 226, 590):
                rows.append(loop.prefill(ids[:, start:stop]))
                start = stop
        logits.append(torch.stack(rows))
        kept.append(kept_by(loop))
        if graphs:
            assert loop.graphs.failed is None
            assert sum(kind.need_logits for kind in loop.graphs.captured) >= 1
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["keydiff", "dropkv", "h2o"])
def test_a_cache_is_filled_by_graphs(policy, dtype, tokens):
    ids, logits, memory = tokens(120, batch=2).cuda(), [], []
    model = tiny_model("llama", dtype=dtype).cuda()
    for graphs in (True, False):
        cache = kvcap.BudgetCache(model.config, 100, 16, small_policy(policy, model.config))
        loop = BlockLoop(model, cache.allocate(2, dtype, "cuda"), graphs=graphs)
        for _ in range(2):  # again after a reset, by what was captured before
            cache.reset()
            rows = [loop.prefill(ids[:, :50])]
            rows += [loop.read(ids[:, i : i + 1]) for i in range(50, 100)]
        logits.append(torch.stack(rows).float())
        memory.append([x.clone() for x in cache.buffers()])
        if graphs:
            assert {kind.length for kind in loop.graphs.captured} == {16, 1}
    with torch.no_grad():
        exact, plain = (
            tiny_model("llama", "eager", dtype=x).cuda()(ids[:, :100]).logits[:, 49:].float()
            for x in (torch.float32, dtype)
        )
    allowed = 2 * float((plain - exact).abs().max()) + 2e-4
    for replayed in logits:  # [51, B, V]
        assert (replayed.transpose(0, 1) - exact).abs().max() <= allowed
    # A token's rotation is rounded once here, and three times in the model.
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.2}
    for x, y in zip(*memory, strict=True):
        torch.testing.assert_close(x, y, **close)


@pytest.mark.parametrize("kind", ["int8", "int8-int4", "int4"])
def test_quantised_slots_are_replayed(kind):
    ids = distinct(240, of=240).cuda()
    model, kept, logits = tiny_model("llama", vocab_size=256).cuda(), [], []
    for graphs in (True, False):
        cache = kvcap.BudgetCache(model.config, 64, 16, kv_dtype=kind)
        loop = BlockLoop(model, cache, graphs=graphs)
        for _ in range(2):  # again after a reset, by what was captured before
            cache.reset()
            rows = [loop.prefill(ids[:, :48])]
            rows += [loop.read(ids[:, i : i + 1]) for i in range(48, 60)]
            rows += [loop.prefill(ids[:, 60:180])]
            rows += [loop.read(ids[:, i : i + 1]) for i in range(180, 200)]
        logits.append(torch.stack(rows))
        kept.append(map(set, kept_by(loop)))
        if graphs:
            assert {kind.length for kind in loop.graphs.captured} >= {16, 1}
            assert loop.execution == "CUDA graphs"
    # By another rounding a number may become the next one of 8 or 4 bits.
    torch.testing.assert_close(logits[0], logits[1], rtol=0.05, atol=0.05)
    assert all(len(a & b) > 0.95 * len(a) for a, b in zip(*kept, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_decoding_of_every_family(family, tokens):
    ids, logits = tokens(120).cuda(), []
    model = tiny_model(family).cuda()
    for graphs in (True, False):
        loop = BlockLoop(model, kvcap.BudgetCache(model.config, 24, 8), graphs=graphs)
        rows = [loop.prefill(ids[:, :100])]
        rows += [loop.read(ids[:, i : i + 1]) for i in range(100, 120)]
        logits.append(torch.stack(rows))
        if graphs:  # captured by kvcap's own decoder
            assert (loop.graphs.decoder is not None) == (family in OWN)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("policy", ["keydiff", "dropkv"])
@pytest.mark.parametrize("name", sorted((ALL | ELSEWHERE).keys() - FAMILIES))
def test_other_families_answer_as_on_the_cpu(name, policy):
    ids = distinct(90)
    logits = []
    for device, graphs in (("cpu", False), ("cuda", False), ("cuda", True)):
        model = model_of(name).to(device)
        try:
            cache = kvcap.BudgetCache(model.config, 24, 8, small_policy(policy, model.config))
        except UnsupportedModel as error:
            if "this version of transformers" not in str(error):
                raise
            pytest.skip(str(error))
        loop = BlockLoop(model, cache, graphs=graphs)
        rows = [loop.prefill(ids[:, :70].to(device))]
        rows += [loop.read(ids[:, i : i + 1].to(device)) for i in range(70, 90)]
        logits.append(torch.stack(rows).cpu())
    for on_device in logits[1:]:
        torch.testing.assert_close(on_device, logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("policy", ["keydiff", "dropkv"])
@pytest.mark.parametrize("block", [16, 40])
def test_a_capture_that_fails_leaves_the_device_as_it_was(policy, block, tokens):
    ids, logits = tokens(200, batch=2).cuda(), []
    model = tiny_model("llama").cuda()
    for failing in (True, False):
        cache = kvcap.BudgetCache(model.config, 40, block, small_policy(policy, model.config))
        loop = BlockLoop(model, cache, graphs=failing)

        def fail(*_, cache=cache):
            if cache.context.stream is not None:
                raise RuntimeError("no room")

        handle = model.model.layers[-1].mlp.register_forward_pre_hook(fail)
        stream = torch.cuda.current_stream()
        logits.append(loop.prefill(ids))
        handle.remove()
        assert not failing or loop.execution == "CUDA graphs, but where capture failed: no room"
        assert torch.cuda.current_stream() == stream
        assert torch.rand(3, device="cuda").max() < 1  # refused within a capture
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


def test_a_capture_is_not_broken_by_graphs_that_nobody_uses(tokens, capfd, monkeypatch):
    """Which Python finds as garbage at any time, be it within a capture."""
    model = tiny_model("llama").cuda()
    eviction = small_policy("keydiff", model.config)

    def loop_of():
        return BlockLoop(model, kvcap.BudgetCache(model.config, 40, 16, eviction))

    def litter(*_):
        if left and torch.cuda.is_current_stream_capturing():
            left[0].myself = left[0]
            left.clear()
            [[] for _ in range(99)]

    left = [loop_of()]
    left[0].prefill(tokens(200).cuda())
    assert left[0].graphs.captured
    loop = loop_of()
    row_pass = loop.cache.row_pass
    monkeypatch.setattr(loop.cache, "row_pass", lambda *a, **k: (litter(), row_pass(*a, **k))[1])
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        loop.prefill(tokens(200).cuda())
    finally:
        gc.set_threshold(*threshold)
    assert not left
    assert loop.graphs.captured
    assert loop.execution == "CUDA graphs"
    assert "not permitted" not in capfd.readouterr().err


@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "h2o", "cake", "adakv", "calidrop"])
def test_a_dropped_cache_frees_its_memory_and_its_graphs(policy, tokens):
    """By counting references: Python's cyclic collector, which sees no GPU's memory, rests."""
    model = tiny_model("llama", dtype=torch.bfloat16).cuda()
    eviction = small_policy(policy, model.config)

    def use() -> list[weakref.ref]:
        loop = BlockLoop(model, kvcap.BudgetCache(model.config, 40, 16, eviction))
        loop.prefill(tokens(200).cuda())
        for i in range(6):
            loop.read(tokens(1, seed=i).cuda())
        assert loop.graphs.captured
        made = [loop.cache, loop.graphs, *loop.graphs.captured.values()]
        return [weakref.ref(x) for x in (*made, *loop.cache.buffers())]

    use()  # libraries keep a workspace of theirs
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            assert not any(gone() for gone in use())
            assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("positions", ["compact", "auto"])
def test_a_runtime_whose_sessions_were_dropped_holds_nothing(positions):
    """Half-way through answers that share a pass, and after what the first one was given."""
    runtime = kvcap.Runtime.from_pretrained(
        "pocket", budget_tokens=64, block_size=16, device="cuda", positions=positions
    )

    def use() -> None:
        batch, sessions = runtime.batch(2), [runtime.session() for _ in range(2)]
        for session in sessions:
            session.set_generation(max_new_tokens=24)
            batch.add(session, session.send("Please remember: the code for the old door is 12."))
        for _ in range(12):
            batch.step()

    use()
    gc.collect()
    gc.disable()
    try:
        held = []
        for _ in range(5):
            use()
            held.append(torch.cuda.memory_allocated())
        # Libraries may take a workspace at any of the first uses, and nothing at later ones.
        assert held[2:] == held[2:3] * 3, held
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "h2o", "pyramidkv", "criticalkv", "adakv"])
def test_sessions_of_unequal_lengths_answer_together_as_alone(policy):
    """One is full, one fills, one becomes full among the others, and one has pins."""
    runtime = kvcap.Runtime.from_pretrained(
        "pocket",
        small_policy(policy, None),
        budget_tokens=96,
        block_size=16,
        dtype="float32",
        device="cuda",
    )
    doors = enumerate(["blue", "red", "old", "green", "small", "north"])
    facts = [f"Please remember: the code for the {door} door is {i}77. " for i, door in doors]
    texts = ["".join(facts), "Hello.", "".join(facts[:3]), "".join(facts[::-1])]

    def begun() -> list[Session]:
        group = [runtime.session() for _ in texts]
        for session, text in zip(group, texts, strict=True):
            session.set_generation(do_sample=False, max_new_tokens=2)
            if session is group[3] and policy != "pyramidkv":  # whose last layer is too small
                "".join(session.send("The word is plum.", pin=True))
            "".join(session.send(text))
            session.set_generation(max_new_tokens=60, eos_token_id=1_000_000)
        return group

    alone, sessions = begun(), begun()
    expected = ["".join(session.send("Go on.")) for session in alone]
    batch = runtime.batch(4)
    assert batch.why_one_by_one is None
    for session in sessions:
        batch.add(session, session.send("Go on."))
    answers = dict.fromkeys(map(id, sessions), "")
    for session, text in batch:
        answers[id(session)] += text
    assert [answers[id(session)] for session in sessions] == expected
    # Tokens of sentences that are alike may be worth the same but for rounding.
    assert differing(sessions, alone) <= 0.005
    made = batch._rows.loop.graphs.captured
    assert len({kind for kind in made if kind.longest}) == 1  # for all mixtures
    assert batch._rows.loop.execution == "CUDA graphs"
