"""Fixed storage: what is held, how many bytes, and that everything of a slot moves together."""

from __future__ import annotations

import gc

import pytest
import torch
from conftest import as_cache, in_turn, small_policy, tiny_config, tiny_model

import kvcap
from kvcap.policies import PolicyError, policies
from kvcap.policies.knorm import Knorm
from kvcap.runtime.backends.pytorch import cuda_graphs
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.errors import (
    CacheMismatch,
    KvcapError,
    MemoryCapExceeded,
    PinsTooLarge,
    PositionMismatch,
    UnsupportedModel,
)

EVICTING = [name for name in policies() if name != "full"]


MODEL = tiny_model("llama")


@pytest.mark.slow(keep=13)
@pytest.mark.parametrize(("policy", "kv_heads"), in_turn(EVICTING, [1, 2, 4]))
def test_bytes_equal_the_plan_for_every_policy_and_dtype(policy, kv_heads):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = tiny_model("llama", dtype=dtype, num_key_value_heads=kv_heads)
        eviction = small_policy(policy, model.config)
        plan = kvcap.MemoryPlan.of(
            model.config, policy=eviction, budget_tokens=40, block_size=9, dtype=dtype
        )
        cache = kvcap.BudgetCache(model.config, 40, 9, eviction)
        BlockLoop(model, cache).prefill(torch.randint(3, 97, (1, 61)))
        assert cache.nbytes == plan.cache_bytes
        assert cache.layout.positions == plan.positions == "compact"


def test_the_cache_layers_look_like_transformers_layers(tokens):
    cache = kvcap.BudgetCache(MODEL.config, 16, 8)
    assert cache.layers[0].keys is None
    BlockLoop(MODEL, cache).prefill(tokens(30))
    keys, values = cache.layers[0].keys, cache.layers[0].values
    assert keys.shape == values.shape == (1, 2, 16, 16)
    assert cache.get_seq_length() == 30
    assert cache.is_initialized
    assert len(cache) == 2


def test_counts_go_back_to_before_a_block_that_broke_off(tokens):
    model = tiny_model("llama")
    cache = kvcap.BudgetCache(model.config, 24, 8, "snapkv")
    loop = BlockLoop(model, cache)
    loop.prefill(tokens(40))
    before = cache.counters

    def fail(*_):
        raise RuntimeError("broken off")

    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken off"):
        loop.read(tokens(8))
    hook.remove()
    assert cache.counters != before
    assert not cache.consistent or cache.seen != 40
    cache.counters = before
    assert cache.consistent
    assert (cache.seen, cache.held) == (40, 24)
    assert cuda_graphs.is_full(cache)
    loop.read(tokens(8))


def test_a_cache_is_full_where_every_head_is(tokens):
    cache = kvcap.BudgetCache(MODEL.config, 24, 8, "keydiff")
    loop = BlockLoop(MODEL, cache)
    loop.prefill(tokens(23))
    assert not cuda_graphs.is_full(cache)
    loop.prefill(tokens(9))
    assert cuda_graphs.is_full(cache)
    cache.layers[0].segments[0].held += 3
    assert not cuda_graphs.is_full(cache)
    assert [layer.excess for layer in cache.capped_layers] == [3, *[0] * (len(cache.layers) - 1)]


