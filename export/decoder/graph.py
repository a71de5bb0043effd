"""The decoder as the module that is traced: from tokens and held state to logits and kept state.

One graph serves blocks and single tokens: the axes of tokens and slots are open. It runs eagerly
too, which is what its ONNX file is checked against.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvcap.export.decoder.layer import Block, LayerPass
from kvcap.export.graphs.portable import Portable
from kvcap.export.graphs.ports import PORTS, Port, ports_of
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.models.rope import Rotation

TOKENS = Port(
    "input_ids", "int64", ("batch", "tokens"), "token ids", "the block, at most block_size of them"
)
SEEN = Port("seen", "int32", (), "tokens", "tokens read before this run")
PINNED = Port(
    "pinned", "int32", ("spans", "two"), "tokens",
    "[start, stop) in tokens read, never evicted; one row at least, [0, 0] pins nothing",
)  # fmt: skip
LOGITS = Port("logits", "float32", ("batch", "vocabulary"), "logits", "of the block's last token")


class State(NamedTuple):
    """One tensor that a run takes and gives back."""

    name: str
    layer: int
    port: Port  # as an input
    full: int  # the most that its open axis can be

    @property
    def kept(self) -> Port:
        """The port that gives it back."""
        axes = tuple(f"kept_{axis}" if axis == self.axis else axis for axis in self.port.axes)
        return Port(
            f"kept_{self.port.name}", self.port.dtype, axes, self.port.unit,
            f"what is the next run's {self.port.name}",
        )  # fmt: skip

    @property
    def axis(self) -> str:
        """The axis whose length changes from run to run, the third."""
        return self.port.axes[2]


class Decoder(nn.Module):
    """A causal language model and its evictions as one function without memory.

    Args:
        model: loaded with `attn_implementation='kvcap'`.
        layout: of the cache, whose layers are all capped and whose heads hold equally many slots.
    """

    table: Tensor

    def __init__(self, model: Any, layout: CacheLayout) -> None:
        super().__init__()
        self.model, self.layout = model, layout
        # A window longer than the budget reaches back before the first slot that is held.
        self.first = max(0, layout.window_length - min(layout.budgets))
        self.register_buffer("table", _table(layout, self.first), persistent=False)
        self.state = _state(layout)
        self.inputs: list[Port] = [TOKENS, SEEN, PINNED, *(s.port for s in self.state)]
        self.outputs: list[Port] = [LOGITS, *(s.kept for s in self.state)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`outputs` for `inputs` in order."""
        logits, layers = self.run(*tensors)
        return (logits, *(layers[s.layer].kept[s.name] for s in self.state))

    def run(self, ids: Tensor, seen: Tensor, pinned: Tensor, *held: Tensor) -> Any:
        """Logits [1, V] float32 of a block's last token, and the layers after it."""
        block = Block(self.layout, self.table, self.first, seen, pinned, ids.shape[1])
        layers = [LayerPass(block, i, {}) for i in range(len(self.layout.budgets))]
        for state, tensor in zip(self.state, held, strict=True):
            layers[state.layer].held[state.name] = tensor
        with Portable():
            out = self.model(
                input_ids=ids,
                position_ids=self._positions(ids, seen),
                past_key_values=Cache(layers=layers),
                use_cache=True,
                logits_to_keep=1,
            )
        return out.logits[:, -1].float(), layers

    def empty(self) -> list[Tensor]:
        """What is held before anything was read, in the order of `state`."""
        return [torch.zeros(self.shape(s, 0), dtype=self.dtype(s.port)) for s in self.state]

    def shape(self, state: State, length: int) -> list[int]:
        """The shape of a state whose open axis has this length."""
        return [self.sizes[axis] or length for axis in state.port.axes]

    def dtype(self, port: Port) -> torch.dtype:
        """The type of a port's tensor."""
        found: torch.dtype = getattr(torch, port.dtype, self.model.dtype)  # or of the cache
        return found

    @property
    def sizes(self) -> dict[str, int | None]:
        """Size of every axis by its name, None where open."""
        shape = self.layout.shape
        open_axes = [a for s in self.state for a in (s.axis, f"kept_{s.axis}")]
        return {
            "batch": 1, "tokens": None, "spans": None, "two": 2, "heads": shape.heads,
            "kv_heads": shape.kv_heads, "head_dim": shape.head_size,
            "vocabulary": shape.vocabulary, **dict.fromkeys(open_axes),
        }  # fmt: skip

    def _positions(self, ids: Tensor, seen: Tensor) -> Tensor:
        """Where the model rotates: at true positions, or at 0, as layers rotate by rank."""
        if self.layout.positions == "compact":
            return torch.zeros_like(ids)
        return (seen + torch.arange(ids.shape[1]))[None]


def _table(layout: CacheLayout, first: int) -> Tensor:
    """Cosines and sines [span, 2, R/2] of every position a layer can rotate to."""
    rope = layout.rope
    if not any(layout.rotates) or rope is None or rope.inv_freq is None:
        return torch.zeros(0, 2, 0)
    span = first + max(layout.budgets) + layout.block_size
    return Rotation(rope.inv_freq, span, "cpu").table


def _state(layout: CacheLayout) -> list[State]:
    """Everything a run takes and gives back, layer by layer."""
    found, ports = [], ports_of(layout.eviction.state)
    for layer, budget in enumerate(layout.budgets):
        slots = "slots" if len(set(layout.budgets)) == 1 else f"slots_{budget}"
        for name in ("keys", "values", "positions", *layout.eviction.state):
            port = ports[name]
            axes = tuple(slots if axis == "slots" else axis for axis in port.axes)
            found.append(State(name, layer, _of(port, layer, axes, layout), budget))
        if window := layout.window_length:
            axes = ("batch", "heads", "window", "head_dim")
            port = _of(PORTS["queries"], layer, axes, layout)
            found.append(State("queries", layer, port, window))
    return found


def _of(port: Port, layer: int, axes: tuple[str, ...], layout: CacheLayout) -> Port:
    """A layer's own port."""
    meaning = port.meaning
    if port.name in ("keys", "queries"):
        rotated = "at their true positions"
        if layout.rotates[layer]:
            rotated = "at position 0: the graph rotates them by rank"
        what = "keys of the slots" if port.name == "keys" else "the last queries, oldest first"
        meaning = f"{what}, rotated {rotated}"
    return Port(f"{port.name}.{layer}", port.dtype, axes, port.unit, meaning)
