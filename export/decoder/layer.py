"""Runs one layer of the decoder's graph: appends a block and attends to all slots.

It is the runtime's cache layer without eviction, which is a graph of its own (`evictor`). Past and
present are one buffer with room for the block: the node of attention writes the block behind the
slots in use and copies nothing else. Slots lie in any order; keys are as attention sees them. A
layer that slides holds its last tokens in time order, since attention cuts its window by order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvcap.export.decoder.attention import group_attention
from kvcap.export.graphs.forms import form_of, graph_part
from kvcap.export.graphs.shape import Shape
from kvcap.policies.base import Logits
from kvcap.runtime.attention.masks import Slots
from kvcap.runtime.cache.layer import AttendedLayer
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.errors import NotExportable
from kvcap.runtime.models.output_projection import output_projection
from kvcap.runtime.models.rope import rotate, rotations


class HeldLayer(NamedTuple):
    """A layer as the graph holds it: its budget, its window if it slides, and its heads."""

    budget: int  # slots that stay after a block
    window: int | None  # the last tokens that it sees and holds; None: a policy chooses
    rotates: bool  # its keys count by their rank
    kv_heads: int
    head_size: int


def held_layers(layout: CacheLayout) -> list[HeldLayer]:
    """Return every layer's slots in order; each layer is capped or has a sliding window."""
    layers, capped = [], zip(layout.budgets, layout.rotates, strict=True)
    for layer in layout.shape.layers:
        sizes = layer.kv_heads, layer.head_size
        if layer.kind == "capped":
            budget, rotates = next(capped)
            layers.append(HeldLayer(budget, None, rotates, *sizes))
        else:
            assert layer.window is not None
            # With the token that is read they are the window's.
            layers.append(HeldLayer(max(1, layer.window - 1), layer.window, False, *sizes))
    return layers


class Block:
    """A block of tokens that one run reads, as all layers see it.

    Args:
        layout: of the cache.
        table: cosines and sines [span, 2, R/2] of positions from 0 on; of a model that slides
            the inverse frequencies [R/2] of capped layers, in float64.
        held: slots in use before the block, int32 [lengths], one for each of `lengths`.
        length: tokens of the block.
        seen: tokens read before it, int32 []; None: the model counts by the longest layers' slots.
    """

    def __init__(
        self, layout: CacheLayout, table: Tensor, held: Tensor, length: int, seen: Tensor | None
    ) -> None:
        self.layout, self.table, self.held, self.length = layout, table, held, length
        self.lengths, self.seen = lengths(layout), seen
        self._last: dict[int, Tensor] = {}
        self._ahead: dict[int, Tensor] = {}

    def last(self, budget: int) -> Tensor:
        """Return the block's last slot in layers of this budget, int32 [1]; made once."""
        if budget not in self._last:
            index = self.lengths.index(budget)
            self._last[budget] = self.held[index : index + 1] + (self.length - 1)
        return self._last[budget]

    def ahead(self, budget: int) -> Tensor | None:
        """Return how far behind a layer's own slots the block was read, as cosines and sines.

        They are [1, 2, R/2]; None for layers that hold as many as the longest, by which the model
        counts. Where layers slide, it counts the tokens that were read, which is any number.
        """
        index = self.lengths.index(budget)
        if self.seen is None:
            return self.table.index_select(0, self.held[:1] - self.held[index]) if index else None
        if budget not in self._ahead:
            self._ahead[budget] = rotations(self.table, self.seen - self.held[index : index + 1])
        return self._ahead[budget]


def lengths(layout: CacheLayout) -> list[int]:
    """Return the budgets that layers have, each once, the largest first.

    Layers of one budget hold equally many slots.
    """
    return sorted({layer.budget for layer in held_layers(layout)}, reverse=True)


class LayerPass(AttendedLayer):
    """A block that goes through one layer: transformers' cache layer, and a `CappedLayer`.

    Args:
        block: the run.
        index: of the layer.
        keys: the layer's buffer [1, K, slots, D], with room for the block.
        values: likewise.
        scales: of buffers of int8, [K, 1, D] of keys and of values; None: they are floats.
    """

    def __init__(
        self,
        block: Block,
        index: int,
        keys: Tensor,
        values: Tensor,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.block, self.index, self.past, self.slot_scales = block, index, (keys, values), scales
        self.budget, self.window, self.rotates, *_ = held_layers(block.layout)[index]
        self.made: dict[str, Tensor] = {}  # the layer's outputs by name

    def get_seq_length(self) -> int:
        """Return 0: nothing is counted here, as positions are given."""
        return 0

    def get_mask_sizes(self, _: int | Tensor) -> tuple[int, int]:
        """Have transformers make no mask, whatever the sizes: `attend` is causal by itself."""
        return Slots.of(0), 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in a block [1, K, T, D]; the attention function finds the layer on the keys."""
        self.arrived = self._aligned(key_states), value_states
        return self.carried_by(key_states), value_states

    def take_back(self) -> None:
        """Keep nothing of a run, so that there is nothing to undo."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        logits: Logits,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Attend by the block to all slots and itself. [1, H, T, D] -> [1, H, T, D]."""
        if logits.further:
            raise NotExportable(f"no graph knows {' and '.join(logits.further)} of its attention")
        block, (keys, values), query = self.block, self.arrived, self._aligned(query)
        last, self.scales = block.last(self.budget), (logits.scale, logits.softcap)
        out, self.made["present_keys"], self.made["present_values"] = group_attention(
            query,
            keys,
            values,
            *self.past,
            last,
            logits.scale,
            logits.softcap or 0.0,
            self.slot_scales,
            self.window,
            logits.sinks,
        )
        if self.window is not None:
            return out
        if block.layout.eviction.policy.queries_observed != 0:
            kind = self.past[0].dtype if self.slot_scales is None else torch.float32
            self.made["queries"] = query.to(kind)
        self.made |= self._state(module)
        return out

    def _aligned(self, x: Tensor) -> Tensor:
        """Rotate keys or queries [1, h, T, D] to the positions behind this layer's tokens."""
        rope = self.block.layout.rope
        ahead = self.block.ahead(self.budget) if self.rotates else None
        if rope is None or ahead is None:
            return x
        return rotate(x, ahead, back=True, interleaved=rope.interleaved)

    def _state(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the state that arriving tokens begin with, by `new_NAME`, [1, K, T] each."""
        layout, model = self.block.layout, self.block.layout.shape
        shape = Shape(model.kv_heads, model.heads, model.head_size, budget=self.budget)
        form = form_of(graph_part(layout.eviction), shape)
        if not form.update_inputs:
            return {}
        arrived = dict(zip(("new_keys", "new_values"), self.arrived, strict=True))
        if "output_projection" in form.update_inputs:
            arrived["output_projection"] = output_projection(module, model)
        updated = zip(form.update_outputs(), form.update(arrived), strict=True)
        return {port.name: tensor for port, tensor in updated}
