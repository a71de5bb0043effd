"""Holds one capped layer of the cache, which appends a block, attends to it and then evicts.

Positions. `true`: keys keep the rotation they were read with. `compact`: the survivors count as
the tokens 0..held-1 in time order and the next block is read behind the longest head, so nothing
ever leaves the window the model was trained on. `auto`: they are true until a block would leave
that window, before which all keys are moved to where they count at compact ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvcap.policies.base import Expansion, Logits
from kvcap.runtime.attention.latents import LatentBlock, rotated_first
from kvcap.runtime.attention.masks import MaskNote, Slots
from kvcap.runtime.cache.allocation import Allocation
from kvcap.runtime.cache.positions import TruePositions
from kvcap.runtime.cache.regions import Regions
from kvcap.runtime.cache.slots.base import LayerMemory, SlotEngine
from kvcap.runtime.cache.slots.policy import AttentionCall, LayerPolicy
from kvcap.runtime.cache.step import ForwardContext, PendingBlock
from kvcap.runtime.errors import (
    CacheMismatch,
    PositionMismatch,
    UnsupportedModel,
)
from kvcap.runtime.models.latents import Latent, expansion_of
from kvcap.runtime.types import Span


def refuse_reordering(*_: Any, **__: Any) -> None:
    """Refuse what reorders or crops a cache."""
    raise UnsupportedModel(
        "evicted tokens cannot be brought back, so beam search, contrastive search and assisted "
        "decoding (assistant_model, prompt_lookup_num_tokens, assistant_early_exit), which reorder "
        "or crop the cache, cannot run under a cap; generate greedily or by sampling, several "
        "answers by num_return_sequences"
    )


def refuse_moving(*_: Any, **__: Any) -> None:
    """Refuse to move a cache's buffers to another device."""
    raise UnsupportedModel(
        "the buffers of a capped layer stay where they are, on the model's device; keep fewer "
        "tokens (budget_tokens) rather than offload them"
    )


class AttendedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of transformers' caches that kvcap's attention finds by the keys it returns.

    A conversation in it may be of any length, and it can neither be moved nor reordered.
    """

    is_sliding = False
    is_compileable = False

    def carried_by(self, keys: Tensor) -> Tensor:
        """Return a view of keys with a reference to the layer, for `attention_forward`."""
        carrier = keys.view_as(keys)
        carrier.kvcap_layer = self  # type: ignore[attr-defined]
        return carrier

    def lazy_initialization(self, *_: Any) -> None:
        """Allocate nothing: who makes the layer gives it its memory."""

    def get_max_cache_shape(self) -> int:
        """Return -1: there is no end."""
        return -1

    get_max_length = get_max_cache_shape
    offload = prefetch = refuse_moving
    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = refuse_reordering


class BudgetLayer(AttendedLayer):
    """A capped layer of a `BudgetCache`, which never holds more slots than it allocated at first.

    Its whole state is how many tokens it has read, its slots, and the block that is pending. It
    has no reference to the cache, so that a cache is freed as soon as nobody holds it.

    Args:
        index: its index among the capped layers.
        allocation: allocates the cache's memory.
        pinned_spans: those of the cache, which changes them in place.
        regions: those of the cache, which its session changes in place.
        mask: the cache's note of the mask that a pass asks transformers for.
    """

    def __init__(
        self,
        index: int,
        allocation: Allocation,
        pinned_spans: Sequence[Span],
        regions: Regions,
        mask: MaskNote,
    ) -> None:
        super().__init__()
        self.index, self.layout = index, allocation.layout
        self.rotates = self.layout.rotates[index]  # its keys are moved, at once or later
        shape = self.layout.shape
        self.rope = shape.layers[shape.capped[index]].rope
        self.readers = shape.readers(shape.capped[index])  # layers that attend to its slots
        self.seen = 0  # tokens read
        self.policy = LayerPolicy(self.layout, index, pinned_spans, regions)
        self.engine = SlotEngine(LayerMemory([], TruePositions()), self.policy)
        """Works on its slots; has none until they are allocated."""
        self.segments = self.engine.segments  # one, or one for every head
        self.pending: PendingBlock | None = None
        self.half_read = False
        """Says that a pass through this layer ended half-way, which makes its slots useless.

        Not all layers that read these slots attended to the pending block, or one of them was
        interrupted, so that slots may be evicted or moved in part."""
        self._allocation = allocation
        self._mask = mask
        self._like: tuple[int, torch.dtype, torch.device] | None = None  # what it is allocated for

    @property
    def on_device(self) -> tuple[Any, ...]:
        """Return small tensors besides the buffers that a CUDA graph must keep alive."""
        return (self.engine.on_device,)

    @property
    def keys(self) -> Tensor | None:
        """Return the held keys [B, K, held, D] as they are stored (a view); None before the first.

        Heads that hold unequally many have no such tensor, nor have quantised slots: read their
        `segments`.
        """
        return self.segments[0].keys if self._in_one else None

    @keys.setter
    def keys(self, value: None) -> None:
        assert value is None  # the base class clears it at construction

    @property
    def values(self) -> Tensor | None:
        """Return the held values [B, K, held, D] (a view), as `keys` does."""
        return self.segments[0].values if self._in_one else None

    @values.setter
    def values(self, value: None) -> None:
        assert value is None

    @property
    def _in_one(self) -> bool:
        """Return whether one tensor holds all keys, in the model's type."""
        return len(self.segments) == 1 and not self.layout.slot_format.quantised

    @property
    def held(self) -> int:
        """Return the most slots in use by a head."""
        return max([segment.held for segment in self.segments], default=0)

    @property
    def excess(self) -> int:
        """Return by how many slots the fullest head exceeds the number that an eviction leaves."""
        return self.engine.excess

    def get_seq_length(self) -> int:
        """Return the number of tokens read so far, by which positions and masks count."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return the visible slots of the next block, and the offset of the first, for a mask."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        held = self.held
        check = partial(self._mask.check, self.seen, self._allocation.batch)
        return Slots.of(held + length, check), self.seen - held

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate all memory of this layer, for keys such as `key_states` [B, K, T, D]."""
        given, shape = (key_states.shape[1], key_states.shape[3]), self.layout.shape
        if given != (own := (shape.kv_heads, shape.head_size)):
            raise CacheMismatch(
                f"the config tells of {own[0]} KV heads of size {own[1]}, and the model's keys are "
                f"{given[0]} of {given[1]}; make the cache of the config that the model was made of"
            )
        self._like = key_states.shape[0], key_states.dtype, key_states.device
        self.engine = self._allocation.engine(key_states, self.policy)
        self.segments = self.engine.segments
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, context: ForwardContext | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take a block [B, K, T, D] without its fillers; return it with a reference to the layer.

        `attend` appends it. The registered attention function calls that, and reads nothing of what
        is returned. No gradient flows through slots.

        Raises:
            CacheMismatch: before anything is changed.
        """
        context = context or ForwardContext()
        length = context.tokens or key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        if (like := (len(key_states), key_states.dtype, key_states.device)) != self._like:
            self._refuse_unlike(like)
        if context.stream is not None:
            context.stream.next_layer()
        sizes = context.sizes or [length]
        with torch.no_grad():
            arrived = key_states, value_states
            if length < key_states.shape[2]:
                arrived = key_states[:, :, :length], value_states[:, :, :length]
        self.pending = PendingBlock(context, length, arrived, sizes, readers=self.readers)
        self.half_read = True
        return self.carried_by(key_states), value_states

    def _refuse_unlike(self, like: tuple[int, torch.dtype, torch.device]) -> None:
        """Refuse keys of another batch size, type or device than the buffers have."""
        assert self._like is not None
        given, own = (f"{b} sequences of {t} on {d}" for b, t, d in (like, self._like))
        raise CacheMismatch(
            f"the cache is allocated for {own}, and keys of {given} were given; a cache is of "
            "one batch size, type and device, also after reset(): make a new BudgetCache"
        )

    def _read(self, block: PendingBlock, query: Tensor, call: AttentionCall) -> Tensor:
        """Write a block into the slots behind those in use, attend with it, and evict."""
        assert block.arrived is not None
        block.place = block.context.place_of(self.seen, block.length, query.device)
        (keys, values), block.arrived = block.arrived, None
        self.engine.append(block, keys, values)
        self.seen = block.place.total_tokens
        return self.engine.attend(query, block, call)

    def read_token(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        angles: tuple[Tensor, Tensor],
        module: nn.Module,
        scaling: float,
        context: ForwardContext | None = None,
    ) -> Tensor | None:
        """Rotate, append and attend to one token by one kernel, then evict.

        Takes the place of rotating, `update` and `attend`, where the kernel covers the layer.

        Args:
            query: [B, H, 1, D], not rotated yet.
            key: [B, K, 1, D], likewise.
            value: [B, K, 1, D].
            angles: cosines and sines [B or 1, 1, D] of the position it is read at.
            module: the model's attention, whose output projection policies may read.
            scaling: factor of the logits.
            context: of the pass.

        Returns:
            [B, H, 1, D]; None, and nothing is read: rotate it, and call `update` and `attend`.

        Raises:
            CacheMismatch: before anything is changed.
        """
        if not self.is_initialized or (self.rope is not None and self.rope.interleaved):
            return None  # the kernel rotates halves
        if (like := (len(key), key.dtype, key.device)) != self._like:
            self._refuse_unlike(like)
        context = context or ForwardContext()
        block = PendingBlock(context, 1, (key, value), [1])
        block.place = context.place_of(self.seen, 1, key.device)
        out = self.engine.token(query, angles, block, AttentionCall(module, Logits(scaling)))
        if out is not None:
            self.seen = block.place.total_tokens
        return out

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        logits: Logits,
        position_ids: Tensor | None,
        expansion: Expansion | None = None,
    ) -> Tensor:
        """Append the pending block, attend with its queries [B, H, T, D], evict. [B, H, T, D].

        It is called once for every layer that reads these slots, first for the layer that owns
        them. All see the same keys, and the last call evicts.

        Of several blocks in one pass, each is appended after those before it were attended to and
        evicted, as if it came in a pass of its own.

        Raises:
            PositionMismatch: where the caller's `position_ids` do not follow what was read.
            UnsupportedModel: the policy reads the output projection, which cannot be read; or more
                layers read these slots than the config says.
        """
        block = self.pending
        if block is None:
            raise UnsupportedModel(
                f"more layers attend to a block than the {self.readers} that are known to read it, "
                "and its tokens may be evicted by now; run this model with a cache of transformers"
            )
        own = block.readers == self.readers
        if own and block.context.start is None and self.index == 0 and position_ids is not None:
            self._check_positions(position_ids)
        block.readers -= 1
        if not block.readers:
            self.pending = None
        call = AttentionCall(module, logits, expansion)
        if not own:
            out = self.engine.again(query, block, call)
        elif len(block.sizes) == 1:
            out = self._read(block, query, call)
        else:
            parts = [self._read(*part, call).transpose(1, 2) for part in block.parts(query)]
            out = torch.cat(parts, dim=1).transpose(1, 2)
        self.half_read = self.pending is not None
        return out

    def _check_positions(self, position_ids: Tensor) -> None:
        """Refuse positions [1 or B, T] of a block that do not count on from the tokens read."""
        first, length = self.seen, position_ids.shape[-1]
        expected = torch.arange(first, first + length, device=position_ids.device)
        if bool((position_ids == expected).all()):
            return
        self.take_back()
        start = int(position_ids.flatten()[0])
        how = f"start at {start}" if start != first else f"do not count on from {start}"
        raise PositionMismatch(
            f"position_ids {how}, but {first} tokens were read; leave position_ids out, the cache "
            "keeps count. Packed sequences need a cache each"
        )

    def take_back(self) -> None:
        """Forget the pending block, as it is refused."""
        block, self.pending, self.half_read = self.pending, None, False
        if block is not None and block.arrived is None:
            self.seen -= block.length
            for segment in self.segments:
                segment.held -= block.length

    def advance(self, tokens: int) -> None:
        """Count tokens that a CUDA graph has read, after which it evicted down to the budget."""
        self.seen += tokens
        for segment in self.segments:
            segment.held = min(segment.held + tokens, segment.target_length)
        self.enable_rotation()

    def become_compact(self) -> None:
        """Move all held keys to compact positions; if that fails, the layer is `half_read`."""
        self.half_read = True
        self.engine.become_compact(self.seen)
        self.half_read = False

    def enable_rotation(self) -> None:
        """Have keys rotated whenever they are read, by 0 as long as no token has moved."""
        self.engine.positions.note_moved()

    def restore_counters(self, seen: int, held: list[int]) -> None:
        """Set the tokens read and each segment's slots in use, as before a block that failed."""
        self.seen, self.pending, self.half_read = seen, None, False
        self.engine.restore(held)

    def reset(self) -> None:
        """Forget all tokens; the buffers stay allocated."""
        self.engine.reset()
        self.seen, self.pending, self.half_read = 0, None, False


