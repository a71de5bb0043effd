"""Every supported family gives the uncapped model's logits while tokens fit, on both attentions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FAMILIES, as_cache, small_policy, tiny_config, tiny_model
from tools import in_blocks, uncapped
from transformers import AutoConfig

import kvcap
from kvcap.policies import Eviction, policies
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.layer import BudgetLayer
from kvcap.runtime.models.config import ModelShape

LENGTH = 60  # beyond the tiny models' sliding windows of 24


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def roomy(eviction: Eviction, config: Any) -> int:
    """A budget at which the smallest head of the smallest layer holds all tokens."""
    sizes = (64 << i for i in range(9))
    layers = len(kvcap.BudgetCache(config, 8).capped_layers)
    return next(n for n in sizes if min(map(min, eviction.allot(n, layers, 2))) >= LENGTH)


@pytest.mark.parametrize("policy", policies())
def test_answers_evict_nothing_while_tokens_fit(policy, tokens):
    ids = tokens(40)
    model = tiny_model("llama")
    eviction = small_policy(policy, model.config, recents=LENGTH)
    loop = BlockLoop(
        model, kvcap.BudgetCache(model.config, roomy(eviction, model.config), 7, eviction)
    )
    logits = [loop.prefill(ids[:, :30])] + [loop.read(ids[:, i : i + 1]) for i in range(30, 40)]
    close(torch.stack(logits, 1), uncapped("llama", ids)[:, 29:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models(dtype, tokens):
    """No further from float32 than twice the uncapped model of the same precision."""
    ids = tokens(LENGTH)
    exact = uncapped("llama", ids)
    plain = tiny_model("llama", "eager", dtype=dtype)
    with torch.no_grad():
        allowed = 2 * (plain(ids).logits.float() - exact).abs().max()
    model = tiny_model("llama", dtype=dtype)
    for positions in ("compact", "true"):
        cache = kvcap.BudgetCache(model.config, 64, 16, positions=positions)
        got = in_blocks(model, cache, ids, 16).float()
        assert (got - exact).abs().max() <= allowed


@pytest.mark.parametrize("family", FAMILIES)
def test_hybrid_models_cap_their_global_layers_only(family):
    config = tiny_config(family)
    cache = kvcap.BudgetCache(config, 16, 8)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(cache.layers)
    for layer, kind in zip(cache.layers, kinds, strict=True):
        assert isinstance(layer, BudgetLayer) == (kind == "full_attention")


# Drop-in use of transformers' generate ----------------------------------------------------------


def test_compact_drop_in_equals_the_block_loop(tokens):
    """generate() passes true positions; the attention function brings them back."""
    ids = tokens(57)  # the last token alone, as transformers 4.57 reads it
    model = tiny_model("llama")
    cache = kvcap.BudgetCache(model.config, 24, 8)
    assert cache.layout.positions == "compact"
    out = model.generate(
        ids,
        **as_cache(cache),
        prefill_chunk_size=8,
        max_new_tokens=10,
        do_sample=False,
        pad_token_id=2,
        eos_token_id=-1,
        attention_mask=torch.ones_like(ids),
    )
    loop = BlockLoop(model, kvcap.BudgetCache(model.config, 24, 8))
    logits, said = loop.prefill(ids), []
    for _ in range(10):
        said.append(int(logits.argmax()))
        logits = loop.read(logits.argmax(-1, keepdim=True))
    assert out[0, 57:].tolist() == said


# Refusals -----------------------------------------------------------------------------------------


def test_length_dependent_rope_falls_back_with_a_warning():
    from kvcap.runtime.cache.layout import default_positions

    long = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    name = "rope_parameters" if hasattr(tiny_config("llama"), "rope_parameters") else "rope_scaling"
    config = tiny_config("llama", **{name: long})
    with pytest.warns(UserWarning, match="dynamic"):
        assert default_positions(ModelShape.of(config)) == "true"
    with pytest.raises(kvcap.KvcapError, match="dynamic"):
        kvcap.BudgetCache(config, 24, 8, positions="compact")


@pytest.mark.parametrize("family", ["gpt2", "mamba", "bert", "bloom", "zamba"])
def test_other_models_are_refused_by_name(family):
    with pytest.raises(kvcap.KvcapError, match=rf"{family}.*supported: .*llama, .* run"):
        kvcap.BudgetCache(AutoConfig.for_model(family), 24, 8)


def test_models_that_slide_everywhere(tokens):
    config = tiny_config("mistral", sliding_window=24)
    with pytest.raises(kvcap.KvcapError, match="at most 24 slots"):
        kvcap.BudgetCache(config, 24, 8)
    # Within the window every slot stays in reach, so a cap below it changes nothing.
    ids = tokens(60)
    model = tiny_model("mistral", sliding_window=80)
    cache = kvcap.BudgetCache(model.config, 64, 16)
    close(in_blocks(model, cache, ids, 16), uncapped("mistral", ids, sliding_window=80))


def test_wrong_positions_are_refused(tokens):
    model = tiny_model("llama")
    cache = kvcap.BudgetCache(model.config, 24, 8)
    model(tokens(8), **as_cache(cache))
    with pytest.raises(ValueError, match="8 tokens were read"):
        model(tokens(8), **as_cache(cache), position_ids=torch.arange(3, 11)[None])


def test_blocks_larger_than_their_slots_are_refused_untouched(tokens):
    model = tiny_model("llama")
    cache = kvcap.BudgetCache(model.config, 24, 8)
    model(tokens(8), **as_cache(cache))
    with pytest.raises(kvcap.KvcapError, match="prefill_chunk_size=8"):
        model(tokens(60), **as_cache(cache))
    assert cache.seen == 8
    assert cache.consistent


def test_full_refuses_before_reading(tokens):
    model = tiny_model("llama")
    loop = BlockLoop(model, kvcap.BudgetCache(model.config, 24, 8, "full"))
    with pytest.raises(kvcap.KvcapError, match="raise the budget to 30"):
        loop.prefill(tokens(30))
    assert loop.cache.seen == 0
    loop.prefill(tokens(24))
    with pytest.raises(kvcap.KvcapError, match="never evicts"):
        loop.read(tokens(1))
    assert loop.cache.seen == 24


def test_beam_search_and_cropping_are_refused(tokens):
    model = tiny_model("llama")
    cache = kvcap.BudgetCache(model.config, 24, 8)
    with pytest.raises(kvcap.KvcapError, match="beam search"):
        model.generate(
            tokens(8),
            **as_cache(cache),
            num_beams=2,
            max_new_tokens=4,
            pad_token_id=2,
            attention_mask=torch.ones(1, 8),
        )


def test_a_half_read_cache_is_found_out(tokens, monkeypatch):
    model = tiny_model("llama")
    loop = BlockLoop(model, kvcap.BudgetCache(model.config, 24, 8))
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", lambda _: 1 / 0)
        patch.setattr(model.model.layers[1].self_attn, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.prefill(tokens(8))
    with pytest.raises(kvcap.KvcapError, match="reset"):
        loop.prefill(tokens(8))
    loop.cache.reset()
    loop.prefill(tokens(8))


# Planted faults: each must make the comparison with the uncapped model fail -----------------------
