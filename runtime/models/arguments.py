"""Names the argument by which a model takes its cache.

Transformers 5.24 calls it `cache`, which was `past_key_values` before; code that comes with a
model's weights may keep the older name.
"""

from __future__ import annotations

import inspect
from functools import cache as remembered
from typing import Any

from transformers import GenerationMixin

CACHE_NAMES = ("cache", "past_key_values")  # the newer first


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return the cache as the argument of a call, under the name that the model's forward has.

    Args:
        model: a model of transformers, or a part of one that takes a cache.
        cache: what it is given.
    """
    kind: Any = type(model)
    return {cache_name(kind): cache}


@remembered
def cache_name(kind: type) -> str:
    """Return `cache` or `past_key_values`, whichever the forward of this class of models takes.

    For a forward that names neither, such as those around another model, it is this version's name.
    """
    return _among(getattr(kind, "forward", None) or kind.__call__) or GENERATION


def cache_of(arguments: dict[str, Any]) -> Any | None:
    """Return the cache among the arguments of a call, by either name; None without one."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def _among(function: Any) -> str | None:
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


GENERATION = _among(GenerationMixin.prepare_inputs_for_generation) or CACHE_NAMES[1]
"""Names the argument by which this version's `generate` takes a cache."""
