"""Compares three ways to move keys to compact positions; the runtime uses the first, 'by shift'.

'by shift': a key stays rotated as the model made it, with the number of positions that it has moved
down since; attention rotates a copy, once. 'by rank': a key is stored without rotation, with its
rank among the held ones. Models of transformers rotate keys before a cache gets them, so the
rotation is undone on arrival and done again at every attention: keys are rounded twice. 'in place':
every eviction rotates the stored keys a little further and rounds them; in bfloat16 the rotation of
a slow frequency is smaller than the rounding, so that such a pair never moves at all. Runs on the
CPU, and on a CUDA device if there is one. Reads `budgets`, `evictions`, `repeats`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import percentiles, seconds
from kvcap.policies.base import Logits
from kvcap.runtime.attention.functions import attend
from kvcap.runtime.models.rope import Rotation, table_dtype

HEADS, KV_HEADS, SIZE, THETA = 8, 2, 64, 10_000.0
COLUMNS = (
    "device",
    "keys",
    "dtype",
    "budget",
    "error_max",
    "error_mean",
    "error_relative",
    "step_ms",
)
WAYS = ("by shift", "by rank", "in place")


def run(options: BenchmarkOptions) -> Result:
    """Return the error of the keys that attention sees after `evictions`, and a step's time.

    Every step reads a key and evicts one at random. The error is relative to a rotation of the
    original key in float64; `error_relative` is the largest error of a key divided by its norm.
    """
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    dtypes = torch.float32, torch.bfloat16
    rows = [
        _measure(KeyCache(way, dtype, budget, device), options)
        for device, budget, dtype, way in product(devices, options.budgets, dtypes, WAYS)
    ]
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE, "rope_theta": THETA}
    return Result("positions", COLUMNS, rows, {**sizes, "evictions": options.evictions})


class KeyCache:
    """A full cache of one layer's keys [1, K, N, D] that loses random slots."""

    def __init__(self, way: str, dtype: torch.dtype, budget: int, device: str) -> None:
        self.way, self.budget = way, budget
        self.random = torch.Generator(device).manual_seed(0)
        frequencies = THETA ** -(torch.arange(0, SIZE, 2).float() / SIZE)
        table = table_dtype(dtype)
        self.rotation = Rotation(frequencies, budget + 1, device, table)
        self.forth = Rotation(-frequencies, budget + 1, device, table)
        self.made = self.random_normal(KV_HEADS, budget).to(dtype)
        ranks = torch.arange(budget, device=device).expand(1, KV_HEADS, -1)
        self.born = ranks.clone()  # the step in which a slot was read
        self.shift = torch.zeros(1, KV_HEADS, budget, dtype=torch.int32, device=device)
        self.rank = ranks.int()
        self.keys = self.made.clone()
        if way == "by rank":
            self.keys = self.rotation.back(self.made, self.rank)
        self.values = self.random_normal(KV_HEADS, budget).to(dtype)
        self.query = self.random_normal(HEADS, 1).to(dtype)
        self.last = self.rotation.rows([budget - 1])
        self.seen = budget

    def random_normal(self, heads: int, tokens: int) -> Tensor:
        """Draw random numbers [1, heads, tokens, D]."""
        return torch.randn(1, heads, tokens, SIZE, generator=self.random, device=self.random.device)

    def step(self) -> Tensor:
        """Evict a random slot of every head, read a key into it, attend; return [1, H, 1, D]."""
        device = self.random.device
        evicted = torch.randint(self.budget, (1, KV_HEADS, 1), generator=self.random, device=device)
        moved = (self.born > self.born.gather(-1, evicted)).int()  # newer slots move by one
        self.shift += moved
        if self.way == "in place":
            self.keys.copy_(self.rotation.back(self.keys, moved))
        new = self.random_normal(KV_HEADS, 1).to(self.keys.dtype)
        row = evicted[..., None].expand(-1, -1, -1, SIZE)
        if self.way == "by rank":
            self.rank -= moved
            self.rank.scatter_(2, evicted, self.budget - 1)
            self.keys.scatter_(2, row, self.rotation.back_by(new, self.last))
        else:
            self.keys.scatter_(2, row, new)
        self.made.scatter_(2, row, new)
        self.born.scatter_(2, evicted, self.seen)
        self.shift.scatter_(2, evicted, 0)
        self.seen += 1
        return attend(self.query, self.visible(), self.values, Logits(SIZE**-0.5))

    def visible(self) -> Tensor:
        """Return the keys as attention sees them, [1, K, N, D]."""
        if self.way == "in place":
            return self.keys
        if self.way == "by rank":
            return self.forth.back(self.keys, self.rank)
        return self.rotation.back(self.keys, self.shift)

    def reference(self) -> Tensor:
        """Return the exact keys, [1, K, N, D] in float64."""
        frequencies = THETA ** -(torch.arange(0, SIZE, 2).float() / SIZE)
        angles = self.shift.double().cpu()[..., None] * frequencies.double()
        rotated = torch.complex(*self.made.double().cpu().chunk(2, dim=-1)) * torch.polar(
            torch.ones_like(angles), -angles
        )
        return torch.cat((rotated.real, rotated.imag), dim=-1)


def _measure(slots: KeyCache, options: BenchmarkOptions) -> dict[str, Any]:
    device = slots.random.device

    def step() -> None:
        slots.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(options.evictions):
        slots.step()
    expected = slots.reference()
    error = slots.visible().double().cpu() - expected
    times = [seconds(step) * 1000 for _ in range(100 * options.repeats)]
    relative = error.norm(dim=-1) / expected.norm(dim=-1)
    return {
        "device": device.type,
        "keys": slots.way,
        "dtype": str(slots.keys.dtype).removeprefix("torch."),
        "budget": slots.budget,
        "error_max": float(error.abs().max()),
        "error_mean": float(error.abs().mean()),
        "error_relative": float(relative.max()),
        "step_ms": percentiles(times),
    }
