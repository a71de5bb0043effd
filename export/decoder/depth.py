"""Cuts a model of many layers down to its first few, which show what every layer does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from kvcap.export.decoder.layer import held_layers
from kvcap.export.decoder.repeat import Numbered
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.models.module_settings import settings

LEAST = 3  # layers of a model that is cut down: the first, and two to compare


def layers_of(model: Any) -> tuple[str, nn.ModuleList] | None:
    """Find a model's list of layers; return its name and the list, or None where none is clear."""
    count = model.config.num_hidden_layers
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    name = min(lists, key=lambda name: name.count("."), default=None)
    return None if name is None else (name, lists[name])


def kinds_of(model: Any, layout: CacheLayout) -> list[int]:
    """Number the kinds of a model's layers; return each layer's.

    Layers of one kind differ by their weights alone: they have the same modules, settings and
    sizes, and hold the same number of slots. Where layers cannot be found, each is its own kind.
    """
    named_layers, held = layers_of(model), held_layers(layout)
    if named_layers is None:
        return list(range(len(held)))
    numbers = dict[Any, int]()
    facts = zip(map(settings, named_layers[1]), held, strict=True)
    return [numbers.setdefault(fact, len(numbers)) for fact in facts]


def enough(kinds: Sequence[int]) -> int | None:
    """Return how many first layers have a layer of every kind between two of one kind.

    These are the second and the last of them. The first layer counts for no kind, as it computes
    what all share. None: there are no such layers, or they are all.
    """
    for count in range(LEAST, len(kinds)):
        between = set(kinds[1 : count - 1])
        if between == set(kinds[1:]) and kinds[count - 1] == kinds[1]:
            return count
    return None


def numbered(model: Any, prefix: str) -> Numbered:
    """Return how layers are numbered in the names of ports and weights, which begin by `prefix`."""
    named_layers = layers_of(model)
    assert named_layers is not None
    layers = re.escape(f"{prefix}{named_layers[0]}")
    return Numbered(re.compile(rf"^(?:[a-z_]+|{layers})\.(\d+)(?=$|\.)"))


@contextmanager
def first_layers(model: Any, layout: CacheLayout, count: int) -> Iterator[CacheLayout]:
    """Leave a model its first layers alone, and its config; yields the cache's layout of these."""
    named_layers = layers_of(model)
    assert named_layers is not None
    parent, _, name = named_layers[0].rpartition(".")
    config, total = model.config, len(named_layers[1])
    lists = {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == total
    }
    holder = model.get_submodule(parent)
    try:
        setattr(holder, name, named_layers[1][:count])
        config.num_hidden_layers = count
        for key, value in lists.items():
            setattr(config, key, value[:count])
        yield replace(layout, shape=replace(layout.shape, layers=layout.shape.layers[:count]))
    finally:
        setattr(holder, name, named_layers[1])
        config.num_hidden_layers = total
        for key, value in lists.items():
            setattr(config, key, value)
