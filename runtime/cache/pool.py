"""Holds keys, values and auxiliary tensors of a fixed number of slots, cut into segments.

They are allocated once, never grown and never replaced. A segment has the slots of heads that hold
equally many: a whole layer where budgets are uniform, one head where they are not, so that nothing
is padded or masked. Slots lie unordered within a row: `positions` says where a token belongs, and
moving a boundary between rows moves only the slots on the wrong side of it. Knows no policy, no
model and no transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from kvcap.policies.base import Logits
from kvcap.runtime.cache.slot_format import SlotFormat

PIECE = 1 << 19  # bytes of float32 numbers that are dequantised at once on a CPU
SHIFT = "shift"
"""Names the auxiliary tensor of how far a slot's position moved down since its key was rotated.

Quantised keys of layers that rotate are held unrotated, at position 0. Such a key has moved up by
its rank, so that its shift is minus its rank.
"""


class SlotPool:
    """A pool of slots: flat buffers `[slots, D]` of keys and values, `[slots]` of other numbers.

    Args:
        slots: number of slots.
        head_size: `D`.
        dtype: type of keys and values.
        device: where all buffers are.
        aux: types of the auxiliary tensors, of one number a slot, by name.
        new: makes the buffers, as `torch.zeros` does.
        values_from: values are the keys' numbers from that index on (latents); None: they have a
            buffer of their own.
        slot_format: which tensors hold quantised keys and values, and which their scales, in
            `sides`; by default keys and values have the model's type.
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
        sides = self.format.shapes(head_size, dtype)
        shapes = {"keys": sides.pop("keys"), "values": sides.pop("values")}
        if values_from is not None:
            del shapes["values"]
        shapes |= {"positions": ((), torch.int32), **sides}  # kernels take them in this order
        shapes |= {name: ((), kind) for name, kind in (aux or {}).items()}
        self._named = {
            name: new(slots, *shape, dtype=kind, device=device)
            for name, (shape, kind) in shapes.items()
        }
        self.keys, self.positions = self._named["keys"], self._named["positions"]
        self.values = self._named.get("values", self.keys[:, values_from:])
        self.aux = {name: self._named[name] for name in aux or {}}

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of storage, used or not; constant for the life of the pool."""
        return sum(x.untyped_storage().nbytes() for x in self._named.values())

    @property
    def slot_bytes(self) -> int:
        """Return the bytes that one slot of one head takes."""
        return self.nbytes // self.slots

    @property
    def read_dtype(self) -> torch.dtype:
        """Return the type of copies of quantised numbers: float32 on a CPU, else the model's."""
        return torch.float32 if self.keys.device.type == "cpu" else self.dtype

    def named(self) -> dict[str, Tensor]:
        """Return every buffer by name; each has something of every slot."""
        return self._named

    def kinds(self) -> dict[str, torch.dtype]:
        """Return the auxiliary tensors' types by name."""
        return {name: tensor.dtype for name, tensor in self.aux.items()}

    def buffers(self) -> list[Tensor]:
        """Return every buffer, whose rows move with a slot."""
        return list(self._named.values())


