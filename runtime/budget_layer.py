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

from kvcap.runtime.attention import Rows
from kvcap.runtime.calibration import Calibration
from kvcap.runtime.errors import (
    BlockTooLarge,
    MemoryCapExceeded,
    PositionMismatch,
    UnsupportedModel,
)
from kvcap.runtime.evictor import SHIFT, Evictor, Seen
from kvcap.runtime.late_rotation import LateRotation, left
from kvcap.runtime.layer_attention import Asked, Block, LayerAttention
from kvcap.runtime.query_ring import QueryRing
from kvcap.runtime.slot_pool import Segment

if TYPE_CHECKING:
    from kvcap.runtime.budget_cache import BudgetCache


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
        # Keys and values that attention appends, and what it has yet to do with them.
        self._waiting: tuple[Tensor, Tensor, LateRotation | None] | None = None

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
        held = self.held - self._overdue()
        return held + length, self.seen - held

    def get_max_cache_shape(self) -> int:
        """-1: a conversation may be of any length."""
        return -1

    get_max_length = get_max_cache_shape

    @torch.inference_mode(False)  # ordinary tensors may be written to in any mode
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate everything this layer will ever hold."""
        cache, layout = self._cache, self._cache.layout
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
        the registered attention function, which does not read what is returned, runs then.

        Raises:
            BlockTooLarge, MemoryCapExceeded: before anything is changed.
            UnsupportedModel: the policy or the positions need the registered attention function.
        """
        length = self._cache.current.tokens or key_states.shape[2]
        late = left(key_states)
        key_states, value_states = key_states[:, :, :length], value_states[:, :, :length]
        if self.evictor is None:
            self.lazy_initialization(key_states)
        if self._cache.current.side is not None:
            self._cache.current.side.turn()
        if self._cache.current.blocks > 1 or late is not None:
            self._waiting = key_states, value_states, late
        else:
            self._append(key_states, value_states)
        keys = self.keys if self._waiting is None else None
        keys = key_states.view_as(key_states) if keys is None else keys
        keys.kvcap_layer = self  # type: ignore[attr-defined]  # attention_forward finds it here
        return keys, value_states if self.values is None else self.values

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Append a block [B, K, T, D]."""
        self._make_room(key_states.shape[2])
        self._write(key_states, value_states)

    def _make_room(self, length: int) -> None:
        """For a block of `length`, and say where it counts."""
        assert self.evictor is not None
        self._check(length)
        if self._overdue():  # stock attention never calls attend()
            held = [segment.keys for segment in self.segments]
            self.evictor.look(Seen(self.seen, self._block.length, held))
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
        (keys, values, late), self._waiting = self._waiting, None
        if late is not None:
            assert late.query is query, "see can_be_late"
            return self._attend_token(late, keys, values, asked)
        size = self._cache.block_size
        blocks = zip(*(x.split(size, dim=2) for x in (keys, values, query)), strict=True)
        out = []
        for i, (key, value, block) in enumerate(blocks):
            self._cache.current.block = i
            self._append(key, value)
            out.append(self._attend_block(block, asked).transpose(1, 2))
        return torch.cat(out, dim=1).transpose(1, 2)

    def _attend_block(self, query: Tensor, asked: Asked) -> Tensor:
        """`attend`, of one block."""
        assert self._attention is not None
        self._attended = True
        return self._attention.block(query, self._block, asked, self._cache.current)

    def _attend_token(self, late: LateRotation, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        """`attend`, of one token that is yet to be rotated and appended."""
        assert self._attention is not None
        self._make_room(1)
        current = self._cache.current
        time = current.times_of(self.seen, 1, key.device)
        out = self._attention.token(late, key, value, time, self._block, asked, current)
        if out is not None:
            self.seen, self._attended = self._block.seen, True
            return out
        query, key = late.now(key)
        self._write(key, value)
        return self._attend_block(query, asked)

    def _overdue(self) -> int:
        """Slots that must go before the next block, as no attention function evicted them."""
        return 0 if self._attended or self.evictor is None else self.evictor.due(self._block.length)

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
        room = min(s.capacity - s.held for s in self.segments) + self._overdue()
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
        first = self.seen - self._block.length
        if position_ids is not None and int(position_ids.flatten()[0]) != first:
            raise PositionMismatch(
                f"position_ids start at {int(position_ids.flatten()[0])}, but {first} tokens were "
                "read; leave position_ids out, the cache keeps count"
            )

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

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
