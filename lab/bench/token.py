"""Times a token's attention and eviction on a GPU, by every variant of the kernel.

The layers have Llama-3.2-3B's shape, bfloat16, and full slots: a token is rotated, appended and
attended to (`kernels/token.py`), and KeyDiff evicts a slot. Variants read `block` slots at once,
have `stages` such blocks in flight, and cut a head's slots into `parts`; the first row of each
batch is the runtime's own choice. `median_ms` is one layer's attention within a CUDA graph,
`evicting_ms` that with the eviction. Inputs rotate through 512 MiB, so that none is in the GPU's
cache. The floor is the time to read all slots once, at the bandwidth that a sum over 4 GiB reached
in the same run. Variants that need more shared memory than there is are left out. Reads `budgets`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcap import kernels
from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.reports import device_name, versions
from kvcap.kernels import decode, token
from kvcap.kernels import rows as row_kernels
from kvcap.kernels.arguments import Pins
from kvcap.lab.bench.gpu import require_cuda
from kvcap.lab.bench.kernels import ROTATED, read_bandwidth, replayed, triton_version
from kvcap.policies import Observation
from kvcap.policies.base import RowRanges
from kvcap.policies.keydiff import KeyDiff
from kvcap.runtime.cache.pool import SHIFT, Segment, SlotPool
from kvcap.runtime.cache.row_table import ALIGNED, STEP
from kvcap.runtime.models.rope import Rotation, table_dtype

HEADS, KV_HEADS, SIZE, DTYPE, THETA = 24, 8, 128, torch.bfloat16, 500_000.0
BATCHES = (1, 16)
SPARE = 512  # slots for a block, behind those that stay
MOVED = 2048  # most positions that keys may move while they are timed
DEFAULTS = {"budgets": (2048,)}
COLUMNS = (
    "batch", "slots", "block", "stages", "warps", "parts", "median_ms", "evicting_ms",
    "floor_ms", "of_read",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A way in which the kernel reads slots."""

    block: int  # slots read at once
    stages: int  # blocks in flight
    warps: int
    parts: int | None = None  # parts of a head's slots; None: as the runtime chooses


def run(options: BenchmarkOptions) -> Result:
    """Return a row for every batch and variant; `derived` has the fastest of each batch.

    Raises:
        ValueError: there is no CUDA device.
    """
    require_cuda()
    bandwidth = read_bandwidth()
    machine = {
        "device": device_name("cuda"),
        "versions": {**versions(), "triton": triton_version()},
        "read_tb_s": bandwidth / 1e12,
    }
    rows, fastest = list[dict[str, Any]](), list[dict[str, Any]]()
    for slots in options.budgets:
        for batch in BATCHES:
            measured = list(_measured(batch, slots, bandwidth))
            rows += [{**row, **machine} for row in measured]
            fastest += [
                min(measured, key=lambda row: row[name]) for name in ("median_ms", "evicting_ms")
            ]
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE, "dtype": "bfloat16"}
    return Result("token", COLUMNS, rows, {**machine, **sizes, "fastest": fastest})


def variants(device: str = "cuda") -> list[Variant]:
    """Return the runtime's variant first, then variants that differ in one or two settings."""
    tile = token.tile_of(SIZE * DTYPE.itemsize, torch.device(device))
    usual = Variant(tile.block, tile.stages, tile.warps)
    chosen = [usual]
    chosen += [replace(usual, block=n, stages=s) for n in (32, 64, 128) for s in (2, 3, 5)]
    chosen += [replace(usual, parts=n, stages=s) for n in (2, 4, 8, 16, 32) for s in (3, 5)]
    chosen += [replace(usual, warps=w, stages=s) for w in (2, 8) for s in (3, 5)]
    return list(dict.fromkeys(chosen))