class LatentLayer(BudgetLayer):
    """A capped layer whose slots hold latents, of multi-head latent attention.

    Args:
        latent: sizes of a latent.
        given: as `BudgetLayer`.
    """

    def __init__(self, latent: Latent, *given: Any) -> None:
        super().__init__(*given)
        self.latent = latent

    def update(
        self, key_states: Tensor, value_states: Tensor, context: ForwardContext | None = None
    ) -> Any:
        """Append latents [B, 1, T, R] and rotated parts [B, 1, T, r] as slots `[k_rot, c]`.

        Returns:
            A `LatentBlock` of each.

        Raises:
            CacheMismatch: before anything is changed.
        """
        slots = torch.cat((value_states.detach(), key_states.detach()), dim=-1)
        super().update(slots, slots[..., self.latent.rotated :], context)
        return LatentBlock(key_states, self), LatentBlock(value_states, self)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        logits: Logits,
        position_ids: Tensor | None,
        expansion: Expansion | None = None,
    ) -> Tensor:
        """Attend with queries `[q_nope, q_rot]` [B, H, T, nope + r]; see `BudgetLayer.attend`.

        Returns:
            Outputs of the heads' own values [B, H, T, v].

        Raises:
            UnsupportedModel: the weights that expand latents cannot be read.
        """
        try:
            expansion = expansion_of(module, self.latent)
        except UnsupportedModel:
            self.take_back()
            raise
        query = rotated_first(query, self.latent.rotated)
        return super().attend(module, query, logits, position_ids, expansion)
