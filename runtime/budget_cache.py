"""The cache that transformers models write to: fixed bytes, evicting after every block."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from kvcap.policies import Eviction, load_policy
from kvcap.runtime.attention import NAME
from kvcap.runtime.budget_layer import BudgetLayer
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.layout import CacheLayout, Positions
from kvcap.runtime.model_shape import ModelShape
from kvcap.runtime.rope import Rotation


class BudgetCache(Cache):  # type: ignore[misc]
    """A transformers cache of fixed size: `model.generate(..., past_key_values=BudgetCache(...))`.

    Args:
        config: the model's config.
        budget_tokens: slots per KV head and layer that stay after every block (`N`).
        block_size: tokens read at once (`T`); pass it to generate() as `prefill_chunk_size`.
        policy: a name (see `kvcap policies`) or an `Eviction`.
        positions: 'compact' or 'true'; by default compact where it is exact and the model was
            loaded with `attn_implementation='kvcap'`, else true.
        evict_every: in generation, evict every so many tokens, at most `block_size`.

    Raises:
        UnsupportedModel: for the model, or for a policy that needs `attn_implementation='kvcap'`.
        PolicyError: unknown policy, or pins that do not fit the budget.
        PlanInfeasible: sizes below 1, or `evict_every` above the block.
    """

    def __init__(
        self,
        config: Any,
        budget_tokens: int = 256,
        block_size: int = 128,
        policy: str | Eviction = "keydiff",
        *,
        positions: Positions | None = None,
        evict_every: int = 1,
    ) -> None:
        if not 1 <= evict_every <= block_size:
            raise PlanInfeasible(
                f"evict_every={evict_every}, block_size={block_size}: evict every 1 to block_size "
                "tokens"
            )
        config = config.get_text_config(decoder=True)
        self.eviction = load_policy(policy) if isinstance(policy, str) else policy
        self.block_size, self.evict_every = block_size, evict_every
        shape = ModelShape.of(config, budget_tokens + block_size)
        stock = self._check_attention(config, positions)
        positions = positions or ("true" if stock or not shape.moves_exactly else "compact")
        self.layout = CacheLayout(shape, self.eviction, budget_tokens, block_size, positions)
        self.eviction.check(self.layout.budgets)
        self.reading_at: int | None = None
        """The position the next block is read at; `None`: at the logical length, as transformers
        does. The block loop sets it so that compact positions need no rotation on arrival."""
        self._rotation: Rotation | None = None
        capped = iter(zip(self.layout.budgets, self.layout.rotates, strict=True))
        super().__init__(
            layers=[
                BudgetLayer(self, *next(capped))
                if layer.window is None
                else DynamicSlidingWindowLayer(layer.window)
                for layer in shape.layers
            ]
        )

    @property
    def capped_layers(self) -> list[BudgetLayer]:
        """The layers kvcap caps, without native sliding ones."""
        return [layer for layer in self.layers if isinstance(layer, BudgetLayer)]

    @property
    def seen(self) -> int:
        """Tokens read so far."""
        return self.capped_layers[0].seen

    @property
    def held(self) -> int:
        """The most slots any head of any layer holds."""
        return max(layer.held for layer in self.capped_layers)

    @property
    def next_position(self) -> int:
        """Where the block loop reads the next token."""
        compact = self.layout.positions == "compact" and self.layout.shape.all_capped
        return self.held if compact else self.seen

    @property
    def room(self) -> int:
        """Tokens the next block may have."""
        layers = self.capped_layers
        if not self.eviction.policy.evicts:
            return min(self.block_size, min(layer.budget - layer.held for layer in layers))
        return self.block_size - max(0, *(layer.held - layer.budget for layer in layers))

    @property
    def consistent(self) -> bool:
        """Whether all layers have read the same tokens; false after a pass failed half-way."""
        return len({layer.get_seq_length() for layer in self.layers}) == 1

    @property
    def nbytes(self) -> int:
        """Exact bytes of all storage this cache holds, native sliding layers included."""
        total = 0 if self._rotation is None else self._rotation.table.untyped_storage().nbytes()
        for layer in self.layers:
            if isinstance(layer, BudgetLayer):
                total += layer.nbytes
            elif layer.is_initialized:
                total += sum(x.untyped_storage().nbytes() for x in (layer.keys, layer.values))
        return total

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use, and of what is held whatever is in use."""
        free = sum(
            layer.store.slot_bytes * (layer.store.capacity - layer.held)
            for layer in self.capped_layers
            if layer.store is not None
        )
        return self.nbytes - free

    def allocate(self, batch: int, dtype: torch.dtype, device: torch.device | str) -> BudgetCache:
        """Allocate now rather than at the first token. Returns itself."""
        shape = self.layout.shape
        like = torch.empty(batch, shape.kv_heads, 0, shape.head_size, dtype=dtype, device=device)
        for layer in self.capped_layers:
            layer.lazy_initialization(like)
        if self.layout.rotation_span:
            self.rotation(like.device)
        return self

    def rotation(self, device: torch.device) -> Rotation:
        """The table of rotations that all capped layers share."""
        if self._rotation is None:
            rope = self.layout.rope
            assert rope is not None
            assert rope.inv_freq is not None
            self._rotation = Rotation(rope.inv_freq, self.layout.rotation_span, device)
        return self._rotation

    def _check_attention(self, config: Any, positions: Positions | None) -> bool:
        """Whether the model's attention is stock, refusing what that cannot do."""
        attention = getattr(config, "_attn_implementation", None)
        stock = attention not in (None, NAME)
        load = "load the model with attn_implementation='kvcap'"
        if stock and self.eviction.needs_attention:
            raise UnsupportedModel(
                f"policy {self.eviction.name!r} works inside attention, which {attention!r} does not "
                f"show; {load}"
            )
        if stock and positions == "compact":
            raise UnsupportedModel(
                f"positions='compact' are not possible with attention {attention!r}; {load}, or "
                "use positions='true'"
            )
        return stock
