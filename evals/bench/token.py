"""A token's attention and eviction on a GPU, by every variant of the kernel that attends.

Layers of Llama-3.2-3B's shape, bfloat16, whose slots are full: a token is rotated, appended and
attended to (`kernels/token.py`), and KeyDiff gives up a slot. Variants read `block` slots at once,
have `stages` of such blocks under way, and cut a head's slots into `parts`; each batch's first row
is as the runtime has it. `median_ms` is one layer's attention within a CUDA graph, `evicting_ms`
that and the eviction; inputs rotate through 512 MiB, so that none is found in the chip's cache. The
floor is one read of all slots, at the bandwidth that a sum over 4 GiB reached in the same run.
Variants that take more shared memory than there is are left out. Reads `budgets`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcap import kernels
from kvcap.evals.bench import Options, Result
from kvcap.evals.bench.gpu import require_cuda
from kvcap.evals.bench.kernels import ROTATED, read_bandwidth, replayed, triton_version
from kvcap.evals.reports import device_name, versions
from kvcap.kernels import decode, evict, token
from kvcap.policies import Observation
from kvcap.policies.keydiff import KeyDiff
from kvcap.runtime.cache.pool import SHIFT, Segment, SlotPool
from kvcap.runtime.models.rope import Rotation, table_dtype

HEADS, KV_HEADS, SIZE, DTYPE, THETA = 24, 8, 128, torch.bfloat16, 500_000.0
BATCHES = (1, 16)
SPARE = 512  # slots of a block, behind those that stay
MOVED = 2048  # by how much keys may move while they are timed
DEFAULTS = {"budgets": (2048,)}
COLUMNS = (
    "batch", "slots", "block", "stages", "warps", "parts", "median_ms", "evicting_ms",
    "floor_ms", "of_read",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """How the kernel reads slots; `parts` None: as many as the runtime chooses."""

    block: int
    stages: int
    warps: int
    parts: int | None = None


def run(options: Options) -> Result:
    """A row for every batch and variant, the fastest of each batch in `derived`.

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
            found = list(_measured(batch, slots, bandwidth))
            rows += [{**row, **machine} for row in found]
            fastest += [
                min(found, key=lambda row: row[name]) for name in ("median_ms", "evicting_ms")
            ]
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE, "dtype": "bfloat16"}
    return Result("token", COLUMNS, rows, {**machine, **sizes, "fastest": fastest})


def variants(device: str = "cuda") -> list[Variant]:
    """That of the runtime first; then those that differ from it in one or two respects."""
    tile = token.tile_of(SIZE * DTYPE.itemsize, torch.device(device))
    usual = Variant(tile.block, tile.stages, tile.warps)
    found = [usual]
    found += [replace(usual, block=n, stages=s) for n in (32, 64, 128) for s in (2, 3, 5)]
    found += [replace(usual, parts=n, stages=s) for n in (2, 4, 8, 16, 32) for s in (3, 5)]
    found += [replace(usual, warps=w, stages=s) for w in (2, 8) for s in (3, 5)]
    return list(dict.fromkeys(found))


class Layer:
    """Full slots of one layer, and a token that comes. Random."""

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
        self.segment.held = slots
        self.segment.keys.normal_()
        self.segment.values.normal_()
        self.segment.positions.copy_(torch.rand(batch, kv_heads, slots, device=device).argsort(-1))
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
        """The token rotated, appended and attended: the output, and the sums of keys' parts."""
        buffers = self.segment.append_views(whole=False)
        tile = decode.Tile(variant.block, variant.stages, variant.warps, programs=2)
        turn = buffers[3], self.rotation.table
        size = buffers[0].shape[-1]
        query, key, value = self.token
        out, _, sums = token.attend(
            query, key, value, self.angles, self.time, buffers, size**-0.5, turn, summed=True,
            tile=tile, most_parts=variant.parts,
        )  # fmt: skip
        assert sums is not None
        return out, sums

    def evict(self, sums: Tensor) -> Tensor:
        """What the runtime does after a token: the slot that KeyDiff gives up, [B, K, 1]."""
        keys, values, positions, shift = buffers = self.segment.append_views(whole=False)
        stored = kernels.StoredKeys(sums, (shift, self.rotation.table))
        obs = Observation(keys, values, positions, self.slots + 1, self.slots)
        scores = kernels.score(KeyDiff(), obs, stored)
        return evict.give_up(
            scores, positions, 1, evict.Pins(0, 0, obs.num_tokens, ()), shift, buffers
        )

    def reset(self) -> None:
        """Have keys be moved as at first."""
        self.segment.aux(SHIFT).copy_(self.before)


def _measured(batch: int, slots: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    """A row for every variant that the device has the shared memory for."""
    must_read = 2 * batch * KV_HEADS * slots * SIZE * DTYPE.itemsize
    layers = [Layer(batch, slots) for _ in range(max(2, ROTATED // must_read))]
    for variant in variants():
        try:
            sums = layers[0].attend(variant)[1]
        except Exception as error:
            if type(error).__name__ != "OutOfResources":  # of triton, which this does not import
                raise
            continue
        layers[0].evict(sums)

        def attended(layer: Layer, variant: Variant = variant) -> Tensor:
            return layer.attend(variant)[0]

        def evicted(layer: Layer, variant: Variant = variant) -> Tensor:
            return layer.evict(layer.attend(variant)[1])

        took = replayed(attended, layers)
        with_eviction = replayed(evicted, layers)
        for layer in layers:
            layer.reset()
        yield {
            "batch": batch, "slots": slots, **asdict(variant), "parts": sums.shape[2] - 1,
            "median_ms": took, "evicting_ms": with_eviction,
            "floor_ms": must_read / bandwidth * 1e3, "of_read": must_read / took * 1e3 / bandwidth,
        }  # fmt: skip
