"""Asks the policy for one layer: which tensors it reads, and which tokens of a segment stay.

What it reads is found out once, so that nobody asks for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from kvcap import kernels
from kvcap.policies import Observation
from kvcap.policies.base import Expansion, Logits
from kvcap.policies.base.component import ATTENTION_VIEWS
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.cache.pool import Segment
from kvcap.runtime.cache.regions import Regions
from kvcap.runtime.models.output_projection import output_projection
from kvcap.runtime.types import Span

EVERY = slice(None)


class AttentionCall(NamedTuple):
    """A record of an attention call's arguments besides queries, keys and values."""

    module: nn.Module | None = None
    logits: Logits = Logits()
    expansion: Expansion | None = None  # of slots that hold latents


class LayerPolicy:
    """A layer's view of the cache's eviction: what it reads, and which tokens it pins.

    Args:
        layout: of the cache.
        index: of the layer among the capped ones.
        pinned_spans: tokens [start, stop) that are never evicted; the cache changes them in place.
        regions: parts of the conversation that leave before or after others, changed likewise.
    """

    def __init__(
        self, layout: CacheLayout, index: int, pinned_spans: Sequence[Span], regions: Regions
    ) -> None:
        self.eviction, self.layout, self.index = layout.eviction, layout, index
        self.pinned_spans, self.regions = pinned_spans, regions
        eviction, policy = self.eviction, self.eviction.policy
        self.has_state = bool(eviction.state)
        """Says that numbers are kept of every slot, which each block changes."""
        self.reads_queries = policy.queries_observed != 0
        self.reads_values = bool(eviction.observes & {"values", "output"})
        self.reads_keys = bool(eviction.observes & (ATTENTION_VIEWS | {"keys"}))
        self.rotates_keys_itself = (
            kernels.uses_stored_keys(policy) and len(eviction.components) == 1
        )
        """Says that its kernel rotates keys as it reads them, and nothing else looks at any."""
        self.reads_projection = "output_projection" in eviction.observes
        self.reads_all_output = policy.queries_observed is None and "output" in eviction.observes
        """Says that it looks at attention's output for all queries of a block."""

    def pins(self, segment: Segment) -> tuple[int, int]:
        """Return how many first and how many newest tokens of a segment are never evicted."""
        sinks, recents = self.eviction.pins_of(self.placed(segment))
        return max([sinks, *(stop for _, stop in segment.first_pinned)]), recents

    def placed(self, segment: Segment) -> Observation:
        """Observe a segment's place and budget alone, for what depends on no more."""
        none = segment.positions
        return Observation(
            none,
            none,
            none,
            0,
            segment.target_length,
            layer=self.index,
            first_head=segment.head,
            pinned_spans=tuple(self.pinned_spans),
        )

    def projection(self, call: AttentionCall, heads: slice = EVERY) -> Tensor | None:
        """Return the output projection [k, G, D, hidden] of some KV heads; None without a module.

        Raises:
            UnsupportedModel: its weights cannot be read.
        """
        module = call.module
        return None if module is None else output_projection(module, self.layout.shape)[heads]
