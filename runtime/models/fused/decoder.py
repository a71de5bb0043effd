"""Decodes models of the usual formula in fewer kernels than transformers' modules take.

A layer is x + attention(norm(x)), then x + mlp(norm(x)), with rotary positions by halves and a
gated feed-forward part. The decoder shares a model's weights and is tried against its layers. For a
single token, the steps between matrix products take as long to launch as the products take to run:
norms, gates and sums go into the products' kernel, the rotation into attention's. Knows
transformers' models, and three methods of a cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvcap.kernels import elementwise
from kvcap.kernels.choice import ready
from kvcap.runtime.attention.functions import attention_forward
from kvcap.runtime.models.arguments import cache_argument
from kvcap.runtime.models.fused.linear import JoinedLinear
from kvcap.runtime.models.module_settings import settings
from kvcap.runtime.models.quantised import is_plain
from kvcap.runtime.types import ATTENTION


class Family(NamedTuple):
    """A family whose layers have the formula."""

    model: str  # its class
    norms_heads: bool = False  # every head's queries and keys
    skips_rope: bool = False  # in some layers


FAMILIES = {  # by their model type
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", norms_heads=True),
    "smollm3": Family("SmolLM3ForCausalLM", skips_rope=True),
}

Angles = tuple[Tensor, Tensor]  # cosines and sines [B, T, D]


_agreed: dict[Hashable, bool] = {}  # by formula: whether the decoder answered as the model did


def decoder_of(model: Any) -> Decoder | None:
    """Build kvcap's own decoder of a model; None where the model must run by its own modules.

    Weights that one product can read are moved side by side.
    """
    if not covers(model) or not agrees(model):
        return None
    decoder = Decoder(model)
    decoder.join()
    return decoder


def agrees(model: Any) -> bool:
    """Return whether the decoder of a model that it `covers` answers as the model does.

    It is tried on the model's own weights, once for all models of one formula.
    """
    try:
        if (formula := _formula(model)) not in _agreed:
            _agreed[formula] = Decoder(model).agrees()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False  # its modules are others, or want to be called in another way
    return _agreed[formula]


def _formula(model: Any) -> Hashable:
    """Return all that decides how a model's layers compute, except their weights' numbers."""
    kinds = map(settings, (*model.model.layers, model.model.norm))
    file = vars(sys.modules[type(model).__module__])
    functions = (x for x in file.values() if isinstance(x, FunctionType))  # which can be patched
    return frozenset(kinds), frozenset(functions)


def covers(model: Any) -> bool:
    """Return whether a model is of `FAMILIES`, in plain numbers, and runs nobody else's code."""
    family = getattr(model.config, "model_type", None)
    if family not in FAMILIES or model.training:
        return False
    file = f"transformers.models.{family}.modeling_{family}"
    if (type(model).__module__, type(model).__name__) != (file, FAMILIES[family].model):
        return False
    covered, modules = (
        (file, "torch.nn.modules.", "transformers.activations"),
        list(model.modules()),
    )
    return (
        model.config._attn_implementation == ATTENTION
        and all(type(m).__module__.startswith(covered) and not is_watched(m) for m in modules)
        and all(is_plain(m) for m in modules if isinstance(m, nn.Linear))
    )


