"""Where rows lie that hold unequally many slots, as numbers on the device that kernels read.

A row is a head of a sequence. Heads differ where budgets do, and sequences of one cache where each
is a conversation of its own length; layers differ where slots move between them.

The host's `Segment`s say the same. What kernels evict they count on the device too, so that both
agree after each pass, and a CUDA graph serves whatever heads hold; what the host alone has changed
is told to the device before the next pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvcap.policies.base import Rows
from kvcap.runtime.cache.layer_balance import LayerBalance
from kvcap.runtime.cache.pool import Segment

STEP = 512  # to which the longest row is rounded up: rows of about that length share a CUDA graph
ALIGNED = 16  # a multiple of so many numbers: kernels are compiled apart for strides that are not
LATE = 1  # passes that may be under way while the host launches the next one without their results

Pins = Callable[[Segment], tuple[int, int]]


@dataclass(frozen=True)
class LayerScores:
    """What a layer that shares a pool with others found out about a block, until all evict."""

    scores: Tensor  # [B, K, longest]
    preference: Tensor  # [] float32
    length: int  # of the block
    seen: int | Tensor  # tokens read, the block's included


class LayerRows(NamedTuple):
    """One layer's rows, while it reads a block."""

    before: Rows  # as they are before the block is appended
    after: Rows  # with the block, before any is given up
    shown: Rows  # with the block's fillers, too, which attention reads before they are dropped
    held: Tensor  # [B·K] int32, slots of each: is written when some are given up
    targets: Tensor  # [B·K] int32, the slots that each may have
    pins: Tensor  # [B·K, 2] int32, how many first and how many newest tokens of each stay
    read_at: Tensor | None  # [B] int32, where the block is read; None: at true positions
    table: RowTable  # of all layers
    always: bool  # a CUDA graph serves whether any are given up or not
    copies: Tensor | None  # [B·K + 1] int32, their starts in a copy; None: its pool is its own
    waiting: list[LayerScores]  # of the layers that have read the block and are to evict after it


