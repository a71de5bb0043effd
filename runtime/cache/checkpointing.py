"""Refuses gradient checkpointing beside a capped cache, which it takes from every layer."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.arguments import cache_of


@cache
def watch_layers(kind: type[Any]) -> None:
    """Refuse what a layer made without the cache of this class that it was given.

    Transformers' layers take the cache out of their own arguments, in a condition that differs
    between versions; so what came of it is looked at.

    Args:
        kind: has a `begun`, as `BudgetCache`.
    """
    plain: Any = GradientCheckpointingLayer.__call__

    @wraps(plain)
    def call(layer: Any, *args: Any, **given: Any) -> Any:
        out = plain(layer, *args, **given)
        if layer.training and layer.gradient_checkpointing:
            past = cache_of(given)
            if isinstance(past, kind) and not past.begun:
                raise UnsupportedModel(
                    "the model's layers left the capped cache out, as they do in training with "
                    "gradient checkpointing, and a capped cache keeps no gradients: evicted tokens "
                    "have none. Call model.eval(), or train without a cap: remove() it, or pass no "
                    "BudgetCache"
                )
        return out

    GradientCheckpointingLayer.__call__ = call
