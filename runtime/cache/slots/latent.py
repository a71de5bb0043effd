"""Holds one layer's slots of latents, and attends to them in plain PyTorch.

Queries are taken to the latents, or the slots are expanded for them, whichever costs less.
"""

from __future__ import annotations

from torch import Tensor

from kvcap.runtime.attention.latents import absorbed, attend_absorbed, attend_expanded
from kvcap.runtime.cache.slots.eager import EagerSlots
from kvcap.runtime.cache.slots.policy import AttentionCall
from kvcap.runtime.cache.step import ForwardContext, PendingBlock


class LatentSlots(EagerSlots):
    """An engine that works on a layer's slots of latents, one segment after the other."""

    SHOWS_OUTPUT = False

    def attend(
        self, query: Tensor, block: PendingBlock, call: AttentionCall, shown: Tensor | None = None
    ) -> Tensor:
        """Attend with queries [B, H, T, r + nope], then evict; returns [B, H, T, v].

        The policy observes queries as they are taken to the latents.
        """
        assert call.expansion is not None
        query, expands = query[:, :, : block.length], self._expands(block.length)
        if not expands or self.policy.reads_queries:
            shown = absorbed(query, call.expansion)
        return super().attend(query if expands or shown is None else shown, block, call, shown)

    def _expands(self, tokens: int) -> bool:
        """Return whether slots are expanded for so many queries."""
        layout = self.policy.layout
        latent, slots = layout.shape.latent, layout.budget_tokens + layout.block_size
        assert latent is not None
        return latent.expands(tokens, slots)

    def _over_segment(
        self,
        index: int,
        query: Tensor,
        keys: list[Tensor],
        values: list[Tensor] | None,
        call: AttentionCall,
        context: ForwardContext,
    ) -> Tensor:
        assert call.expansion is not None
        over = attend_expanded if self._expands(query.shape[2]) else attend_absorbed
        return over(query, keys[index], call.expansion, call.logits)
