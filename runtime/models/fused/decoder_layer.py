"""A model's decoder layers in fewer kernels: x + attention(norm(x)), then x + mlp(norm(x)).

Of one token, what lies between matrix products takes as long to launch as these take to run: norms,
gates and sums go into the products' kernel. Of more tokens a sum and the norm behind it are one.
Which layers are such is not read off their names alone: one token is tried. Knows transformers'
modules, no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from kvcap.runtime.models.fused.linear import Products
from kvcap.runtime.models.quantised import is_plain

PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}

AddNorm = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]


class DecoderLayer:
    """What takes the place of a layer's `forward`.

    Args:
        layer: that `is_usual`.
        products: of the model's linear layers.
        add_norm: of (norm, x, y): x + y, and norm(x + y), in one kernel; None: as the model does.
    """

    def __init__(
        self, layer: Any, products: Mapping[nn.Linear, Products], add_norm: AddNorm | None
    ) -> None:
        self.layer, self.attention, self.mlp = layer, layer.self_attn, layer.mlp
        self.add_norm = add_norm
        self.first, self.second = layer.input_layernorm, layer.post_attention_layernorm
        self.inputs = products[self.attention.q_proj]
        self.output = products[self.attention.o_proj]
        self.gates, self.down = products[self.mlp.gate_proj], products[self.mlp.down_proj]
        self.plain = layer.forward
        self.next: DecoderLayer | None = None
        self._known: tuple[Tensor, Tensor] | None = None  # an input, and its norm

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """`layer(hidden_states)`."""
        groups = self.inputs, self.output, self.gates, self.down
        if self.inputs.one(hidden_states) and all(x.weight is not None for x in groups):
            return self._one(hidden_states, **kwargs)
        if self.add_norm is None:
            out: Tensor = self.plain(hidden_states, **kwargs)
            return out
        return self._several(self.add_norm, hidden_states, **kwargs)

    def _one(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Of one token."""
        first, second = ((norm.weight, _epsilon(norm)) for norm in (self.first, self.second))
        self.inputs.are(x, self.inputs.row(x, *first))  # attention asks for them
        with self.output.adding(x):
            x, _ = self.attention(hidden_states=x, **kwargs)
        return self.down.row(self.gates.row(x, *second, gated=True), plus=x)

    def _several(self, add_norm: AddNorm, x: Tensor, **kwargs: Any) -> Tensor:
        """Of more."""
        known, self._known = self._known, None
        normed = known[1] if known is not None and known[0] is x else self.first(x)
        attended, _ = self.attention(hidden_states=normed, **kwargs)
        x, normed = add_norm(self.second, x, attended)
        y: Tensor = self.mlp(normed)
        if self.next is None:
            return x + y
        total, normed = add_norm(self.next.first, x, y)
        self.next._known = total, normed
        return total


def decoder_layers(
    model: nn.Module, products: Mapping[nn.Linear, Products], add_norm: AddNorm | None
) -> list[DecoderLayer]:
    """Of all of a model's layers that are usual."""
    found = []
    for modules in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        layers = [DecoderLayer(m, products, add_norm) for m in modules if is_usual(model, m)]
        for one, after in pairwise(layers):
            one.next = after  # which looks whether it gets what is known
        found += layers
    return found


@torch.no_grad()
def is_usual(model: Any, layer: Any) -> bool:
    """Whether a layer is of the formula above, its answer to one token being the very same."""
    if any(is_watched(module) for module in layer.modules()):
        return False  # somebody else's code runs in it
    if not {name for name, _ in layer.named_children()} >= PARTS or not is_gated(layer.mlp):
        return False
    attention, norms = layer.self_attn, (layer.input_layernorm, layer.post_attention_layernorm)
    linear: list[Any] = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
    if not all(is_plain(m) for m in linear) or any(_epsilon(m) is None for m in norms):
        return False
    x = sample(layer.mlp.gate_proj.weight, layer.mlp.gate_proj.in_features)[None]
    if not torch.equal(layer.mlp.act_fn(x), silu(x)):
        return False
    asked: list[Tensor] = []
    hooks = [m.register_forward_hook(lambda _, i, o: asked.extend((i[0], o))) for m in linear]
    try:
        place = model.base_model.rotary_emb(x, torch.zeros(1, 1, dtype=torch.long, device=x.device))
        answer = layer(x, attention_mask=None, position_embeddings=place)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False  # it wants to be called in another way
    finally:
        for hook in hooks:
            hook.remove()
    if len(asked) != 8 or not isinstance(answer, Tensor):
        return False
    query_in, _, key_in, _, value_in, _, _, attended = asked
    normed = _norm(norms[0], x)
    y = x + attended
    y = y + layer.mlp(_norm(norms[1], y))
    pairs = (normed, query_in), (normed, key_in), (normed, value_in), (y, answer)
    return all(torch.equal(mine, its) for mine, its in pairs)


@torch.no_grad()
def is_gated(module: Any) -> bool:
    """Whether a module is down(act(gate(x)) · up(x)): by its parts, and held to its own answer."""
    if {name for name, _ in module.named_children()} != GATED:
        return False
    linear = module.gate_proj, module.up_proj, module.down_proj
    if not all(is_plain(m) for m in linear):
        return False
    x = sample(module.gate_proj.weight, module.gate_proj.in_features)
    return torch.equal(module(x), gated(module, gate, x))


def gate(activation: Any, gates: Tensor, up: Tensor) -> Tensor:
    """What lies between a feed-forward layer's products."""
    product: Tensor = activation(gates) * up
    return product


def gated(module: Any, by: Any, x: Tensor) -> Tensor:
    """A feed-forward layer whose products are gated `by` something like `gate`."""
    inner = by(module.act_fn, module.gate_proj(x), module.up_proj(x))
    projected: Tensor = module.down_proj(inner)
    return projected


def is_watched(module: Any) -> bool:
    """Whether calling it runs more than its class does: a forward of its own, or hooks."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def sample(like: Tensor, size: int) -> Tensor:
    """A row [1, size] to try a module with, of the type and device of its weights."""
    return torch.linspace(-2, 2, size, device=like.device, dtype=like.dtype)[None]


def _epsilon(norm: nn.Module) -> Any:
    return getattr(norm, "variance_epsilon", None)


def _norm(norm: Any, x: Tensor) -> Tensor:
    """As `matvec` has it, rounded as the model does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _epsilon(norm))
    normed: Tensor = norm.weight * wide.to(x.dtype)
    return normed