def is_watched(module: nn.Module) -> bool:
    """Return whether calling a module runs more than its class does: its own forward, or hooks."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


class Decoder:
    """Replaces a model that it `covers`, and reads its weights."""

    def __init__(self, model: Any) -> None:
        base, family = model.model, FAMILIES[model.config.model_type]
        self.model, self.embed, self.rotary = model, base.embed_tokens, base.rotary_emb
        layers = base.layers[: model.config.num_hidden_layers]
        self.layers = [DecoderLayer(layer, family) for layer in layers]
        self.norm, self.head = Norm.of(base.norm), JoinedLinear(model.lm_head)
        self.parts = PARTS

    @property
    def products(self) -> list[JoinedLinear]:
        """Return all matrix products."""
        return [self.head, *(product for layer in self.layers for product in layer.products)]

    def join(self) -> None:
        """Launch fewer kernels: one for products with the same input, one for the steps between."""
        for product in self.products:
            product.join()
        self.parts = KERNELS if ready(self.norm.gain) else PARTS

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cache: Any,
        logits_to_keep: Tensor,
        **further: Any,
    ) -> CausalLMOutputWithPast:
        """Run as the model does; let the model run by itself if somebody has begun to watch it.

        Args:
            input_ids: [B, T].
            position_ids: [B, T].
            cache: a `BudgetCache`, all of whose layers are capped.
            logits_to_keep: of these tokens [N] logits are wanted, places in the block.
            further: for the model.
        """
        if not covers(self.model):
            out: CausalLMOutputWithPast = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                **cache_argument(self.model, cache),
                logits_to_keep=logits_to_keep,
                **further,
            )
            return out
        x, y = self.embed(input_ids), None
        angles = self.rotary(x, position_ids)
        for layer in self.layers:
            x, y = layer(x, y, angles, cache, self.parts)
        x, y = x[:, logits_to_keep], None if y is None else y[:, logits_to_keep]
        return CausalLMOutputWithPast(logits=self._logits(x, y))

    def _logits(self, x: Tensor, y: Tensor | None) -> Tensor:
        """Return logits [B, N, V] of the last layer's results."""
        if y is None and self.head.is_single_row(x):
            return self.head.project_row(x, *self.norm)
        _, normed = self.parts.add_norm(x, y, *self.norm)
        return self.head.project(normed)[0]

    @torch.no_grad()
    def agrees(self) -> bool:
        """Return whether a layer of every kind answers three tokens just as its model's does.

        To be asked before weights are joined, which sums in another order. The device is waited for
        only once, since it may have a queue of what others read meanwhile.
        """
        base, device = self.model.model, self.embed.weight.device
        pairs = zip(base.layers, self.layers, strict=False)
        kinds = {settings(layer): (layer, own) for layer, own in pairs}
        ids = torch.arange(7, 10, device=device)[None]
        x, same = self.embed(ids), []
        angles = self.rotary(x, ids)
        for layer, own in kinds.values():
            its = layer(x, attention_mask=None, position_embeddings=angles)
            total, more = own(x, None, angles, None, self.parts)
            if more is None or more.shape != its.shape:
                return False
            same.append((total + more).eq(its).all())
            x = its
        same.append(self.parts.norm(x, *self.norm).eq(base.norm(x)).all())
        return bool(torch.stack(same).all())