class Layer:
    """A layer with random full slots, and a token to read."""

    def __init__(
        self,
        batch: int,
        slots: int,
        heads: int = HEADS,
        kv_heads: int = KV_HEADS,
        size: int = SIZE,
        dtype: torch.dtype = DTYPE,
        device: str = "cuda",
    ) -> None:
        pool = SlotPool(
            batch * kv_heads * (slots + SPARE), size, dtype, device, {SHIFT: torch.int32}
        )
        self.slots = slots
        self.segment = Segment(pool, 0, slots, SPARE, batch, kv_heads)
        keys, values = torch.randn(2, batch, kv_heads, slots, size, device=device).to(dtype)
        self.segment.append(keys, values, torch.arange(slots, dtype=torch.int32, device=device))
        self.segment.positions.copy_(torch.rand(batch, kv_heads, slots, device=device).argsort(-1))
        count = batch * kv_heads
        starts = torch.arange(count + 1, dtype=torch.int32, device=device) * (slots + SPARE)
        held = torch.full((count,), slots, dtype=torch.int32, device=device)
        longest = -(-slots // STEP) * STEP + ALIGNED
        self.rows, after = RowRanges(starts, held, longest), RowRanges(starts, held + 1, longest)
        none = torch.zeros(count, 2, dtype=torch.int32, device=device)
        self.moved = row_kernels.Pool(pool.buffers(), pool.aux[SHIFT], after, none, held)
        self.left = torch.empty_like(held)
        self.segment.aux(SHIFT).random_(slots)
        self.before = self.segment.aux(SHIFT).clone()
        many = torch.randn(batch, 1, heads + 2 * kv_heads, size, device=device).to(dtype)
        self.token = many.transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1)
        self.time = torch.full((1,), slots, dtype=torch.int32, device=device)
        inverse = THETA ** -(torch.arange(0, size, 2) / size)
        self.rotation = Rotation(inverse, slots + MOVED, device, table_dtype(dtype))
        angles = (slots * inverse).repeat(2)[None, None].to(device)
        self.angles = angles.cos().to(dtype), angles.sin().to(dtype)

    def attend(self, variant: Variant) -> tuple[Tensor, Tensor]:
        """Rotate, append and attend a token; return the output, and sums of the keys in parts."""
        tile = decode.Tile(variant.block, variant.stages, variant.warps, programs=2)
        (query, key, value), scaling = self.token, self.segment.pool.size**-0.5
        pool = self.segment.pool
        out, _, sums = token.attend(
            query,
            key,
            value,
            self.angles,
            self.time,
            pool.buffers(),
            scaling,
            (pool.aux[SHIFT], self.rotation.table),
            self.rows,
            summed=True,
            tile=tile,
            most_parts=variant.parts,
        )
        assert sums is not None
        return out, sums

    def evict(self, sums: Tensor) -> None:
        """Evict a slot of every head by KeyDiff, as the runtime does after a token."""
        pool, seen, (batch, heads) = self.segment.pool, self.slots + 1, sums.shape[:2]
        keys, values = (x.expand(batch, heads, -1, -1) for x in (pool.keys, pool.values))
        positions = row_kernels.padded(pool.positions, self.moved.rows, batch, positions=True)
        obs = Observation(keys, values, positions, seen, self.slots, rows=self.moved.rows)
        turn = pool.aux[SHIFT].expand(batch, heads, -1), self.rotation.table
        scores = kernels.score_rows(KeyDiff(), obs, kernels.StoredKeys(sums, turn))
        row_kernels.evict_one(scores, Pins(seen, ()), self.moved, self.left)

    def reset(self) -> None:
        """Set the keys' shifts back to their first values."""
        self.segment.aux(SHIFT).copy_(self.before)


def _measured(batch: int, slots: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Yield a row for every variant that the device has enough shared memory for."""
    must_read = batch * KV_HEADS * slots * 2 * SIZE * DTYPE.itemsize  # bytes, without positions
    layers = [Layer(batch, slots) for _ in range(max(2, ROTATED // must_read))]
    for variant in variants():
        try:
            sums = layers[0].attend(variant)[1]
        except Exception as error:
            if type(error).__name__ != "OutOfResources":  # by name, as Triton is not imported here
                raise
            continue
        layers[0].evict(sums)

        def attended(layer: Layer, variant: Variant = variant) -> Tensor:
            return layer.attend(variant)[0]

        def evicted(layer: Layer, variant: Variant = variant) -> None:
            layer.evict(layer.attend(variant)[1])

        took = replayed(attended, layers)
        with_eviction = replayed(evicted, layers)
        for layer in layers:
            layer.reset()
        yield {
            "batch": batch,
            "slots": slots,
            **asdict(variant),
            "parts": sums.shape[2] - 1,
            "median_ms": took,
            "evicting_ms": with_eviction,
            "floor_ms": must_read / bandwidth * 1e3,
            "of_read": must_read / took * 1e3 / bandwidth,
        }
