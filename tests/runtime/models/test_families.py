"""Every supported family gives the uncapped model's logits while tokens fit, on both attentions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import as_cache, small_policy, tiny_config, tiny_model
from families import SINKS, model_of
from tools import in_blocks, uncapped

import kvcap
from kvcap.policies import Eviction, policies
from kvcap.runtime.backends.pytorch.loop import BlockLoop
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


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("family", "dtype"), [
    ("llama", torch.bfloat16), ("llama", torch.float16),
    *((family, torch.bfloat16) for family in SINKS),
])  # fmt: skip
def test_low_precision_models(family, dtype, tokens):
    """No further from float32 than twice the uncapped model of the same precision."""
    ids = tokens(LENGTH)
    with torch.no_grad():
        exact = model_of(family, "eager")(ids).logits
        plain = model_of(family, "eager", dtype)(ids).logits.float()
    allowed = 2 * (plain - exact).abs().max()
    model = model_of(family, dtype=dtype)
    for positions in ("compact", "true"):
        cache = kvcap.BudgetCache(model.config, 64, 16, positions=positions)
        got = in_blocks(model, cache, ids, 16).float()
        assert (got - exact).abs().max() <= allowed


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
