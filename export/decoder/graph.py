"""Defines the decoder as the module that is traced: tokens and slots in, logits and a block out.

One graph serves blocks and single tokens: the axes of tokens and slots are open. It runs eagerly
too, which is what its ONNX file is checked against. What goes is decided beside it, in `evictor`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvcap.export.decoder.layer import Block, LayerPass, held_layers, lengths
from kvcap.export.graphs.portable import Portable
from kvcap.export.graphs.ports import PORTS, Port, new_port, ports_of
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.models.arguments import cache_argument
from kvcap.runtime.models.rope import Rotation

TOKENS = Port(
    "input_ids", "int64", ("batch", "tokens"), "token ids", "the block, at most block_size of them"
)
SEEN = Port("seen", "int32", (), "tokens", "tokens read before this run")
HELD = Port(
    "held",
    "int32",
    ("lengths",),
    "slots",
    "slots in use before this run, one for all layers of a budget, the largest budget first",
)
SCALES = [
    Port(
        f"{kind}_scale",
        "float32",
        ("kv_heads", "one", "head_dim"),
        "activation",
        f"what 1 in the {kind}s of the layer's slots is, for each channel",
    )
    for kind in ("key", "value")
]
TURNED = {
    "arrived": replace(PORTS["keys"], dtype="int8", meaning="keys as they were written"),
    "shifts": replace(PORTS["positions"], meaning="by how much keys are turned back since"),
}
SLIDING = {"kv_heads": "sliding_kv_heads", "head_dim": "sliding_head_dim"}
"""Names the axes of layers that slide, whose heads may be of other sizes."""
LOGITS = Port("logits", "float32", ("batch", "vocabulary"), "logits", "of the block's last token")


class RunBuffer(NamedTuple):
    """A buffer that a run needs: one of the decoder's, or of its evictor's alone."""

    name: str
    layer: int
    port: Port
    full: tuple[int, ...]  # its shape

    @property
    def present(self) -> Port:
        """Return the output port of a buffer of slots, which shares the input's memory."""
        meaning = f"{self.port.name} with the block in it: bind both to one memory"
        return replace(self.port, name=f"present_{self.port.name}", meaning=meaning)


class DecoderGraph(nn.Module):
    """A causal language model that reads a block over slots that it is given.

    Args:
        model: loaded with `attn_implementation='kvcap'`.
        layout: of the cache, whose layers are capped or slide, and whose heads hold equally many
            slots.
        slot_scales: [L, 2, K, D] of keys and values that are held in int8; None: in floats.
    """

    table: Tensor

    def __init__(self, model: Any, layout: CacheLayout, slot_scales: Tensor | None = None) -> None:
        super().__init__()
        self.model, self.layout, self.slot_scales = model, layout, slot_scales
        self.register_buffer("table", _table(layout), persistent=False)
        self.layers = held_layers(layout)
        self.state = state_of(layout, slot_scales is not None)
        self.past = [s for s in self.state if s.name in ("keys", "values")]
        counts = [HELD, SEEN] if _counts_seen(layout) else [HELD]
        scales = [] if slot_scales is None else scale_ports(len(self.layers))
        self.inputs: list[Port] = [TOKENS, *counts, *(s.port for s in self.past), *scales]
        ports = _made(layout)
        self.outputs: list[Port] = [LOGITS, *(s.present for s in self.past), *ports.values()]
        self._made = list(ports)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute `outputs` from `inputs`, in their order."""
        logits, layers = self.run(*tensors)
        buffers = (layers[s.layer].made[f"present_{s.name}"] for s in self.past)
        return (logits, *buffers, *(layers[i].made[name] for name, i in self._made))

    def run(self, *tensors: Tensor) -> Any:
        """Compute the logits [1, V] float32 of a block's last token; return them and its layers."""
        feeds = {port.name: x for port, x in zip(self.inputs, tensors, strict=True)}
        ids, held = feeds["input_ids"], feeds["held"]
        seen = feeds.get("seen")
        block = Block(self.layout, self.table, held, ids.shape[1], seen)

        def scales(layer: int) -> tuple[Tensor, Tensor] | None:
            if self.slot_scales is None:
                return None
            return feeds[f"key_scale.{layer}"], feeds[f"value_scale.{layer}"]

        layers = [
            LayerPass(block, i, feeds[f"keys.{i}"], feeds[f"values.{i}"], scales(i))
            for i in range(len(self.layers))
        ]
        # Compact positions are ranks: those behind the slots in use. Layers that slide have
        # their own tokens at true positions, and others rotate the block back to theirs.
        first = held[0] if seen is None else seen
        with Portable():
            out = self.model(
                input_ids=ids,
                position_ids=(first + torch.arange(ids.shape[1]))[None],
                **cache_argument(self.model, Cache(layers=layers)),
                use_cache=True,
                logits_to_keep=1,
            )
        return out.logits[:, -1].float(), layers

    def empty(self) -> list[Tensor]:
        """Make the inputs behind the counts as nothing was read: empty buffers, and scales."""
        buffers = [torch.zeros(s.full, dtype=self.dtype(s.port)) for s in self.past]
        return buffers + ([] if self.slot_scales is None else as_inputs(self.slot_scales))

    @property
    def counts(self) -> list[Port]:
        """Return the ports before a run's buffers: the block's tokens, and how many there are."""
        return [port for port in self.inputs if port in (TOKENS, HELD, SEEN)]

    @cached_property
    def scales(self) -> list[tuple[float, float | None]]:
        """Return each layer's factor of logits and its softcap, found by running a token."""
        shapes = [[self.sizes[axis] or 1 for axis in port.axes] for port in self.counts]
        pairs = zip(self.counts, shapes, strict=True)
        zeros = [torch.zeros(shape, dtype=self.dtype(port)) for port, shape in pairs]
        with torch.inference_mode():
            _, layers = self.run(*zeros, *self.empty())
        return [layer.scales for layer in layers]

    def dtype(self, port: Port) -> torch.dtype:
        """Return the type of a port's tensor."""
        return getattr(torch, port.dtype, self.cache)

    @property
    def cache(self) -> torch.dtype:
        """Return the type of keys and values; for slots in int8, the type they are computed in."""
        if self.slot_scales is not None:
            return torch.float32
        return cache_dtype(self.layout, self.model.dtype)

    @property
    def sizes(self) -> dict[str, int | None]:
        """Return the size of every axis by its name, None where open."""
        shape = self.layout.shape
        return {
            "batch": 1,
            "one": 1,
            "tokens": None,
            "lengths": len(lengths(self.layout)),
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_size,
            "vocabulary": shape.vocabulary,
            "window": self.layout.window_length,
            **{
                axis: size
                for layer in self.layers
                if layer.window is not None
                for axis, size in zip(SLIDING.values(), layer[-2:], strict=True)
            },
            **dict.fromkeys(s.port.axes[2] for s in self.past),
        }


