"""Keeps one layer's evicted tokens outside its cache, and adds their share to its attention.

The tokens lie in slots of their own, where the corrector says: on the model's device, on the host
or in a mapped file. Per query head one query is remembered, with its output and log-sum-exp over
the evicted tokens (CaliDrop, Alg. 1), and corrects later queries that are like it. A token that is
evicted is merged into them at once, while its key is at hand. A token that is dropped from a full
store stays in them until they are computed anew.

On a device no decision depends on the contents of tensors, so that a CUDA graph can replay it once
the store is full.
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

from kvcap.kernels.choice import ready
from kvcap.policies import Observation
from kvcap.policies.base import Corrector, Logits
from kvcap.policies.base.eviction import LOWEST
from kvcap.policies.base.order import lowest
from kvcap.runtime.attention.functions import attend_with_lse, merge, with_sinks
from kvcap.runtime.cache.layout import EVICTED
from kvcap.runtime.cache.pool import SHIFT, Segment, SlotPool
from kvcap.runtime.errors import StoreFailed
from kvcap.runtime.models.rope import Rotation

PIECE = 1 << 20  # bytes of a file that are written at once
Remembered = tuple[Tensor, Tensor, Tensor]
"""Holds queries [b, h, 1, D], their outputs over evicted tokens, likewise, and log-sum-exps."""


class EvictedStore:
    """A store of the tokens evicted from a layer's `segments`, which attends to them, too.

    The layer calls `attend` in place of its own attention, and `take` with every slot that it is
    about to evict.

    Args:
        corrector: decides when attention is computed anew or corrected; says how many tokens are
            kept, and where.
        segments: those of the layer; each gets its own slots for what it evicts.
        heads: query heads of the layer.
        rotation: rotates keys, where positions are compact from the first token.
        new: makes the slots, as `torch.zeros`.
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
        kv_heads, size, device = segments[0].layer_heads, cache.shape[-1], cache.device
        batch = 1 + max(s.row + s.batch - 1 for s in segments)
        block = segments[0].block
        slots = sum(s.batch * s.heads for s in segments) * (corrector.size + block)
        here = corrector.place == "device" or torch.device(device).type == "meta"  # no contents
        where = device if here else "cpu"
        self.pool = SlotPool(slots, size, cache.dtype, where, EVICTED, new)
        self.evicted, start = [], 0
        for s in segments:
            place = Segment(
                self.pool,
                start,
                corrector.size,
                block,
                s.batch,
                s.heads,
                row=s.row,
                head=s.head,
                layer_heads=kv_heads,
            )
            self.evicted.append(place)
            start += place.slots
        self._query = torch.zeros(batch, heads, 1, size, dtype=cache.dtype, device=device)
        self._out = torch.zeros(batch, heads, 1, size, device=device)
        self._lse = torch.full((batch, heads, 1), float("-inf"), device=device)
        self._counts = torch.zeros(batch, heads, 2, dtype=torch.int64, device=device)

    @property
    def counts(self) -> list[int]:
        """Return how many queries generated tokens had, and how many of them attended anew.

        Both are summed over query heads and sequences.
        """
        counts: list[int] = self._counts.sum((0, 1)).tolist()
        return counts

    @counts.setter
    def counts(self, counts: Sequence[int]) -> None:
        self._counts.zero_()
        self._counts[0, 0] = torch.tensor(counts)

    @property
    def full(self) -> bool:
        """Return whether all slots are in use, so that as many tokens are dropped as come."""
        return all(place.held == place.budget for place in self.evicted)

    @property
    def remembered(self) -> dict[str, Tensor]:
        """Return the remembered queries, outputs and log-sum-exps, by name; see `Remembered`."""
        return {"query": self._query, "out": self._out, "lse": self._lse}

    def named(self) -> dict[str, Tensor]:
        """Return its buffers by name."""
        return {**self.pool.named(), **self.remembered, "counts": self._counts}

    def attend(
        self,
        index: int,
        segment: Segment,
        query: Tensor,
        keys: Tensor,
        logits: Logits,
    ) -> tuple[Tensor, Tensor]:
        """Attend to a segment's held tokens, and add the share of its evicted ones.

        Returns outputs [b, h, T, D], and the log-sum-exp of the logits of held tokens alone,
        [b, h, T] float32.

        Args:
            index: index of the segment.
            segment: held tokens, the block that is being read included.
            query: [b, h, T, D], at the positions of the segment.
            keys: [b, k, n, D] of held tokens, likewise.
            logits: of these heads; sinks take their share once, of held and evicted tokens.
        """
        out, lse = attend_with_lse(query, keys, segment.values, logits, own=True)
        evicted, sinks = self.evicted[index], logits.sinks
        if not evicted.held:
            return (out if sinks is None else with_sinks(out, lse, sinks)), lse
        known, counts = self._known(segment), segment.rows_of(self._counts)
        anew, corrected = self.corrector.decide(query, known[0])
        unknown = known[2].isneginf()  # nothing is remembered yet
        anew, corrected = anew | unknown, corrected | unknown
        other, other_lse = known[1].expand(out.shape), known[2].expand(lse.shape)
        if not self._looks_first(query) or bool(anew.any()):
            fresh, fresh_lse = self._recompute(evicted, query, logits)
            other = torch.where(anew[..., None], fresh.float(), other)
            other_lse = torch.where(anew, fresh_lse, other_lse)
            _remember_last(known, anew, (query, fresh.float(), fresh_lse))
        if query.shape[2] == 1:
            counts[..., 0] += 1
            counts[..., 1] += anew[..., 0]
        merged, merged_lse = merge(out, lse, other, other_lse)
        corrected_out = torch.where(corrected[..., None], merged, out.float())
        if sinks is not None:
            corrected_out = with_sinks(
                corrected_out, torch.where(corrected, merged_lse, lse), sinks
            )
        return corrected_out.to(out.dtype), lse

    def _known(self, segment: Segment) -> Remembered:
        """Return what a segment's query heads remember, as views."""
        query, out, lse = (segment.rows_of(x) for x in (self._query, self._out, self._lse))
        return query, out, lse

    def _looks_first(self, query: Tensor) -> bool:
        """Return whether the host checks first if any query attends anew, before all of them do.

        That saves copies if the store lies on another device, and work on a CPU, where the check
        does not make anything wait. Tensors of a dry run have no data to check.
        """
        if type(query) is not Tensor:
            return False
        elsewhere = self.pool.keys.device != query.device
        return elsewhere or (query.device.type == "cpu" and not ready(query))

    def _recompute(self, evicted: Segment, query: Tensor, logits: Logits) -> tuple[Tensor, Tensor]:
        """Attend with `query` to the evicted tokens; all are older, so there is no mask."""
        keys, values = evicted.keys.to(query.device), evicted.values.to(query.device)
        if self.rotation is not None:
            # An evicted token counts behind the held ones that are older than it.
            keys = self.rotation.back(keys, evicted.aux(SHIFT).to(query.device))
        return attend_with_lse(query, keys, values, logits)

    def take(
        self, index: int, segment: Segment, slots: Tensor, scores: Tensor, obs: Observation
    ) -> None:
        """Take in the tokens of a segment's slots [b, k, e] that are about to be evicted.

        Args:
            index: index of the segment.
            segment: still with these slots, and with shifts that have not grown yet.
            slots: indices of the slots that go.
            scores: [b, k, n], those of all slots.
            obs: observation of the segment, with keys [b, k, n, D] as attention saw them.
        """
        place, known, count = self.evicted[index], self._known(segment), slots.shape[-1]
        slots = slots.long()
        if count > 1:  # in time order, so that sums over them come out alike on every device
            slots = slots.gather(2, segment.positions.gather(2, slots).argsort(dim=-1))
        self._remember(known, segment, slots, obs)
        self._grow_older(place, segment.positions.gather(2, slots))
        for first in range(0, count, place.block):
            stop = min(first + place.block, count)
            self._copy(place, segment, slots[..., first:stop], scores, first)
            place.held += stop - first
            if (excess := place.held - place.budget) > 0:  # those of the lowest scores go
                place.evict(lowest(place.aux("score"), place.positions, excess))

    def _remember(
        self, known: Remembered, segment: Segment, slots: Tensor, obs: Observation
    ) -> None:
        """Merge tokens that are evicted into what is remembered, where something is."""
        query, out, lse = known
        keys, values = _of_slots(obs.keys, slots), _of_slots(segment.values, slots)
        added, added_lse = attend_with_lse(query, keys, values, obs.rule)
        some = ~lse.isneginf()
        merged, merged_lse = merge(out, lse, added, added_lse)
        out.copy_(torch.where(some[..., None], merged, out))
        lse.copy_(torch.where(some, merged_lse, lse))

    def _grow_older(self, place: Segment, gone: Tensor) -> None:
        """Raise stored tokens' shifts by how many positions `gone` [b, k, e], sorted, are older."""
        if self.rotation is not None and place.held:
            gone, positions = gone.to(place.positions.device), place.positions.contiguous()
            place.aux(SHIFT).add_(torch.searchsorted(gone, positions, out_int32=True))

    def _copy(
        self, place: Segment, segment: Segment, slots: Tensor, scores: Tensor, older: int
    ) -> None:
        """Copy a segment's slots [b, k, e] and their scores behind the store's slots in use.

        So many `older` slots go with them, and each of them is older than the next.
        """
        source = {**segment.held_views(), "score": scores}
        for name, target in place.free_views(slots.shape[-1]).items():
            if name in source:  # where positions stay true there is no shift
                target.copy_(_of_slots(source[name], slots))
                if name == "score":
                    target.nan_to_num_(nan=LOWEST)
                elif name == SHIFT and self.rotation is not None:
                    target.add_(torch.arange(older, older + len(slots[0, 0]), device=target.device))

    def made_at(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Return the positions that keys are rotated to, [b, k, held] of each segment.

        At true positions they are the shifts, all 0. A session's file saves positions and not
        shifts, as it may be read into a cache whose shifts differ.
        """
        if self.rotation is None:
            return [place.aux(SHIFT) for place in self.evicted]
        made_at = []
        for segment, place in zip(segments, self.evicted, strict=True):
            made_at.append(_ranks(place.positions, segment.positions) + place.aux(SHIFT))
        return made_at

    def become_compact(self, segments: Sequence[Segment], rotation: Rotation) -> None:
        """Move evicted tokens from true positions to compact ones, as `segments` are moved.

        Remembered outputs are forgotten, as the positions of their queries are not known.
        """
        for segment, place in zip(segments, self.evicted, strict=True):
            for row in segment.each_row():
                keys, times = place.keys[row], place.positions[row]
                keys.copy_(rotation.moved(keys, _ranks(times, segment.positions[row]) - times))
            place.aux(SHIFT).zero_()
        self._lse.fill_(float("-inf"))
        self.rotation = rotation

    def count_full(self) -> None:
        """Count all slots as in use, without writing into them."""
        for place in self.evicted:
            place.held = place.budget

    def forget_excess(self) -> None:
        """Forget tokens beyond the budget, which a `take` that failed half-way left."""
        for place in self.evicted:
            place.held = min(place.held, place.budget)

    def reset(self) -> None:
        """Forget all evicted tokens; the buffers stay allocated."""
        for place in self.evicted:
            place.held = 0
        self._query.zero_()
        self._out.zero_()
        self._lse.fill_(float("-inf"))
        self._counts.zero_()


def _remember_last(known: Remembered, anew: Tensor, attended: Remembered) -> None:
    """Remember each head's last query that attended anew, with its output and log-sum-exp.

    Args:
        known: what is remembered; heads of which no query attended anew keep it.
        anew: [b, h, T] bool, the queries that attended anew.
        attended: all queries [b, h, T, D], outputs likewise, and log-sum-exps [b, h, T].
    """
    order = torch.arange(1, anew.shape[2] + 1, device=anew.device)
    last = (anew * order).amax(-1, keepdim=True)  # [b, h, 1], 0: none
    place, some = (last - 1).clamp(min=0), last > 0
    for old, new in zip(known, attended, strict=True):
        newest = _of_slots(new, place)  # [b, h, 1, D] or [b, h, 1]
        old.copy_(torch.where(some[..., None] if new.dim() == 4 else some, newest, old))


def _ranks(times: Tensor, held: Tensor) -> Tensor:
    """Return how many of the `held` tokens [..., n] are older than each of others [..., e]."""
    in_order = held.to(times.device).sort(dim=-1).values
    return torch.searchsorted(in_order, times.contiguous(), out_int32=True)


def _of_slots(x: Tensor, slots: Tensor) -> Tensor:
    """Return the entries [b, k, e, ...] of `x` [b, k, n, ...] for slots [b, k, e]."""
    if x.dim() == 4:
        slots = slots[..., None].expand(*slots.shape, x.shape[-1])
    return x.gather(2, slots)


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
                f"({error.strerror}); give a directory that exists and can be written, or 'device' "
                "or 'host'"
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
        """Return the next tensor of the file, of zeros, as `torch.zeros` makes one."""
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
