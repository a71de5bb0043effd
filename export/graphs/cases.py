"""Makes the inputs that a graph is checked with: random, outliers, zero keys, few slots and many.

They are seeded, so a case has the same numbers on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvcap.export.graphs.stages import StageGraph

OUTLIER = 960.0  # the mean of one channel of real models' keys; its square is beyond float16
LONG = 8192
FEW = 8  # queries of a long case; attention of a whole block would take gigabytes
WIDE = 64  # hidden size to check with, if a graph leaves it open


class Case(NamedTuple):
    """A case that a graph is run on: a kind of inputs, and a number of slots."""

    kind: str  # random, outliers, zero keys, all zero
    slots: int


def cases(graph: StageGraph, quick: bool = False) -> list[Case]:
    """Return a graph's cases; `quick` leaves the long one out.

    A graph with a fixed number of slots is checked at that number.
    """
    shape = graph.form.shape
    if shape.slots is not None:
        return [Case(kind, shape.slots) for kind in ("random", "outliers", "zero keys", "all zero")]
    usual = shape.budget + shape.block
    tensors = [Case("random", n) for n in sorted({1, 2, shape.budget, usual})]
    tensors += [Case(kind, usual) for kind in ("outliers", "zero keys", "all zero")]
    if not quick and not graph.form.eviction.policy.compares_pairs:
        tensors.append(Case("random", LONG))
    return tensors


def inputs(graph: StageGraph, case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Make every input that the graph may take, by name; the same `seed` gives the same numbers."""
    sizes, shape = {**graph.sizes}, graph.form.shape
    n = sizes["slots"] = case.slots
    block = sizes["block"] = sizes["gone"] = sizes["block"] or min(shape.block, n)
    if sizes["queries"] is None:
        observed = graph.form.eviction.policy.queries_observed or block
        sizes["queries"] = min(observed, n, FEW if n >= LONG else n)
    sizes["hidden"] = WIDE
    generator = torch.Generator().manual_seed(seed * 1_000_003 + n)
    floats = _Floats(generator, dtype, case.kind)
    tensors: dict[str, Tensor] = {}
    for port in _all_ports(graph):
        size = [sizes[axis] or 0 for axis in port.axes]
        if "keys" in port.name:
            tensors[port.name] = floats.keys(size)
        elif port.dtype == "cache":
            tensors[port.name] = floats.normal(size)
    heads = (shape.batch, shape.kv_heads)
    tensors["seen"] = torch.tensor(3 * n + 5, dtype=torch.int32)
    tensors["positions"] = _positions(generator, heads, n, block, 3 * n + 5)
    old = torch.arange(n) < n - block
    tensors["accumulated"] = torch.rand(*heads, n, generator=generator) * old  # 0 for a new slot
    tensors["output_norm"] = torch.rand(*heads, n, generator=generator) * 20
    for name, dtype in graph.form.eviction.policy.state.items():
        if name not in tensors:
            numbers = torch.rand(*heads, n, generator=generator)
            tensors[name] = (numbers if dtype.is_floating_point else 100 * numbers).to(dtype) * old
    tensors["pinned"] = torch.rand(*heads, n, generator=generator) < 0.02
    if "budget" in {port.name for port in graph.inputs}:
        tensors["budget"] = torch.tensor(max(1, min(shape.budget, n) // 2), dtype=torch.int32)
    tensors |= graph.form.cached(tensors)
    if "gone_keys" in tensors:
        tensors["anchor"] = tensors["anchor"] + tensors["gone_keys"].float().sum(-2)
    return tensors


def _all_ports(graph: StageGraph) -> Iterator:  # type: ignore[type-arg]
    """Yield the graph's input ports, and keys, as cached state is computed from them."""
    from kvcap.export.graphs.ports import PORTS

    names = {port.name for port in graph.inputs}
    yield from graph.inputs
    if "keys" not in names:
        yield PORTS["keys"]


class _Floats:
    """A source of random activations that are all of one kind."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype, kind: str) -> None:
        self.generator, self.dtype, self.kind = generator, dtype, kind

    def normal(self, size: list[int]) -> Tensor:
        """Draw standard normal numbers."""
        return torch.randn(size, generator=self.generator).to(self.dtype)

    def keys(self, size: list[int]) -> Tensor:
        """Draw keys [B, K, n, D]."""
        keys = torch.randn(size, generator=self.generator)
        if self.kind == "outliers":
            keys[..., min(3, size[-1] - 1)] += OUTLIER
        elif self.kind == "zero keys":
            keys[..., ::3, :] = 0
        elif self.kind == "all zero":
            keys = torch.zeros(size)
        return keys.to(self.dtype)


def _positions(
    generator: torch.Generator, heads: tuple[int, int], n: int, block: int, seen: int
) -> Tensor:
    """Draw positions [B, K, n] int32: old slots in random order, then the block's in order."""
    rows = []
    for _ in range(heads[0] * heads[1]):
        old = torch.randperm(seen - block, generator=generator)[: n - min(block, n)]
        rows.append(torch.cat((old, torch.arange(seen - min(block, n), seen))))
    return torch.stack(rows).view(*heads, n).to(torch.int32)
