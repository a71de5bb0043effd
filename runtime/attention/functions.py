"""Defines the attention function that kvcap registers with transformers under the name 'kvcap'.

It sees what `cache.update` returned. Keys of a capped layer carry their layer, which does the
attention and then evicts; any other keys (native sliding layers, no cache) get ordinary masked
attention. Knows tensors only; the layer knows the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from kvcap.kernels import decode, token
from kvcap.kernels.choice import ready
from kvcap.policies.base import Logits, RowRanges
from kvcap.runtime.attention.masks import attention_mask
from kvcap.runtime.attention.uncompiled import uncompiled
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.types import ATTENTION

MANY_SLOTS = 500_000  # of all sequences and KV heads: enough for a GPU to be busy with SDPA


class CappedLayer(Protocol):
    """A protocol of cache layers that attend and evict by themselves."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        logits: Logits,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Return attention [B, H, T, D] of the block just appended, without its fillers."""
        ...

    def take_back(self) -> None:
        """Forget the block just appended, since it is refused."""
        ...


def attend_plainly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    logits: Logits,
    mask: Tensor | None = None,
    bias: Callable[[int, int, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return attention as `attend` does, where no kernel runs it.

    Args:
        query: [B, H, T, D].
        keys: [B, K, n, D].
        values: [B, K, n, D].
        logits: of the model.
        mask: [B, 1, T, n], boolean (True: visible) or additive.
        bias: makes a CPU's mask of T tokens over n slots for a query, to be added to logits; by
            default it is made here.
    """
    length, slots = query.shape[2], keys.shape[2]
    if not logits.linear or logits.sinks is not None:
        # `scaled_dot_product_attention` takes neither.
        out, lse = attend_with_lse(query, keys, values, logits, mask, own=True)
        return out if logits.sinks is None else with_sinks(out, lse, logits.sinks)
    if mask is None and length > 1:
        if query.is_cuda:  # on a CPU this bias would be turned into the same mask
            mask = bottom_right(length, slots)
        else:
            mask = (bias or causal)(length, slots, query)
    if mask is None and query.device.type == "cpu":
        # The group's queries as rows of one head: no repeated keys, and the fastest on a CPU
        # (0.044 ms against 0.066 grouped and 0.144 repeated, 8/2 heads, 1,152 slots; bf16 0.05
        # against 0.51). On a GPU it is slower than grouping.
        folded = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
        out = scaled_dot_product_attention(folded, keys, values, scale=logits.scale)
        return out.reshape(query.shape)
    grouped = query.shape[1] != keys.shape[1]
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=logits.scale, enable_gqa=grouped
    )


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    logits: Logits,
    mask: Tensor | None = None,
    bias: Callable[[int, int, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return attention of the newest T tokens over n slots, the last T of them their own.

    Without a mask every older slot is visible and the block is causal (bottom-right). Arguments as
    in `attend_plainly`.

    Returns:
        [B, H, T, D]
    """
    if mask is None and takes_slots(query, keys, values, logits):
        scale, softcap, sinks = logits[:3]
        return decode.attend(query, keys, values, scale, softcap, sinks=sinks)
    return attend_plainly(query, keys, values, logits, mask, bias)


def takes_slots(query: Tensor, keys: Tensor, values: Tensor, logits: Logits) -> bool:
    """Return whether a kernel of kvcap's runs `attend` here; it can also return the log-sum-exp."""
    few = keys.shape[0] * keys.shape[1] * keys.shape[2] < MANY_SLOTS or logits.sinks is not None
    return few and takes_lse(query, keys, values, logits)


def attend_weighing(
    query: Tensor,
    keys: Tensor,
    weigh: Callable[[Tensor], Tensor],
    logits: Logits,
) -> Tensor:
    """Attend like `attend`, for one token and values that are only given by their weighted sums.

    Args:
        query: [B, H, 1, D].
        keys: [B, K, n, D].
        weigh: returns the sums [B, K, G, D] of the values by weights [B, K, G, n].
        logits: of the model.
    """
    grouped = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])  # [B, K, G, D]
    z = logits._replace(scale=1.0).of(torch.matmul(grouped * logits.scale, keys.mT))
    return weigh(logits.weights(z)).reshape(query.shape)


