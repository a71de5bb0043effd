"""Attends over slots that hold latents, in multi-head latent attention (MLA).

Either queries are projected to the latents (`absorbed`), which makes it attention of all query
heads over one KV head; or the slots are expanded to every head's keys and values, which costs less
for many queries. Both are exact. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.utils._pytree import tree_leaves

from kvcap.policies.base import Expansion, Logits
from kvcap.runtime.attention.functions import CappedLayer, attend
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.types import ATTENTION


def rotated_first(query: Tensor, rotated: int) -> Tensor:
    """Return transformers' queries `[q_nope, q_rot]` [B, H, T, nope + r] as `[q_rot, q_nope]`."""
    return query.roll(rotated, dims=-1)


def absorbed(query: Tensor, expansion: Expansion) -> Tensor:
    """Project queries `[q_rot, q_nope]` to `[q_rot, q_nope W_uk]` [B, H, T, r + R], like slots."""
    turned, own = query.tensor_split((expansion.rotated,), dim=-1)
    return torch.cat((turned, torch.matmul(own, expansion.keys.to(query.dtype))), dim=-1)


def attend_absorbed(query: Tensor, slots: Tensor, expansion: Expansion, logits: Logits) -> Tensor:
    """Attend causally with `absorbed` queries over slots, as of one KV head. [B, H, T, v].

    Arguments as in `attend_expanded`, with queries [B, H, T, r + R].
    """
    # Whole slots in place of their latents: torch's fused attention wants values as large as keys.
    out = attend(query, slots, slots, logits)[..., expansion.rotated :]
    return expansion.head_values(out)


def attend_expanded(query: Tensor, slots: Tensor, expansion: Expansion, logits: Logits) -> Tensor:
    """Attend causally over every head's own keys and values. [B, H, T, v].

    Args:
        query: [B, H, T, r + nope], rotated numbers first.
        slots: [B, 1, n, r + R].
        expansion: of the layer.
        logits: of the model.
    """
    keys = expansion.head_keys(slots)  # [B, H, n, r + nope]
    values = expansion.head_values(slots[..., expansion.rotated :])  # [B, H, n, v]
    size = values.shape[-1]
    if (spare := keys.shape[-1] - size) > 0:  # torch's fused attention wants one size
        values = pad(values, (0, spare))
    return attend(query, keys, values, logits)[..., :size]


class LatentBlock:
    """A stand-in for a block of latents that a capped layer's `update` returns, without numbers.

    Transformers expands what `update` returns to every head's keys and values, and hands them to
    attention. Slots are in no order and need no expansion, so nothing is computed here: results
    have the right shapes and carry `kvcap_layer`, by which kvcap's attention finds the slots. Any
    other use is refused, so that no other attention can take the block for all there is.

    Args:
        like: the latents or rotated parts [B, 1, T, ...] that arrived.
        layer: whose block it is.
        shaped: of the shape that is shown; by default as `like`.
    """

    SHAPING = frozenset(("contiguous", "expand", "reshape", "transpose", "unsqueeze", "view"))

    def __init__(self, like: Tensor, layer: CappedLayer, shaped: Tensor | None = None) -> None:
        self.kvcap_layer, self.sources = layer, (like,)
        self._shaped = _nothing(like.shape) if shaped is None else shaped
        self.dtype, self.device = like.dtype, like.device

    @property
    def shape(self) -> torch.Size:
        """Return the shape shown."""
        return self._shaped.shape

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self.SHAPING:
            shaping = getattr(self._shaped, name)
            return lambda *args, **options: self._shown(shaping(*args, **options))
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal(name)

    def __getitem__(self, index: Any) -> LatentBlock:
        return self._shown(self._shaped[index])

    def new_empty(self, *shape: Any, **_: Any) -> LatentBlock:
        """Return a block of another shape, as a tensor's method does."""
        return self._shown(_nothing(shape[0] if len(shape) == 1 else shape))

    def copy_(self, source: LatentBlock) -> LatentBlock:
        """Copy nothing, and return the block."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply `kv_b_proj`, or cut its result into keys and values; refuse anything else."""
        block = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        if func is linear and block is args[0]:
            return block.new_empty((*block.shape[:-1], args[1].shape[0]))
        if func is torch.split and block is args[0]:
            return tuple(map(block._shown, torch.split(block._shaped, *args[1:], **(kwargs or {}))))
        raise block._refusal(getattr(func, "__name__", str(func)))

    def _shown(self, shaped: Tensor) -> LatentBlock:
        return LatentBlock(self.sources[0], self.kvcap_layer, shaped)

    def _refusal(self, name: str) -> UnsupportedModel:
        self.kvcap_layer.take_back()
        return UnsupportedModel(
            f"slots that hold latents were to be read by {name!r}, which knows of no slots; load "
            f"the model with attn_implementation={ATTENTION!r}"
        )


def _nothing(shape: Any) -> Tensor:
    """Return a tensor of a shape that holds no numbers and takes no memory."""
    return torch.empty((), device="meta").expand(shape)