def cache_dtype(layout: CacheLayout, weights: torch.dtype) -> torch.dtype:
    """Return the type of a cache's numbers for a model of this type.

    With compact positions keys are turned in place as older ones go, at times at every token:
    float16's rounding would add up, float32's is 7e-6 of a key after 10,000 evictions.
    """
    return torch.float32 if any(layout.rotates) else weights


def _table(layout: CacheLayout) -> Tensor:
    """Return cosines and sines [span, 2, R/2] of how much less a layer holds than the longest.

    Of a model that slides the inverse frequencies [R/2]: it counts further than any table.
    """
    rope = layout.rope
    if not any(layout.rotates) or rope is None or rope.inv_freq is None:
        return torch.zeros(0, 2, 0)
    if layout.shape.slides:
        return rope.inv_freq.double()
    budgets = lengths(layout)
    if len(budgets) == 1:
        return torch.zeros(0, 2, 0)
    return Rotation(rope.inv_freq, budgets[0] - budgets[-1] + layout.block_size + 1, "cpu").table


def _counts_seen(layout: CacheLayout) -> bool:
    """Return whether the model counts the tokens that were read, and not the slots in use."""
    return layout.positions != "compact" or layout.shape.slides


def scale_ports(layers: int) -> list[Port]:
    """Return the inputs that are the scales of every layer's slots."""
    return [replace(port, name=f"{port.name}.{i}") for i in range(layers) for port in SCALES]


def as_inputs(scales: Tensor) -> list[Tensor]:
    """Return scales [L, 2, K, D] in the order of `scale_ports`, [K, 1, D] each."""
    return list(scales.unsqueeze(-2).flatten(0, 1))


def state_of(layout: CacheLayout, quantised: bool = False) -> list[RunBuffer]:
    """Return everything that is kept from run to run, layer by layer, as its buffers.

    Keys that are `quantised`, and turned as older ones go, are kept once more as they were written:
    they are turned from there every time, so that no rounding adds up.
    """
    buffers, ports = list[RunBuffer](), ports_of(layout.eviction.state)
    shape, block = layout.shape, layout.block_size
    one_length = len(lengths(layout)) == 1
    for layer, held in enumerate(held_layers(layout)):
        slots = "slots" if one_length else f"slots_{held.budget}"
        rows = (1, held.kv_heads, held.budget + block)
        names = ["keys", "values"]
        if held.window is None:
            names += ["positions", *layout.eviction.state]
        for name in names + (list(TURNED) if quantised and held.rotates else []):
            port = TURNED[name] if name in TURNED else ports[name]
            if quantised and name in ("keys", "values"):
                port = replace(port, dtype="int8")
            axes = tuple(slots if axis == "slots" else axis for axis in port.axes)
            full = (*rows, held.head_size) if "head_dim" in axes else rows
            if held.window is not None:
                axes = tuple(SLIDING.get(axis, axis) for axis in axes)
            own = Port(f"{name}.{layer}", port.dtype, axes, port.unit, port.meaning)
            buffers.append(RunBuffer(name, layer, own, full))
        if (window := layout.window_length) and held.window is None:
            port = PORTS["queries"]
            axes = ("batch", "heads", "window", "head_dim")
            own = Port(f"queries.{layer}", port.dtype, axes, port.unit, port.meaning)
            full = (1, shape.heads, window, shape.head_size)
            buffers.append(RunBuffer("queries", layer, own, full))
    return buffers


def _made(layout: CacheLayout) -> dict[tuple[str, int], Port]:
    """Return the ports that a run gives an evictor besides the buffers, by name and layer."""
    ports_by_layer = dict[tuple[str, int], Port]()
    for layer in layout.shape.capped:
        if layout.eviction.policy.queries_observed != 0:
            meaning = "queries of the block, as attention saw them"
            port = replace(PORTS["queries"], name="block_queries", meaning=meaning)
            ports_by_layer["queries", layer] = _of_block(port, layer)
        if "output_norm" in layout.eviction.state:
            port = new_port("output_norm")
            ports_by_layer[port.name, layer] = _of_block(port, layer)
    return ports_by_layer


def _of_block(port: Port, layer: int) -> Port:
    """Return a layer's own port, of the block's tokens."""
    tokens = ("queries", "block")
    axes = tuple("tokens" if axis in tokens else axis for axis in port.axes)
    return replace(port, name=f"{port.name}.{layer}", axes=axes)
