"""Rotary positions of one token left to attention, whose kernel rotates on the way.

A model rotates queries and keys by a function of its modelling file, before the cache and attention
see them. Of one token that is a kernel between two others, for numbers that the next one reads at
once. Whether a model allows it is tried with a token. Knows transformers' modules, no cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcap.runtime.models.fused.decoder_layer import is_watched, sample

NAME = "apply_rotary_pos_emb"  # the function of transformers' modelling files

Rotate = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LateRotation:
    """What has yet to be done with a token's query and key."""

    query: Tensor  # [B, H, 1, D]
    angles: tuple[Tensor, Tensor]  # cosines and sines [B or 1, 1, D]
    rotate: Rotate  # the model's own

    def now(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """The query and its key [B, K, 1, D], rotated."""
        return self.rotate(self.query, key, *self.angles)


def late(rotate: Rotate) -> Rotate:
    """What takes the place of a model's `rotate`: of one token it leaves that to be done."""

    def rotation(q: Tensor, k: Tensor, *args: Any, **further: Any) -> tuple[Tensor, Tensor]:
        if q.shape[2] > 1 or len(args) != 2 or further:
            return rotate(q, k, *args, **further)
        k = k.view_as(k)
        k.kvcap_late_rotation = LateRotation(q, args, rotate)  # type: ignore[attr-defined]
        return q, k

    return rotation


def left(key: Tensor) -> LateRotation | None:
    """What has yet to be done with a key that comes to a cache, if anything."""
    return getattr(key, "kvcap_late_rotation", None)


@torch.no_grad()
def can_be_late(model: Any, file: Any) -> bool:
    """Whether no attention layer of a model does anything with what its `file` rotates.

    But handing it to the cache and to the registered attention function; and whether halves of
    whole heads are rotated by the angles that the layer is given.
    """
    rotate, rotated = getattr(file, NAME), list[LateRotation]()

    def noted(q: Tensor, k: Tensor, *args: Any, **further: Any) -> tuple[Tensor, Tensor]:
        q, k = late(rotate)(q, k, *args, **further)
        rotated.append(k.kvcap_late_rotation)  # type: ignore[attr-defined]
        return q, k

    layers = [layer.self_attn for layer in getattr(model.base_model, "layers", [])]
    if any(is_watched(module) for attention in layers for module in attention.modules()):
        return False  # somebody else's code runs in it
    setattr(file, NAME, noted)
    try:
        handed = [_hands_on(model, attention, rotated) for attention in layers]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False  # it wants to be called in another way
    finally:
        setattr(file, NAME, rotate)
    return bool(rotated) and all(handed)


class _Spy:
    """In the place of a cache, and of its layer."""

    def __init__(self) -> None:
        self.key: Any = None
        self.query: Any = None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.key = keys
        keys = keys.view_as(keys)
        keys.kvcap_layer = self  # type: ignore[attr-defined]
        return keys, values

    def attend(self, module: Any, query: Tensor, *_: Any) -> Tensor:
        self.query = query
        return query


def _hands_on(model: Any, attention: Any, rotated: list[LateRotation]) -> bool:
    x, before = sample(next(attention.parameters()), model.config.hidden_size)[None], len(rotated)
    place = model.base_model.rotary_emb(x, torch.full((1, 1), 7, device=x.device))
    spy = _Spy()
    attention(
        hidden_states=x,
        position_embeddings=place,
        attention_mask=None,
        past_key_values=spy,
    )
    found = None if spy.key is None else left(spy.key)
    if found is None or spy.query is not found.query:
        return spy.query is not None and len(rotated) == before  # it has no positions
    return all(
        torch.equal(its, _rotated(x, *found.angles))
        for x, its in zip((spy.query, spy.key), found.now(spy.key), strict=True)
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves of `x` [B, H, T, D], as attention's kernel rotates them."""
    half = x.shape[-1] // 2
    cos, sin = (a[..., :half].repeat(1, 1, 2)[:, None] for a in (cos, sin))
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
