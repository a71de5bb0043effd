"""One layer of the decoder's graph: append, attend, score, evict, all on tensors of open length.

The same as `runtime.budget_layer` without its buffers: what is held comes in, what stays goes out.
Slots lie in time order, so that with compact positions a slot's index is its position, and keys
are kept as the model made them at position 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvcap.export.forms import Traced, form_of, graph_part
from kvcap.export.graphs import Evict, rows_of, survivors, take
from kvcap.export.shape import Shape
from kvcap.runtime.layout import CacheLayout
from kvcap.runtime.projection import output_projection


@dataclass(frozen=True)
class LayerPlan:
    """What is the same for every block of one layer."""

    layout: CacheLayout
    index: int
    table: Tensor  # cosines and sines [span, 2, R/2]
    origin: int  # its row of the oldest slot

    @property
    def budget(self) -> int:
        """Slots that stay."""
        return self.layout.budgets[self.index]

    @property
    def rotates(self) -> bool:
        """Whether its keys count where their slot lies."""
        return self.layout.rotates[self.index]

    def form(self, scaling: float, softcap: float | None) -> Traced:
        """How its scores are computed."""
        model = self.layout.shape
        shape = Shape(
            model.kv_heads,
            model.heads,
            model.head_size,
            block=self.layout.block_size,
            budget=self.budget,
            scaling=scaling,
            softcap=softcap,
        )
        return form_of(graph_part(self.layout.eviction), shape)

    def rotated(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Rotate `x` [1, h, n, D] to the positions [start, stop), in x's dtype."""
        if not self.rotates:
            return x
        rows = self.table[start + self.origin : stop + self.origin]  # [n, 2, R/2]
        cos, sin = rows.unbind(1)
        half = cos.shape[-1]
        a, b = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
        rest = x[..., 2 * half :]
        return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), -1)


class LayerPass(CacheLayerMixin):  # type: ignore[misc]
    """One block going through one layer; a cache layer of transformers, and a `CappedLayer`.

    Args:
        plan: of the layer.
        held: the layer's state by name, [1, K, n, ...] per slot and `queries` [1, H, w, D].
        seen: tokens read before the block, int32 [].
        pinned: spans [P, 2] of tokens that are never evicted.
    """

    is_sliding = False
    is_compileable = False

    def __init__(
        self, plan: LayerPlan, held: dict[str, Tensor], seen: Tensor, pinned: Tensor
    ) -> None:
        super().__init__()
        self.plan, self.held, self.seen, self.spans = plan, held, seen, pinned
        self.kept: dict[str, Tensor] = {}
        self.worth = seen  # what slots were chosen by [1, K, n], once there was a block

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to allocate."""

    def get_seq_length(self) -> int:
        """Nothing is counted here: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """No mask is made by transformers: `attend` is causal by itself."""
        length = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return length, 0

    def get_max_cache_shape(self) -> int:
        """-1: no end."""
        return -1

    get_max_length = get_max_cache_shape

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a block [1, K, T, D]; the attention function finds the layer on the keys."""
        heads, length = key_states.shape[1:3]
        times = self.seen + torch.arange(length, dtype=torch.int32)
        arriving = {
            "keys": key_states,
            "values": value_states,
            "positions": times.expand(1, heads, -1),
        }
        self.slots = {name: torch.cat((self.held[name], new), 2) for name, new in arriving.items()}
        keys = key_states.view_as(key_states)
        keys.kvcap_layer = self  # type: ignore[attr-defined]
        return keys, value_states

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        scaling: float,
        softcap: float | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Attention of the block over all slots, then eviction. [1, H, T, D] -> [1, H, T, D]."""
        length, slots = query.shape[2], self.slots["keys"].shape[2]
        keys = self.plan.rotated(self.slots["keys"], 0, slots)
        out = _attention(
            self.plan.rotated(query, slots - length, slots),
            keys,
            self.slots["values"],
            scaling,
            softcap,
        )
        self._evict(module, query, keys, self.plan.form(scaling, softcap))
        return out

    def _evict(self, module: nn.Module, query: Tensor, keys: Tensor, form: Traced) -> None:
        """Score by the keys as attention saw them, select, gather everything a slot has."""
        given = {**self.slots, "keys": keys, "seen": self.seen + query.shape[2]}
        if (window := self._window(query)) is not None:
            slots = keys.shape[2]
            given["queries"] = self.plan.rotated(window, slots - window.shape[2], slots)
        given |= self._state(module, query.shape[2], form)
        given["pinned"] = self._pinned()
        evict, seen = Evict(form), form.observe(given)
        self.worth = evict.worth(given, seen)
        keep = survivors(self.worth, torch.sym_min(keys.shape[2], self.plan.budget))
        rows = rows_of(keep, keys.shape[2])
        stored = {**self.slots, **{name: given[name] for name in form.slot_state}, **seen.state}
        self.kept |= {name: take(tensor, rows, keep) for name, tensor in stored.items()}

    def _window(self, query: Tensor) -> Tensor | None:
        """The queries that the policy observes, as the model made them; the last ones are kept."""
        count = self.plan.layout.eviction.policy.queries_observed
        if count == 0:
            return None
        if count is None:
            return query
        if self.plan.layout.ring_length:
            query = torch.cat((self.held["queries"], query), 2)
        start = query.shape[2] - torch.sym_min(query.shape[2], count)
        window = query[:, :, start:]
        if self.plan.layout.ring_length:
            self.kept["queries"] = window
        return window

    def _state(self, module: nn.Module, length: int, form: Traced) -> dict[str, Tensor]:
        """State of all slots: what was held, and that of the arriving tokens, or 0."""
        new: dict[str, Tensor] = {}
        if form.update_inputs:
            arriving = {f"new_{name}": x[:, :, -length:] for name, x in self.slots.items()}
            if "output_projection" in form.update_inputs:
                shape = self.plan.layout.shape
                arriving["output_projection"] = output_projection(module, shape)
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
        start, stop = self.spans.unbind(1)  # [P]
        positions = self.slots["positions"][..., None]
        return ((positions >= start) & (positions < stop)).any(-1)


def plans(layout: CacheLayout, table: Tensor, origin: int) -> list[LayerPlan]:
    """One for every layer."""
    first = LayerPlan(layout, 0, table, origin)
    return [replace(first, index=i) for i in range(len(layout.budgets))]


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """Causal attention of the newest T tokens over n slots; the group's queries are rows.

    Query [1, H, T, D], keys and values [1, K, n, D] -> [1, H, T, D].
    """
    length, slots = query.shape[2], keys.shape[2]
    q = (query * scaling).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # [1, K, G·T, D]
    z = torch.matmul(q, keys.mT).float().unflatten(2, (-1, length))  # [1, K, G, T, n]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    ahead = torch.arange(slots) - (slots - length) > torch.arange(length)[:, None]  # [T, n]
    z = z.masked_fill(ahead, float("-inf"))
    weights = z.softmax(-1).to(values.dtype).flatten(2, 3)
    return torch.matmul(weights, values).view(query.shape)