def takes_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    buffers: Sequence[Tensor],
    rows: RowRanges,
    *,
    turned: bool,
) -> bool:
    """Return whether `kernels/token.py` is to append and attend, with these arguments.

    Where held keys are `turned` (rotated as they are read), anything else would copy all of them
    first.
    """
    slots = min(buffers[2].numel(), len(rows.lengths) * rows.longest)  # others may share the pool
    better = turned or slots < MANY_SLOTS
    return better and ready(query) and token.covers(query, key, value, buffers)


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: RowRanges,
    logits: Logits,
) -> Tensor:
    """Attend causally with heads that may hold unequally many tokens, in one launch.

    Args:
        query: [B, H, T, D].
        keys: [slots, D], the pool's or a rotated copy of it.
        values: [slots, D] likewise.
        rows: where the B·K heads lie, with one start more, where the last ends.
        logits: of the model.

    Returns:
        [B, H, T, D]

    Raises:
        UnsupportedModel: kernels do not know the rule of the logits.
    """
    if logits.further:
        raise UnsupportedModel(
            f"Triton kernels do not know {' and '.join(logits.further)} of this model's attention; "
            "set KVCAP_KERNELS=eager"
        )
    (starts, lengths, longest), (scale, softcap, sinks) = rows, logits[:3]
    return decode.attend_ragged(
        query, keys, values, starts[:-1], lengths, scale, softcap, longest, sinks
    )


def attend_with_lse(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    logits: Logits,
    mask: Tensor | None = None,
    *,
    own: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return attention, and the log-sum-exp of its logits (the logarithm of its denominator).

    Sink logits are left out; see `with_sinks`. Arguments as in `attend`, but without a mask every
    slot is visible, or where the last T are the block's `own`, the causal ones. By a kernel or by
    torch's fused operator where one covers the call, else plainly, with a workspace [B, H, T, n].

    Returns:
        [B, H, T, D] in the values' dtype, and log-sum-exp of the logits [B, H, T] in float32.
    """
    if mask is None and takes_lse(query, keys, values, logits):
        return decode.attend_with_lse(query, keys, values, logits.scale, logits.softcap, own)
    if mask is None and own and query.shape[2] > 1:
        mask = causal(query.shape[2], keys.shape[2], query)
    if logits.linear and _tells_lse(query, keys, values):
        return _attend_with_lse_on_cpu(query, keys, values, logits.scale, mask)
    group, length = query.shape[1] // keys.shape[1], query.shape[2]
    q = query.unflatten(1, (-1, group)).flatten(2, 3)  # [B, K, G·T, D]
    z = logits.of(torch.matmul(q, keys.mT).unflatten(2, (group, length)))
    if mask is not None:
        mask = mask.unsqueeze(1)  # one head's mask over [B, K, G, T, n]
        # The least number rather than -inf: a padded row sees nothing, and must not be NaN.
        least = torch.finfo(z.dtype).min
        z = z.masked_fill(~mask, least) if mask.dtype == torch.bool else z + mask
    lse = z.float().logsumexp(-1, keepdim=True)
    weights = (z - lse).exp().to(values.dtype)
    out = torch.matmul(weights.flatten(2, 3), values).view(query.shape)
    return out, lse.view(query.shape[:3])


def takes_lse(query: Tensor, keys: Tensor, values: Tensor, logits: Logits) -> bool:
    """Return whether a kernel of kvcap's returns attention with its log-sum-exp here."""
    return not logits.further and ready(query) and decode.covers(query, keys, values)


def _tells_lse(*inputs: Tensor) -> bool:
    """Return whether torch's fused attention for CPUs can return the log-sum-exp of these inputs.

    It gives the log-sum-exp no gradient, so that training computes both plainly.
    """
    if any(x.device.type != "cpu" or x.stride(-1) != 1 for x in inputs):
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))


