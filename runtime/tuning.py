"""A model's modules as a CUDA graph should hold them: faster code for the same formulas."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvcap.kernels import linear
from kvcap.kernels.choice import ready

ROTATION = "apply_rotary_pos_emb"  # the function of transformers' modelling files
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # read the same input
MOST_TOGETHER = 2**23  # numbers that come of one product; larger ones fill a GPU by themselves


class Tuning:
    """What of a model runs by other code while a graph is made.

    Args:
        model: of transformers.
        compiled: what lies between matrix products by `torch.compile`, which takes some seconds
            once: RMS norms (eight kernels each in transformers), rotations of queries and keys
            (ten), and the gates of feed-forward layers (two).
    """

    def __init__(self, model: nn.Module, compiled: bool) -> None:
        self.forwards: dict[nn.Module, Any] = {}
        for layers in _linear_layers(model):
            products = _Products(layers)
            self.forwards |= {layer: partial(products.of, layer) for layer in layers}
        self.rotations: dict[Any, Any] = {}  # by the modelling file that has it
        if compiled:
            self._compile(model)

    def _compile(self, model: nn.Module) -> None:
        norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
        code = {kind: _compiled(kind.forward) for kind in {type(norm) for norm in norms}}
        self.forwards |= {norm: partial(code[type(norm)], norm) for norm in norms}
        gate = _compiled(_gate)
        for gated in [m for m in model.modules() if _is_gated(m)]:
            self.forwards[gated] = partial(_gated, gated, gate)
        for file in {sys.modules[type(m).__module__] for m in model.modules()}:
            if hasattr(file, ROTATION):
                self.rotations[file] = _compiled(getattr(file, ROTATION))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it, the model runs by it."""
        plain = {file: getattr(file, ROTATION) for file in self.rotations}
        for module, forward in self.forwards.items():
            module.forward = forward
        for file, rotation in self.rotations.items():
            setattr(file, ROTATION, rotation)
        try:
            yield
        finally:
            for module in self.forwards:
                del module.forward
            for file, rotation in plain.items():
                setattr(file, ROTATION, rotation)


def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


def _is_gated(module: nn.Module) -> bool:
    """Whether a module is down(act(gate(x)) · up(x)): by its parts, and held to its own answer."""
    if {name for name, _ in module.named_children()} != {
        "gate_proj", "up_proj", "down_proj", "act_fn",
    }:  # fmt: skip
        return False
    part: Any = module
    if not all(type(m) is nn.Linear for m in (part.gate_proj, part.up_proj, part.down_proj)):
        return False
    weight = part.gate_proj.weight
    x = torch.linspace(-2, 2, weight.shape[1], device=weight.device, dtype=weight.dtype)[None]
    with torch.no_grad():
        return torch.equal(module(x), _gated(part, _gate, x))


def _gate(activation: Any, gate: Tensor, up: Tensor) -> Tensor:
    gated: Tensor = activation(gate) * up
    return gated


def _gated(module: Any, gate: Any, x: Tensor) -> Tensor:
    gated = gate(module.act_fn, module.gate_proj(x), module.up_proj(x))
    projected: Tensor = module.down_proj(gated)
    return projected


def _linear_layers(model: nn.Module) -> list[list[nn.Linear]]:
    """All of a model's, those side by side that read the same input."""
    found: list[list[nn.Linear]] = []
    for module in model.modules():
        for names in TOGETHER:
            layers = [getattr(module, name, None) for name in names]
            plain = [layer for layer in layers if type(layer) is nn.Linear]
            alike = {(x.bias is None, x.weight.dtype, x.weight.device) for x in plain}
            if len(plain) == len(names) and len(alike) == 1:
                found.append(plain)
    grouped = {layer for layers in found for layer in layers}
    rest = [m for m in model.modules() if type(m) is nn.Linear and m not in grouped]
    return found + [[layer] for layer in rest]


class _Products:
    """Linear layers that read the same input: one launch when the first of them is asked.

    Their weights are moved to lie one behind the other, where each layer finds its own as before:
    one matrix product then makes all of what a block is multiplied with.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers
        self.rows = [layer.weight.shape[0] for layer in layers]
        several = len(layers) > 1
        biases = [layer.bias.detach() for layer in layers if several and layer.bias is not None]
        self.weight = _joined(layers) if several else None
        self.bias = torch.cat(biases) if biases else None
        self._x: Tensor | None = None
        self._found: dict[nn.Linear, Tensor] = {}

    def of(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """`layer(x)`, by kvcap's kernel where it can be."""
        if self._x is not x or layer not in self._found:
            found = self._all(x)
            if found is None:
                return nn.functional.linear(x, layer.weight, layer.bias)
            self._x, self._found = x, dict(zip(self.layers, found, strict=True))
        product = self._found.pop(layer)
        if not self._found:
            self._x = None  # memory that others may have
        return product

    def _all(self, x: Tensor) -> Sequence[Tensor] | None:
        """Every layer's product; None: better one by one."""
        weights: list[Tensor] = [layer.weight for layer in self.layers]
        if ready(x) and linear.covers(x, *weights):
            return linear.matvecs(x, weights, [layer.bias for layer in self.layers])
        tokens = x.numel() // x.shape[-1]
        if self.weight is None or tokens * sum(self.rows) > MOST_TOGETHER:
            return None
        product: Tensor = nn.functional.linear(x, self.weight, self.bias)
        parts: Sequence[Tensor] = product.split(self.rows, dim=-1)
        return parts


@torch.inference_mode(False)
@torch.no_grad()
def _joined(layers: Sequence[nn.Linear]) -> Tensor | None:
    """Their weights as one matrix, whose rows they are from now on; None: no memory to do so."""
    weights = [layer.weight.data for layer in layers]
    rows = [weight.shape[0] for weight in weights]
    starts = [weight.data_ptr() for weight in weights]
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    if starts[1:] == ends[:-1] and len({x.untyped_storage().data_ptr() for x in weights}) == 1:
        return weights[0].as_strided((sum(rows), weights[0].shape[1]), weights[0].stride())
    try:
        weight = torch.cat(weights)
    except torch.OutOfMemoryError:
        return None
    for layer, part in zip(layers, weight.split(rows), strict=True):
        layer.weight.data = part
    return weight