class RowTable:
    """The rows of all capped layers.

    Args:
        layers: their segments: of all heads, of a head each, or of a sequence; of one pool for each
            layer, or of one for all.
        pins_of: for each layer, how many first and newest tokens of a segment stay.
        recents: where slots move, how many newest tokens stay, by the slots of a head.
        balance: moves slots between layers, if they move.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Segment]],
        pins_of: Sequence[Pins],
        recents: Sequence[int] = (),
        balance: LayerBalance | None = None,
    ) -> None:
        self.layers, self.balance, self._pins_of = layers, balance, pins_of
        self._most = [0] * len(layers)  # slots that a row of each may have
        device, last = layers[0][0].pool.keys.device, layers[0][-1]
        self.batch = last.row + last.batch
        self.count = count = sum(s.batch * s.heads for s in layers[0])  # of a layer
        with torch.inference_mode(False):  # ordinary tensors may be written to in any mode
            shape = len(layers), 5 * count + 2
            self._numbers = torch.zeros(shape, dtype=torch.int32, device=device)
            self._recents = torch.tensor(recents, dtype=torch.int32, device=device)
            self.preferences = self._numbers[:, -1].view(torch.float32)
            """How much each layer wants slots [L], where they move between layers; NaN: untold."""
        parts = self._numbers.split((count + 1, count, count, 2 * count, 1), dim=1)
        self.starts, self.held, self.targets, pins, _ = parts
        self.pins = pins.unflatten(1, (count, 2))
        self.last_is_full = False
        """Whether the last layer held all it may when host and device last agreed."""
        self.seen: int | None = None
        """Tokens read when host and device last agreed; None: the host has changed something."""
        self.late = False
        """Whether the host may hear of a pass after it has launched the next one; see `settle`."""
        self._coming: deque[_Told] = deque()  # what the device has been asked for, and not read yet
        self._known = 0  # tokens read when `_most` was true

    def agreed(self, seen: int, divided: bool) -> None:
        """A pass has changed both alike, after which so many tokens are read.

        Where it `divided` slots anew the device alone did: the host waits for it, and is told.
        """
        if divided and self.late:
            self._hear_late(seen)
        elif divided:
            self._be_told(seen)
        self._agree(seen)

    def settle(self) -> bool:
        """Have the host wait for all passes it has not heard of; whether there were any.

        Until then it does not know how many slots rows have, only that none is longer than before
        by more than what was read: enough for passes that a CUDA graph serves.
        """
        late, self._coming = bool(self._coming), deque()
        if late and self.seen is not None:
            self._be_told(self.seen)
            self._agree(self.seen)
        return late

    def tell(self, seen: int) -> None:
        """Have the device agree with the host, which has read so many tokens."""
        if self.seen != seen:
            numbers = [self._of(i, segments) for i, segments in enumerate(self.layers)]
            told = torch.tensor(numbers, dtype=torch.int32)
            if self.balance is not None:
                each = [float("nan") if p is None else p for p in self.balance.preferences]
                told[:, -1].view(torch.float32).copy_(torch.tensor(each))
            self._numbers.copy_(told)
            self._coming.clear()
            self._known = seen
            self._agree(seen)

    def _hear_late(self, seen: int) -> None:
        """Ask the device where rows lie now, and read what it was asked for before."""
        self._coming.append(_Told(self._numbers, seen))
        if len(self._coming) > LATE:
            told = self._coming.popleft()
            self._most, self._known = told.most(self.count), told.seen

    def _be_told(self, seen: int) -> None:
        """Have the host agree with the device, which has read so many tokens."""
        self._known = seen
        numbers, count = self._numbers.cpu(), self.count
        for index, (segments, told) in enumerate(zip(self.layers, numbers.tolist(), strict=True)):
            held, targets, row = told[count + 1 :], told[2 * count + 1 :], 0
            for segment in segments:
                segment.start, end = told[row : row + 2]
                segment.budget = end - segment.start - segment.block
                segment.held, segment.target_length = held[row], targets[row]
                row += segment.batch * segment.heads
            self._most[index] = max(*held[:count], *targets[:count])
        if self.balance is not None:
            told = numbers[:, -1].view(torch.float32).tolist()
            self.balance.preferences = [None if p != p else p for p in told]

    def _agree(self, seen: int) -> None:
        """Note that host and device agree after so many tokens."""
        last = self.layers[-1][-1]
        self.seen, self.last_is_full = seen, last.held >= last.target_length

    def _of(self, index: int, segments: Sequence[Segment]) -> list[int]:
        """One layer's numbers."""
        self._most[index] = max(max(s.target_length, s.held) for s in segments)
        rows = [(s, i) for s in segments for i in range(s.batch * s.heads)]
        last = segments[-1]
        found = [*(s.start + i * s.capacity for s, i in rows), last.start + last.slots]
        found += [s.held for s, _ in rows]
        found += [s.target_length for s, _ in rows]
        pins = [(self._pins_of[index](s), s.batch * s.heads) for s in segments]
        return [*found, *(n for those, count in pins for n in count * those), 0]

    def divide(self, index: int, starts: Tensor, budgets: Tensor) -> None:
        """Give a layer's rows these places [B·K + 1] and slots [B·K], on the device alone."""
        self.starts[index].copy_(starts)
        self.targets[index].copy_(budgets)
        self.pins[index, :, 1].copy_(self._recents.index_select(0, budgets))

    def share_out(self, starts: Tensor, held: Tensor, targets: Tensor, preferences: Tensor) -> None:
        """Give all layers' rows these places [L·B·K + 1], slots in use [L·B·K] and targets [L].

        On the device alone, as what layers prefer [L] from now on.
        """
        self.starts.copy_(starts.unfold(0, self.count + 1, self.count))
        self.held.copy_(held.view(self.held.shape))
        self.targets.copy_(targets[:, None].expand(self.targets.shape))
        recents = self._recents.index_select(0, targets)[:, None]
        self.pins[..., 1].copy_(recents.expand(self.targets.shape))
        self.preferences.copy_(preferences)

    def longest(self, length: int) -> int:
        """No row is longer once it has read so many tokens more; the same for rows of about it.

        Where slots move after such a block, as often as not to longer rows, of twice as many.
        """
        longest, more = self._rounded(length), 0 if self.seen is None else self.seen - self._known
        if self._coming and max(self._most) + more > longest and self.settle():
            longest = self._rounded(length)
        return longest + -(-length // ALIGNED) * ALIGNED

    def _rounded(self, length: int) -> int:
        """The slots of the longest row that the host knows of, rounded up."""
        steps = -(-max(self._most) // STEP)
        if len(self._recents) and length > 1:
            steps = 1 << (steps - 1).bit_length()
        return steps * STEP


class _Told:
    """A copy of a table's numbers after so many tokens, on its way to the host."""

    def __init__(self, numbers: Tensor, seen: int) -> None:
        gpu = numbers.is_cuda
        self.seen, self._event = seen, torch.cuda.Event() if gpu else None
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=gpu)
        self._numbers.copy_(numbers, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def most(self, count: int) -> list[int]:
        """The slots that a row of each layer, which has so many, holds or may have at most."""
        if self._event is not None:
            self._event.synchronize()
        most: list[int] = self._numbers[:, count + 1 : 3 * count + 1].amax(1).tolist()
        return most


class RowPass:
    """The rows during one forward pass.

    Args:
        table: of the cache.
        longest: no row is longer while it reads a block.
        compact: whether blocks are read at compact positions.
        always: a CUDA graph is captured or prepared, which serves whatever rows hold.
        count: how many tokens of the pass's one block are no fillers, int32 [] on the device; None:
            all that a layer is given.
    """

    def __init__(
        self,
        table: RowTable,
        longest: int,
        compact: bool,
        always: bool = False,
        count: Tensor | None = None,
    ) -> None:
        self.table, self.most, self.always, self.count = table, longest, always, count
        each = table.held.unflatten(1, (table.batch, -1))  # [L, B, K]
        self.read_at = each.amax((0, 2)) if compact else None
        """Behind the longest row of each sequence, on the device [B]."""
        self.waiting: list[LayerScores] = []
        """What layers that evict together found out so far."""
        self._later: dict[int | None, Tensor] = {}
        self._copies: Tensor | None = None  # where rows begin in a layer's copy
        if table.balance is not None:
            places = torch.arange(table.count + 1, dtype=torch.int32, device=table.held.device)
            self._copies = places * longest

    def after(self, length: int) -> Tensor:
        """Slots of all rows [L, B·K] int32, with those of the pass's one block."""
        return self._with(length if self.count is None else None)

    def _with(self, more: int | None) -> Tensor:
        """Slots of all rows [L, B·K] int32 and so many more each; None: `count`."""
        if more not in self._later:
            self._later[more] = self.table.held + (self.count if more is None else more)
        return self._later[more]

    def first(self, seen: int | Tensor) -> int | Tensor:
        """Where tokens are read first: after those `seen`, or [B, 1] at compact positions."""
        return seen if self.read_at is None else self.read_at[:, None]

    def of(self, index: int, length: int, alone: bool) -> LayerRows:
        """A layer's rows, to which so many tokens are appended; `alone` as the pass's one block."""
        table = self.table
        starts, held = table.starts[index], table.held[index]
        if alone:
            after, shown = self.after(length)[index], self._with(length)[index]
        else:
            after = shown = held + length
        before, rows, all_rows = (Rows(starts, x, self.most) for x in (held, after, shown))
        return LayerRows(
            before, rows, all_rows, held, table.targets[index], table.pins[index], self.read_at,
            table, self.always, self._copies, self.waiting,
        )  # fmt: skip
