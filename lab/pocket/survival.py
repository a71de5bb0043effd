"""Computes a training loss that makes facts survive eviction by key similarity.

KeyDiff keeps the keys that differ most from the mean of the keys held. The loss acts out one such
round in every head of every layer: a full cache (the facts, and the filler keys that would have
lasted longest) plus a block of new tokens, at consecutive positions. It then asks that each key of
a fact be less similar to the mean than each key of filler.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

HELD, BLOCK = 256, 128  # slots of the cache, tokens of a block
_MARGIN, _SOFTNESS = 0.1, 0.1  # in units of cosine


def hidden_states(
    model: LlamaForCausalLM, ids: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the last hidden state and the input of each layer, each of shape (B, T, hidden)."""
    base = model.model
    hidden = base.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rotary = base.rotary_emb(hidden, positions)
    inputs = []
    for layer in base.layers:
        inputs.append(hidden)
        hidden = layer(hidden, position_embeddings=rotary)
    return base.norm(hidden), inputs


def rotate(keys: torch.Tensor, positions: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """Rotate keys (B, H, N, D) to ``positions`` (N) by RoPE with ``rates`` (D / 2)."""
    angle = positions[:, None] * rates
    cos, sin = angle.cos(), angle.sin()
    one, two = keys.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def similarity(keys: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each key with the mean key, (B, H, N, D) to (B, H, N)."""
    return F.cosine_similarity(keys, keys.mean(2, keepdim=True), dim=-1)


def take(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the keys (B, H, n, D) at ``index`` (B, H, n)."""
    return keys.gather(2, index[..., None].expand(-1, -1, -1, keys.shape[-1]))


def survival_loss(
    model: LlamaForCausalLM, inputs: list[torch.Tensor], facts: torch.Tensor, start: int
) -> torch.Tensor:
    """Return the mean loss over layers; ``facts`` (B, T) marks fact tokens, a block is at start."""
    rows = facts[:, :start].any(1)
    rates = model.model.rotary_emb.inv_freq
    total = inputs[0].new_zeros(())
    for layer, hidden in zip(model.model.layers, inputs, strict=True):
        hidden, marks = hidden[rows, : start + BLOCK], facts[rows, : start + BLOCK]
        attention = layer.self_attn
        keys = attention.k_proj(layer.input_layernorm(hidden))
        keys = keys.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2).float()
        total = total + _layer_loss(keys, marks[:, None].expand(keys.shape[:3]), rates, start)
    return total / len(inputs)


def _layer_loss(
    keys: torch.Tensor, facts: torch.Tensor, rates: torch.Tensor, start: int
) -> torch.Tensor:
    with torch.no_grad():  # which keys would the cache hold by now?
        rough = torch.arange(start, device=keys.device) * (HELD / start)
        lasting = facts[..., :start] * 2.0 - similarity(rotate(keys[:, :, :start], rough, rates))
        held = lasting.topk(HELD, -1).indices.sort(-1).values
        block = torch.arange(start, start + BLOCK, device=keys.device)
        index = torch.cat([held, block.expand(*held.shape[:2], -1)], -1)
    positions = torch.arange(HELD + BLOCK, device=keys.device)
    alike = similarity(rotate(take(keys, index), positions, rates))
    fact = facts.gather(2, index)
    gap = alike[..., :, None] - alike[..., None, :] + _MARGIN
    pairs = fact[..., :, None] & ~fact[..., None, :]
    return (F.softplus(gap / _SOFTNESS) * _SOFTNESS * pairs).sum() / pairs.sum().clamp(min=1)
