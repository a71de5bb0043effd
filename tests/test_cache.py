"""Fixed storage: what is held, how many bytes, and that everything of a slot moves together."""

from __future__ import annotations

import pytest
import torch
from conftest import small_policy, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcap
from kvcap.policies import policies
from kvcap.runtime import alike
from kvcap.runtime.loop import BlockLoop
from kvcap.runtime.slot_pool import Segment, SlotPool

EVICTING = [name for name in policies() if name != "full"]


@given(
    budget=st.integers(1, 9),
    block=st.integers(1, 6),
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    seed=st.integers(0, 10_000),
)
def test_compact_moves_everything_of_a_slot_together(budget, block, batch, heads, seed):
    """Against Python lists: after any evictions each head holds the survivors, whole."""
    g = torch.Generator().manual_seed(seed)
    pool = SlotPool(
        batch * heads * (budget + block), 4, torch.float32, side={"mass": torch.float32}
    )
    store = Segment(pool, 0, budget, block, batch, heads)
    nbytes, pointer = pool.nbytes, pool.keys.data_ptr()
    expected = [[set() for _ in range(heads)] for _ in range(batch)]
    seen = 0
    for _ in range(6):
        length = int(torch.randint(1, block + 1, (1,), generator=g))
        stamp = torch.arange(seen, seen + length).float()[:, None].expand(batch, heads, length, 4)
        store.append(stamp, -stamp, torch.arange(seen, seen + length))
        store.side("mass").copy_(store.positions.float() * 2)
        for b in range(batch):
            for h in range(heads):
                expected[b][h] |= set(range(seen, seen + length))
        seen += length
        if (count := store.held - budget) > 0:
            gone = torch.stack(
                [torch.randperm(store.held, generator=g)[:count] for _ in range(batch * heads)]
            ).view(batch, heads, count)
            for b in range(batch):
                for h in range(heads):
                    expected[b][h] -= set(store.positions[b, h, gone[b, h]].tolist())
            before = store.positions.clone()
            store.compact(gone)
            # Only evicted slots below the budget are written: survivors stay where they are.
            stayed = store.positions == before[:, :, :budget]
            survivors = torch.ones(batch, heads, budget + count, dtype=torch.bool)
            survivors.scatter_(-1, gone, False)
            assert (stayed | ~survivors[..., :budget]).all()
        assert store.held <= budget
        for b in range(batch):
            for h in range(heads):
                assert sorted(store.positions[b, h].tolist()) == sorted(expected[b][h])
        assert torch.equal(store.keys[..., 0], store.positions.float())
        assert torch.equal(store.values[..., 0], -store.positions.float())
        assert torch.equal(store.side("mass"), store.positions.float() * 2)
        assert (pool.nbytes, pool.keys.data_ptr()) == (nbytes, pointer)


@pytest.mark.parametrize("policy", EVICTING)
@given(
    budget=st.integers(8, 20),
    block=st.integers(1, 12),
    length=st.integers(1, 60),
    evict_every=st.integers(1, 3),
    compact=st.booleans(),
)
@settings(max_examples=12)  # of each policy
def test_never_above_the_cap(policy, budget, block, length, evict_every, compact):
    """After every block and generated token: held ≤ N, bytes as planned, positions unique."""
    model = MODEL
    eviction = small_policy(policy, model.config)
    positions = "compact" if compact else "true"
    cache = kvcap.BudgetCache(
        model.config, budget, block, eviction,
        positions=positions, evict_every=min(evict_every, block),
    ).allocate(1, torch.float32, "cpu")  # fmt: skip
    plan = kvcap.MemoryPlan.of(
        model.config, policy=eviction, kv_budget_tokens=budget,
        block_size=block, dtype=torch.float32, positions=positions,
    )  # fmt: skip
    loop = BlockLoop(model, cache)
    ids = torch.randint(3, 97, (1, length))

    def check() -> None:
        assert cache.held <= budget + cache.evict_every - 1
        assert cache.nbytes == plan.cache_bytes == loop.peak_bytes
        assert cache.used_bytes <= cache.nbytes
        for layer in cache.capped_layers:
            for segment in layer.segments:
                for head in segment.positions[0]:
                    assert len(set(head.tolist())) == segment.held
                    assert head.max() == layer.seen - 1 or policy != "streaming_llm"
                    assert head.max() < layer.seen

    # A block never exceeds the room, also when generation has left tokens to evict.
    loop.prefill(ids, lambda _: check())
    for i in range(5):
        loop.read(torch.tensor([[i + 5]]))
        check()
    loop.prefill(ids, lambda _: None)
    assert cache.seen == 2 * length + 5
    cache.reset()
    assert (cache.seen, cache.held, cache.nbytes) == (0, 0, plan.cache_bytes)


