"""Keys, values and auxiliary tensors of a fixed number of slots, cut into segments.

Allocated once, never grown, never replaced. A segment is the slots of heads that hold equally many:
a whole layer where budgets are uniform, one head where they are not, so that nothing is padded and
nothing masked. Slots lie unordered within a row: `positions` says where a token belongs, and moving
a boundary between rows moves only the slots on the wrong side of it. Knows no policy, no model and
no transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from kvcap.runtime.cache.slot_format import SlotFormat

PIECE = 1 << 19  # bytes of float32 numbers that are dequantised at once on a CPU
SHIFT = "shift"
"""The auxiliary tensor of how far a slot's position has moved down since its key was rotated.

A quantised key that is rotated at all is held unrotated, at position 0: it has moved up by its
rank, and its shift is minus that.
"""


class SlotPool:
    """Flat buffers `[slots, D]` of keys and values, `[slots]` of positions and auxiliary tensors.

    Args:
        slots: how many.
        head_size: `D`.
        dtype: of keys and values.
        device: of all.
        aux: types of the auxiliary tensors by name.
        new: makes the buffers, as `torch.zeros` does.
        values_from: the values are the keys' numbers from that one on (latents); None: their own.
        slot_format: in one of fewer bits keys and values are the tensors that it says, and `sides`
            with scales.
    """

    def __init__(
        self,
        slots: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        aux: Mapping[str, torch.dtype] | None = None,
        new: Callable[..., Tensor] = torch.zeros,
        values_from: int | None = None,
        slot_format: SlotFormat | None = None,
    ) -> None:
        self.slots, self.size, self.dtype = slots, head_size, dtype
        self.values_from, self.format = values_from, slot_format or SlotFormat()
        shapes = self.format.shapes(head_size, dtype)
        if values_from is not None:
            del shapes["values"]
        self.sides = {
            name: new(slots, *shape, dtype=kind, device=device)
            for name, (shape, kind) in shapes.items()
        }
        self.keys = self.sides.pop("keys")
        if values_from is None:
            self.values = self.sides.pop("values")
        else:
            self.values = self.keys[:, values_from:]
        self.positions = new(slots, dtype=torch.int32, device=device)
        self.aux = {name: new(slots, dtype=dt, device=device) for name, dt in (aux or {}).items()}
        values = {"values": self.values} if values_from is None else {}
        self._named = {
            "keys": self.keys, **values, "positions": self.positions, **self.sides, **self.aux,
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Exact bytes of storage, used or not; constant for the life of the pool."""
        return sum(x.untyped_storage().nbytes() for x in self.buffers())

    @property
    def slot_bytes(self) -> int:
        """Bytes that one slot of one head takes."""
        return self.nbytes // self.slots

    @property
    def read_dtype(self) -> torch.dtype:
        """Of copies of quantised keys and values: float32 on a CPU, else the model's type."""
        return torch.float32 if self.keys.device.type == "cpu" else self.dtype

    def named(self) -> dict[str, Tensor]:
        """Everything that belongs to a slot, by name."""
        return self._named

    def kinds(self) -> dict[str, torch.dtype]:
        """The auxiliary tensors' types by name."""
        return {name: tensor.dtype for name, tensor in self.aux.items()}

    def buffers(self) -> list[Tensor]:
        """Everything that belongs to a slot and moves with it."""
        return list(self._named.values())


