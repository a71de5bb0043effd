"""Two ways to move keys to compact positions, and why the runtime takes the first.

'at attention': a key stays as the model made it, with the shift its position has moved down since;
attention rotates a copy, once, whatever happened before. 'in place': every eviction rotates the
stored keys a little further and rounds them each time; in bfloat16 the turn of a slow frequency is
smaller than the rounding, so that such a pair never moves at all. Reads `budgets`, `evictions`,
`repeats`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvcap.evals.bench import Options, Result
from kvcap.evals.measure import percentiles, seconds
from kvcap.runtime.attention.functions import attend
from kvcap.runtime.models.rope import Rotation

HEADS, KV_HEADS, SIZE, THETA = 8, 2, 64, 10_000.0
COLUMNS = ("keys", "dtype", "budget", "error_max", "error_mean", "error_relative", "step_ms")
WAYS = ("at attention", "in place")


def run(options: Options) -> Result:
    """Error of the keys attention sees after `evictions`, and the time of one decode step.

    Every step reads a key and evicts one at random. The error is against a float64 rotation of the
    key as it was made; `error_relative` is the largest error of a key as a vector over its norm.
    """
    rows = [
        _measure(way, dtype, budget, options)
        for budget, dtype, way in product(options.budgets, (torch.float32, torch.bfloat16), WAYS)
    ]
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE, "rope_theta": THETA}
    return Result("positions", COLUMNS, rows, {**sizes, "evictions": options.evictions})


class Slots:
    """A full cache of one layer's keys [1, K, N, D] under random eviction."""

    def __init__(self, way: str, dtype: torch.dtype, budget: int) -> None:
        self.in_place = way == "in place"
        self.budget = budget
        self.random = torch.Generator().manual_seed(0)
        frequencies = THETA ** -(torch.arange(0, SIZE, 2).float() / SIZE)
        self.rotation = Rotation(frequencies, budget + 1, "cpu")
        self.made = torch.randn(1, KV_HEADS, budget, SIZE, generator=self.random).to(dtype)
        self.keys = self.made.clone()
        self.values = torch.randn(self.made.shape, generator=self.random).to(dtype)
        self.query = torch.randn(1, HEADS, 1, SIZE, generator=self.random).to(dtype)
        self.born = torch.arange(budget).expand(1, KV_HEADS, -1).clone()  # when a slot was read
        self.shift = torch.zeros(1, KV_HEADS, budget, dtype=torch.int32)
        self.seen = budget

    def step(self) -> Tensor:
        """Evict a random slot of every head, read a key into it, attend. Returns [1, H, 1, D]."""
        evicted = torch.randint(self.budget, (1, KV_HEADS, 1), generator=self.random)
        moved = (self.born > self.born.gather(-1, evicted)).int()  # by one position
        self.shift += moved
        if self.in_place:
            self.keys.copy_(self.rotation.back(self.keys, moved))
        new = torch.randn(1, KV_HEADS, 1, SIZE, generator=self.random).to(self.keys.dtype)
        row = evicted[..., None].expand(-1, -1, -1, SIZE)
        self.keys.scatter_(2, row, new)
        self.made.scatter_(2, row, new)
        self.born.scatter_(2, evicted, self.seen)
        self.shift.scatter_(2, evicted, 0)
        self.seen += 1
        return attend(self.query, self.visible(), self.values, SIZE**-0.5)

    def visible(self) -> Tensor:
        """The keys as attention sees them."""
        return self.keys if self.in_place else self.rotation.back(self.keys, self.shift)

    def reference(self) -> Tensor:
        """The keys as they should be, in float64."""
        frequencies = THETA ** -(torch.arange(0, SIZE, 2).float() / SIZE)
        angles = self.shift.double()[..., None] * frequencies.double()
        turned = torch.complex(*self.made.double().chunk(2, dim=-1)) * torch.polar(
            torch.ones_like(angles), -angles
        )
        return torch.cat((turned.real, turned.imag), dim=-1)


def _measure(way: str, dtype: torch.dtype, budget: int, options: Options) -> dict[str, Any]:
    slots = Slots(way, dtype, budget)
    for _ in range(options.evictions):
        slots.step()
    expected = slots.reference()
    error = slots.visible().double() - expected
    times = [seconds(slots.step) * 1000 for _ in range(100 * options.repeats)]
    relative = error.norm(dim=-1) / expected.norm(dim=-1)
    return {
        "keys": way,
        "dtype": str(dtype).removeprefix("torch."),
        "budget": budget,
        "error_max": float(error.abs().max()),
        "error_mean": float(error.abs().mean()),
        "error_relative": float(relative.max()),
        "step_ms": percentiles(times),
    }