def _attend_with_lse_on_cpu(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run `attend_with_lse` without a softcap; KV heads count as sequences, no key is copied."""
    (batch, heads, length, size), kv_heads = query.shape, keys.shape[1]
    # Where every slot is visible, the group's queries are rows of one head, as in `attend`.
    group = heads // kv_heads if mask is not None else 1
    q = query.reshape(batch * kv_heads, group, -1, size)
    k, v = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (keys, values))
    if mask is not None:
        if mask.dtype == torch.bool:
            hidden = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
            mask = hidden.masked_fill_(~mask, float("-inf"))
        mask = mask.to(query.dtype).expand(-1, -1, length, -1)
        mask = mask.repeat_interleave(kv_heads, 0) if mask.shape[0] > 1 else mask
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask, scale=scaling
    )
    return out.reshape(query.shape), lse.reshape(batch, heads, length)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return attention with a sink logit in its softmax, from attention without it.

    A sink logit is a number that the model learned for each query head. It has no value, so that
    its share of the weights is lost: `softmax([z, sink]) v = σ(lse(z) - sink) · softmax(z) v`.

    Args:
        out: [B, H, T, D] without it.
        lse: log-sum-exp of the slots' logits [B, H, T], float32.
        sinks: [H].
    """
    share = torch.sigmoid(lse - sinks.float()[:, None])[..., None]
    return (out * share).to(out.dtype)


def causal(length: int, slots: int, like: Tensor) -> Tensor:
    """Return the mask [1, 1, T, n] of a block whose own tokens are the last slots, as bool."""
    mask = like.new_ones(length, slots, dtype=torch.bool).tril(slots - length)
    return mask[None, None]


def bottom_right(length: int, slots: int) -> Tensor:
    """Return the mask of `causal` as a bias that `scaled_dot_product_attention` knows as causal."""
    from torch.nn.attention.bias import causal_lower_right  # takes a second to import

    return cast(Tensor, causal_lower_right(length, slots))


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over two sets of tokens, from attention over each.

    Args:
        out: [B, H, T, D].
        lse: log-sum-exp of its logits [B, H, T].
        other: [B, H, T, D] over the other set.
        other_lse: [B, H, T], -inf where there is none.
    """
    share = torch.sigmoid(other_lse - lse)[..., None]  # of the other set
    merged = out.float() + share * (other.float() - out.float())
    return merged, torch.logaddexp(lse, other_lse)


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
    s_aux: Tensor | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: query [B, H, T, D] -> output [B, T, H, D].

    `s_aux` [H] are sink logits, see `with_sinks`.

    Raises:
        UnsupportedModel: it is asked for what it does not do, such as dropout or the attention
            weights.
        PositionMismatch: a capped layer is to read tokens at other places than its next.
    """
    logits = Logits(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    layer: CappedLayer | None = getattr(key, "kvcap_layer", None)
    if dropout or not further.keys() <= HARMLESS:
        try:
            _refuse_unknown(further, dropout)
        except UnsupportedModel:
            if layer is not None:
                layer.take_back()
            raise
    if layer is not None:
        if attention_mask is not None:  # transformers' own is none here, see `masks.py`
            layer.take_back()
            raise UnsupportedModel(
                "the model gives its attention a mask of its own, and no mask can follow slots; "
                "run it without a cap"
            )
        with torch.no_grad():
            out = layer.attend(module, query, logits, position_ids)
        if torch.is_grad_enabled():
            out = without_gradient(out, query, *getattr(key, "sources", (key, value)))
    else:
        if attention_mask is None and not getattr(module, "is_causal", True):
            attention_mask = query.new_ones(1, 1, 1, key.shape[2], dtype=torch.bool)
        out = attend(query, key, value, logits, attention_mask)
    out = out.transpose(1, 2)
    if (spare := query.shape[2] - out.shape[1]) == 0:
        return out.contiguous(), None
    return pad(out, (0, 0, 0, 0, 0, spare)), None  # fillers attend to nothing


# Arguments of models and transformers that change nothing here: masks say what a sliding window
# hides, layers keep count of places, `generate` hands on tokenizers, and these hand on their masks.
HARMLESS = frozenset(
    ("assistant_tokenizer", "cache_position", "num_items_in_batch", "output_hidden_states",
     "output_router_logits", "return_dict", "sliding_window", "special_tokens_mask",
     "token_type_ids", "tokenizer", "use_cache")
)  # fmt: skip
WITHOUT = {  # advice by the argument that is refused
    "output_attentions": "its kernels keep no weights, and slots of each head are of other tokens; "
    "load the model with attn_implementation='eager' and without a cap to see attention weights",
    "dropout": "call model.eval(), or train with attn_implementation='sdpa'",
}
PACKED = frozenset(("cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx"))


def _refuse_unknown(further: Mapping[str, Any], dropout: float) -> None:
    """Refuse arguments that would change the result, or be left out in silence."""
    settings = {**further, "dropout": dropout}
    for name in settings.keys() - HARMLESS:
        value = settings[name]
        off = value is None or value is (name == "is_causal") or (name == "dropout" and not value)
        if off:
            continue
        advice = WITHOUT.get(name, f"leave {name} out, or use attn_implementation='sdpa'")
        if name in PACKED:
            advice = (
                "sequences that are packed into one cannot be kept separate where each head holds "
                f"other tokens; give each a call of its own, without {name}"
            )
        raise UnsupportedModel(f"kvcap's attention does not take {name}; {advice}")


def without_gradient(out: Tensor, *sources: Tensor) -> Tensor:
    """Return `out`, which `sources` made under `no_grad`, and refuse a gradient through it."""
    if not any(x.requires_grad for x in sources):
        return out
    return cast(Tensor, _WithoutGradient.apply(out, *sources))  # type: ignore[no-untyped-call]


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, out: Tensor, *sources: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Any:
        raise UnsupportedModel(
            "a capped cache keeps no gradients: evicted tokens have none. Train without a "
            "BudgetCache, and with attn_implementation='sdpa'"
        )


def register(_module: Any = None) -> None:
    """Make `attn_implementation='kvcap'` known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, uncompiled(attention_forward))
    AttentionMaskInterface.register(ATTENTION, uncompiled(attention_mask))