def test_before_a_token_nobody_counts_what_is_free(tokens, monkeypatch):
    """Where whatever is read takes the place of something: all segments would be gone through."""
    loops = {
        name: BlockLoop(MODEL, kvcap.BudgetCache(MODEL.config, 24, 8, policy), on_full)
        for name, policy, on_full in [
            ("evicts", "keydiff", "evict"),
            ("refuses", "keydiff", "error"),
            ("never", "full", "evict"),
        ]
    }
    for loop in loops.values():
        loop.prefill(tokens(20))
    counted = []
    room = BlockLoop.room.fget
    monkeypatch.setattr(
        BlockLoop, "room", property(lambda loop: (counted.append(loop), room(loop))[1])
    )
    for loop in loops.values():
        loop.read(tokens(1))
    assert counted == [loops["refuses"], loops["never"]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_attention_is_refused_as_a_cache_is_made_or_first_used(attention, tokens):
    model = tiny_model("llama", attention)
    with pytest.raises(UnsupportedModel, match=rf"attention '{attention}'.*kvcap\.cap\(model\)"):
        kvcap.BudgetCache(model.config, 24, 8)
    cache = kvcap.BudgetCache(tiny_config("llama"), 24, 8)  # which does not tell its attention
    with pytest.raises(UnsupportedModel, match=rf"attention '{attention}'.*kvcap\.cap\(model\)"):
        model(tokens(8), **as_cache(cache))
    assert (cache.seen, cache.consistent) == (0, True)


# Outside torch.no_grad() --------------------------------------------------------------------------


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("policy", EVICTING)
def test_no_graph_of_gradients_is_kept(policy, tokens):
    eviction = small_policy(policy, MODEL.config)
    cache = kvcap.BudgetCache(MODEL.config, 24, 8, eviction)
    ids, alive = tokens(72), []
    for block in ids[:, :56].split(8, 1):  # every layer evicts by then, however slots are divided
        MODEL(block, **as_cache(cache))
    for i in range(56, 72):
        MODEL(ids[:, i : i + 1], **as_cache(cache))
        if i in (63, 71):  # all that is made for tokens is there by then
            gc.collect()
            alive.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    assert not any(x.requires_grad or x.grad_fn is not None for x in cache.buffers())
    assert alive[0] == alive[1]
    assert torch.is_grad_enabled()


def test_a_gradient_is_refused_rather_than_wrong(tokens):
    cache = kvcap.BudgetCache(MODEL.config, 24, 8)
    loss = MODEL(tokens(8), **as_cache(cache), labels=tokens(8)).loss
    with pytest.raises(UnsupportedModel, match="keeps no gradients"):
        loss.backward()


# Tokens that wait for their eviction --------------------------------------------------------------


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize(("policy", "family", "positions", "waiting"), in_turn(EVICTING, [
    ("llama", "compact", 1), ("gemma3_text", "compact", 2), ("llama", "true", 3),
    ("gemma3_text", "compact", 4), ("llama", "compact", 2), ("llama", "true", 1),
    ("gemma3_text", "compact", 3),
]))  # fmt: skip
def test_a_block_finds_room_beside_them(policy, family, positions, waiting):
    """A second generate() under evict_every reads a block as the loop does, cut to fit."""
    ids, model = torch.arange(3, 63)[None], tiny_model(family)  # none twice, whose norms would tie
    given = {"positions": positions, "evict_every": 4}
    plain, other = (
        kvcap.BudgetCache(model.config, 24, 8, small_policy(policy, model.config), **given)
        for _ in range(2)
    )
    loop, lengths = BlockLoop(model, other), [8] * 5 + [1] * waiting + [8, 1]
    with torch.no_grad():
        for part in ids[:, : sum(lengths)].split(lengths, dim=1):
            logits = model(part, **as_cache(plain)).logits[:, -1]
            expected = loop.prefill(part)
    assert (plain.seen, plain.consistent) == (sum(lengths), True)
    if plain.balance is not None:
        return  # layers share their slots out anew between passes, not within one
    assert plain.held <= 24 + 3
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
    for one, its in zip(plain.capped_layers, other.capped_layers, strict=True):
        for a, b in zip(one.segments, its.segments, strict=True):
            assert torch.equal(a.positions.sort(-1).values, b.positions.sort(-1).values)


def test_a_second_generate_under_evict_every(tokens):
    cache = kvcap.BudgetCache(MODEL.config, 16, 8, evict_every=4)
    options = as_cache(cache) | {"do_sample": False, "pad_token_id": 2}
    ids, lengths = tokens(8), [8, 6, 8]  # the last token said before is read with what is new
    for new in lengths:
        more = torch.cat((ids, tokens(new - 1, seed=new)), dim=1)
        ids = MODEL.generate(
            more, attention_mask=torch.ones_like(more), max_new_tokens=6, **options
        )
    assert cache.seen == ids.shape[1] - 1


# Pins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVICTING)
def test_too_many_pins_are_refused_before_anything_is_allocated_or_read(policy, tokens):
    cache, messages = (
        kvcap.BudgetCache(MODEL.config, 24, 8, small_policy(policy, MODEL.config)),
        set(),
    )
    for seen in (0, 60):
        if seen:
            BlockLoop(MODEL, cache).prefill(tokens(seen))
        with pytest.raises(PinsTooLarge, match=r"needs \d+ slots in every head") as error:
            cache.pin([(60, 100)])
        messages.add(str(error.value))
        assert (cache.seen, cache.pinned_spans) == (seen, [])
    assert len(messages) == 1 or cache.balance is not None  # by which layers have other sizes then
    BlockLoop(MODEL, cache).prefill(tokens(60))
    kvcap.BudgetCache(MODEL.config, 24, 8).pin([(0, 20)])


# What a cache is not for --------------------------------------------------------------------------


def test_a_policy_that_never_evicts_takes_no_room_of_a_block(tokens):
    """Transformers' own pass is refused; a loop refuses what does not fit before it reads."""
    cache = kvcap.BudgetCache(MODEL.config, 24, 8, "full")
    for seed in range(3):
        MODEL(tokens(8, seed=seed), **as_cache(cache))
    with pytest.raises(MemoryCapExceeded, match="never evicts: 24 tokens are held and 1 more"):
        MODEL(tokens(1), **as_cache(cache))
    assert (cache.seen, cache.consistent) == (24, True)


def test_another_batch_size_or_type(tokens):
    cache = kvcap.BudgetCache(MODEL.config, 24, 8)
    MODEL(tokens(8), **as_cache(cache))
    for reset in (False, True):
        if reset:
            cache.reset()
        with pytest.raises(CacheMismatch, match=r"for 1 sequences.* of 2 sequences"):
            MODEL(tokens(8, batch=2), **as_cache(cache))
        with pytest.raises(CacheMismatch, match="bfloat16"):
            tiny_model("llama", dtype=torch.bfloat16)(tokens(8), **as_cache(cache))
    assert (cache.seen, cache.consistent) == (0, True)
    MODEL(tokens(8), **as_cache(cache))
    with pytest.raises(CacheMismatch):
        MODEL(
            tokens(8),
            **as_cache(kvcap.BudgetCache(MODEL.config).allocate(2, torch.float32, "cpu")),
        )


@pytest.mark.parametrize("prompt", [0, 1])
def test_a_prompt_that_does_not_go_on(prompt, tokens):
    """The same again, or another: refused, unless transformers 4.57 fails before it asks."""
    cache = kvcap.BudgetCache(MODEL.config, 64, 40)
    ids = tokens(30)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2}
    MODEL.generate(ids, attention_mask=torch.ones_like(ids), **as_cache(cache), **options)
    other = tokens(30, seed=prompt)
    with pytest.raises((PositionMismatch, IndexError)):
        MODEL.generate(other, attention_mask=torch.ones_like(other), **as_cache(cache), **options)
    cache.reset()
    MODEL.generate(other, attention_mask=torch.ones_like(ids), **as_cache(cache), **options)


