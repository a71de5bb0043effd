"""A model's modules as a CUDA graph should hold them: faster code for the same formulas.

Knows transformers' modules, no cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvcap.runtime.models.fused.decoder_layer import decoder_layers, gate, gated, is_gated
from kvcap.runtime.models.fused.deferred_rope import NAME as ROTATION
from kvcap.runtime.models.fused.deferred_rope import can_be_late, late
from kvcap.runtime.models.fused.linear import products


class Tuning:
    """What of a model runs by other code while a graph is made.

    Args:
        model: of transformers.
        compiled: what lies between matrix products by `torch.compile`, which takes some seconds
            once: RMS norms (eight kernels each in transformers), sums before them, rotations of
            queries and keys (ten), and the gates of feed-forward layers (two).
    """

    def __init__(self, model: nn.Module, compiled: bool) -> None:
        groups = products(model)
        layers = decoder_layers(model, groups, _compiled(_add_norm) if compiled else None)
        self.forwards: dict[nn.Module, Any] = {
            layer: partial(group.of, layer) for layer, group in groups.items()
        }
        self.forwards |= {layer.layer: layer.forward for layer in layers}
        files = {sys.modules[type(m).__module__] for m in model.modules()}
        self.rotations: dict[Any, Any] = {}  # by the modelling file that has it
        for file in [file for file in files if hasattr(file, ROTATION)]:
            rotate = getattr(file, ROTATION)
            self.rotations[file] = _compiled(rotate) if compiled else rotate
            if can_be_late(model, file):
                self.rotations[file] = late(self.rotations[file])
        if compiled:
            self._compile(model)
        # What has a forward of its own runs somebody else's code.
        self.forwards = {m: f for m, f in self.forwards.items() if "forward" not in vars(m)}

    def _compile(self, model: nn.Module) -> None:
        norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
        code = {kind: _compiled(kind.forward) for kind in {type(norm) for norm in norms}}
        self.forwards |= {norm: partial(code[type(norm)], norm) for norm in norms}
        by = _compiled(gate)
        for module in [m for m in model.modules() if is_gated(m)]:
            self.forwards[module] = partial(gated, module, by)

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


def _add_norm(norm: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, type(norm).forward(norm, total)