class DecoderLayer:
    """A layer that computes x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, layer: Any, family: Family) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.index = attention, attention.layer_idx
        self.size, self.scaling = attention.head_dim, attention.scaling
        self.rotates = not family.skips_rope or bool(attention.use_rope)
        self.first = Norm.of(layer.input_layernorm)
        self.second = Norm.of(layer.post_attention_layernorm)
        self.inputs = JoinedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = JoinedLinear(attention.o_proj)
        self.gates = JoinedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = JoinedLinear(mlp.down_proj)
        self.products = self.inputs, self.output, self.gates, self.down
        self.heads = [rows // self.size for rows in self.inputs.rows]  # H, K, K
        self.head_norms: list[Norm] = []  # of queries, and of keys
        self.joint_norms: list[Norm] = []  # of both, which lie side by side in one row's product
        if family.norms_heads:
            self.head_norms = [Norm.of(attention.q_norm), Norm.of(attention.k_norm)]
            each = zip(self.head_norms, self.heads, strict=False)
            gains = [norm.gain.detach().expand(heads, -1) for norm, heads in each]
            self.joint_norms = [Norm(torch.cat(gains), self.head_norms[0].epsilon)]

    def __call__(
        self, x: Tensor, y: Tensor | None, angles: Angles, cache: Any, parts: Parts
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's result as a sum of two, which the next norm's kernel adds up.

        Args:
            x: [B, T, C].
            y: [B, T, C], to be added to it, or None.
            angles: of the tokens' positions.
            cache: a `BudgetCache`; None: tokens attend to each other only.
            parts: what lies between products.
        """
        single = y is None and self.inputs.is_single_row(x)
        if single and all(product.weight is not None for product in self.products):
            (q, k, v), product = self.inputs.rows, self.inputs.project_row(x, *self.first)
            both, value = self._normed(product.split((q + k, v), dim=-1), self.joint_norms, parts)
            heads = [*both.split(self.heads[:2], dim=2), value]
            x = self.output.project_row(self._attend(heads, angles, cache, parts), plus=x)
            gated = self.gates.project_row(x, *self.second, gated=True)
            return self.down.project_row(gated, plus=x), None
        x, normed = parts.add_norm(x, y, *self.first)
        heads = self._normed(self.inputs.project(normed), self.head_norms, parts)
        attended = self._attend(heads, angles, cache, parts)
        x, normed = parts.add_norm(x, self.output.project(attended)[0], *self.second)
        return x, self.down.project(parts.gate(*self.gates.project(normed)))[0]

    def _normed(
        self, products: Sequence[Tensor], norms: Sequence[Norm], parts: Parts
    ) -> list[Tensor]:
        """Return heads [B, T, N, D] of products [B, T, N·D]; norm those that have norms."""
        heads = [x.unflatten(-1, (-1, self.size)) for x in products]
        return [*map(lambda x, by: parts.norm(x, *by), heads, norms), *heads[len(norms) :]]

    def _attend(self, heads: Sequence[Tensor], angles: Angles, cache: Any, parts: Parts) -> Tensor:
        """Return attention [B, T, H·D] of queries [B, T, H, D], keys and values [B, T, K, D]."""
        query, key, value = (x.transpose(1, 2) for x in heads)
        if self.rotates:
            if cache is not None and query.shape[2] == 1:
                out: Tensor | None = cache.read_token(
                    query, key, value, angles, self.index, self.attention, self.scaling
                )
                if out is not None:
                    return out.transpose(1, 2).flatten(2)
            query, key = parts.rotate(query, key, *angles)
        if cache is not None:
            if self.index == 0:
                # There is none: tokens see all before them.
                cache.check_mask({"q_length": query.shape[2], "batch_size": len(query)})
            key, value = cache.update(key, value, self.index)
        attended, _ = attention_forward(self.attention, query, key, value, None, self.scaling)
        return attended.flatten(2)


class Norm(NamedTuple):
    """A pair of numbers that define an RMS norm: its gain and epsilon."""

    gain: Tensor  # [C]
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Return the numbers of transformers' module."""
        return cls(module.weight, module.variance_epsilon)


def norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm of x [..., C], x · gain / sqrt(mean(x²) + epsilon), rounded alike."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return gain * wide.to(x.dtype)


def add_norm(x: Tensor, y: Tensor | None, gain: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Add y to x, if there is one; returns the sum, and the norm of it."""
    total = x if y is None else x + y
    return total, norm(total, gain, epsilon)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate halves of queries [B, H, T, D] and keys [B, K, T, D], by angles [B, T, D]."""
    cos, sin = cos[:, None], sin[:, None]

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    return rotated(query), rotated(key)


def gate(gates: Tensor, up: Tensor) -> Tensor:
    """Return silu(gates) · up, the step between the products of a feed-forward part."""
    return silu(gates) * up


class Parts(NamedTuple):
    """A set of functions that run between matrix products: plain ones, or kernels like them."""

    norm: Callable[..., Tensor]
    add_norm: Callable[..., tuple[Tensor, Tensor]]
    rotate: Callable[..., tuple[Tensor, Tensor]]
    gate: Callable[..., Tensor]


PARTS = Parts(norm, add_norm, rotate, gate)
KERNELS = Parts(elementwise.norm, elementwise.add_norm, elementwise.rotate, elementwise.gate)