class Segment:
    """`[b, k]` rows of equally many slots, side by side in a pool from slot `start`.

    `budget` slots of a row stay after an eviction, or fewer where `target_length` is lower;
    `block` more take the arriving tokens.

    Args:
        pool: where the slots are.
        start: its first slot.
        budget: slots of a row.
        block: more slots of a row.
        batch: `b`, sequences.
        heads: `k`, KV heads.
        row: the first of its sequences within the batch.
        head: the first of its KV heads within the layer.
        layer_heads: KV heads of the layer; by default it has no others.

    >>> pool = SlotPool(12, head_size=8, dtype=torch.float32)
    >>> segment = Segment(pool, 0, budget=4, block=2, heads=2)
    >>> segment.append(torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 8), torch.arange(2))
    >>> segment.held, segment.keys.shape, pool.nbytes
    (2, torch.Size([1, 2, 2, 8]), 816)
    """

    def __init__(
        self,
        pool: SlotPool,
        start: int,
        budget: int,
        block: int,
        batch: int = 1,
        heads: int = 1,
        *,
        row: int = 0,
        head: int = 0,
        layer_heads: int | None = None,
    ) -> None:
        self.pool, self.start, self.budget, self.block = pool, start, budget, block
        self.batch, self.heads, self.row, self.head = batch, heads, row, head
        self.layer_heads = layer_heads or heads
        self.target_length = budget
        self.held = 0
        self.first_pinned = 0
        """Of a session's row: how many of its first tokens are pinned, besides the cache's pins."""
        device = pool.positions.device
        self._rows = torch.arange(batch * heads, device=device).view(batch, heads, 1)
        self._wholes: tuple[tuple[int, int], dict[str, Tensor]] | None = None  # all slots, by name
        self._viewed: tuple[tuple[int, ...], dict[str, Tensor]] | None = None  # held ones, likewise

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return self.budget + self.block

    @property
    def slots(self) -> int:
        """Slots of all rows."""
        return self.batch * self.heads * self.capacity

    @property
    def keys(self) -> Tensor:
        """The held keys as they are stored, a view [b, k, held, D]."""
        return self._held("keys")

    @property
    def values(self) -> Tensor:
        """The held values as they are stored, a view [b, k, held, D]."""
        if self.pool.values_from is not None:
            return self.view(self.pool.values)
        return self._held("values")

    @property
    def positions(self) -> Tensor:
        """The held tokens' places in the conversation, a view [b, k, held] int32."""
        return self._held("positions")

    def aux(self, name: str) -> Tensor:
        """A auxiliary tensor's held part, a view [b, k, held]."""
        return self._held(name)

    def read_values(self) -> Tensor:
        """The held values [b, k, held, D]: a view, or a copy of quantised ones.

        A copy is in float32 on a CPU, which is what it computes with, else in the model's type.
        """
        pool, slots = self.pool, self.held
        if not pool.format.quantised:
            return self.values
        parts = pool.format.parts("value", self.named(0, slots))
        out, numbers = self.empty(slots), pool.format.values
        assert numbers is not None, "all formats of fewer bits quantise values"
        for piece in self.pieces(slots):
            numbers.dequantise({name: x[piece] for name, x in parts.items()}, out[piece], None)
        return out.to(pool.read_dtype)

    def weigh_values(self, weights: Tensor) -> Tensor:
        """Sums [b, k, r, D] of the held quantised values by weights [b, k, r, held], in float32.

        Piece by piece: there is no copy of all values.
        """
        parts = self.pool.format.parts("value", self.named(0, self.held))
        out, numbers = (
            weights.new_zeros(*weights.shape[:3], self.pool.size),
            self.pool.format.values,
        )
        assert numbers is not None
        for piece in self.pieces(self.held):
            b, k, n = piece
            those = {name: x[piece] for name, x in parts.items()}
            out[b, k] += numbers.weigh(those, weights[b, k, :, n])
        return out

    def by_sequence(self) -> list[Segment]:
        """The same slots as a segment of each sequence, which may hold unequally many."""
        if self.batch == 1:
            return [self]
        size, heads = self.slots // self.batch, self.heads
        return [
            Segment(
                self.pool, self.start + i * size, self.budget, self.block, 1, heads,
                row=self.row + i, head=self.head, layer_heads=self.layer_heads,
            )
            for i in range(self.batch)
        ]  # fmt: skip

    def each_row(self) -> Iterator[tuple[int, int]]:
        """The sequence and the KV head of every row, as indices into this segment's views."""
        return product(range(self.batch), range(self.heads))

    def empty(self, slots: int) -> Tensor:
        """Memory for so many keys or values of every row, [b, k, slots, D] float32."""
        shape = self.batch, self.heads, slots, self.pool.size
        return torch.empty(shape, device=self.pool.keys.device)

    def pieces(self, slots: int) -> Iterator[tuple[slice, slice, slice]]:
        """The first slots of every row in parts, whose copies stay in a processor's cache.

        Rows, heads and slots of each: on a CPU all, if they are few, or some of one head.
        """
        row, every = 4 * self.pool.size, slice(None)
        rows = self.batch * self.heads
        if self.pool.keys.device.type != "cpu" or rows * slots * row <= PIECE:
            yield every, every, slice(slots)
            return
        step = max(32, PIECE // row)
        for i, start in product(range(rows), range(0, slots, step)):
            b, k = divmod(i, self.heads)
            yield slice(b, b + 1), slice(k, k + 1), slice(start, min(start + step, slots))

    def named(self, start: int, stop: int) -> Mapping[str, Tensor]:
        """Slots [start, stop) of every row of every buffer, views by name."""
        return {name: x[:, :, start:stop] for name, x in self._all_slots().items()}

    def _held(self, name: str) -> Tensor:
        """The held part of a buffer, a view [b, k, held, ...].

        Kept as long as it holds: a token asks for it again and again, and to make it takes a CPU as
        long as to use it.
        """
        place = self.start, self.budget, self.held
        if self._viewed is None or self._viewed[0] != place:
            self._viewed = place, {}
        kept = self._viewed[1]
        if name not in kept:
            kept[name] = self._all_slots()[name][:, :, : self.held]
        return kept[name]

    def _all_slots(self) -> dict[str, Tensor]:
        """All slots of every buffer, in use or not, views [b, k, capacity, ...] by name."""
        place = self.start, self.budget
        if self._wholes is None or self._wholes[0] != place:
            pool = self.pool.named()
            self._wholes = place, {name: self.whole(x) for name, x in pool.items()}
        return self._wholes[1]

    def buffers(self) -> list[Tensor]:
        """The held parts of all the pool's buffers, views."""
        return list(self.named(0, self.held).values())

    def view(self, buffer: Tensor) -> Tensor:
        """The held part of one of the pool's buffers or a copy of it, a view [b, k, held, ...]."""
        return self._view(buffer, 0, self.held)

    def whole(self, buffer: Tensor) -> Tensor:
        """All slots of one of the pool's buffers, in use or not, a view [b, k, capacity, ...]."""
        return self._view(buffer, 0, self.capacity)

    def rows_of(self, x: Tensor) -> Tensor:
        """This segment's part of a layer's tensor [B, K, ...] or [B, H, ...]: it, or a view."""
        if self.heads == self.layer_heads and self.batch == x.shape[0]:
            return x  # to make a view takes a CPU as long as to use it
        group = x.shape[1] // self.layer_heads
        first = self.head * group
        return x[self.row : self.row + self.batch, first : first + self.heads * group]

    def query_heads_of(self, x: Tensor | None) -> Tensor | None:
        """This segment's part of numbers [H] of a layer's query heads, a view [h]."""
        if x is None:
            return None
        group = len(x) // self.layer_heads
        return x[self.head * group : (self.head + self.heads) * group]

    def behind(self, length: int) -> Mapping[str, Tensor]:
        """So many slots of every row behind those in use, views by name."""
        stop = self.held + length
        assert stop <= self.capacity, f"{stop} slots needed, {self.capacity} allocated"
        return self.named(self.held, stop)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Write a block [b, k, T, D] of tokens that count as `positions` [T] int32.

        Behind the slots in use.
        """
        start, length = self.held, keys.shape[2]
        blocks = {"keys": keys, "values": values, "positions": positions}
        if self.pool.format.quantised:
            blocks |= self.pool.format.written(keys, values)
            count = torch.arange(length, dtype=torch.int32, device=keys.device)
            blocks[SHIFT] = -(count + start)  # minus the ranks
        for name, target in self.behind(length).items():
            target.copy_(blocks[name]) if name in blocks else target.zero_()
        self.held = start + length

    def compact(self, evicted: Tensor) -> None:
        """Give up the slots `evicted` [b, k, e], each head's its own; `held` falls by `e`.

        Survivors beyond the new `held` move into evicted slots below it, in place: at most `e`
        slots are written, and no temporary is larger than that.
        """
        count = evicted.shape[-1]
        kept = self.held - count
        rows = self._rows * self.capacity + self.start
        target = evicted.sort(dim=-1).values if count > 1 else evicted  # [b, k, e]
        source = _survivors(target, kept) if count > 1 else kept
        rows_to, rows_from = (rows + target).flatten(), (rows + source).flatten()
        for buffer in self.pool.buffers():
            buffer.index_copy_(0, rows_to, buffer.index_select(0, rows_from))
        self.held = kept

    def _view(self, buffer: Tensor, start: int, stop: int) -> Tensor:
        """Slots [start, stop) of every row, [b, k, stop - start, ...]."""
        step = buffer.stride(0)
        row = self.capacity * step
        size = (self.batch, self.heads, stop - start, *buffer.shape[1:])
        stride = (self.heads * row, row, step, *buffer.stride()[1:])
        first = buffer.storage_offset() + (self.start + start) * step
        return buffer.as_strided(size, stride, first)


def _survivors(target: Tensor, kept: int) -> Tensor:
    """For each evicted slot [b, k, e], in order, the one from `kept` on that moves into it.

    First come the holes below `kept`; a slot that is none moves onto itself.
    """
    count = target.shape[-1]
    # Tail slots [kept, held) survive unless they are evicted themselves; a spare last place
    # takes the marks of the holes. Survivors come first, as many as there are holes.
    gone = torch.zeros(*target.shape[:2], count + 1, dtype=torch.int8, device=target.device)
    gone.scatter_(-1, torch.where(target < kept, count, target - kept), 1)
    source = kept + gone[..., :count].argsort(dim=-1, stable=True)
    return torch.where(target < kept, source, target)


def resize(segments: Sequence[Segment], budgets: Sequence[int]) -> None:
    """Move the boundaries between neighbouring segments of a pool; what they take stays the same.

    In place: a slot moves only where its row's new place does not cover it, so that a row's
    neighbours must have left before it comes. Rows that move right go last to first, then those
    that move left first to last.

    Args:
        segments: side by side, in the order of their slots.
        budgets: the new one of each, with room for what it holds.
    """
    before = sum(segment.slots for segment in segments)
    start = segments[0].start
    moves: list[tuple[Segment, int, int]] = []  # from and to, of every row
    places = []
    for segment, budget in zip(segments, budgets, strict=True):
        capacity = budget + segment.block
        assert segment.held <= capacity, "a segment must have room for what it holds"
        rows = range(segment.batch * segment.heads)
        old = segment.start
        moves += [(segment, old + i * segment.capacity, start + i * capacity) for i in rows]
        places.append((segment, start, budget))
        start += segment.batch * segment.heads * capacity
    assert start - segments[0].start == before, "segments must share exactly what they have"
    for segment, old, new in [m for m in reversed(moves) if m[2] > m[1]]:
        count = min(new - old, segment.held)
        _move(segment.pool, old, new + segment.held - count, count)
    for segment, old, new in [m for m in moves if m[2] < m[1]]:
        count = min(old - new, segment.held)
        _move(segment.pool, old + segment.held - count, new, count)
    for segment, first, budget in places:
        segment.start, segment.budget, segment.target_length = first, budget, budget


def _move(pool: SlotPool, source: int, target: int, count: int) -> None:
    if count:
        for buffer in pool.buffers():
            buffer[target : target + count] = buffer[source : source + count]
