"""Builds the evictor of a decoder that others exported: one graph for all layers and any budget.

Such a decoder shows keys, values and positions, so only policies that read no more can run beside
it. If each run returns a new cache, an `AdoptedEvictionGraph` copies the slots that stay, in time
order. Layers take the place of a batch, as a policy scores each by itself. With compact positions a
slot's index is its position: the graph keeps every key rotated to position 0 and returns a copy
rotated to its new position, so that errors do not add up. If slots stay in place in a buffer, a
`Selector` returns the slots that go.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvcap.export.graphs.forms import form_of, graph_part
from kvcap.export.graphs.portable import Portable
from kvcap.export.graphs.ports import CACHE, Port
from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.stages import evicted, rows_of, survivors, take
from kvcap.export.graphs.trace import IR_VERSION, program_of, slim
from kvcap.policies import Eviction, load_policy, policies
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.errors import NotExportable
from kvcap.runtime.models.rope import rotate
from kvcap.runtime.types import DEFAULT_POLICY

# All that a policy can observe of a decoder with past_key_values: no queries and no attention.
REVEALED = frozenset({"keys", "values", "positions"})
SLOTS, HELD = ("layers", "kv_heads", "slots"), ("layers", "kv_heads", "held")
OPEN = ("slots", "held", "shifts", "spans", "capacity", "count")
INPUTS = (
    Port("keys", CACHE, (*SLOTS, "head_dim"), "activation", "all layers' `present` keys"),
    Port("values", CACHE, (*SLOTS, "head_dim"), "activation", "all layers' `present` values"),
    Port("positions", "int32", HELD, "tokens", "what was kept before the block, by its tokens"),
    Port("seen", "int32", (), "tokens", "tokens read so far, the block's included"),
    Port("stay", "int32", (), "slots", "slots of each head that stay, at most all there are"),
    Port("recents", "int32", (), "tokens", "newest tokens that are never evicted"),
    Port("spans", "int32", ("spans", "two"), "tokens", "[start, stop) that are never evicted"),
    Port("base", CACHE, (*HELD, "head_dim"), "activation", "kept keys, turned to position 0"),
    Port("table", "float32", ("shifts", "two", "pairs"), "1", "cosine and sine of each position"),
)
COMPACT = ("base", "table")  # inputs of compact positions
BUFFER = ("layers", "kv_heads", "capacity", "head_dim")
CHOOSING = (
    Port("keys", CACHE, BUFFER, "activation", "a layer's buffer, with free slots behind"),
    Port("values", CACHE, BUFFER, "activation", "likewise"),
    Port("positions", "int32", SLOTS, "tokens", "of all slots in use, by their tokens"),
    *(port for port in INPUTS if port.name in ("seen", "stay", "recents", "spans")),
)
GONE = Port("gone", "int64", ("layers", "kv_heads", "count"), "slots", "slots that go, in no order")


class AdoptedEvictionGraph(nn.Module):
    """A module that scores all slots, and gathers and rotates those that stay, for all layers.

    Args:
        eviction: a policy that reads keys, values and positions alone.
        layers: layers, `L`.
        kv_heads: KV heads of a layer, `K`.
        head_dim: size of a head, `D`.
        pairs: rotated pairs of numbers of a key, for compact positions; 0 leaves positions true.
        interleaved: whether a pair is (2i, 2i + 1); else it is (i, i + pairs).

    Raises:
        NotExportable: the policy reads more than such a decoder shows.
    """

    def __init__(
        self,
        eviction: Eviction,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pairs: int = 0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        check(eviction)
        self.eviction, self.compact = graph_part(eviction), pairs > 0
        self.interleaved = interleaved
        self.form = form_of(self.eviction, Shape(kv_heads, kv_heads, head_dim))
        self.sizes: dict[str, int | None] = {
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "pairs": pairs,
            "two": 2,
            **dict.fromkeys((*OPEN, "stay")),
        }
        self.inputs = [port for port in INPUTS if self.compact or port.name not in COMPACT]
        kept = ["keys", "values", "positions", *(["base"] if self.compact else [])]
        self.outputs = [_kept(port) for name in kept for port in INPUTS if port.name == name]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values [L, K, stay, D] and positions [L, K, stay] of slots that stay.

        `outputs` has their order; with compact positions the keys at position 0 follow.
        """
        feeds = {port.name: tensor for port, tensor in zip(self.inputs, tensors, strict=True)}
        keys, past = feeds["keys"], feeds["positions"].shape[2]
        slots = keys.shape[2]
        times = torch.arange(slots, dtype=torch.int32)[past:] + (feeds["seen"] - slots)
        arrived = times.expand(*keys.shape[:2], -1)
        feeds["positions"] = torch.cat((feeds["positions"], arrived), dim=2)
        keep = self._keep(feeds, slots)
        rows = rows_of(keep, slots)
        kept = {name: take(feeds[name], rows, keep) for name in ("values", "positions")}
        if not self.compact:
            return take(keys, rows, keep), kept["values"], kept["positions"]
        turned = partial(rotate, interleaved=self.interleaved)
        new = turned(keys[:, :, past:], feeds["table"][past:slots], back=True)
        base = take(torch.cat((feeds["base"], new), dim=2), rows, keep)
        stay = keep.shape[-1]
        torch._check(stay <= feeds["table"].shape[0])
        here = turned(base, feeds["table"][:stay])
        return here, kept["values"], kept["positions"], base

    def _keep(self, feeds: dict[str, Tensor], slots: int) -> Tensor:
        """Return the indices of the slots that stay, [L, K, stay], in time order."""
        return survivors(self._worth(feeds), feeds["positions"], self._stay(feeds, slots))

    def _worth(self, feeds: dict[str, Tensor]) -> Tensor:
        """Return the worth by which slots are kept, [L, K, slots]."""
        positions, spans = feeds["positions"], feeds["spans"]
        obs = self.form.observe(feeds)
        with Portable():
            scores = self.eviction.score(obs, by=lambda _, obs: self.form.score(feeds, obs))
        inside = (positions[..., None] >= spans[:, 0]) & (positions[..., None] < spans[:, 1])
        pinned = inside.any(-1) | (positions >= feeds["seen"] - feeds["recents"])
        return self.eviction.worth(scores, pinned, obs)

    @staticmethod
    def _stay(feeds: dict[str, Tensor], slots: int) -> Any:
        """Return how many slots of a head stay, 1 to `slots`."""
        stay: Any = feeds["stay"].item()
        torch._check(stay >= 1)
        torch._check(stay <= slots)
        return stay