@pytest.mark.parametrize("name", ["offload", "prefetch"])
def test_buffers_stay_where_they_are(name, tokens):
    cache = kvcap.BudgetCache(MODEL.config, 24, 8)
    MODEL(tokens(8), **as_cache(cache))
    with pytest.raises(UnsupportedModel, match="stay where they are"):
        getattr(cache.layers[0], name)()
    with pytest.raises(UnsupportedModel, match="stay where they are"):
        getattr(cache, name)(0)


@pytest.mark.parametrize("policy", [None, 3, Knorm, ["keydiff"]])
def test_policies_of_a_wrong_type(policy):
    with pytest.raises(PolicyError, match="use a name such as 'keydiff'"):
        kvcap.BudgetCache(MODEL.config, 24, 8, policy)


def test_a_policy_alone_is_taken(tokens):
    cache = kvcap.BudgetCache(MODEL.config, 24, 8, Knorm())
    BlockLoop(MODEL, cache).prefill(tokens(40))
    assert cache.eviction.name == "knorm"


def test_it_says_what_it_is(tokens):
    cache = kvcap.BudgetCache(MODEL.config, 24, 8)
    assert "not allocated yet" in repr(cache)
    BlockLoop(MODEL, cache).prefill(tokens(40))
    assert repr(cache) == (
        "BudgetCache(llama, 2 of 2 layers capped, 2 KV heads of 16; policy 'lagkv', compact "
        f"positions; 40 tokens read, 24 of 24 slots, blocks of 8; {cache.nbytes:,} bytes)"
    )


def test_it_says_why_more_is_in_use_than_the_budget(tokens):
    cache = kvcap.BudgetCache(MODEL.config, 24, 8, evict_every=8)
    loop, ids = BlockLoop(MODEL, cache), tokens(43)
    loop.prefill(ids[:, :40])
    for i in range(40, 43):
        loop.read(ids[:, i : i + 1])
    assert cache.held == 27
    assert "24 of 24 slots + 3 waiting for the next eviction, blocks of 8" in repr(cache)


def test_an_update_outside_a_model_is_refused():
    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(KvcapError, match="ready-made"):
        kvcap.BudgetCache(MODEL.config, 24, 8).update(x, x, 0)


def test_the_package_lists_its_names():
    assert set(kvcap.__all__) <= set(dir(kvcap))
    assert {"BudgetCache", "cap", "__version__"} <= set(dir(kvcap))
