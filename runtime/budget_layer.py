"""One capped layer of the cache: appends, attends, lets the policy look, evicts.

Positions. `true`: keys keep the rotation they were read with. `compact`: the survivors count as
the tokens 0..held-1 in time order and the next block is read at `held`, so nothing ever leaves the
window the model was trained on. A key is stored exactly as the model made it, with the `shift` its
position has moved down since; attention rotates a copy, so errors never add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcap.policies import Observation
from kvcap.runtime.attention import attend
from kvcap.runtime.errors import (
    BlockTooLarge,
    MemoryCapExceeded,
    PositionMismatch,
    UnsupportedModel,
)
from kvcap.runtime.fixed_cache import FixedKVCache
from kvcap.runtime.query_ring import QueryRing
from kvcap.runtime.rope import Rotation

if TYPE_CHECKING:
    from kvcap.runtime.budget_cache import BudgetCache

SHIFT = "shift"  # side tensor: how far a slot's position has moved down since it was read


class BudgetLayer(CacheLayerMixin):  # type: ignore[misc]
    """One capped layer of a `BudgetCache`."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: BudgetCache, budget: int, rotates: bool) -> None:
        super().__init__()
        self._cache = cache
        self.budget = budget
        self.rotates = rotates  # its keys are moved to other positions
        self.seen = 0  # tokens read
        self.store: FixedKVCache | None = None
        self._offset = 0  # how far past the cache's positions the block in hand was rotated
        self._evicted = False  # compact positions differ from true ones
        self._length = 0  # tokens in the last block
        self._attended = True  # the registered attention function has seen the last block
        self.ring: QueryRing | None = None

    @property
    def keys(self) -> Tensor | None:
        """The held keys [B, K, held, D] as they are stored (a view), or None before the first."""
        return None if self.store is None else self.store.keys

    @keys.setter
    def keys(self, value: None) -> None:
        assert value is None  # the base class clears it at construction

    @property
    def values(self) -> Tensor | None:
        """The held values [B, K, held, D] (a view), or None before the first token."""
        return None if self.store is None else self.store.values

    @values.setter
    def values(self, value: None) -> None:
        assert value is None

    @property
    def held(self) -> int:
        """Slots in use per KV head."""
        return 0 if self.store is None else self.store.held

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

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate everything this layer will ever hold."""
        batch, kv_heads, _, head_size = key_states.shape
        cache, policy = self._cache, self._cache.eviction.policy
        self.store = FixedKVCache(
            batch,
            kv_heads,
            budget=self.budget,
            block=cache.block_size,
            head_size=head_size,
            dtype=key_states.dtype,
            device=key_states.device,
            side={**policy.state, **({SHIFT: torch.int32} if self.rotates else {})},
        )
        if length := cache.layout.ring_length:
            self.ring = QueryRing(key_states, cache.layout.shape.heads, length)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a block [B, K, T, D]; returns all held keys and values (views).

        Raises:
            BlockTooLarge, MemoryCapExceeded: before anything is changed.
            UnsupportedModel: the policy or the positions need the registered attention function.
        """
        length = key_states.shape[2]
        if self.store is None:
            self.lazy_initialization(key_states)
            assert self.store is not None
        self._check(length)
        if overdue := self._overdue():  # stock attention never calls attend()
            self._evict(self._observe(self.store.keys, None, 1.0, None), overdue)
        held = self.store.held
        read_at = self._cache.reading_at
        self._offset = (self.seen if read_at is None else read_at) - held if self.rotates else 0
        if self._offset:
            key_states = self._cache.rotation(key_states.device).back_by(key_states, self._offset)
        self.store.append(key_states, value_states, self.seen)
        self.seen += length
        self._length, self._attended = length, False
        keys = self.store.keys
        keys.kvcap_layer = self  # type: ignore[attr-defined]  # attention_forward finds it here
        return keys, self.store.values

    def attend(
        self, query: Tensor, scaling: float, softcap: float | None, position_ids: Tensor | None
    ) -> Tensor:
        """Attention of the block just appended, then eviction. [B, H, T, D] -> [B, H, T, D].

        Raises:
            PositionMismatch: where the caller's `position_ids` do not follow what was read.
        """
        assert self.store is not None
        if self._cache.reading_at is None and self is self._cache.capped_layers[0]:
            self._check_positions(position_ids)
        self._attended = True
        if self._offset:
            query = self._cache.rotation(query.device).back_by(query, self._offset)
        keys = self.store.keys
        if (rotation := self._moving(keys.device)) is not None:
            keys = rotation.back(keys, self.store.side(SHIFT))
        out = attend(query, keys, self.store.values, scaling, softcap)
        self._look(query, keys, scaling, softcap)
        return out

    def _look(self, query: Tensor, keys: Tensor, scaling: float, softcap: float | None) -> None:
        """Keep what the policy will ask for, update its state, evict when it is time."""
        assert self.store is not None
        policy = self._cache.eviction.policy
        if self.ring is not None:
            self.ring.append(query)
        due = self._due()
        if not due and not policy.state:
            return
        observation = self._observe(keys, self._window(query), scaling, softcap)
        for name, tensor in policy.update(observation).items():
            self.store.side(name).copy_(tensor)
        if due:
            self._evict(observation, due)

    def _window(self, query: Tensor) -> Tensor | None:
        """The queries the policy observes, rotated for today's positions."""
        count = self._cache.eviction.policy.queries_observed
        if count is None:
            return query
        if count == 0:
            return None
        if self.ring is None:
            return query[:, :, -count:]
        return self.ring.last(min(count, self.seen), self._moving(query.device))

    def _moving(self, device: torch.device) -> Rotation | None:
        """The rotation, once positions have moved."""
        return self._cache.rotation(device) if self.rotates and self._evicted else None

    def _observe(
        self, keys: Tensor, queries: Tensor | None, scaling: float, softcap: float | None
    ) -> Observation:
        assert self.store is not None
        eviction = self._cache.eviction
        return Observation(
            keys=keys,
            values=self.store.values,
            positions=self.store.positions,
            seen=self.seen,
            budget=self.budget,
            queries=queries,
            scaling=scaling,
            softcap=softcap,
            state={name: self.store.side(name) for name in eviction.policy.state},
            saliency=eviction.saliency,
        )

    def _evict(self, observation: Observation, count: int) -> None:
        assert self.store is not None
        evicted = self._cache.eviction.select(observation, count)  # [B, K, e]
        if self.rotates:
            # A survivor moves down by the number of evicted tokens older than itself.
            gone = self.store.positions.gather(-1, evicted).sort(dim=-1).values
            older = torch.searchsorted(gone, self.store.positions.contiguous(), out_int32=True)
            self.store.side(SHIFT).add_(older)
            self._evicted = True
        if self.ring is not None:
            self.ring.evicted(count)
        self.store.compact(evicted)

    def _due(self) -> int:
        """Slots to give up after the last block: at once after a block, in steps by the way."""
        excess = max(0, self.held - self.budget)
        return excess if self._length > 1 or excess >= self._cache.evict_every else 0

    def _overdue(self) -> int:
        """Slots that must go before the next block, as no attention function evicted them."""
        return 0 if self._attended else self._due()

    def _check(self, length: int) -> None:
        """Refuse a block that cannot be read rightly, before anything has changed."""
        cache, policy = self._cache, self._cache.eviction.policy
        if not self._attended and self.seen and cache.eviction.needs_attention:
            raise UnsupportedModel(
                f"policy {cache.eviction.name!r} works inside attention, which stock attention does "
                "not show; load the model with attn_implementation='kvcap'"
            )
        if not self._attended and self.seen and self.rotates:
            raise UnsupportedModel(
                "positions='compact' need the registered attention function; load the model with "
                "attn_implementation='kvcap', or use positions='true'"
            )
        held = self.held - self._overdue()
        if not policy.evicts and held + length > self.budget:
            raise MemoryCapExceeded(
                f"policy {cache.eviction.name!r} never evicts: {self.held} tokens are held and "
                f"{length} more were given, the budget is {self.budget}; use a larger budget or a "
                "policy that evicts"
            )
        room = self.budget + cache.block_size - held
        if length > room:
            raise BlockTooLarge(
                f"a block of {length} tokens was given and {room} slots are free for it; "
                f"pass prefill_chunk_size={cache.block_size} to generate(), or build the cache "
                f"with block_size={length}"
            )

    def _check_positions(self, position_ids: Tensor | None) -> None:
        first = self.seen - self._length
        if position_ids is not None and int(position_ids.flatten()[0]) != first:
            raise PositionMismatch(
                f"position_ids start at {int(position_ids.flatten()[0])}, but {first} tokens were "
                "read; leave position_ids out, the cache keeps count"
            )

    @property
    def nbytes(self) -> int:
        """Exact bytes of storage."""
        buffers = (self.store, self.ring)
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def reset(self) -> None:
        """Forget everything; the buffers stay."""
        if self.store is not None:
            self.store.reset()
        self.seen, self._evicted, self._attended = 0, False, True

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise UnsupportedModel(
            "evicted tokens cannot be brought back, so beam search, contrastive search and "
            "assisted decoding, which reorder or crop the cache, are not supported"
        )

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
