"""One layer's evicted tokens, off the cache but on the machine, and what they add to attention.

The tokens lie in slots of their own, on the host or in a mapped file. What a query would have got
from them is remembered per query head: the query, the output, the log-sum-exp (CaliDrop, Alg. 1).
Tokens evicted since are merged into it as they go, since their keys are at hand then; those dropped
from a full store stay in it until it is made anew.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from kvcap.policies import Observation
from kvcap.policies.base import Corrector
from kvcap.policies.base.order import lowest
from kvcap.runtime.attention.functions import attend_with_lse, causal, merge, with_sinks
from kvcap.runtime.cache.layout import EVICTED
from kvcap.runtime.cache.pool import Segment, SlotPool
from kvcap.runtime.errors import StoreFailed
from kvcap.runtime.models.rope import Rotation

PIECE = 1 << 20  # bytes of a file that are written at once


class EvictedStore:
    """The evicted tokens of a layer's `segments`, and what they add to its attention.

    The cache calls `attend` in the place of its own attention, and `take` with every slot that is
    about to be given up; it knows no more of it than that.

    Args:
        corrector: what decides, and how many tokens are kept.
        segments: of the layer; each gets its own place for what it evicts.
        heads: query heads of the layer.
        rotation: moves keys, where positions are compact from the first token.
        new: makes buffers, as `torch.zeros`.
    """

    def __init__(
        self,
        corrector: Corrector,
        segments: Sequence[Segment],
        heads: int,
        rotation: Rotation | None = None,
        new: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        self.corrector, self.rotation = corrector, rotation
        cache = segments[0].pool.keys
        kv_heads, size = segments[0].layer_heads, cache.shape[-1]
        batch = 1 + max(s.row + s.batch - 1 for s in segments)
        block = segments[0].block
        slots = sum(s.batch * s.heads for s in segments) * (corrector.size + block)
        self.pool = SlotPool(slots, size, cache.dtype, "cpu", EVICTED, new)
        self.evicted, start = [], 0
        for s in segments:
            place = Segment(
                self.pool, start, corrector.size, block, s.batch, s.heads,
                row=s.row, head=s.head, layer_heads=kv_heads,
            )  # fmt: skip
            self.evicted.append(place)
            start += place.slots
        device = cache.device
        self._query = torch.zeros(batch, heads, 1, size, dtype=cache.dtype, device=device)
        self._out = torch.zeros(batch, heads, 1, size, device=device)
        self._lse = torch.full((batch, heads, 1), float("-inf"), device=device)
        self.steps = 0  # tokens generated, per query head and sequence
        self.recomputed = 0  # how many of them attended to the evicted tokens anew

    @property
    def remembered(self) -> dict[str, Tensor]:
        """What queries got from the evicted tokens, by name."""
        return {"query": self._query, "out": self._out, "lse": self._lse}

    def named(self) -> dict[str, Tensor]:
        """Its buffers by name."""
        return {**self.pool.named(), **self.remembered}

    def attend(
        self,
        index: int,
        segment: Segment,
        query: Tensor,
        keys: Tensor,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention over what is held and what the evicted tokens add. Shape [b, h, T, D].

        Args:
            index: of the segment.
            segment: what is held, the block in hand included.
            query: [b, h, T, D], at the positions of the segment.
            keys: [b, k, n, D] of what is held, likewise.
            scaling: of the logits.
            softcap: of the logits.
            sinks: [h], sink logits; they take their share once, of held and evicted tokens.
        """
        mask = causal(query.shape[2], segment.held, query.device)
        out, lse = attend_with_lse(query, keys, segment.values, scaling, softcap, mask)
        evicted = self.evicted[index]
        if not evicted.held:
            return out if sinks is None else with_sinks(out, lse, sinks)
        mine = [segment.rows_of(x) for x in (self._query, self._out, self._lse)]
        anew, corrected = self.corrector.decide(query, mine[0])
        unknown = mine[2].isneginf()  # nothing is remembered yet
        anew, corrected = anew | unknown, corrected | unknown
        other, other_lse = mine[1].expand(out.shape), mine[2].expand(lse.shape)
        if bool(anew.any()):
            fresh, fresh_lse = self._recompute(evicted, segment, query, scaling, softcap)
            other = torch.where(anew[..., None], fresh.float(), other)
            other_lse = torch.where(anew, fresh_lse, other_lse)
            # Remember the last query that attended anew, head by head.
            length = query.shape[2]
            order = torch.arange(1, length + 1, device=anew.device)
            last = (anew * order).amax(-1, keepdim=True)  # [b, h, 1], 0: none
            row = (last - 1).clamp(min=0)[..., None].expand(*query.shape[:2], 1, query.shape[3])
            known = last > 0
            mine[0].copy_(torch.where(known[..., None], query.gather(2, row), mine[0]))
            mine[1].copy_(torch.where(known[..., None], fresh.float().gather(2, row), mine[1]))
            mine[2].copy_(torch.where(known, fresh_lse.gather(2, row[..., 0]), mine[2]))
        if query.shape[2] == 1:
            self.steps += anew.numel()
            self.recomputed += int(anew.sum())
        merged, merged_lse = merge(out, lse, other, other_lse)
        corrected_out = torch.where(corrected[..., None], merged, out.float())
        if sinks is not None:
            corrected_out = with_sinks(
                corrected_out, torch.where(corrected, merged_lse, lse), sinks
            )
        return corrected_out.to(out.dtype)

    def _recompute(
        self,
        evicted: Segment,
        segment: Segment,
        query: Tensor,
        scaling: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of `query` over the evicted tokens: all are older, so no mask."""
        keys, values = evicted.keys.to(query.device), evicted.values.to(query.device)
        if self.rotation is not None:
            # An evicted token counts behind the held ones that are older than it.
            held = segment.positions.sort(dim=-1).values
            rank = torch.searchsorted(held, evicted.positions.to(query.device).contiguous())
            keys = self.rotation.back(keys, evicted.aux("made_at").to(query.device) - rank)
        return attend_with_lse(query, keys, values, scaling, softcap)

    def take(
        self,
        index: int,
        segment: Segment,
        slots: Tensor,
        scores: Tensor,
        obs: Observation,
        shift: Tensor | None,
    ) -> None:
        """Take in the tokens of a segment's slots [b, k, e], about to be given up.

        Args:
            index: of the segment.
            segment: still whole.
            slots: which go.
            scores: [b, k, n] of all slots.
            obs: of the segment, whose keys [b, k, n, D] are as attention saw them.
            shift: [b, k, n] how far positions have moved, where they are compact.
        """
        # In time order, so that sums over them come out alike on every device.
        slots = slots.gather(2, segment.positions.gather(2, slots).argsort(dim=-1))
        keys = obs.keys
        wide = slots[..., None].expand(*slots.shape, keys.shape[-1])
        values = segment.values.gather(2, wide)
        self._remember(segment, keys.gather(2, wide), values, obs.scaling, obs.softcap)
        times = segment.positions.gather(2, slots)
        made_at = torch.zeros_like(times)
        if shift is not None:
            held = segment.positions.sort(dim=-1).values
            made_at = torch.searchsorted(held, times, out_int32=True) + shift.gather(2, slots)
        stored = segment.keys.gather(2, wide)
        place = self.evicted[index]
        for part in torch.arange(slots.shape[-1]).split(place.block):
            part_slots = slice(int(part[0]), int(part[-1]) + 1)
            place.append(stored[:, :, part_slots].cpu(), values[:, :, part_slots].cpu(), part.int())
            new = slice(place.held - len(part), place.held)
            place.positions[:, :, new] = times[:, :, part_slots].cpu()
            place.aux("made_at")[:, :, new] = made_at[:, :, part_slots].cpu()
            place.aux("score")[:, :, new] = scores.gather(2, slots)[:, :, part_slots].cpu()
            if (excess := place.held - place.budget) > 0:
                place.compact(lowest(place.aux("score"), place.positions, excess))

    def _remember(
        self,
        segment: Segment,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        softcap: float | None,
    ) -> None:
        """Merge tokens that go now into what is remembered, where something is."""
        query, out, lse = (segment.rows_of(x) for x in (self._query, self._out, self._lse))
        added, added_lse = attend_with_lse(query, keys, values, scaling, softcap)
        known = ~lse.isneginf()
        merged, merged_lse = merge(out, lse, added, added_lse)
        out.copy_(torch.where(known[..., None], merged, out))
        lse.copy_(torch.where(known, merged_lse, lse))

    def become_compact(self, segments: Sequence[Segment], rotation: Rotation) -> None:
        """Have evicted tokens count at compact positions from now on, as `segments` do.

        What queries got from them is forgotten: nobody noted at which position they asked.
        """
        for segment, place in zip(segments, self.evicted, strict=True):
            for row in segment.each_row():
                held, times = segment.positions[row].cpu().sort().values, place.positions[row]
                made_at = torch.searchsorted(held, times.contiguous(), out_int32=True)
                keys = place.keys[row]
                keys.copy_(rotation.moved(keys, made_at - times))
                place.aux("made_at")[row].copy_(made_at)
        self._lse.fill_(float("-inf"))
        self.rotation = rotation

    def reset(self) -> None:
        """Forget everything; the buffers stay."""
        for place in self.evicted:
            place.held = 0
        self._lse.fill_(float("-inf"))
        self.steps = self.recomputed = 0


class MappedFile:
    """A file of `nbytes` zeros in `directory` that tensors are mapped into memory from.

    Every byte is written when it is made, so that a full disk is an error then and never a crash
    later. Where the system allows, it has no name from then on: nobody can cut it short, which
    would end the process, and nothing is left of it after this process, however that ends.

    Raises:
        StoreFailed: no such directory, not writable, or not enough room.
    """

    def __init__(self, directory: str, nbytes: int) -> None:
        self.nbytes, self._next = nbytes, 0
        try:
            descriptor, path = tempfile.mkstemp(".evicted", "kvcap-", directory)
        except OSError as error:
            raise StoreFailed(
                f"the store for evicted tokens cannot be made in {directory!r} "
                f"({error.strerror}); give a directory that exists and can be written"
            ) from error
        self._file = os.fdopen(descriptor, "r+b")
        self._finalizer = weakref.finalize(self, _remove, self._file, path)
        try:
            if os.name == "posix":
                os.unlink(path)
            for start in range(0, nbytes, PIECE):
                _write_all(descriptor, bytes(min(PIECE, nbytes - start)))
        except OSError as error:
            self._finalizer()
            raise StoreFailed(
                f"the store for evicted tokens needs {nbytes:,} bytes in {directory!r} "
                f"({error.strerror}); free some, give another directory, or a smaller "
                "calibration_size"
            ) from error

    def new(self, *shape: int, dtype: torch.dtype, **_: Any) -> Tensor:
        """The next tensor of the file, as `torch.zeros` makes one."""
        length = int(np.prod(shape)) * dtype.itemsize
        assert self._next + length <= self.nbytes, "the file was made too small"
        mapped = np.memmap(self._file, np.uint8, "r+", offset=self._next, shape=(length,))
        self._next += length
        return torch.from_numpy(mapped).view(dtype).view(shape)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _remove(file: BinaryIO, path: str) -> None:
    file.close()
    with contextlib.suppress(OSError):
        os.unlink(path)
