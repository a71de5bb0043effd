"""Allocates all memory of a cache, once: exactly the buffers that its layout lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kvcap.runtime.cache.evicted_store import EvictedStore, MappedFile
from kvcap.runtime.cache.layer_balance import LayerBalance
from kvcap.runtime.cache.layout import BufferSpec, CacheLayout
from kvcap.runtime.cache.pool import Segment, SlotPool
from kvcap.runtime.cache.positions import CompactPositions, TruePositions
from kvcap.runtime.cache.query_window import QueryWindow
from kvcap.runtime.cache.slots import QuantisedRowSlots, RowSlots, covers, eager_of
from kvcap.runtime.cache.slots.base import LayerMemory, SlotEngine
from kvcap.runtime.cache.slots.policy import LayerPolicy
from kvcap.runtime.models.rope import Rotation, table_dtype


class Allocation:
    """A record of one cache's storage, which it allocates as the first tokens of layers arrive.

    Args:
        layout: sizes of the cache.
        evict_every: in generation, evict every so many tokens.
    """

    def __init__(self, layout: CacheLayout, evict_every: int = 1) -> None:
        self.layout = layout
        self.by_rows = False
        """Says that layers have `RowSlots`; decided when the first one is allocated."""
        self._evict_every = evict_every
        self.compact = layout.positions == "compact"
        """Says whether tokens count at compact positions; 'auto' positions switch it on later."""
        self.batch: int | None = None
        """Holds the number of sequences; None: nothing is allocated yet."""
        self._named: dict[str, Callable[[], Mapping[str, Tensor]]] = {}  # what was made, by place
        self.segments: list[Segment] = []
        """Holds the segments of all capped layers that are allocated."""
        self.balance: LayerBalance | None = None  # of layers that share one pool
        self._file: MappedFile | None = None  # of evicted tokens
        self._specs: dict[tuple[int, torch.dtype], dict[str, BufferSpec]] = {}  # once worked out
        self._rotation: Rotation | None = None  # that all capped layers share
        if layout.pooled:
            budget, slots = layout.eviction.layer_budget, layout.budget_tokens
            assert budget is not None
            pinned, layers = layout.eviction.pins(slots), len(layout.shape.capped)
            self.balance = LayerBalance(budget, slots, layers, pinned)

    def reset(self) -> None:
        """Count positions as in a new cache, and forget what layers want of each other."""
        self.compact = self.layout.positions == "compact"
        if self.balance is not None:
            self.balance.reset()

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Return every allocated tensor, by the name that the layout gives it."""
        return {
            f"{place}.{name}": buffer
            for place, named in self._named.items()
            for name, buffer in named().items()
        }

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of all buffers, counted anew: a number kept could be wrong."""
        every = self._named.values()
        return sum([x.untyped_storage().nbytes() for named in every for x in named().values()])

    @torch.inference_mode(False)  # ordinary tensors may be written to in any mode
    def engine(self, like: Tensor, policy: LayerPolicy) -> SlotEngine:
        """Allocate all memory of a capped layer; return the engine that works on its slots.

        Args:
            like: keys such as the layer will be given [B, K, T, D].
            policy: of the layer.

        Raises:
            StoreFailed: the file of evicted tokens cannot be made.
        """
        layout, heads, index = self.layout, self.layout.shape.heads, policy.index
        segments, ring, store, mean = self._segments(index, like), None, None, None
        self.segments += segments
        rotation = self.rotation(like) if layout.rotates[index] else None
        later = rotation if layout.positions == "auto" else None
        rotation = rotation if self.compact else None
        positions = TruePositions() if rotation is None else CompactPositions(rotation)
        if layout.window_length:
            ring = QueryWindow(like, heads, layout.window_length)
            self._register(f"window.{index}", ring.named, like)
        if (corrector := layout.eviction.corrector) is not None:
            new = self._in_file(corrector.place, like)
            store = EvictedStore(corrector, segments, heads, rotation, new)
            self._register(f"evicted.{index}", store.named, like)
        if layout.centred(index):
            mean = like.new_zeros(*like.shape[:2], like.shape[3], dtype=torch.float32)
            self._register(f"mean.{index}", partial(dict, keys=mean), like)
        memory = LayerMemory(segments, positions, ring, store, later, mean)
        if self.by_rows:
            rows = QuantisedRowSlots if layout.slot_format.quantised else RowSlots
            return rows(memory, policy, self.balance)
        return eager_of(layout)(memory, policy, self._evict_every, self.balance)

    def rotation(self, like: Tensor) -> Rotation:
        """Return the table of rotations that all capped layers share, for keys such as `like`."""
        if self._rotation is None:
            rope = self.layout.rope
            assert rope is not None
            assert rope.inv_freq is not None
            span, dtype = self.layout.rotation_span, table_dtype(like.dtype)
            self._rotation = Rotation(
                rope.inv_freq, span, like.device, dtype, interleaved=rope.interleaved
            )
            self._register("rotation", self._rotation.named, like)
        return self._rotation

    @torch.inference_mode(False)
    def states(
        self, index: int, batch: int, dtype: torch.dtype, device: torch.device | str
    ) -> Mapping[str, Tensor]:
        """Allocate the states of a recurrent layer of the model, all zeros, by name."""
        named: dict[str, Tensor] = {
            state.name: torch.zeros((batch, *state.shape), dtype=state.dtype(dtype), device=device)
            for state in self.layout.shape.layers[index].states
        }
        self._register(f"state.{index}", lambda: named, torch.empty(batch, 0, dtype=dtype))
        return named

    def _register(
        self, place: str, named: Callable[[], Mapping[str, Tensor]], like: Tensor
    ) -> None:
        """Register new buffers, which must have the shapes and types that the layout lists."""
        kind = like.shape[0], like.dtype
        if kind not in self._specs:
            self._specs[kind] = self.layout.buffers(*kind)
        specs = self._specs[kind]
        for name, buffer in named().items():
            made, planned = (tuple(buffer.shape), buffer.dtype), specs[f"{place}.{name}"][1:]
            assert made == planned, f"{place}.{name} is {made}, and the layout has {planned}"
        self._named[place], self.batch = named, like.shape[0]

    def _segments(self, index: int, like: Tensor) -> list[Segment]:
        """Return the segments of a capped layer, from a new pool or from one that layers share."""
        if self.balance is None:
            return self._pool(index, [index], like)[0]
        if not self.balance.segments:
            together = self._pool(0, list(range(len(self.layout.budgets))), like)
            self.balance.segments = [segment for (segment,) in together]
        return [self.balance.segments[index]]

    def _pool(self, number: int, layers: list[int], like: Tensor) -> list[list[Segment]]:
        """Allocate one pool for some layers; return each one's segments: one, or one a head."""
        layout, (batch, heads, _, size) = self.layout, like.shape
        slots = sum(layout.slots(index, batch) for index in layers)
        latent, aux = layout.shape.latent, layout.aux(layers)
        first = None if latent is None else latent.rotated
        pool = SlotPool(
            slots,
            size,
            like.dtype,
            like.device,
            aux,
            values_from=first,
            slot_format=layout.slot_format,
        )
        self._register(f"pool.{number}", pool.named, like)
        if layers[0] == 0:
            self.by_rows = covers(layout, self._evict_every, pool)
        by_layer, start = [], 0
        for index in layers:
            kept = layout.allotments[index]
            rows = [(0, 0, batch, heads, kept[0])]  # sequence, head, how many of both, budget
            if layout.ragged:
                rows = [(b, k, 1, 1, slots) for b in range(batch) for k, slots in enumerate(kept)]
            by_layer.append(list[Segment]())
            for row, head, b, k, budget in rows:
                segment = Segment(
                    pool,
                    start,
                    budget,
                    layout.block_size,
                    b,
                    k,
                    row=row,
                    head=head,
                    layer_heads=heads,
                )
                by_layer[-1].append(segment)
                start += segment.slots
        return by_layer

    def _in_file(self, place: str, like: Tensor) -> Callable[..., Tensor]:
        """Return a function that makes buffers of evicted tokens, as `torch.zeros` does.

        It makes them in memory, or in one file of all layers if `place` is a directory. Tensors of
        a dry run have no data and need no file.
        """
        if place in ("device", "host") or isinstance(like, FakeTensor):
            return torch.zeros
        if self._file is None:
            needed = self.layout.nbytes(like.shape[0], like.dtype)["evicted_store"]
            self._file = MappedFile(place, needed)
        return self._file.new
