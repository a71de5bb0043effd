"""Says where rows lie and how many slots they have in use, as numbers on the device.

A row is a KV head of a sequence. The host's `Segment`s have the same numbers. Kernels update those
on the device as they evict, so that both agree after each pass, and one CUDA graph serves whatever
rows hold; changes by the host are uploaded before the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.policies.base import RowRanges
from kvcap.runtime.cache.layer_balance import LayerBalance
from kvcap.runtime.cache.pool import Segment
from kvcap.runtime.cache.regions import MOST_WEIGHED, Region

STEP = 512  # to which the longest row is rounded up: rows of about that length share a CUDA graph
ALIGNED = 16  # lengths are multiples of it: other strides would need kernels of their own


@dataclass(frozen=True)
class LayerScores:
    """A record of a layer's scores for a block, kept until all layers that share a pool evict."""

    scores: Tensor  # [B, K, longest]
    preference: Tensor  # [] float32
    length: int  # of the block
    seen: int | Tensor  # tokens read, the block's included


class LayerRowPass(NamedTuple):
    """A description of one layer's rows, while it reads a block."""

    before: RowRanges  # as they are before the block is appended
    after: RowRanges  # with the block, before any is evicted
    shown: RowRanges  # with the block's fillers, too, which attention reads before they are dropped
    held: Tensor  # [B·K] int32, slots of each: is written when some are evicted
    targets: Tensor  # [B·K] int32, the slots that each may have
    pins: Tensor  # [B·K, 2] int32, how many first and how many newest tokens of each stay
    read_at: Tensor | None  # [B] int32, where the block is read; None: at true positions
    copies: Tensor | None  # [B·K + 1] int32, their starts in a copy; None: its pool is its own
    whole: RowPass  # the pass over all layers


class NoTable:
    """A stand-in for the table of a cache whose rows no device counts, or none yet."""

    seen: int | None = None

    def agreed(self, seen: int, length: int, divided: bool) -> None:
        """Do nothing: the host alone counts."""


