"""Computes full attention under a mask of the tokens that a capped cache kept, as the reference.

A capped cache reads a text block by block, and records the tokens that every head held. Then the
whole text is read at once, uncapped, and each token sees exactly those tokens. With compact
positions, queries and keys are rotated, in float64, to their ranks among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from conftest import as_cache
from reference import rotate
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import kvcap
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.step import ForwardContext

NAME = "masked_reference"
POLICIES = ["keydiff", "snapkv", "h2o", "dropkv", "streaming_llm"]
OPTIONS: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 4, "kernel": 3, "pool": "avg"}, "dropkv": {"window": 4},
    "streaming_llm": {"sinks": 2},
}  # fmt: skip
Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Kept:
    """The tokens that heads of capped layers saw, block by block."""

    compact: bool = False
    rotate: Rotate = rotate
    inv_freq: dict[int, Tensor] = field(default_factory=dict)  # frequencies of layers that rotate
    blocks: dict[int, list[tuple[int, list[list[int]]]]] = field(default_factory=dict)
    """Holds by capped layer each block's first token and the tokens of KV heads before it."""


_KEPT = Kept()


def eviction_of(policy: str) -> kvcap.Eviction:
    """Return one of `POLICIES` for budgets of some slots."""
    return kvcap.load_policy(policy, **OPTIONS.get(policy, {}))


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute eager attention; in capped layers over kept tokens, at the cache's positions."""
    index, length = module.layer_idx, query.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    group = query.shape[1] // key.shape[1]
    if index not in _KEPT.blocks:
        keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
        out = _softmax(query @ keys.mT * scaling, softcap, attention_mask) @ values
        return out.transpose(1, 2).contiguous(), None
    out = torch.zeros(*query.shape[:3], value.shape[3])
    blocks = _KEPT.blocks[index]
    for (start, held), stop in zip(blocks, [b[0] for b in blocks[1:]] + [length], strict=True):
        for h in range(query.shape[1]):
            # A slot of latents serves all query heads, which expand it to keys of their own.
            seen = sorted(held[h * len(held) // query.shape[1]]) + list(range(start, stop))
            q, k = query[0, h, start:stop].double(), key[0, h // group, seen].double()
            if _KEPT.compact and (inv_freq := _KEPT.inv_freq.get(index)) is not None:
                moves = torch.arange(len(seen)) - torch.tensor(seen)
                k, q = (_KEPT.rotate(x, moves[-len(x) :], inv_freq) for x in (k, q))
            hidden = torch.ones(len(q), len(seen)).triu(len(seen) - len(q) + 1).bool()
            mask = torch.zeros(hidden.shape, dtype=torch.double).masked_fill(hidden, -torch.inf)
            weights = _softmax(q @ k.T * scaling, softcap, mask)
            out[0, h, start:stop] = (weights @ value[0, h // group, seen].double()).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


def _softmax(logits: Tensor, softcap: float | None, mask: Tensor | None) -> Tensor:
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return (logits if mask is None else logits + mask[..., : logits.shape[-1]]).softmax(-1)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, eager_mask)


def compare(
    make: Callable[[str], Any],
    cache: kvcap.BudgetCache,
    ids: Tensor,
    block: int,
    rotation: Rotate = rotate,
    inv_freq: dict[int, Tensor] | None = None,
    single: int = 3,
) -> tuple[Tensor, Tensor]:
    """Return logits [T, V] of every token, under the cap and under the mask of kept tokens.

    Args:
        make: makes the model with an attention of a name, always with the same weights.
        cache: an empty cache for that model.
        ids: the text [1, T].
        block: tokens of a block.
        rotation: the layout of the model's rotary embedding.
        inv_freq: the model's own frequencies of each layer that rotates.
        single: number of last tokens that are read one by one, as in generation.
    """
    model, kept = make("kvcap"), Kept(cache.layout.positions == "compact", rotation, inv_freq or {})
    loop, logits, start = BlockLoop(model, cache), [], 0
    parts = [*ids[:, : ids.shape[1] - single].split(block, 1), *ids[:, -single:].split(1, 1)]
    for part in parts:
        for index, layer in enumerate(cache.layers):
            if layer in cache.capped_layers:
                heads = [p for s in layer.segments for p in s.positions[0].tolist()]
                heads = heads or [[]] * cache.layout.shape.kv_heads
                kept.blocks.setdefault(index, []).append((start, heads))
        logits.append(_read(loop, part))
        start += part.shape[1]
    global _KEPT
    _KEPT = kept
    with torch.no_grad():
        expected = make(NAME)(ids).logits[0]
    return torch.cat(logits), expected


def _read(loop: BlockLoop, part: Tensor) -> Tensor:
    """Read a block; return the logits [T, V] of all its tokens."""
    cache = loop.cache
    positions = cache.next_position + torch.arange(part.shape[1])[None]
    with torch.no_grad(), cache.passing(ForwardContext(cache.next_position)):
        out = loop.model(input_ids=part, position_ids=positions, **as_cache(cache))
    return out.logits[0]


def rotary_frequencies(model: Any, layer_type: str = "full_attention") -> Tensor:
    """Return the model's own inverse frequencies [R/2] for layers of a type."""
    (rotary,) = {m for n, m in model.named_modules() if n.endswith("rotary_emb")}
    own = getattr(rotary, f"{layer_type}_inv_freq", None)
    return rotary.inv_freq if own is None else own
