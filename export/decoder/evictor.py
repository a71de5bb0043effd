"""Builds the evictor of a decoder's layer: which slots go, and the state kept of slots.

One graph for all layers that are alike, run for one after the other. It reads the layer's buffers
as they are and gives out numbers of slots; whoever runs it moves what stays into their places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvcap.export.decoder.attention import MOST
from kvcap.export.decoder.graph import SCALES, DecoderGraph
from kvcap.export.graphs.forms import form_of, graph_part
from kvcap.export.graphs.ports import PORTS, Port, next_port
from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.stages import Evict, evicted
from kvcap.export.graphs.trace import IR_VERSION, program_of, slim
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.cache.layout import CacheLayout

BUFFERS = ("keys", "values")  # inputs with free slots behind those in use
STAY = Port("stay", "int32", (), "slots", "slots of each head that stay, at most all there are")
SPANS = Port(
    "pinned",
    "int32",
    ("spans", "two"),
    "tokens",
    "[start, stop) in tokens read, never evicted; one row at least, [0, 0] pins nothing",
)
GONE = Port("gone", "int64", ("batch", "kv_heads", "count"), "slots", "slots that go, in no order")


class EvictionGraph(nn.Module):
    """A module that scores one layer's slots and selects those that go.

    Args:
        layout: of the cache.
        layer: its index among capped layers; the graph serves every layer of its budget and
            attention.
        scaling: of its logits.
        softcap: of its logits, if they have one.
        dtype: of keys and values, or of what they are computed in.
        quantised: whether slots hold int8, with scales.
    """

    def __init__(
        self,
        layout: CacheLayout,
        layer: int,
        scaling: float,
        softcap: float | None,
        dtype: torch.dtype,
        quantised: bool = False,
    ) -> None:
        super().__init__()
        model, self.layout, self.layer, self.cache = layout.shape, layout, layer, dtype
        self.quantised = quantised
        shape = Shape(
            model.kv_heads,
            model.heads,
            model.head_size,
            block=layout.block_size,
            budget=layout.budgets[layer],
            scaling=scaling,
            softcap=softcap,
        )
        self.form = form_of(graph_part(layout.eviction), shape)
        scoring = {port.name: port for port in self.form.inputs()}
        first = {name: PORTS[name] for name in ("keys", "positions", "seen")}
        ports = {**first, **scoring}
        scales = [port for port in SCALES if quantised and _scaled(port) in ports]
        slots = [_capacity(port, quantised) for port in ports.values()]
        self.inputs = [*slots, *scales, STAY, SPANS]
        states = layout.eviction.policy.state
        self.outputs = [GONE, *(next_port(self.form.ports[name]) for name in states)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute `outputs` from `inputs`, in their order."""
        return self.run(*tensors)[0]

    def run(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Compute the outputs; return them and the worth of every slot [1, K, n], which decided."""
        feeds = {port.name: x for port, x in zip(self.inputs, tensors, strict=True)}
        positions, spans = feeds["positions"], feeds["pinned"]
        slots = positions.shape[-1]
        for name in BUFFERS:
            if name in feeds:
                torch._check(slots <= feeds[name].shape[2])
                feeds[name] = feeds[name][:, :, :slots]
                if self.quantised:
                    feeds[name] = feeds[name].float() * feeds[f"{name[:-1]}_scale"]
        inside = (positions[..., None] >= spans[:, 0]) & (positions[..., None] < spans[:, 1])
        feeds["pinned"] = inside.any(-1)
        worth, state = Evict(self.form).decided(feeds)
        stay: Any = feeds["stay"].item()
        torch._check(stay >= 1)
        torch._check(stay <= slots)
        return (evicted(worth, positions, stay), *state.values()), worth

    @property
    def sizes(self) -> dict[str, int | None]:
        """Return the size of every axis by its name, None where open."""
        model = self.layout.shape
        return {
            "batch": 1,
            "one": 1,
            "kv_heads": model.kv_heads,
            "heads": model.heads,
            "two": 2,
            "head_dim": model.head_size,
            **dict.fromkeys(("slots", "capacity", "spans", "count")),
            "queries": 1 if self.layout.eviction.policy.queries_observed == 1 else None,
        }

    def example(self) -> list[Tensor]:
        """Make inputs to trace on, of lengths that no trace freezes: neither 0 nor 1 nor equal."""
        draws = torch.Generator().manual_seed(0)
        lengths = {"slots": 11, "capacity": 17, "spans": 2, "queries": 3}
        counts = {"seen": 23, "stay": 7}

        def example_of(port: Port) -> Tensor:
            if port.name in counts:
                return torch.tensor(counts[port.name], dtype=torch.int32)
            shape = [self.sizes[axis] or lengths[axis] for axis in port.axes]
            if port.name == "positions":
                return torch.arange(11, dtype=torch.int32).expand(shape).contiguous()
            tensor = torch.rand(shape, generator=draws)
            if port.dtype == "int8":
                tensor = tensor * MOST
            return tensor.to(getattr(torch, port.dtype, self.cache))

        return [example_of(port) for port in self.inputs]


def _capacity(port: Port, quantised: bool) -> Port:
    """Return a layer's port; a buffer is given with all its slots, in use or not."""
    if port.name not in BUFFERS:
        return port
    axes = tuple("capacity" if axis == "slots" else axis for axis in port.axes)
    dtype = "int8" if quantised else port.dtype
    return Port(port.name, dtype, axes, port.unit, f"{port.meaning}, and those not in use")


def _scaled(port: Port) -> str:
    """Return the buffer that a scale belongs to."""
    return f"{port.name.partition('_')[0]}s"


def evictors_of(decoder: DecoderGraph) -> list[tuple[EvictionGraph, list[int]]]:
    """Make the evictors of a decoder, each with the layers it serves by their index in the model.

    Layers that slide have none: their oldest tokens go.
    """
    layout, evictors = decoder.layout, dict[Any, tuple[EvictionGraph, list[int]]]()
    dtype, quantised = decoder.cache, decoder.slot_scales is not None
    for index, layer in enumerate(layout.shape.capped):
        scaling, softcap = decoder.scales[layer]
        alike = layout.budgets[index], scaling, softcap
        if alike not in evictors:
            evictors[alike] = EvictionGraph(layout, index, scaling, softcap, dtype, quantised), []
        evictors[alike][1].append(layer)
    return list(evictors.values())


def trace(evictor: EvictionGraph) -> Any:
    """Trace an evictor; return the stripped onnx.ModelProto."""
    open_axes = {
        axis: torch.export.Dim.AUTO for axis, size in evictor.sizes.items() if size is None
    }
    program = program_of(evictor, evictor.inputs, evictor.example(), open_axes)
    model = program.model_proto
    model.ir_version = min(model.ir_version, IR_VERSION)
    ports = (*evictor.inputs, *evictor.outputs)
    slim(model, [port.name for port in evictor.outputs], {port.name: port.axes for port in ports})
    library("onnx.checker").check_model(model)
    return model
