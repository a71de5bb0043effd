"""Reads through a cache that KeyDiff keeps small, with gradients.

It does the arithmetic of a capped chat: blocks of tokens, after each the keys most like the mean
key of their head are dropped, and what is left counts as consecutive positions. Slow and plain; it
serves the last training run, in which the model learns to answer from what such a cache holds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import LlamaForCausalLM

from kvcap.lab.pocket.survival import BLOCK, rotate, similarity, take

Cache = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: unrotated keys and values (B, K, n, D)


def read_evicted(
    model: LlamaForCausalLM, ids: torch.Tensor, budget: int, graded: int
) -> torch.Tensor:
    """Read ``ids`` (B, T) with ``budget`` slots; return the last hidden states (B, graded, hidden).

    Only the last ``graded`` tokens have gradients; both they and T are whole blocks.
    """
    cache: Cache = []
    blocks = ids.split(BLOCK, 1)
    free = (ids.shape[1] - graded) // BLOCK
    with torch.no_grad():
        for block in blocks[:free]:
            _, cache = _read_block(model, block, cache, budget)
    outs = []
    for block in blocks[free:]:
        out, cache = _read_block(model, block, cache, budget)
        outs.append(out)
    return torch.cat(outs, 1)


def _read_block(
    model: LlamaForCausalLM, ids: torch.Tensor, cache: Cache, budget: int
) -> tuple[torch.Tensor, Cache]:
    base: Any = model.model
    kept: Cache = []
    rates = base.rotary_emb.inv_freq
    hidden = base.embed_tokens(ids)
    for i, layer in enumerate(base.layers):
        mixed, slots = _attend(
            layer.self_attn, layer.input_layernorm(hidden), cache[i : i + 1], rates, budget
        )
        kept.append(slots)
        hidden = hidden + mixed
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return base.norm(hidden), kept


def _attend(
    attention: Any,
    hidden: torch.Tensor,
    held: Cache,
    rates: torch.Tensor,
    budget: int,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    size = attention.head_dim
    query, key, value = (
        project(hidden).unflatten(-1, (-1, size)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    for old_key, old_value in held:
        key, value = torch.cat([old_key, key], 2), torch.cat([old_value, value], 2)
    new, n = query.shape[2], key.shape[2]
    positions = torch.arange(n, device=key.device)
    turned = rotate(key.float(), positions, rates)
    groups = query.shape[1] // key.shape[1]
    out = F.scaled_dot_product_attention(
        rotate(query.float(), positions[-new:], rates).to(value.dtype),
        turned.to(value.dtype).repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        attn_mask=causal_lower_right(new, n),
    )
    if n > budget:
        index = (-similarity(turned)).topk(budget, -1).indices.sort(-1).values
        key, value = take(key, index), take(value, index)
    mixed: torch.Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
    return mixed, (key, value)
