"""Joins linear layers that read the same input into one matrix product. Knows torch only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcap.kernels import linear
from kvcap.kernels.choice import ready

MOST_TOGETHER = 2**23  # numbers that come of one product; larger ones fill a GPU by themselves


class JoinedLinear:
    """A group of one or more `nn.Linear` that read the same input, on one device in one type.

    Until `join` they are multiplied with one by one, as their model does.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self.rows = [layer.weight.shape[0] for layer in layers]
        self.weight: Tensor | None = None
        """Holds all their weights [O, I] as one matrix; None: they are separate."""
        self.bias: Tensor | None = None

    def join(self) -> None:
        """Move their weights one behind the other, where each layer finds its own as before.

        They stay where they are if there is no memory to move them.
        """
        if len(self.layers) == 1:
            self.weight, self.bias = self.layers[0].weight, self.layers[0].bias
        elif self._alike:
            biases = [layer.bias.detach() for layer in self.layers if layer.bias is not None]
            self.weight = _joined(self.layers)
            self.bias = torch.cat(biases) if biases else None

    @property
    def _alike(self) -> bool:
        """Return whether one product can replace theirs: one type and device, all or no biases."""
        kinds = {(x.weight.dtype, x.weight.device, x.bias is None) for x in self.layers}
        return len(kinds) == 1

    def is_single_row(self, x: Tensor) -> bool:
        """Return whether `x` is one row, which kvcap's kernel multiplies with all at once."""
        return self.weight is not None and ready(x) and linear.covers(x, self.weight)

    def project_row(self, x: Tensor, *args: Any, **further: Any) -> Tensor:
        """Return all products [..., O] of one row, with the extras of `kernels.linear.matvec`."""
        assert self.weight is not None
        return linear.matvec(x, self.weight, self.bias, *args, **further)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Return every layer's product [..., O_i]; views of one where they are joined and small."""
        several = len(self.layers) > 1
        if self.weight is None or (several and x[..., 0].numel() * sum(self.rows) > MOST_TOGETHER):
            return [functional.linear(x, layer.weight, layer.bias) for layer in self.layers]
        product = functional.linear(x, self.weight, self.bias)
        return product.split(self.rows, dim=-1) if several else [product]


@torch.inference_mode(False)
@torch.no_grad()
def _joined(layers: Sequence[nn.Linear]) -> Tensor | None:
    """Return layers' weights as one matrix that holds them from then on; None: out of memory."""
    weights = [layer.weight.data for layer in layers]
    starts = [weight.data_ptr() for weight in weights]
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    if starts[1:] == ends[:-1] and len({x.untyped_storage().data_ptr() for x in weights}) == 1:
        rows = sum(weight.shape[0] for weight in weights)
        return weights[0].as_strided((rows, weights[0].shape[1]), weights[0].stride())
    try:
        return _side_by_side(layers)
    except torch.OutOfMemoryError:
        return None


@torch.inference_mode(False)
@torch.no_grad()
def _side_by_side(layers: Sequence[nn.Linear]) -> Tensor:
    """Copy weights into one matrix, whose rows they are from now on."""
    rows = [layer.weight.shape[0] for layer in layers]
    first = layers[0].weight
    weight = torch.empty(sum(rows), first.shape[1], dtype=first.dtype, device=first.device)
    for layer, part in zip(layers, weight.split(rows), strict=True):
        part.copy_(layer.weight)
        layer.weight.data = part
    return weight
