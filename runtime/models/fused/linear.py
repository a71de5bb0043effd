"""Linear layers as matrix products: those that read the same input are one.

Knows torch's modules and a kernel, no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvcap.kernels import linear
from kvcap.kernels.choice import ready
from kvcap.runtime.models.quantised import is_plain

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # read the same input
MOST_TOGETHER = 2**23  # numbers that come of one product; larger ones fill a GPU by themselves


class Products:
    """Linear layers that read the same input: one launch when the first of them is asked.

    Their weights are moved to lie one behind the other, where each layer finds its own as before:
    one matrix product then makes all of what a block is multiplied with.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers
        self.rows = [layer.weight.shape[0] for layer in layers]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.weight = layers[0].weight if len(layers) == 1 else _joined(layers)
        """[O, I], all of theirs; None: there was no memory to move them."""
        self.bias = torch.cat(biases) if len(biases) > 1 else biases[0] if biases else None
        self._plus: Tensor | None = None
        self._x: Tensor | None = None
        self._found: dict[nn.Linear, Tensor] = {}

    def of(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """`layer(x)`, by kvcap's kernel where it can be."""
        if self._x is not x or layer not in self._found:
            found = self._all(x)
            if found is None:
                return _product(x, layer.weight, layer.bias)
            self.are(x, found)
        product = self._found.pop(layer)
        if not self._found:
            self._x = None  # memory that others may have
        return product

    def are(self, x: Tensor, product: Tensor) -> None:
        """Say what comes of `x`: [..., O]."""
        parts = product.split(self.rows, dim=-1) if len(self.rows) > 1 else [product]
        self._x, self._found = x, dict(zip(self.layers, parts, strict=True))

    def one(self, x: Tensor) -> bool:
        """Whether `x` is one row, which kvcap's kernel multiplies with all of them at once."""
        return self.weight is not None and ready(x) and linear.covers(x, self.weight)

    @contextmanager
    def adding(self, plus: Tensor) -> Iterator[None]:
        """Within it, `plus` [..., O] is added to a product of one row, which must come."""
        self._plus = plus
        try:
            yield
            assert self._plus is None, "there was no product to add to"
        finally:
            self._plus = None

    def row(self, x: Tensor, *args: Any, **further: Any) -> Tensor:
        """All of them of one row, and what further `matvec` does on the way."""
        assert self.weight is not None
        return linear.matvec(x, self.weight, self.bias, *args, **further)

    def _all(self, x: Tensor) -> Tensor | None:
        """Every layer's product; None: better one by one."""
        if self.weight is None:
            return None
        if self.one(x):
            plus, self._plus = self._plus, None
            return self.row(x, plus=plus)
        tokens = x.numel() // x.shape[-1]
        if len(self.layers) > 1 and tokens * sum(self.rows) > MOST_TOGETHER:
            return None
        return nn.functional.linear(x, self.weight, self.bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if ready(x) and linear.covers(x, weight):
        return linear.matvec(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def products(model: nn.Module) -> dict[nn.Linear, Products]:
    """Those of every plain linear layer; layers that read the same input share one."""
    found: list[list[nn.Linear]] = []
    for module in model.modules():
        for names in TOGETHER:
            layers = [getattr(module, name, None) for name in names]
            plain = [layer for layer in layers if is_plain(layer)]
            alike = {(x.bias is None, x.weight.dtype, x.weight.device) for x in plain}
            if len(plain) == len(names) and len(alike) == 1:
                found.append(plain)
    grouped = {layer for layers in found for layer in layers}
    rest = [m for m in model.modules() if is_plain(m) and m not in grouped]
    groups = [Products(layers) for layers in [*found, *([layer] for layer in rest)]]
    return {layer: group for group in groups for layer in group.layers}


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