class Segment:
    """A part of a pool: `[b, k]` rows of equally many slots, side by side from slot `start`.

    A row has `budget` slots, and `block` more for the arriving tokens. After an eviction
    `target_length` slots stay in use, which is `budget` or less.

    Args:
        pool: where the slots are.
        start: its first slot.
        budget: slots of a row that may stay in use.
        block: further slots of a row.
        batch: `b`, sequences.
        heads: `k`, KV heads.
        row: the first of its sequences within the batch.
        head: the first of its KV heads within the layer.
        layer_heads: KV heads of the layer; by default only those of the segment.

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
        self.first_pinned: tuple[tuple[int, int], ...] = ()
        """Holds the span of a session's first tokens that are pinned in its row; () without."""
        device = pool.positions.device
        self._buffers = pool.buffers()
        self._rows = torch.arange(batch * heads, device=device).view(batch, heads, 1)
        self._views: dict[tuple[int, ...], dict[str, Tensor]] = {}  # the last two made, by slots

    @property
    def capacity(self) -> int:
        """Return the slots of a row."""
        return self.budget + self.block

    @property
    def slots(self) -> int:
        """Return the slots of all rows."""
        return self.batch * self.heads * self.capacity

    @property
    def keys(self) -> Tensor:
        """Return the held keys as they are stored, a view [b, k, held, D]."""
        return self.held_views()["keys"]

    @property
    def values(self) -> Tensor:
        """Return the held values as they are stored, a view [b, k, held, D]."""
        return self.held_views()["values"]

    @property
    def positions(self) -> Tensor:
        """Return the held tokens' indices in the conversation, a view [b, k, held] int32."""
        return self.held_views()["positions"]

    def aux(self, name: str) -> Tensor:
        """Return an auxiliary tensor's held part, a view [b, k, held]."""
        return self.held_views()[name]

    def by_sequence(self) -> list[Segment]:
        """Return a segment of each sequence over the same slots; they may hold unequally many."""
        size, heads = self.slots // self.batch, self.heads
        return [
            Segment(
                self.pool,
                self.start + i * size,
                self.budget,
                self.block,
                1,
                heads,
                row=self.row + i,
                head=self.head,
                layer_heads=self.layer_heads,
            )
            for i in range(self.batch)
        ]

    def each_row(self) -> Iterator[tuple[int, int]]:
        """Yield the sequence and the KV head of every row, as indices into the segment's views."""
        return product(range(self.batch), range(self.heads))

    def empty(self, slots: int) -> Tensor:
        """Make an empty float32 tensor [b, k, slots, D], for keys or values of every row."""
        shape = self.batch, self.heads, slots, self.pool.size
        return torch.empty(shape, device=self.pool.keys.device)

    def pieces(self, slots: int) -> Iterator[tuple[slice, slice, slice]]:
        """Yield parts of every row's first `slots`, such that a copy of one fits a CPU's cache.

        A part is a slice of sequences, of heads and of slots. On a CPU it has slots of one head,
        unless all are few; elsewhere one part has all.
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

    def held_views(self) -> dict[str, Tensor]:
        """Return the slots in use of every buffer, views [b, k, held, ...] by name.

        They are kept until they change: every token needs them several times, and making them takes
        a CPU as long as using them.
        """
        place = self.start, self.budget, 0, self.held
        return self._views.get(place) or self._view_slots(place)

    def free_views(self, length: int) -> dict[str, Tensor]:
        """Return so many slots of every row behind those in use, views as in `held_views`."""
        place = self.start, self.budget, self.held, self.held + length
        return self._views.get(place) or self._view_slots(place)

    def _view_slots(self, place: tuple[int, int, int, int]) -> dict[str, Tensor]:
        """Make views of every row's slots, from the third number of `place` to the fourth."""
        start, stop = place[2:]
        assert stop <= self.capacity, f"{stop} slots needed, {self.capacity} allocated"
        if len(self._views) == 2:  # a full cache has the same for every token: free and held
            self._views.clear()
        pool = {"values": self.pool.values, **self.pool.named()}  # which may be a part of keys
        views = self._views[place] = {name: self.view(x, start, stop) for name, x in pool.items()}
        return views

    def view(self, buffer: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """View slots [start, stop) of every row of one of the pool's buffers, or of a copy of it.

        Those in use by default. [b, k, stop - start, ...]
        """
        step, count = buffer.stride(0), (self.held if stop is None else stop) - start
        row = self.capacity * step
        size = (self.batch, self.heads, count, *buffer.shape[1:])
        stride = (self.heads * row, row, step, *buffer.stride()[1:])
        first = buffer.storage_offset() + (self.start + start) * step
        return buffer.as_strided(size, stride, first)

    def rows_of(self, x: Tensor) -> Tensor:
        """Return this segment's part of a layer's tensor [B, K, ...] or [B, H, ...], a view."""
        if self.heads == self.layer_heads and self.batch == x.shape[0]:
            return x  # making a view takes a CPU as long as using it
        group = x.shape[1] // self.layer_heads
        first = self.head * group
        return x[self.row : self.row + self.batch, first : first + self.heads * group]

    def logits_of(self, logits: Logits) -> Logits:
        """Return a layer's logits with the sinks of this segment's query heads."""
        if logits.sinks is None:
            return logits
        group = len(logits.sinks) // self.layer_heads
        mine = slice(self.head * group, (self.head + self.heads) * group)
        return logits._replace(sinks=logits.sinks[mine])

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, **others: Tensor) -> None:
        """Write a block [b, k, T, D] behind the slots in use.

        `positions` [T] int32 are the tokens' indices in the conversation. Buffers that are not
        among the `others`, which are given by name, become 0 there.
        """
        length = len(positions)
        blocks = {"keys": keys, "values": values, "positions": positions, **others}
        for name, target in self.free_views(length).items():
            target.copy_(blocks[name]) if name in blocks else target.zero_()
        self.held += length

    def evict(self, evicted: Tensor) -> None:
        """Evict the slots [b, k, e] of each head, so that `held` falls by `e`.

        Survivors beyond the new `held` move into evicted slots below it, in place: at most `e`
        slots are written, and no temporary is larger than that.
        """
        count = evicted.shape[-1]
        kept = self.held - count
        rows = self._rows * (self.budget + self.block) + self.start
        target = evicted.sort(dim=-1).values if count > 1 else evicted  # [b, k, e]
        source = _survivors(target, kept) if count > 1 else kept
        rows_to, rows_from = (rows + target).flatten(), (rows + source).flatten()
        for buffer in self._buffers:
            buffer.index_copy_(0, rows_to, buffer.index_select(0, rows_from))
        self.held = kept


