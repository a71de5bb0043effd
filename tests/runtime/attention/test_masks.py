"""Masks: honoured where nothing is evicted, refused by name where slots are."""

from __future__ import annotations

import warnings

import pytest
import torch
from conftest import as_cache, tiny_model
from tools import greedy
from torch.nn import functional
from transformers import DynamicCache, StaticCache, masking_utils

import kvcap
from kvcap.runtime.attention import masks
from kvcap.runtime.attention.functions import attention_forward
from kvcap.runtime.errors import PaddingUnsupported, PositionMismatch, UnsupportedModel

MODELS = {name: tiny_model("llama", name) for name in ("kvcap", "sdpa", "eager")}
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])


def cache_for(model, block=16):
    return kvcap.BudgetCache(model.config, 24, block)


def padded(ids, pad):
    """The first row's first three tokens are `pad`, and hidden."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = pad, 0
    return {"input_ids": ids, "attention_mask": mask}


def custom(length):
    """A causal mask that also hides the third token from later ones."""
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[3:, 2] = False
    return mask[None, None]


# With a BudgetCache -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
def test_padding_is_refused(batch, tokens):
    model = MODELS["kvcap"]
    given = padded(tokens(16, batch=batch), 5)
    cache = cache_for(model)
    with pytest.raises(PaddingUnsupported, match="has zeros"):
        model(**given, **as_cache(cache))
    assert (cache.seen, cache.consistent) == (0, True)
    with pytest.raises(PaddingUnsupported, match="has zeros"):
        model.generate(
            **given, **as_cache(cache), max_new_tokens=2, do_sample=False, pad_token_id=2
        )
    assert cache.seen == 0
    model(tokens(16, batch=batch), **as_cache(cache))
    assert cache.seen == 16


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_masks_of_ones_own_are_refused(family, tokens):
    model = tiny_model(family)
    cache = cache_for(model)
    mask = custom(10)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    for given in (mask, additive):
        with pytest.raises(PaddingUnsupported, match="ready-made"):
            model(tokens(10), attention_mask=given, **as_cache(cache))
        assert cache.seen == 0


def test_packed_sequences_are_refused(tokens):
    model = MODELS["kvcap"]
    cache = cache_for(model)
    with pytest.raises(PositionMismatch, match="Packed sequences need a cache each"):
        model(tokens(10), position_ids=PACKED, **as_cache(cache))
    assert (cache.seen, cache.consistent) == (0, True)
    model(tokens(10), position_ids=torch.arange(10)[None], **as_cache(cache))


def test_a_mask_that_knows_fewer_tokens_than_were_read(tokens):
    model = MODELS["kvcap"]
    cache = cache_for(model)
    model(tokens(10), **as_cache(cache))
    with pytest.raises(PositionMismatch, match="covers 10 tokens, but 10 were read and 10 more"):
        model(tokens(10), attention_mask=torch.ones(1, 10), **as_cache(cache))
    model(tokens(10), attention_mask=torch.ones(1, 20), **as_cache(cache))
    assert cache.seen == 20


def test_models_that_see_ahead_are_refused(tokens, monkeypatch):
    model = MODELS["kvcap"]
    if not hasattr(masking_utils, "create_bidirectional_mask"):
        pytest.skip("transformers 4.57 makes causal masks only")
    monkeypatch.setattr(model.config, "is_causal", False, raising=False)
    with pytest.raises(PaddingUnsupported, match="not causal"):
        model(tokens(10), **as_cache(cache_for(model)))


def test_masks_of_other_caches_stay_as_they_were(tokens):
    """Watching other attentions for capped caches changes nothing for other caches."""
    model, ids = MODELS["sdpa"], tokens(16, batch=2)
    given = padded(ids, 5)
    cache_for(MODELS["kvcap"])  # watches
    with torch.no_grad():
        logits = model(**given, **as_cache(DynamicCache())).logits
        expected = MODELS["eager"](**given, **as_cache(DynamicCache())).logits
    torch.testing.assert_close(logits[:, 3:], expected[:, 3:], rtol=1e-4, atol=1e-4)


# Without ------------------------------------------------------------------------------------------


def both(run):
    """Of kvcap's attention and of transformers' own."""
    with torch.no_grad():
        got, expected = run(MODELS["kvcap"]), run(MODELS["sdpa"])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    return got


def test_a_mask_of_ones_own(tokens):
    ids = tokens(10)
    got = both(lambda m: m(ids, attention_mask=custom(10)).logits)
    assert (got - both(lambda m: m(ids).logits)).abs().max() > 1e-2


def test_packed_sequences(tokens):
    ids = tokens(10)
    got = both(lambda m: m(ids, position_ids=PACKED, use_cache=False).logits)
    alone = both(lambda m: m(ids[:, 4:], use_cache=False).logits)
    torch.testing.assert_close(got[:, 4:], alone, rtol=1e-4, atol=1e-4)


def test_padding(tokens):
    ids = tokens(10, batch=2)
    for family in ("llama", "gemma2"):  # which has a softcap
        model = tiny_model(family)
        with torch.no_grad():
            one, other = (model(**padded(ids, pad)).logits[:, 3:] for pad in (5, 50))
            plain = tiny_model(family, "eager")(**padded(ids, 5)).logits[:, 3:]
        assert torch.equal(one, other)
        torch.testing.assert_close(one, plain, rtol=1e-4, atol=1e-4)


def test_a_static_cache(tokens):
    ids = tokens(10)

    def logits(model):
        cache = StaticCache(config=model.config, max_cache_len=20)
        parts = ids.split([6, 1, 3], dim=1)
        return torch.cat([model(p, **as_cache(cache), use_cache=True).logits for p in parts], 1)

    static = both(logits)
    torch.testing.assert_close(static, both(lambda m: m(ids).logits), rtol=1e-4, atol=1e-4)


def test_generate_with_a_static_cache(tokens):
    ids = tokens(10)
    options = greedy(ids, 8, disable_compile=True)
    both(lambda m: m.generate(ids, cache_implementation="static", **options))


def test_several_tokens_behind_a_growing_cache(tokens):
    def logits(model):
        cache = DynamicCache(config=model.config)
        return [model(part, **as_cache(cache)).logits for part in tokens(20).split(7, dim=1)][2]

    both(logits)


def test_modules_that_are_not_causal():
    module = torch.nn.Module()
    module.is_causal = False
    query, key = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 9, 16)
    out, _ = attention_forward(module, query, key, key, None)
    expected = functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    torch.testing.assert_close(out.transpose(1, 2), expected)


# What attention is asked for besides --------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 10])}, "a call of its own, without cu_seq_lens_q"),
        ({"is_causal": False}, "causal"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
    ],
)
@pytest.mark.parametrize("capped", [False, True])
def test_what_it_does_not_know_is_refused(given, message, capped, tokens):
    model = MODELS["kvcap"]
    cache = cache_for(model) if capped else None
    with pytest.raises((UnsupportedModel, PaddingUnsupported), match=message):
        model(tokens(10), **as_cache(cache), **given)
    if cache is not None:
        assert (cache.seen, cache.held, cache.consistent) == (0, 0, True)
        model(tokens(10), **as_cache(cache))


@pytest.mark.parametrize("capped", [False, True])
def test_attention_weights_are_refused(capped, tokens):
    model = MODELS["kvcap"]
    cache = cache_for(model) if capped else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers 4.57 warns and goes on
        with pytest.raises(UnsupportedModel, match="attn_implementation='eager'"):
            model(tokens(10), **as_cache(cache), output_attentions=True)
        with pytest.raises(UnsupportedModel, match="attn_implementation='eager'"):
            model.generate(
                tokens(10),
                attention_mask=torch.ones(1, 10),
                **as_cache(cache_for(model)),
                max_new_tokens=2,
                pad_token_id=2,
                return_dict_in_generate=True,
                output_attentions=True,
            )


def test_dropout_is_refused(tokens):
    model = tiny_model("llama", attention_dropout=0.5)
    model(tokens(10), **as_cache(cache_for(model)))
    with pytest.raises(UnsupportedModel, match="does not take dropout"):
        model.train()(tokens(10))


def test_what_changes_nothing_is_taken(tokens):
    model = MODELS["kvcap"]
    out = model(
        tokens(10),
        **as_cache(cache_for(model)),
        output_hidden_states=True,
        num_items_in_batch=torch.tensor(10),
        output_attentions=False,
        tokenizer=object(),
        special_tokens_mask=torch.zeros(1, 10),
        output_router_logits=False,
    )
    assert len(out.hidden_states) == 3


# Uncapped -----------------------------------------------------------------------------------------


def test_one_warning_where_nothing_is_capped(tokens, monkeypatch):
    monkeypatch.setattr(masks, "_warned", False)
    model = MODELS["kvcap"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MODELS["sdpa"](tokens(8))
        model(tokens(8), **as_cache(cache_for(model)))
        assert not caught
        for _ in range(2):
            model.generate(
                tokens(8), attention_mask=torch.ones(1, 8), max_new_tokens=3, pad_token_id=2
            )
    assert ["kvcap.cap(" in str(w.message) for w in caught] == [True]


def test_native_sliding_layers_beside_capped_ones_do_not_warn(tokens, monkeypatch):
    monkeypatch.setattr(masks, "_warned", False)
    model = tiny_model("gemma3_text")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens(10), **as_cache(cache_for(model)))
