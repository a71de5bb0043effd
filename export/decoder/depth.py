"""Cuts a model of many layers down to a few, to trace or check what is alike in every layer.

Only where layers differ by their weights alone: the same modules, settings and sizes in all of
them, and the same budget.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from kvcap.export.decoder.layer import held_layers
from kvcap.export.decoder.repeat import TRACED, Numbered
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.models.module_settings import settings


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


def are_alike(model: Any, layout: CacheLayout) -> bool:
    """Return whether all layers but the first do the same, so that one can stand for the others."""
    found = layers_of(model)
    if found is None or len(found[1]) <= TRACED:
        return False
    if len(set(held_layers(layout))) > 1:
        return False
    return all(settings(layer) == settings(found[1][1]) for layer in found[1][2:])


def numbered(model: Any, prefix: str) -> Numbered:
    """Return how layers are numbered in the names of ports and weights, which begin by `prefix`."""
    found = layers_of(model)
    assert found is not None
    layers = re.escape(f"{prefix}{found[0]}")
    return Numbered(re.compile(rf"^(?:[a-z_]+|{layers})\.(\d+)(?=$|\.)"))


@contextmanager
def first_layers(model: Any, layout: CacheLayout, count: int = TRACED) -> Iterator[CacheLayout]:
    """Leave a model its first layers alone, and its config; yields the cache's layout of these."""
    found = layers_of(model)
    assert found is not None
    parent, _, name = found[0].rpartition(".")
    config, total = model.config, len(found[1])
    lists = {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == total
    }
    holder = model.get_submodule(parent)
    try:
        setattr(holder, name, found[1][:count])
        config.num_hidden_layers = count
        for key, value in lists.items():
            setattr(config, key, value[:count])
        yield replace(layout, shape=replace(layout.shape, layers=layout.shape.layers[:count]))
    finally:
        setattr(holder, name, found[1])
        config.num_hidden_layers = total
        for key, value in lists.items():
            setattr(config, key, value)
