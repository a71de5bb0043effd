"""A model's modules as a CUDA graph should hold them: faster code for the same formulas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvcap.kernels import linear
from kvcap.kernels.choice import ready


class Tuning:
    """What of a model runs by other code while a graph is made.

    Args:
        model: of transformers.
        compiled: RMS norms by `torch.compile`, which takes some seconds once; transformers' own
            are eight kernels each.
    """

    def __init__(self, model: nn.Module, compiled: bool) -> None:
        self.linears = [m for m in model.modules() if type(m) is nn.Linear]
        self.norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
        self._compiled: dict[type, Any] = {}
        if compiled:
            kinds = {type(norm) for norm in self.norms}
            self._compiled = {k: torch.compile(k.forward, dynamic=False) for k in kinds}

    @contextmanager
    def applied(self, tokens: int) -> Iterator[None]:
        """For blocks of that many tokens, all sequences together."""
        changed: list[nn.Module] = []
        if tokens == 1:
            changed += self.linears
        changed += [norm for norm in self.norms if type(norm) in self._compiled]
        for module in changed:
            fast = self._compiled.get(type(module), _one_row)
            module.forward = partial(fast, module)
        try:
            yield
        finally:
            for module in changed:
                del module.forward


def _one_row(module: nn.Linear, x: Tensor) -> Tensor:
    """`nn.Linear.forward`, by kvcap's kernel where it can be."""
    if ready(x) and linear.covers(x, module.weight):
        return linear.matvec(x, module.weight, module.bias)
    return nn.functional.linear(x, module.weight, module.bias)