def has_data(x: Tensor) -> bool:
    """Return whether a tensor has numbers; those of a dry run have none."""
    return type(x) is Tensor


def _survivors(target: Tensor, kept: int) -> Tensor:
    """Return for each evicted slot [b, k, e], ascending, the slot that moves into it.

    Slots below `kept` are holes, which survivors from `kept` on fill; the others move onto
    themselves.
    """
    count = target.shape[-1]
    # Tail slots [kept, held) survive unless they are evicted themselves; a spare last place
    # takes the marks of the holes. Survivors come first, as many as there are holes.
    gone = torch.zeros(*target.shape[:2], count + 1, dtype=torch.int8, device=target.device)
    gone.scatter_(-1, torch.where(target < kept, count, target - kept), 1)
    source = kept + gone[..., :count].argsort(dim=-1, stable=True)
    return torch.where(target < kept, source, target)


def resize(segments: Sequence[Segment], budgets: Sequence[int]) -> None:
    """Move the boundaries between neighbouring segments, which keep their slots in all.

    Slots are moved in place, and only those that their row's new place does not cover, so that a
    row's neighbours must have left before it comes: rows that move right go last to first, then
    those that move left first to last.

    Args:
        segments: side by side, in the order of their slots.
        budgets: the new budget of each, with room for the slots that it has in use.
    """
    before = sum(segment.slots for segment in segments)
    start = segments[0].start
    moves: list[tuple[Segment, int, int]] = []  # from and to, of every row
    resized = []
    for segment, budget in zip(segments, budgets, strict=True):
        capacity = budget + segment.block
        assert segment.held <= capacity, "a segment must have room for what it holds"
        rows = range(segment.batch * segment.heads)
        old = segment.start
        moves += [(segment, old + i * segment.capacity, start + i * capacity) for i in rows]
        resized.append((segment, start, budget))
        start += segment.batch * segment.heads * capacity
    assert start - segments[0].start == before, "segments must share exactly what they have"
    for segment, old, new in [m for m in reversed(moves) if m[2] > m[1]]:
        count = min(new - old, segment.held)
        _move(segment.pool, old, new + segment.held - count, count)
    for segment, old, new in [m for m in moves if m[2] < m[1]]:
        count = min(old - new, segment.held)
        _move(segment.pool, old + segment.held - count, new, count)
    for segment, first, budget in resized:
        segment.start, segment.budget, segment.target_length = first, budget, budget


def _move(pool: SlotPool, source: int, target: int, count: int) -> None:
    for buffer in pool.buffers():
        buffer[target : target + count] = buffer[source : source + count]
