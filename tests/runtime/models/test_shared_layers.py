"""Layers that attend to an earlier layer's keys and values (Gemma 3n, Gemma 4), under the cap.

Logits and kept tokens are held to the slow reference in `tests/runtime/cache/test_reference.py`.
"""

from __future__ import annotations

import pytest
import torch
from conftest import as_cache
from families import config_of as tiny_config
from families import model_of as tiny_model

import kvcap
from kvcap.export.decoder.spec import layout_for
from kvcap.policies import load_policy
from kvcap.runtime.backends.pytorch.cuda_graphs import why_unsteady
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import NotExportable, SessionBroken, UnsupportedModel
from kvcap.runtime.models import config as model_config
from kvcap.runtime.models.config import ModelShape

SHARED = ["gemma3n", "gemma4"]


# What the cache holds -----------------------------------------------------------------------------


def test_what_layers_are():
    for family in SHARED:
        shape = ModelShape.of(tiny_config(family))
        assert [layer.kind for layer in shape.layers] == ["sliding", "capped"] * 2 + ["shared"] * 4
        assert [layer.reads for layer in shape.layers] == [None] * 4 + [2, 3] * 2
        assert [shape.readers(i) for i in range(4)] == [1, 1, 3, 3]
        assert shape.layers[7].numbers == 0
    assert (shape.kv_heads, shape.head_size) == (2, 32)
    assert shape.layers[0].head_size == 16
    shape = ModelShape.of(tiny_config("gemma4 k=v"))
    assert [(x.kv_heads, x.head_size) for x in shape.layers] == [(2, 16), (1, 32)] * 2
    assert (shape.kv_heads, shape.head_size, shape.groups) == (1, 32, 4)


# Planted faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SHARED)
def test_a_wrong_owner_is_seen(family, monkeypatch, tokens):
    """Layers that are said to read layer 1, and read layer 3."""
    right = model_config._read_layers
    monkeypatch.setattr(
        model_config,
        "_read_layers",
        lambda *a: [1 if x == 3 else x for x in right(*a)],
    )
    model = tiny_model(family)
    loop = BlockLoop(model, kvcap.BudgetCache(model.config, 16, 8))
    with pytest.raises(UnsupportedModel, match="more layers attend"):
        loop.prefill(tokens(8))


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SHARED)
def test_a_pass_that_failed_half_way(family, tokens, monkeypatch):
    model, ids = tiny_model(family), tokens(24)
    held = kvcap.BudgetCache(model.config, 16, 8)
    with monkeypatch.context() as patched:
        patched.setattr(model.model.layers[6].mlp, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(ids[:, :8], **as_cache(held))
    assert not held.consistent
    with pytest.raises(SessionBroken, match="not all layers"), torch.no_grad():
        model(ids[:, 8:16], **as_cache(held))
    held.reset()
    with torch.no_grad():
        model(ids[:, :8], **as_cache(held))
    assert held.consistent


def test_what_cannot_run_is_refused_by_name():
    layers = "layers 4 to 7 read 2 and 3"
    for family in SHARED:
        config = tiny_config(family)
        with pytest.raises(UnsupportedModel, match=rf"attend to them too \({layers}\)"):
            kvcap.BudgetCache(config, 16, 8, "calidrop")
        with pytest.raises(NotExportable, match=layers):
            layout_for(config, CacheSettings(16, 8, load_policy("keydiff")))
        held = kvcap.BudgetCache(config, 16, 8)
        assert why_unsteady(held) == "layers read the slots of others"
        assert "2 of 8 layers capped" in repr(held)


def test_capped_layers_of_unequal_sizes_are_refused():
    config = tiny_config("gemma4", per_layer_config={1: {"head_dim": 64}, 3: {"head_dim": 32}})
    with pytest.raises(UnsupportedModel, match="2 of 32, 2 of 64"):
        ModelShape.of(config)
