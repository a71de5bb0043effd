"""Lists all inputs and outputs of graphs, with their names, types, axes, units and meanings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcap.export.graphs.shape import Shape

DYNAMIC = ("slots", "queries", "block", "gone", "hidden")  # axes that may be left open
CACHE = "cache"  # the type of the cache: float32 or float16

_HEAD = ("batch", "kv_heads")
_SLOT = (*_HEAD, "slots")
_ROTATED = "as attention saw them: rotated, at today's positions"


@dataclass(frozen=True)
class Port:
    """An input or output of a graph, which has a name, a type and named axes."""

    name: str
    dtype: str  # float32, int32, bool, or CACHE
    axes: tuple[str, ...]
    unit: str
    meaning: str

    def type_in(self, dtype: str) -> str:
        """Return the element type in a graph whose cache is of type `dtype`."""
        return dtype if self.dtype == CACHE else self.dtype

    def as_dict(self, dtype: str, sizes: dict[str, int | None]) -> dict[str, Any]:
        """Describe the port for a manifest; an open axis has its name in place of a size."""
        axes = [{"name": axis, "size": sizes[axis] or axis} for axis in self.axes]
        return {
            "name": self.name,
            "dtype": self.type_in(dtype),
            "axes": axes,
            "unit": self.unit,
            "meaning": self.meaning,
        }


def _table(*ports: Port) -> dict[str, Port]:
    return {port.name: port for port in ports}


PORTS = _table(
    Port("keys", CACHE, (*_SLOT, "head_dim"), "activation", f"keys of the slots, {_ROTATED}"),
    Port("values", CACHE, (*_SLOT, "head_dim"), "activation", "values of the slots"),
    Port("positions", "int32", _SLOT, "tokens", "each slot's place in the conversation, from 0"),
    Port("seen", "int32", (), "tokens", "tokens read so far, the newest block's included"),
    Port(
        "queries",
        CACHE,
        ("batch", "heads", "queries", "head_dim"),
        "activation",
        f"the last queries, oldest first, {_ROTATED}; never more than tokens were read",
    ),
    Port(
        "accumulated",
        "float32",
        _SLOT,
        "attention",
        "what this graph returned for the slot last time, 0 for a new one",
    ),
    Port(
        "output_norm",
        "float32",
        _SLOT,
        "activation",
        "mean |v W_O|1 of the slot's value, from the update graph, kept with the slot",
    ),
    Port(
        "inverse_norms",
        "float32",
        _SLOT,
        "1/activation",
        "1/|k| of the slot's key, from the update graph, kept with the slot",
    ),
    Port(
        "anchor",
        "float32",
        (*_HEAD, "head_dim"),
        "activation",
        "sum of what the slots hold: their keys, or unit keys where anchor=unit_mean",
    ),
    Port("pinned", "bool", _SLOT, "1", "slots that stay whatever their score"),
    Port("budget", "int32", (), "slots", "slots of each head that stay"),
    Port("new_keys", CACHE, (*_HEAD, "block", "head_dim"), "activation", f"arriving, {_ROTATED}"),
    Port("new_values", CACHE, (*_HEAD, "block", "head_dim"), "activation", "arriving values"),
    Port("gone_keys", CACHE, (*_HEAD, "gone", "head_dim"), "activation", "evicted, 0 if none"),
    Port(
        "output_projection",
        CACHE,
        ("kv_heads", "groups", "head_dim", "hidden"),
        "1",
        "the layer's W_O, transposed and cut by query head",
    ),
)


def ports_of(state: Mapping[str, torch.dtype]) -> dict[str, Port]:
    """Return all input ports, and one for each `state` that a policy keeps per slot, by name."""
    again = "what this graph returned for the slot last time, 0 for a new one"
    types = {name: str(dtype).removeprefix("torch.") for name, dtype in state.items()}
    return {name: Port(name, types[name], _SLOT, "1", again) for name in types} | PORTS


def scores_port() -> Port:
    """Return the output port that every score graph has."""
    return Port("scores", "float32", _SLOT, "see formula", "worth of every slot, higher is kept")


def kept_port(port: Port) -> Port:
    """Return the output port `kept_NAME` of a slot's property, over the slots that stay."""
    axes = tuple("kept" if axis == "slots" else axis for axis in port.axes)
    return Port(f"kept_{port.name}", port.dtype, axes, port.unit, f"{port.name} of the slots kept")


def next_port(port: Port) -> Port:
    """Return the output port `next_NAME` of a state, with its value after the block."""
    return Port(f"next_{port.name}", port.dtype, port.axes, port.unit, f"{port.name}, updated")


def new_port(name: str) -> Port:
    """Return the output port `new_NAME` of a state, for the tokens that arrive in the block."""
    port = PORTS[name]
    axes = tuple("block" if axis == "slots" else axis for axis in port.axes)
    return Port(f"new_{name}", port.dtype, axes, port.unit, f"{name} of the arriving tokens")


def sizes(shape: Shape, queries: int | None) -> dict[str, int | None]:
    """Return the size of every axis, None if it is open.

    Args:
        shape: the layer's sizes.
        queries: how many of the last queries the policy observes; None: all of the block.
    """
    static = shape.slots is not None
    count, block = shape.block if queries is None else queries, None
    if shape.slots is not None:
        count, block = min(count, shape.slots), min(shape.block, shape.slots)
    return {
        "batch": shape.batch,
        "kv_heads": shape.kv_heads,
        "heads": shape.heads,
        "groups": shape.groups,
        "head_dim": shape.head_dim,
        "slots": shape.slots,
        "queries": count if static or count == 1 else None,
        "block": block,
        "gone": block,
        "hidden": None,
        "kept": None if shape.slots is None else min(shape.budget, shape.slots),
    }
