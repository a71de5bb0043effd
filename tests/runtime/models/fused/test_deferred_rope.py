"""Which models leave the rotation of a token to attention, and which must not."""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import FAMILIES, tiny_model
from transformers.models.llama import modeling_llama

from kvcap.runtime.models.fused.deferred_rope import NAME, can_be_late, late, left

ROTATIONS_OF_THEIR_OWN = {"gemma3_text"}  # one for every type of layer


def file_of(model):
    return sys.modules[type(model).__module__]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    model = tiny_model(family)
    before = getattr(file_of(model), NAME)
    assert can_be_late(model, file_of(model)) == (family not in ROTATIONS_OF_THEIR_OWN)
    assert getattr(file_of(model), NAME) is before


def test_a_model_that_rotates_in_another_precision_does_so_itself():
    model = tiny_model("olmo2")
    assert can_be_late(model, file_of(model))  # what it computes in float32 is in float32
    assert not can_be_late(model.to(torch.bfloat16), file_of(model))


@pytest.mark.parametrize("fault", ["none", "query", "key", "formula", "angles", "call"])
def test_what_is_done_with_a_rotation_is_noticed(fault, monkeypatch):
    rotate, forward = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    model = tiny_model("llama")

    def attention(self, hidden_states, position_embeddings, attention_mask, past_key_values):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (layer(hidden_states).view(shape).transpose(1, 2) for layer in layers)
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        q, k = (q * 2 if fault == "query" else q), (k * 2 if fault == "key" else k)
        keys, _ = past_key_values.update(k, v, self.layer_idx)
        return keys.kvcap_layer.attend(self, q, self.scaling, None, None), None

    def rotation(q, k, cos, sin):
        if fault == "formula":
            q = q.flip(-1)
        return rotate(q, k, cos, sin if fault == "formula" else sin.cumsum(-1))

    if fault in ("none", "query", "key"):
        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", attention)
    elif fault == "call":
        monkeypatch.setattr(
            modeling_llama.LlamaAttention, "forward", lambda self, x: forward(self, x)
        )
    else:
        monkeypatch.setattr(modeling_llama, NAME, rotation)
    assert can_be_late(model, modeling_llama) == (fault == "none")


@pytest.mark.parametrize("place", ["attention", "projection"])
def test_where_somebody_looks_on_it_is_left_alone(place):
    model = tiny_model("llama")
    attention = model.base_model.layers[1].self_attn
    module = attention if place == "attention" else attention.k_proj
    calls = []
    hook = module.register_forward_hook(lambda *_: calls.append(1))
    assert not can_be_late(model, modeling_llama)
    assert not calls
    hook.remove()
    assert can_be_late(model, modeling_llama)


def test_blocks_are_rotated_at_once_and_tokens_when_it_is_asked():
    rotation = late(modeling_llama.apply_rotary_pos_emb)
    for tokens in (1, 2):
        q, k = torch.randn(1, 4, tokens, 16), torch.randn(1, 2, tokens, 16)
        cos, sin = (torch.randn(1, tokens, 16) for _ in range(2))
        expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
        query, key = rotation(q, k, cos, sin)
        waiting = left(key)
        assert (waiting is not None) == (tokens == 1)
        if waiting is not None:
            assert waiting.query is query is q
            query, key = waiting.now(key)
        assert torch.equal(query, expected[0])
        assert torch.equal(key, expected[1])
        by_name = rotation(q, k, cos=cos, sin=sin)  # not as models here call it
        assert torch.equal(by_name[0], expected[0])
