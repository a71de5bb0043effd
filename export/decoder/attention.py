"""Attends with a block over slots in a buffer, by ONNX Runtime's own node or as it computes.

GroupQueryAttention (domain com.microsoft) of ONNX Runtime on a CPU, as measured with 1.32:

- Where past and present are one memory it writes the block's keys and values behind the slots in
  use, [last + 1 - T, last + 1), and touches nothing else; else it copies both buffers.
- A block of any length may follow any number of slots; its tokens see all slots before it, in
  whatever order they lie, and those of themselves that are not newer.
- It takes float32 and float16; of these it turns keys into float32 at every run.
- It also takes buffers of int8, with a scale for each channel of each KV head that is the same for
  all slots, and quantises a token as it writes it. A block attends to what they stand for in
  float32, and to itself as it is (`blocks`).
- With `local_window_size` W a token sees the last W slots alone, its own included: such slots must
  lie in time order.
- A sink logit of every query head is an input of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NODE = "com.microsoft::GroupQueryAttention"
MOST = 127  # the largest number in 8 bits
QUANTISED = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
BEFORE_SINKS = 4  # inputs of the node that stay empty before its sink logits


def group_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    last: Tensor,
    scaling: float,
    softcap: float = 0.0,
    scales: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Append a block to a layer's buffers, and attend to it and to all slots before it.

    Args:
        query: [1, H, T, D]; computed in the type of the buffers, as keys and values; in float32
            over buffers of int8.
        key: [1, K, T, D], the block's.
        value: likewise.
        keys: buffer [1, K, slots, D]; the block goes to the slots up to `last`.
        values: likewise.
        last: the block's last slot, int32 [1].
        scaling: of logits.
        softcap: logits are `softcap · tanh(logits / softcap)`; 0: as they are.
        scales: of keys and values in buffers of int8, [K, 1, D] float32 each.
        window: slots that a token sees, the last ones and its own; None: all.
        sinks: [H], the sink logit of every query head.

    Returns:
        [1, H, T, D], and the buffers with the block in them.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    kind = keys.dtype if scales is None else torch.float32
    flat = [x.to(kind).transpose(1, 2).flatten(2) for x in (query, key, value)]
    if not torch.compiler.is_compiling():
        tensors = query.to(kind), key, value, keys, values, last
        results = _plainly(*tensors, scaling, softcap, scales, window, sinks)
    else:
        total = last.squeeze(0) + 1
        attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads}
        attributes |= {"scale": float(scaling)} | ({"softcap": float(softcap)} if softcap else {})
        if window is not None:
            attributes["local_window_size"] = window
        further: tuple[Tensor | None, ...] = ()
        if sinks is not None or scales is not None:
            further = (None,) * BEFORE_SINKS + (None if sinks is None else sinks.to(kind),)
        if scales is not None:
            attributes, further = attributes | QUANTISED, further + scales
        out, keys, values = torch.onnx.ops.symbolic_multi_out(
            NODE,
            (*flat, keys, values, last, total, *further),
            attributes,
            dtypes=(kind, keys.dtype, values.dtype),
            shapes=(flat[0].shape, keys.shape, values.shape),
            version=1,
        )
        results = out.unflatten(2, (heads, -1)).transpose(1, 2), keys, values
    return results[0].to(query.dtype), *results[1:]


def _plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    last: Tensor,
    scaling: float,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None,
    window: int | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention as the node does, on copies of its buffers."""
    length, stop = query.shape[2], int(last) + 1
    block = slice(stop - length, stop)
    keys, values = held = keys.clone(), values.clone()
    if scales is None:
        keys[:, :, block], values[:, :, block] = key, value
    else:
        keys[:, :, block], values[:, :, block] = map(quantised, (key, value), scales)
        keys, values = (x.float() * scale for x, scale in zip(held, scales, strict=True))
        if length > 1:  # a block attends to its own keys unrounded, a single token to rounded ones
            keys[:, :, block], values[:, :, block] = key, value
    group = query.shape[1] // keys.shape[1]
    q = (query * scaling).unflatten(1, (-1, group)).flatten(2, 3)  # [1, K, G·T, D]
    z = (q @ keys[:, :, :stop].mT).float().unflatten(2, (group, length))  # [1, K, G, T, n]
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    slots, own = torch.arange(stop), torch.arange(stop - length, stop)[:, None]
    hidden = slots > own
    if window is not None:
        hidden |= slots <= own - window
    z = z.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        logits = sinks.float().view(z.shape[1], group, 1, 1).expand(1, -1, -1, length, 1)
        z = torch.cat((z, logits), -1)
    weights = z.softmax(-1)[..., :stop].to(values.dtype)
    return (weights.flatten(2, 3) @ values[:, :, :stop]).view(query.shape), *held


def quantised(x: Tensor, scales: Tensor) -> Tensor:
    """Round numbers [1, K, T, D] to 8 bits, by scales [K, 1, D]; int8."""
    return (x / scales).round().clamp(-MOST - 1, MOST).to(torch.int8)
