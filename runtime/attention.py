"""The attention function kvcap registers with transformers under the name 'kvcap'.

It sees what `cache.update` returned. Keys of a capped layer carry their layer, which does the
attention and then evicts; any other keys (native sliding layers, no cache) get ordinary masked
attention. Knows tensors only; the layer knows the policy.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvcap.runtime.errors import PaddingUnsupported

NAME = "kvcap"


class CappedLayer(Protocol):
    """A cache layer that attends and evicts by itself."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        scaling: float,
        softcap: float | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Attention output [B, H, T, D] of the block just appended."""
        ...


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention of the newest T tokens over n slots, the last T of them their own.

    Without a mask every older slot is visible and the block is causal (bottom-right).

    Args:
        query: [B, H, T, D].
        keys: [B, K, n, D].
        values: [B, K, n, D].
        scaling: factor of the logits.
        softcap: logits = softcap · tanh(logits / softcap), in Gemma 2.
        mask: [B, 1, T, n], boolean (True: visible) or additive.

    Returns:
        [B, H, T, D]
    """
    length, slots = query.shape[2], keys.shape[2]
    if softcap is not None:
        return _softcapped(query, keys, values, scaling, softcap, mask)
    if mask is None and length > 1:
        mask = cast(Tensor, causal_lower_right(length, slots))
    if mask is None and query.device.type == "cpu":
        # The group's queries as rows of one head: no repeated keys, and the fastest on a CPU
        # (0.044 ms against 0.066 grouped and 0.144 repeated, 8/2 heads, 1,152 slots; bf16 0.05
        # against 0.51). On a GPU it is slower than grouping.
        folded = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
        out = scaled_dot_product_attention(folded, keys, values, scale=scaling)
        return out.reshape(query.shape)
    grouped = query.shape[1] != keys.shape[1]
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )


def _softcapped(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softcap: float,
    mask: Tensor | None,
) -> Tensor:
    """Plain attention, since no fused kernel here takes a softcap. Workspace [B, H, T, n]."""
    group = query.shape[1] // keys.shape[1]
    length, slots = query.shape[2], keys.shape[2]
    q = query.unflatten(1, (-1, group)).flatten(2, 3)  # [B, K, G·T, D]
    z = torch.matmul(q, keys.mT).unflatten(2, (group, length)) * scaling
    z = softcap * torch.tanh(z / softcap)
    if mask is None:
        mask = torch.ones(length, slots, dtype=torch.bool, device=q.device).tril(slots - length)
    else:
        mask = mask.unsqueeze(1)  # one head's mask over [B, K, G, T, n]
    z = z.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else z + mask
    weights = z.softmax(-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights.flatten(2, 3), values).view(query.shape)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface. query [B, H, T, D] -> output [B, T, H, D]."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: CappedLayer | None = getattr(key, "kvcap_layer", None)
    if layer is not None:
        out = layer.attend(module, query, scaling, softcap, position_ids)
    else:
        out = attend(query, key, value, scaling, softcap, attention_mask)
    return out.transpose(1, 2).contiguous(), None


def attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Transformers' mask interface: none for full attention, a native mask for sliding layers.

    Raises:
        PaddingUnsupported: when the batch is padded.
    """
    from transformers.masking_utils import sdpa_mask

    padding = kwargs.get("attention_mask")
    if padding is not None and not bool(padding.all()):
        raise PaddingUnsupported(
            "the batch is padded; heads evict different tokens, so no mask can follow them. "
            "Pass prompts of equal length, or one at a time"
        )
    if kwargs.get("local_size") is None:
        return None  # attend() is causal by itself
    return cast(Tensor, sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False}))


def register(_module: Any = None) -> None:
    """Make `attn_implementation='kvcap'` known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
