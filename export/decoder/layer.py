"""One layer of the decoder's graph: append, attend, score, evict, all on tensors of open length.

The runtime's cache layer without its buffers: what is held comes in, what stays goes out. Slots lie
in time order, so that with compact positions a slot's index is its position, and keys are kept as
the model made them at position 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvcap.export.graphs.forms import Traced, form_of, graph_part
from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.stages import Evict, rows_of, survivors, take
from kvcap.runtime.attention.masks import Slots
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.models.output_projection import output_projection
from kvcap.runtime.models.rope import rotate


class Frame(NamedTuple):
    """Where layers that hold equally many slots stand in a block."""

    slots: int  # n, the block's included
    ahead: Tensor  # [T, n], slots of tokens that a token may not see
    turns: Tensor  # cosines and sines [o + n, 2, R/2] of positions from -o to the last slot's
    first: int  # o


class Block:
    """What all layers of one run have in common.

    Args:
        layout: of the cache.
        table: cosines and sines [span, 2, R/2] of positions from -`first` on.
        first: positions before the oldest slot's, which a window of queries may reach.
        seen: tokens read before the block, int32 [].
        spans: of tokens that are never evicted, [P, 2].
        length: tokens of the block.
    """

    def __init__(
        self, layout: CacheLayout, table: Tensor, first: int, seen: Tensor, spans: Tensor,
        length: int,
    ) -> None:  # fmt: skip
        self.layout, self.table, self.first, self.spans = layout, table, first, spans
        self.length, self.after = length, seen + length
        self.times = seen + torch.arange(length, dtype=torch.int32)  # [T]
        self._frames: dict[int, Frame] = {}

    def frame(self, budget: int, slots: int) -> Frame:
        """Of layers of this budget, which hold `slots`; made once."""
        if budget not in self._frames:
            age = torch.arange(slots) - (slots - self.length)
            ahead = age > torch.arange(self.length)[:, None]
            turns = self.table[: slots + self.first]
            self._frames[budget] = Frame(slots, ahead, turns, self.first)
        return self._frames[budget]


class LayerPass(CacheLayerMixin):  # type: ignore[misc]
    """One block going through one layer; a cache layer of transformers, and a `CappedLayer`.

    Args:
        block: the run.
        index: of the layer.
        held: its state by name, [1, K, n, ...] per slot and `queries` [1, H, w, D].
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, block: Block, index: int, held: dict[str, Tensor]) -> None:
        super().__init__()
        self.block, self.index, self.held = block, index, held
        self.budget = block.layout.budgets[index]
        self.rotates = block.layout.rotates[index]  # its keys count where their slot lies
        self.kept: dict[str, Tensor] = {}
        self.worth = block.times  # what slots were chosen by [1, K, n], after the block

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to allocate."""

    def get_seq_length(self) -> int:
        """Nothing is counted here: positions are given."""
        return 0

    def get_mask_sizes(self, _: int | Tensor) -> tuple[int, int]:
        """No mask is made by transformers, whatever the sizes: `attend` is causal by itself."""
        return Slots.of(0), 0

    def get_max_cache_shape(self) -> int:
        """-1: no end."""
        return -1

    get_max_length = get_max_cache_shape

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a block [1, K, T, D]; the attention function finds the layer on the keys."""
        arriving = {
            "keys": key_states,
            "values": value_states,
            "positions": self.block.times.expand(1, key_states.shape[1], -1),
        }
        self.slots = {name: torch.cat((self.held[name], new), 2) for name, new in arriving.items()}
        keys = key_states.view_as(key_states)
        keys.kvcap_layer = self  # type: ignore[attr-defined]
        return keys, value_states

    def take_back(self) -> None:
        """Nothing of a run is kept."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        scaling: float,
        softcap: float | None,
        position_ids: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of the block over all slots, then eviction. [1, H, T, D] -> [1, H, T, D]."""
        assert sinks is None, "models with sink logits are refused"
        frame = self.block.frame(self.budget, self.slots["keys"].shape[2])
        keys = self._rotated(self.slots["keys"], frame.turns[frame.first :])
        queries = self._rotated(query, frame.turns[-self.block.length :])
        out = _attention(queries, keys, self.slots["values"], frame.ahead, scaling, softcap)
        self._evict(module, query, keys, frame, self._form(scaling, softcap))
        return out

    def _form(self, scaling: float, softcap: float | None) -> Traced:
        """How the layer's scores are computed."""
        layout, model = self.block.layout, self.block.layout.shape
        shape = Shape(
            model.kv_heads, model.heads, model.head_size, block=layout.block_size,
            budget=self.budget, scaling=scaling, softcap=softcap,
        )  # fmt: skip
        return form_of(graph_part(layout.eviction), shape)

    def _rotated(self, x: Tensor, turns: Tensor) -> Tensor:
        """Keys or queries [1, h, n, D] at the positions of the angles [n, 2, R/2]."""
        rope = self.block.layout.rope
        if not self.rotates or rope is None:
            return x
        return rotate(x, turns, interleaved=rope.interleaved)

    def _evict(
        self, module: nn.Module, query: Tensor, keys: Tensor, frame: Frame, form: Traced
    ) -> None:
        """Score by the keys as attention saw them, select, gather everything a slot has."""
        given = {**self.slots, "keys": keys, "seen": self.block.after, "pinned": self._pinned()}
        if (window := self._window(query)) is not None:
            given["queries"] = self._rotated(window, frame.turns[-window.shape[2] :])
        given |= self._state(module, form)
        obs = form.observe(given)
        self.worth = Evict(form).worth(given, obs)
        stays = torch.sym_min(frame.slots, self.budget)
        keep = survivors(self.worth, self.slots["positions"], stays)
        rows = rows_of(keep, frame.slots)
        stored = {**self.slots, **{name: given[name] for name in form.slot_state}, **obs.state}
        self.kept |= {name: take(tensor, rows, keep) for name, tensor in stored.items()}

    def _window(self, query: Tensor) -> Tensor | None:
        """The queries that the policy observes, as the model made them; the last ones are kept."""
        layout = self.block.layout
        count = layout.eviction.policy.queries_observed
        if count == 0:
            return None
        if count is None:
            return query
        if layout.window_length:
            query = torch.cat((self.held["queries"], query), 2)
        window = query[:, :, query.shape[2] - torch.sym_min(query.shape[2], count) :]
        if layout.window_length:
            self.kept["queries"] = window
        return window

    def _state(self, module: nn.Module, form: Traced) -> dict[str, Tensor]:
        """State of all slots: what was held, and that of the arriving tokens, or 0."""
        length, new = self.block.length, dict[str, Tensor]()
        if form.update_inputs:
            arriving = {f"new_{name}": x[:, :, -length:] for name, x in self.slots.items()}
            if "output_projection" in form.update_inputs:
                projection = output_projection(module, self.block.layout.shape)
                arriving["output_projection"] = projection
            made = zip(form.update_outputs(), form.update(arriving), strict=True)
            new = {port.name.removeprefix("new_"): tensor for port, tensor in made}
        found = {}
        for name in form.slot_state:
            held = self.held[name]
            fresh = new.get(name, held.new_zeros(*held.shape[:2], length))
            found[name] = torch.cat((held, fresh), 2)
        return found

    def _pinned(self) -> Tensor:
        """Slots of tokens that lie in a span. Bool [1, K, n]."""
        start, stop = self.block.spans.unbind(1)  # [P]
        positions = self.slots["positions"][..., None]
        return ((positions >= start) & (positions < stop)).any(-1)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, ahead: Tensor, scaling: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Attention of a block over n slots but those `ahead` [T, n]; the group's queries are rows.

    Query [1, H, T, D], keys and values [1, K, n, D] -> [1, H, T, D].
    """
    q = (query * scaling).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # [1, K, G·T, D]
    z = torch.matmul(q, keys.mT).float().unflatten(2, (-1, query.shape[2]))  # [1, K, G, T, n]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    weights = z.masked_fill(ahead, float("-inf")).softmax(-1).to(values.dtype)
    return torch.matmul(weights.flatten(2, 3), values).view(query.shape)
