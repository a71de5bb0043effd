"""One capped layer of the cache: appends blocks, and has them attended and evicted from.

Positions. `true`: keys keep the rotation they were read with. `compact`: the survivors count as
the tokens 0..held-1 in time order and the next block is read behind the longest head, so nothing
ever leaves the window the model was trained on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvcap.runtime.attention.functions import Rows, without_gradient
from kvcap.runtime.attention.masks import Slots
from kvcap.runtime.cache.attend import Asked, Block, LayerAttention
from kvcap.runtime.cache.evicted_store import Calibration
from kvcap.runtime.cache.evictor import SHIFT, Evictor, Seen
from kvcap.runtime.cache.pool import Segment
from kvcap.runtime.cache.query_window import QueryRing
from kvcap.runtime.errors import (
    BlockTooLarge,
    CacheMismatch,
    MemoryCapExceeded,
    PositionMismatch,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from kvcap.runtime.cache.cache import BudgetCache


class BudgetLayer(CacheLayerMixin):  # type: ignore[misc]
    """One capped layer of a `BudgetCache`: the one at `index` among them."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: BudgetCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self.index = index
        self.rotates = cache.layout.rotates[index]  # its keys are moved to other positions
        self.seen = 0  # tokens read
        self.segments: list[Segment] = []  # one, or one for every head where lengths differ
        self.ring: QueryRing | None = None
        self.calibration: Calibration | None = None  # evicted tokens, where they are kept
        self.evictor: Evictor | None = None
        self._attention: LayerAttention | None = None
        self._block = Block()  # the last
        self._attended = True  # the registered attention function has seen the last block
        self._waiting: tuple[Tensor, Tensor] | None = None  # keys and values attention appends
        self._like: tuple[int, torch.dtype, torch.device] | None = None  # what it is allocated for

    @property
    def rows(self) -> Rows | None:
        """Where heads that hold unequally many lie, on the device."""
        return None if self._attention is None else self._attention.rows

    @property
    def keys(self) -> Tensor | None:
        """The held keys [B, K, held, D] as they are stored (a view), or None before the first.

        Heads that hold unequally many have no such tensor: read their `segments`.
        """
        return self.segments[0].keys if len(self.segments) == 1 else None

    @keys.setter
    def keys(self, value: None) -> None:
        assert value is None  # the base class clears it at construction

    @property
    def values(self) -> Tensor | None:
        """The held values [B, K, held, D] (a view), as `keys`."""
        return self.segments[0].values if len(self.segments) == 1 else None

    @values.setter
    def values(self, value: None) -> None:
        assert value is None

    @property
    def held(self) -> int:
        """The most slots in use by a head."""
        return max((segment.held for segment in self.segments), default=0)

    def get_seq_length(self) -> int:
        """Tokens read so far: the logical length, which positions and masks count in."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(slots visible, offset) for the next block, should a mask be built for it."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        held = self.held - self._overdue(length)
        return Slots.of(held + length, self._cache.check_mask), self.seen - held

    def get_max_cache_shape(self) -> int:
        """-1: a conversation may be of any length."""
        return -1

    get_max_length = get_max_cache_shape

    @torch.inference_mode(False)  # ordinary tensors may be written to in any mode
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate everything this layer will ever hold."""
        cache, layout = self._cache, self._cache.layout
        self._like = key_states.shape[0], key_states.dtype, key_states.device
        self.segments = cache.allocation.segments(self.index, key_states)
        self.calibration = cache.allocation.calibration(self.segments)
        if layout.ring_length:
            self.ring = QueryRing(key_states, layout.shape.heads, layout.ring_length)
        keys = self.segments[0].pool.keys
        self.evictor = Evictor(
            layout,
            self.index,
            self.segments,
            self.ring,
            self.calibration,
            cache.balance,
            cache.evict_every,
            cache.rotation(keys) if self.rotates else None,
            cache.pinned_spans,
        )
        self._attention = LayerAttention(self.evictor)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a block [B, K, T, D] but for its fillers; returns what is held (views).

        Where heads hold unequally many, or several blocks come in one pass, they are returned: only
        the registered attention function, which does not read what is returned, runs then. No
        gradient flows through either.

        Raises:
            BlockTooLarge, MemoryCapExceeded, CacheMismatch: before anything is changed.
            UnsupportedModel: the policy or the positions need the registered attention function.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                keys, values = self._update(key_states, value_states)
            keys, values = (
                without_gradient(keys, key_states),
                without_gradient(values, value_states),
            )
        else:
            keys, values = self._update(key_states, value_states)
        keys.kvcap_layer = self  # type: ignore[attr-defined]  # attention_forward finds it here
        return keys, values

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        current = self._cache.current
        length = current.tokens or key_states.shape[2]
        key_states, value_states = key_states[:, :, :length], value_states[:, :, :length]
        if self.evictor is None:
            self.lazy_initialization(key_states)
        self._check_like(key_states)
        if current.side is not None:
            current.side.turn()
        if current.blocks > 1 or self._splits(length):
            self._waiting = key_states, value_states
        else:
            self._append(key_states, value_states)
        keys = self.keys if self._waiting is None else None
        keys = key_states.view_as(key_states) if keys is None else keys
        return keys, value_states if self.values is None else self.values

    def _check_like(self, keys: Tensor) -> None:
        """Refuse keys that the buffers are not for."""
        like = keys.shape[0], keys.dtype, keys.device
        if like != self._like:
            assert self._like is not None
            given, own = (f"{b} sequences of {t} on {d}" for b, t, d in (like, self._like))
            raise CacheMismatch(
                f"the cache is allocated for {own}, and keys of {given} were given; a cache is of "
                "one batch size, type and device, also after reset(): make a new BudgetCache"
            )

    def _splits(self, length: int) -> bool:
        """Whether a block is read in two, as tokens are held that wait for their eviction."""
        if not self._attended or not self._cache.eviction.policy.evicts:
            return False
        return self._cache.cut < length <= self._cache.block_size

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Append a block [B, K, T, D]."""
        self._make_room(key_states.shape[2])
        self._write(key_states, value_states)

    def _make_room(self, length: int) -> None:
        """For a block of `length`, and say where it counts."""
        assert self.evictor is not None
        self._check(length)
        if self._overdue(length):  # stock attention never calls attend()
            held = [segment.keys for segment in self.segments]
            self.evictor.look(Seen(self.seen, self._block.length, held), now=True)
        self._block = self._placed(length, self.evictor)

    def _write(self, key_states: Tensor, value_states: Tensor) -> None:
        """Write a block [B, K, T, D] for which there is room."""
        block, current = self._block, self._cache.current
        if block.offset:
            key_states = self._cache.rotation(key_states).back_by(key_states, block.offset)
        times = current.times_of(self.seen, block.length, key_states.device)
        for segment, residual in zip(self.segments, block.residual, strict=True):
            rows = segment.rows_of(key_states), segment.rows_of(value_states)
            segment.append(*rows, times, current.clock if current.filling else None)
            if residual:
                segment.side(SHIFT)[:, :, -block.length :] = residual
        self.seen, self._attended = block.seen, False

    def _placed(self, length: int, evictor: Evictor) -> Block:
        """Where the next block counts."""
        cache = self._cache
        if self.index == 0:
            cache.frame = cache.longest
        block = Block(length, self.seen + length, 0, [0] * len(self.segments))
        if self.rotates:
            read_at = self.seen if cache.current.start is None else cache.current.start
            block.offset = read_at - cache.frame
            block.residual = [cache.frame - segment.held for segment in self.segments]
            evictor.moved = evictor.moved or any(block.residual)
        return block

    def read_token(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        angles: tuple[Tensor, Tensor],
        module: nn.Module,
        scaling: float,
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

        Returns:
            [B, H, 1, D]; None, and nothing is read: rotate it, and call `update` and `attend`.

        Raises:
            BlockTooLarge, MemoryCapExceeded, CacheMismatch: before anything is changed.
            UnsupportedModel: the policy or the positions need the registered attention function.
        """
        if self._attention is None:
            return None
        self._check_like(key)
        self._make_room(1)
        current, asked = self._cache.current, Asked(module, scaling, None)
        time = current.times_of(self.seen, 1, key.device)
        out = self._attention.token(query, key, value, angles, time, self._block, asked, current)
        if out is not None:
            self.seen, self._attended = self._block.seen, True
        return out

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        scaling: float,
        softcap: float | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Attention of the block just appended, then eviction. [B, H, T, D] -> [B, H, T, D].

        Of several blocks in one pass each is appended when those before it are through: what a
        block attends to is what they left, as in passes of their own.

        Raises:
            PositionMismatch: where the caller's `position_ids` do not follow what was read.
            UnsupportedModel: the policy reads the output projection, which cannot be read.
        """
        if self._cache.current.start is None and self.index == 0:
            self._check_positions(position_ids)
        asked = Asked(module, scaling, softcap)
        if self._waiting is None:
            return self._attend_block(query, asked)
        (keys, values), self._waiting = self._waiting, None
        sizes, current = self._blocks(keys.shape[2]), self._cache.current
        blocks = zip(*(x.split(sizes, dim=2) for x in (keys, values, query)), strict=True)
        out = []
        for i, (key, value, block) in enumerate(blocks):
            current.block = i if current.blocks > 1 else 0
            self._append(key, value)
            out.append(self._attend_block(block, asked).transpose(1, 2))
        return torch.cat(out, dim=1).transpose(1, 2)

    def _blocks(self, length: int) -> list[int]:
        """The lengths of the blocks in which so many tokens are read."""
        size = self._cache.block_size
        first = self._cache.cut if self._cache.current.blocks == 1 else size
        sizes = [min(first, length)]
        while (rest := length - sum(sizes)) > 0:
            sizes.append(min(size, rest))
        return sizes

    def _attend_block(self, query: Tensor, asked: Asked) -> Tensor:
        """`attend`, of one block."""
        assert self._attention is not None
        self._attended = True
        return self._attention.block(query, self._block, asked, self._cache.current)

    def _overdue(self, length: int) -> int:
        """Slots above the budget that stock attention left, to go before a block of `length`."""
        if self._attended or self.evictor is None:
            return 0
        if self.evictor.due(self._block.length) or length > self.evictor.free:
            return self.evictor.excess
        return 0

    def _check(self, length: int) -> None:
        """Refuse a block that cannot be read rightly, before anything has changed."""
        cache, policy = self._cache, self._cache.eviction.policy
        if not self._attended and self.seen and cache.eviction.needs_attention:
            raise UnsupportedModel(
                f"policy {cache.eviction.name!r} works inside attention, which stock attention "
                "does not show; load the model with attn_implementation='kvcap'"
            )
        if not self._attended and self.seen and self.rotates:
            raise UnsupportedModel(
                "positions='compact' need the registered attention function; load the model with "
                "attn_implementation='kvcap', or use positions='true'"
            )
        assert self.evictor is not None
        room = self.evictor.free + self._overdue(length)
        if not policy.evicts and length > room - cache.block_size:
            budget = cache.layout.budget_tokens
            raise MemoryCapExceeded(
                f"policy {cache.eviction.name!r} never evicts: {self.held} tokens are held and "
                f"{length} more were given, the budget is {budget}; use a larger budget or a "
                "policy that evicts"
            )
        if length > room:
            raise BlockTooLarge(
                f"a block of {length} tokens was given and {room} slots are free for it; "
                f"pass prefill_chunk_size={cache.block_size} to generate(), or build the cache "
                f"with block_size={length}"
            )

    def _check_positions(self, position_ids: Tensor | None) -> None:
        if position_ids is None:
            return
        first = self.seen - (self._block.length if self._waiting is None else 0)
        length = position_ids.shape[-1]
        if bool(
            (position_ids == torch.arange(first, first + length, device=position_ids.device)).all()
        ):
            return
        self.take_back()
        start = int(position_ids.flatten()[0])
        how = f"start at {start}" if start != first else f"do not count on from {start}"
        raise PositionMismatch(
            f"position_ids {how}, but {first} tokens were read; leave position_ids out, the cache "
            "keeps count. Packed sequences need a cache each"
        )

    def take_back(self) -> None:
        """Forget the block just appended, which is refused."""
        if self._waiting is None:
            self.seen -= self._block.length
            for segment in self.segments:
                segment.held -= self._block.length
        self._waiting, self._attended = None, True

    def count(self, tokens: int, kept: bool) -> None:
        """Count tokens read in a CUDA graph; all `kept`, or down to the budget."""
        self.seen += tokens
        for segment in self.segments:
            segment.held = segment.held + tokens if kept else segment.stay
        if not kept:
            self.move()

    def move(self) -> None:
        """Have keys rotated from now on, though by nothing before a slot was given up."""
        assert self.evictor is not None
        self.evictor.move()

    def count_as(self, seen: int, held: list[int]) -> None:
        """Count as before a block that was begun and never came to be, as in a failed capture."""
        self.seen, self._attended, self._waiting = seen, True, None
        for segment, slots in zip(self.segments, held, strict=True):
            segment.held = slots

    def reset(self) -> None:
        """Forget everything; the buffers stay."""
        if self.evictor is not None:
            self.evictor.reset()
        self.seen, self._attended, self._waiting = 0, True, None

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise UnsupportedModel(
            "evicted tokens cannot be brought back, so beam search, contrastive search and "
            "assisted decoding, which reorder or crop the cache, are not supported"
        )

    def _stay(self, *_: Any, **__: Any) -> None:
        raise UnsupportedModel(
            "the buffers of a capped layer stay where they are, on the model's device; keep fewer "
            "tokens (budget_tokens) rather than offload them"
        )

    offload = prefetch = _stay
    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