class Selector(AdoptedEvictionGraph):
    """A graph that selects the slots that go, for one layer whose slots lie in a buffer.

    Slots lie in any order. The runtime moves slots that stay into freed places, and rotates keys.
    """

    def __init__(self, eviction: Eviction, kv_heads: int, head_dim: int) -> None:
        super().__init__(eviction, 1, kv_heads, head_dim)
        read = self.eviction.observes | {"positions"}
        self.inputs = [port for port in CHOOSING if port.name in read or port.name not in REVEALED]
        self.outputs = [GONE]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the indices of the slots that go, [1, K, count]."""
        feeds = {port.name: tensor for port, tensor in zip(self.inputs, tensors, strict=True)}
        slots = feeds["positions"].shape[2]
        for name in {"keys", "values"} & feeds.keys():
            torch._check(slots <= feeds[name].shape[2])
            feeds[name] = feeds[name][:, :, :slots]
        return (evicted(self._worth(feeds), feeds["positions"], self._stay(feeds, slots)),)


def _kept(port: Port) -> Port:
    axes = tuple("stay" if axis in OPEN else axis for axis in port.axes)
    return Port(f"kept_{port.name}", port.dtype, axes, port.unit, f"{port.name} of what stays")


def revealed() -> list[str]:
    """Return policies of one part that run on keys, values and positions; the default one first."""
    single = [
        name for name, made in policies().items() if len(made.parts) == 1 and not made.options
    ]
    fitting = [name for name in single if _fits(load_policy(name))]
    return sorted(fitting, key=lambda name: (name != DEFAULT_POLICY, name))


def _fits(eviction: Eviction) -> bool:
    uneven = eviction.layer_budget or eviction.head_budget or eviction.corrector
    return eviction.policy.evicts and eviction.observes <= REVEALED and not uneven


def check(eviction: Eviction) -> None:
    """Refuse an eviction that cannot run on keys, values and positions alone.

    Raises:
        NotExportable: the eviction reads more, or budgets differ; the message names what can run.
    """
    name, more = eviction.name or "the policy", eviction.observes - REVEALED
    if _fits(eviction):
        return
    *others, last = revealed()
    why = "never evicts"
    if eviction.policy.evicts:
        why = f"reads {', '.join(sorted(more))}" if more else "shares slots out, or keeps more"
    raise NotExportable(
        f"{name} {why}, and a decoder that others exported shows keys, values and positions "
        f"alone, of layers that are equally long; use {', '.join(others)} or {last}, or export the "
        "model itself"
    )


def trace(evictor: AdoptedEvictionGraph, dtype: torch.dtype) -> Any:
    """Trace an evictor; return the stripped onnx.ModelProto."""
    feeds = example(evictor, dtype, past=20, block=7, stay=16)
    open_axes = dict.fromkeys(OPEN, torch.export.Dim.AUTO)
    program = program_of(evictor, evictor.inputs, list(feeds.values()), open_axes)
    model = program.model_proto
    model.ir_version = min(model.ir_version, IR_VERSION)
    ports = (*evictor.inputs, *evictor.outputs)
    slim(model, [port.name for port in evictor.outputs], {port.name: port.axes for port in ports})
    library("onnx.checker").check_model(model)
    return model


def example(
    evictor: AdoptedEvictionGraph,
    dtype: torch.dtype,
    *,
    past: int,
    block: int,
    stay: int,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Make random inputs of an evictor that holds `past` slots and has read a block."""
    draws = torch.Generator().manual_seed(seed)
    sizes = {
        **evictor.sizes,
        "slots": past + block,
        "held": past,
        "shifts": past + block + 3,
        "capacity": past + block + 5,
    }
    counts = {"seen": past + block + 5 * (past > 0), "recents": min(2, stay), "stay": stay}

    def made(port: Port) -> Tensor:
        if port.name in counts:
            return torch.tensor(counts[port.name], dtype=torch.int32)
        if port.name == "spans":
            return torch.tensor([[0, min(3, stay)], [0, 0]], dtype=torch.int32)
        shape = [sizes[axis] or 0 for axis in port.axes]
        if port.name == "positions":
            rows = torch.arange(shape[2], dtype=torch.int32).expand(shape)
            if not isinstance(evictor, Selector):
                return rows.contiguous()
            order = torch.rand(shape, generator=draws).argsort(-1)  # slots lie in any order
            return rows.gather(-1, order).contiguous()
        if port.name == "table":
            angles = torch.randn(shape[0], shape[2], generator=draws)
            return torch.stack((angles.cos(), angles.sin()), dim=1)
        return torch.randn(shape, generator=draws).to(dtype)

    return {port.name: made(port) for port in evictor.inputs}