MODEL = tiny_model("llama")


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_bytes_equal_the_plan_for_every_policy_and_dtype(policy, kv_heads):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = tiny_model("llama", dtype=dtype, num_key_value_heads=kv_heads)
        eviction = small_policy(policy, model.config)
        plan = kvcap.MemoryPlan.of(
            model.config, policy=eviction, kv_budget_tokens=40, block_size=9, dtype=dtype
        )
        cache = kvcap.BudgetCache(model.config, 40, 9, eviction)
        BlockLoop(model, cache).prefill(torch.randint(3, 97, (1, 61)))
        assert cache.nbytes == plan.cache_bytes
        assert cache.layout.positions == plan.positions == "compact"


def test_position_only_policies_do_not_depend_on_the_block(tokens):
    ids = tokens(70)
    for policy in ("streaming_llm", "random"):
        kept = []
        for block in (1, 5, 64, 70):
            cache = kvcap.BudgetCache(MODEL.config, 24, block, policy)
            BlockLoop(MODEL, cache).prefill(ids)
            store = cache.layers[1].segments[0]
            kept.append([sorted(head.tolist()) for head in store.positions[0]])
        assert all(k == kept[0] for k in kept), policy


def test_evict_every_keeps_the_same_tokens_for_position_only_policies(tokens):
    kept = []
    for every in (1, 4):
        cache = kvcap.BudgetCache(MODEL.config, 16, 8, "streaming_llm", evict_every=every)
        loop = BlockLoop(MODEL, cache)
        loop.prefill(tokens(30))
        for i in range(8):
            loop.read(torch.tensor([[i + 5]]))
        kept.append(sorted(cache.layers[0].segments[0].positions[0, 0].tolist()))
    assert kept[0] == kept[1]


def test_the_cache_layers_look_like_transformers_layers(tokens):
    cache = kvcap.BudgetCache(MODEL.config, 16, 8)
    assert cache.layers[0].keys is None
    BlockLoop(MODEL, cache).prefill(tokens(30))
    keys, values = cache.layers[0].keys, cache.layers[0].values
    assert keys.shape == values.shape == (1, 2, 16, 16)
    assert cache.get_seq_length() == 30
    assert cache.is_initialized
    assert len(cache) == 2


def test_batches_of_equal_length(tokens):
    ids = tokens(40, batch=3)
    cache = kvcap.BudgetCache(MODEL.config, 16, 8)
    together = BlockLoop(MODEL, cache).prefill(ids)
    for row in range(3):
        alone = BlockLoop(MODEL, kvcap.BudgetCache(MODEL.config, 16, 8)).prefill(ids[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)


def test_counts_go_back_to_before_a_block_that_broke_off(tokens):
    model = tiny_model("llama")
    cache = kvcap.BudgetCache(model.config, 24, 8, "snapkv")
    loop = BlockLoop(model, cache)
    loop.prefill(tokens(40))
    before = cache.counts

    def fail(*_):
        raise RuntimeError("broken off")

    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken off"):
        loop.read(tokens(8))
    hook.remove()
    assert cache.counts != before
    assert not cache.consistent or cache.seen != 40
    cache.counts = before
    assert cache.consistent
    assert (cache.seen, cache.held, alike.excess(cache)) == (40, 24, 0)
    loop.read(tokens(8))