class RowTable:
    """A table on the device of the rows of all capped layers: starts, lengths, targets and pins.

    Args:
        engines: `RowSlots` of the layers, whose segments are of all heads, of a head each, or of a
            sequence; of one pool for each layer, or of one for all.
        recents: how many newest tokens stay in a head of 0, 1, 2, ... slots; empty where slots do
            not move.
        balance: moves slots between layers; None: they do not move.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        recents: Sequence[int] = (),
        balance: LayerBalance | None = None,
    ) -> None:
        self.engines, self.balance = engines, balance
        self._most = [0] * len(engines)  # slots that a row of each layer holds, or may have
        segments = engines[0].segments
        device, last = segments[0].pool.keys.device, segments[-1]
        self.batch = last.row + last.batch
        self.count = count = sum(s.batch * s.heads for s in segments)  # of a layer
        with torch.inference_mode(False):  # ordinary tensors may be written to in any mode
            shape = len(engines), 5 * count + 2
            self._numbers = torch.zeros(shape, dtype=torch.int32, device=device)
            self._recents = torch.tensor(recents, dtype=torch.int32, device=device)
            regions = self.batch, 1 + 3 * MOST_WEIGHED
            self._regions = torch.zeros(regions, dtype=torch.int32, device=device)
            self.preferences = self._numbers[:, -1].view(torch.float32)
            """Holds each layer's preference for slots [L] float32; NaN: it has none yet."""
        parts = self._numbers.split((count + 1, count, count, 2 * count, 1), dim=1)
        self.starts, self.held, self.targets, pins, _ = parts
        self.pins = pins.unflatten(1, (count, 2))
        self.seen: int | None = None
        """Holds the tokens read when host and device last agreed; None: the host changed rows."""
        self._last_is_full = False  # the last layer held all it may when they last agreed
        self._weighed: list[tuple[Region, ...]] = []  # by sequence, as the device has them

    def upload(self, seen: int) -> None:
        """Make the device agree with the host, which has read so many tokens."""
        if self.seen == seen:
            return
        numbers = torch.tensor(
            [self._of(i, engine.segments) for i, engine in enumerate(self.engines)],
            dtype=torch.int32,
        )
        if self.balance is not None:
            each = [float("nan") if p is None else p for p in self.balance.preferences]
            numbers[:, -1].view(torch.float32).copy_(torch.tensor(each))
        self._numbers.copy_(numbers)
        self._agree(seen)

    def weigh(self, regions: list[tuple[Region, ...]]) -> None:
        """Upload the regions of each sequence that leave before or after others, if they differ."""
        if regions == self._weighed:
            return
        numbers = [[len(its), *chain.from_iterable(its)] for its in regions]
        width = self._regions.shape[1]
        padded = [[*its, *[0] * (width - len(its))] for its in numbers]
        self._regions.copy_(torch.tensor(padded, dtype=torch.int32))
        self._weighed = regions

    @property
    def regions(self) -> Tensor | None:
        """Return each sequence's regions as `row_kernels.weigh` takes them; None: none has any."""
        return self._regions if any(self._weighed) else None

    def agreed(self, seen: int, length: int, divided: bool) -> None:
        """Note that a pass has changed host and device alike.

        Args:
            seen: tokens read after it.
            length: tokens of the pass.
            divided: the device shared slots out anew, so that the host must wait for its numbers.
        """
        evicted = length == 1 and self._last_is_full
        if divided:
            self._download()
        self._agree(seen)
        balance = self.balance
        if balance is not None and evicted and not balance.is_balanced and balance.rebalance(seen):
            self.seen = None  # the host moved free slots between layers

    def _download(self) -> None:
        """Wait for the device, and make the host's segments agree with it."""
        numbers, count = self._numbers.cpu(), self.count
        for index, (engine, mine) in enumerate(zip(self.engines, numbers.tolist(), strict=True)):
            held, targets, row = mine[count + 1 :], mine[2 * count + 1 :], 0
            for segment in engine.segments:
                segment.start, end = mine[row : row + 2]
                segment.budget = end - segment.start - segment.block
                segment.held, segment.target_length = held[row], targets[row]
                row += segment.batch * segment.heads
            self._most[index] = max(*held[:count], *targets[:count])
        if self.balance is not None:
            known = numbers[:, -1].view(torch.float32).tolist()
            self.balance.preferences = [None if p != p else p for p in known]

    def _agree(self, seen: int) -> None:
        """Note that host and device agree after so many tokens."""
        last = self.engines[-1].segments[-1]
        self.seen, self._last_is_full = seen, last.held >= last.target_length

    def _of(self, index: int, segments: Sequence[Segment]) -> list[int]:
        """Return one layer's numbers, as the host has them."""
        self._most[index] = max(max(s.target_length, s.held) for s in segments)
        rows = [(s, i) for s in segments for i in range(s.batch * s.heads)]
        last, policy = segments[-1], self.engines[index].policy
        numbers = [*(s.start + i * s.capacity for s, i in rows), last.start + last.slots]
        numbers += [s.held for s, _ in rows]
        numbers += [s.target_length for s, _ in rows]
        pins = [(policy.pins(s), s.batch * s.heads) for s in segments]
        return [*numbers, *(n for pair, count in pins for n in count * pair), 0]

    def divide(self, index: int, starts: Tensor, budgets: Tensor) -> None:
        """Set the starts [B·K + 1] and targets [B·K] of a layer's rows, on the device alone."""
        self.starts[index].copy_(starts)
        self.targets[index].copy_(budgets)
        self.pins[index, :, 1].copy_(self._recents.index_select(0, budgets))

    def share_out(self, starts: Tensor, held: Tensor, targets: Tensor, preferences: Tensor) -> None:
        """Set starts [L·B·K + 1], slots in use [L·B·K] and targets [L] of all layers' rows.

        The layers' preferences [L] are set, too. All of it is on the device alone.
        """
        self.starts.copy_(starts.unfold(0, self.count + 1, self.count))
        self.held.copy_(held.view(self.held.shape))
        self.targets.copy_(targets[:, None].expand(self.targets.shape))
        recents = self._recents.index_select(0, targets)[:, None]
        self.pins[..., 1].copy_(recents.expand(self.targets.shape))
        self.preferences.copy_(preferences)

    def longest(self, length: int) -> int:
        """Return a number of slots that no row exceeds once it has read `length` more tokens.

        It is rounded up, so that few different numbers occur: to a multiple of `STEP`, or where
        slots move after such a block, to a power of two times that, as rows may then grow.
        """
        steps = -(-max(self._most) // STEP)
        if len(self._recents) and length > 1:
            steps = 1 << (steps - 1).bit_length()
        return steps * STEP + -(-length // ALIGNED) * ALIGNED

    def behind_longest(self) -> Tensor:
        """Return the slots in use of each sequence's longest row [B], on the device."""
        each: Tensor = self.held.unflatten(1, (self.batch, -1))  # [L, B, K]
        return each.amax((0, 2))


class RowPass:
    """A view of the rows during one forward pass.

    Args:
        table: rows of the cache.
        longest: no row is longer while it reads a block.
        read_at: position of each sequence's first token, [B] int32 on the device; None: true
            positions.
        always: launch evictions even if no row is too long, as a CUDA graph must.
        count: how many tokens of the pass's one block are no fillers, int32 [] on the device; None:
            all that a layer is given.
        past: how far beyond `read_at` the tokens' positions are.
    """

    def __init__(
        self,
        table: RowTable,
        longest: int,
        read_at: Tensor | None,
        always: bool = False,
        count: Tensor | None = None,
        past: int = 0,
    ) -> None:
        self.past = past
        self.table, self.most, self.always, self.count = table, longest, always, count
        self.read_at = read_at
        self.regions = table.regions
        """Holds what leaves before or after other text; see `RowTable.regions`."""
        self.waiting: list[LayerScores] = []
        """Holds the scores of layers that are yet to evict together."""
        self._later: dict[int | None, Tensor] = {}
        self._copies: Tensor | None = None  # where rows begin in a layer's copy
        if table.balance is not None:
            rows = torch.arange(table.count + 1, dtype=torch.int32, device=table.held.device)
            self._copies = rows * longest

    def after(self, length: int) -> Tensor:
        """Return the slots of all rows [L, B·K] int32, with those of the pass's one block."""
        return self._with(length if self.count is None else None)

    def _with(self, more: int | None) -> Tensor:
        """Return the slots of all rows [L, B·K] int32 and so many more each; None: `count`."""
        if more not in self._later:
            self._later[more] = self.table.held + (self.count if more is None else more)
        return self._later[more]

    def first(self, seen: int | Tensor) -> int | Tensor:
        """Return the position of the first token: [B, 1] at compact positions, else `seen`."""
        return seen if self.read_at is None else self.read_at[:, None]

    def of(self, index: int, length: int, alone: bool) -> LayerRowPass:
        """Return a layer's rows for a block of `length` tokens.

        Args:
            index: index of the layer.
            length: tokens of the block.
            alone: it is the pass's one block.
        """
        table = self.table
        starts, held = table.starts[index], table.held[index]
        if alone:
            after, shown = self.after(length)[index], self._with(length)[index]
        else:
            after = shown = held + length
        before, rows, all_rows = (RowRanges(starts, x, self.most) for x in (held, after, shown))
        return LayerRowPass(
            before,
            rows,
            all_rows,
            held,
            table.targets[index],
            table.pins[index],
            self.read_at,
            self._copies,
            self,
        )

    def finish(self, seen: int, length: int) -> None:
        """Note that all layers have read the pass, whose last block has `length` tokens."""
        layout = self.table.engines[0].policy.layout
        self.table.agreed(seen, length, layout.shares_out(length))
