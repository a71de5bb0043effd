"""Runs exported decoders over slots in buffers that are allocated once.

Past and present of a layer are one buffer: the decoder's graph writes a block behind the slots in
use, another graph says which slots go, and survivors move into their places. Nothing else that is
held is moved or copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.onnxruntime.graph import TYPES, Array, Binding, Buffer, Graph
from kvcap.runtime.backends.onnxruntime.manifest import Manifest, windows_in
from kvcap.runtime.backends.onnxruntime.slots import (
    Int32,
    LayerSlots,
    Turns,
    WindowSlots,
    last_in,
)
from kvcap.runtime.errors import ManifestError
from kvcap.runtime.types import Span

if TYPE_CHECKING:  # a phone's runner has no cache of kvcap's
    from kvcap.runtime.cache.regions import Regions

RUNS = 4  # lengths of blocks whose buffers are kept bound
SCALED = "key", "value"  # these have scales where slots are int8, in this order
SPANS = 9  # spans that the fixed buffer holds: a policy's sinks, and eight of the user's


def slots_in_use(budget: int, seen: int) -> int:
    """Return the slots in use of a head that keeps `budget` of `seen` tokens after every block."""
    return min(budget, seen)


def spans_array(spans: Sequence[Span], buffer: Int32) -> Int32:
    """Return spans as the rows [S, 2] of a graph's input; one empty span where there are none.

    They are written into `buffer` [S_max, 2] where they fit, so that their address stays the same.
    """
    rows = np.array(spans or [(0, 0)], np.int32)
    if len(rows) > len(buffer):
        return rows
    buffer[: len(rows)] = rows
    return buffer[: len(rows)]


class DecoderBuffer(NamedTuple):
    """A buffer that a decoder allocates for one layer."""

    name: str
    layer: int
    shape: tuple[int, ...]
    dtype: Any  # of NumPy

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of the buffer."""
        return int(np.prod(self.shape)) * int(self.dtype.itemsize)


def buffers_of(manifest: Manifest, block: int) -> list[DecoderBuffer]:
    """Return the buffers of a decoder that reads blocks of up to `block` tokens.

    Raises:
        ManifestError: the manifest does not describe them, or contradicts itself.
    """
    facts, buffers, missing = manifest.facts, list[DecoderBuffer](), set[tuple[str, int]]()
    for layer, window in enumerate(windows_in(manifest.facts)):
        names = ("keys", "values", *(["positions"] if window is None else []))
        missing |= {(name, layer) for name in names}
    for entry in facts["state"]:
        name, layer, shape = str(entry["name"]), int(entry["layer"]), list(entry["full"])
        if layer >= len(facts["budgets"]) or len(shape) < 3:
            raise _no_state(manifest, f"{name} of layer {layer}")
        if name != "queries":
            slots = facts["budgets"][layer]
            if shape[2] != slots + facts["block_size"]:
                raise _no_state(manifest, f"{name} of layer {layer} with {shape[2]} slots")
            shape[2] = slots + block
        missing.discard((name, layer))
        buffers.append(DecoderBuffer(name, layer, tuple(shape), np.dtype(entry["dtype"])))
    if missing or len({(spec.name, spec.layer) for spec in buffers}) < len(buffers):
        raise _no_state(manifest, f"{len(buffers)} buffers, and lacks {sorted(missing)[:1]}")
    return buffers


def _no_state(manifest: Manifest, what: str) -> ManifestError:
    return ManifestError(
        f"the manifest in {str(manifest.folder)!r} describes {what}, which is no state of this "
        "decoder; export it again"
    )


def turns_of(manifest: Manifest, block: int) -> Turns | None:
    """Return the rotations of a decoder's keys; None where positions are true."""
    facts = manifest.facts
    if not any(facts["rotates"]):
        return None
    turning = zip(facts["budgets"], facts["rotates"], strict=True)
    span = max(budget for budget, rotates in turning if rotates) + block + 1
    return Turns(facts["inv_freq"], span, facts["interleaved"])


def evictors_of(manifest: Manifest, threads: int | None) -> list[Graph]:
    """Return the graph that evicts of each capped layer of a decoder; many share one.

    Raises:
        GraphBroken: one cannot be loaded.
    """
    by_layer: dict[int, Graph] = {}
    for entry in manifest.facts["evictors"]:
        graph = Graph(manifest.file(entry["file"]), threads)
        by_layer |= dict.fromkeys(entry["layers"], graph)
    return [by_layer[layer] for layer in sorted(by_layer)]


def scales_of(manifest: Manifest) -> Array | None:
    """Return the scales of a decoder's slots, [L, 2, K, 1, D] float32; None for floats.

    Raises:
        ManifestError: the file holds something else.
    """
    if (name := manifest.facts.get("slot_scales")) is None:
        return None
    model = manifest.model
    wanted = (len(manifest.facts["budgets"]), 2, model["kv_heads"], model["head_dim"])
    try:
        scales = np.load(manifest.file(name), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ManifestError(f"{name!r} cannot be read ({error}); export it again") from error
    if not isinstance(scales, np.ndarray) or (scales.shape, scales.dtype) != (wanted, np.float32):
        raise ManifestError(f"{name!r} does not hold scales {list(wanted)}; export it again")
    if not (np.isfinite(scales).all() and (scales > 0).all()):
        raise ManifestError(f"{name!r} holds scales that are none; export it again")
    return np.ascontiguousarray(scales[:, :, :, None])


class BoundRun(NamedTuple):
    """A run that reads blocks of one length into a decoder, with arrays that stay bound."""

    binding: Binding
    ids: Array  # [1, T]
    made: list[dict[str, Array]]  # further inputs of each layer's evictor, by name


class ExportedDecoder:
    """A decoder whose past and present are one buffer, with graphs beside it that evict.

    Args:
        manifest: of the export.
        graph: of the decoder.
        evictors: the graph that evicts of each capped layer; see `evictors_of`.
        block_size: tokens read at once, at most as many as it was exported for.
        evict_every: in generation, evict every so many tokens, at most `block_size`.
        scales: of slots in int8, from `scales_of`; None: they are floats.

    Raises:
        ShapeError, ManifestError: it is not what the manifest says.
    """

    def __init__(
        self,
        manifest: Manifest,
        graph: Graph,
        evictors: Sequence[Graph],
        block_size: int,
        evict_every: int = 1,
        scales: Array | None = None,
    ) -> None:
        facts = manifest.facts
        self.block_size, self.budgets = block_size, [int(n) for n in facts["budgets"]]
        self.evict_every, self.compact = evict_every, facts["positions"] == "compact"
        pins = facts["policy"].get("pins") or {}
        self.sinks = int(pins.get("sinks", 0))
        self.recents = [int(n) for n in pins.get("recents", [0] * len(self.budgets))]
        self.regions: Regions | None = None
        """Holds the regions of the conversation, which its cache sets; None: all text is alike."""
        self.graph, self.evictors, self.version = graph, evictors, graph.version
        self.observed = facts["queries_observed"]  # last queries; None: all of a block
        self.specs, self.turns = buffers_of(manifest, block_size), turns_of(manifest, block_size)
        buffers: list[dict[str, Array]] = [{} for _ in self.budgets]
        for spec in self.specs:
            buffers[spec.layer][spec.name] = np.zeros(spec.shape, spec.dtype)
        self.scales = scales
        each = [None] * len(buffers) if scales is None else list(scales)
        windows = windows_in(facts)
        self.layers = [
            LayerSlots(tensors, budget, self.turns if rotates else None, scale)
            if window is None
            else WindowSlots(tensors, budget, scale)
            for tensors, budget, rotates, scale, window in zip(
                buffers, self.budgets, facts["rotates"], each, windows, strict=True
            )
        ]
        self._lengths = sorted(set(self.budgets), reverse=True)
        self._held = np.zeros(len(self._lengths), np.int32)
        self._seen, self._stay = np.zeros((), np.int32), np.zeros((), np.int32)
        self._spans = np.zeros((SPANS, 2), np.int32)
        self._logits = np.zeros((1, manifest.model["vocabulary"]), np.float32)
        self._runs: dict[int, BoundRun] = {}
        self._require()
        ports = {
            name: port
            for name, port in graph.outputs.items()
            if name.startswith(("block_", "new_"))
        }  # inputs of evictors from the block, which are not kept
        self._ports = {
            name: Buffer(self._sized(name, block_size), TYPES[port.type])
            for name, port in ports.items()
        }
        outputs = self.evictors[0].outputs
        self._states = [name.removeprefix("next_") for name in outputs if name != "gone"]

    def _require(self) -> None:
        """Refuse graphs that have other inputs or outputs; inputs not read may be missing."""
        names = {(spec.name, spec.layer) for spec in self.specs}
        past = {f"{name}.{layer}" for name, layer in names if name in ("keys", "values")}
        new = {f"new_{name}.{layer}" for name, layer in names} & set(self.graph.outputs)
        queries = set(range(len(self.layers)) if self.observed != 0 else ()) - {*self.windows}
        counts = {"held"} if self.compact and not self.windows else {"held", "seen"}
        self.graph.require(
            {"input_ids", *counts, *past, *self._scales()},
            {"logits", *(f"present_{name}" for name in past), *new}
            | {f"block_queries.{layer}" for layer in queries},
        )
        kinds = {name for name, _ in names if name not in ("queries", "arrived", "shifts")}
        known = {"seen", "stay", "pinned", *kinds, *(["queries"] if queries else [])}
        known |= set() if self.scales is None else {f"{name}_scale" for name in SCALED}
        state = {f"next_{name}" for name in kinds - {"keys", "values", "positions"}}
        for evictor in self.evictors:
            evictor.require(known & set(evictor.inputs), {"gone"} | (state & set(evictor.outputs)))

    def run(self, ids: Sequence[int], seen: int, spans: Sequence[Span]) -> NDArray[np.float32]:
        """Read a block into buffers, and evict; return the last token's logits [1, V].

        Args:
            ids: up to `room` tokens.
            seen: tokens read before.
            spans: tokens of the conversation that are never evicted.

        Raises:
            MemoryCapExceeded: the system refused memory; the slots are no longer whole.
        """
        run = self._runs.get(len(ids)) or self._bound(len(ids))
        run.ids[0], self._seen[...] = ids, seen
        held = dict(zip(self.budgets, self.held, strict=True))
        self._held[:] = [held[budget] for budget in self._lengths]
        self.graph.run_bound(run.binding)
        for layer, made in zip(self.layers, run.made, strict=True):
            layer.append(seen, len(ids), made)
        self._evict(seen + len(ids), run, spans)
        return self._logits

    def _scales(self) -> dict[str, Array]:
        """Return the scales of slots in int8 as the decoder's inputs, [K, 1, D] each."""
        if self.scales is None:
            return {}
        return {
            f"{name}_scale.{layer}": scale
            for layer, both in enumerate(self.scales)
            for name, scale in zip(SCALED, both, strict=True)
        }

    def _sized(self, name: str, length: int) -> tuple[int, ...]:
        """Return the shape of one of the decoder's outputs for a block of a length."""
        axes = self.graph.outputs[name].shape
        return tuple(length if isinstance(axis, str) else axis for axis in axes)

    def _bound(self, length: int) -> BoundRun:
        """Return the bound inputs and outputs for blocks of a length; the last few are kept."""
        ids = np.zeros((1, length), np.int64)
        inputs: dict[str, Array] = {"input_ids": ids, "held": self._held}
        if "seen" in self.graph.inputs:
            inputs["seen"] = self._seen
        inputs |= self._scales()
        outputs: dict[str, Array] = {"logits": self._logits}
        for spec in self.specs:
            if spec.name in ("keys", "values"):
                name, buffer = f"{spec.name}.{spec.layer}", self.layers[spec.layer].buffers
                inputs[name] = outputs[f"present_{name}"] = buffer[spec.name]
        made: list[dict[str, Array]] = [{} for _ in self.layers]
        for name, port in self._ports.items():
            kind, _, layer = name.partition(".")
            array = port.at(self._sized(name, length))
            outputs[name] = made[int(layer)][kind.partition("_")[2]] = array
        if len(self._runs) == RUNS:
            del self._runs[next(iter(self._runs))]
        self._runs[length] = run = BoundRun(self.graph.bind(inputs, outputs), ids, made)
        return run

    def _evict(self, seen: int, run: BoundRun, spans: Sequence[Span]) -> None:
        """Bring the policy's state up to date and, where it is time, evict down to the budget."""
        self._seen[...], least = seen, 1 if run.ids.shape[1] > 1 else self.evict_every
        for window in self.windows.values():
            window.slide(least)
        made_by = [made for i, made in enumerate(run.made) if i not in self.windows]
        for layer, evictor, made in zip(self.capped, self.evictors, made_by, strict=True):
            due = layer.held - layer.budget >= least
            if due:
                self._evict_early(layer, seen, spans)
            if (not due or layer.held == layer.budget) and not self._states:
                continue
            stay = layer.budget if due else layer.held
            gone = self._gone(layer, evictor, made.get("queries"), seen, stay, spans)
            if gone.size:
                layer.evict(gone[0])

    def drop(self, spans: Sequence[Span], seen: int) -> None:
        """Evict the slots of these tokens, of `seen` ones: as many from each head as all hold."""
        inside = [layer.within(spans) for layer in self.capped]
        count = min(int(one.sum(axis=1).min()) for one in inside)
        for layer, one in zip(self.capped, inside, strict=True):
            layer.drop(one, count, seen)

    def _evict_early(self, layer: LayerSlots, seen: int, spans: Sequence[Span]) -> None:
        """Evict the regions that leave before other text, down to the layer's budget."""
        if self.regions is not None and self.regions.weighed:
            pins = [(0, self.sinks), (seen - max(1, *self.recents), seen), *spans]
            layer.evict_early(self.regions, pins, layer.held - layer.budget)

    def _gone(
        self,
        layer: LayerSlots,
        evictor: Graph,
        queries: Array | None,
        seen: int,
        stay: int,
        spans: Sequence[Span],
    ) -> Array:
        """Return the slots of a layer that go [1, K, count], and update its policy's state."""
        buffers, held = layer.buffers, layer.held
        self._stay[...] = stay
        given: dict[str, Array] = {
            "seen": self._seen,
            "stay": self._stay,
            "pinned": spans_array(spans, self._spans),
            "keys": buffers["keys"],
            "values": buffers["values"],
        }
        if layer.scales is not None:
            given |= zip((f"{name}_scale" for name in SCALED), layer.scales, strict=True)
        if queries is not None:
            if "queries" in buffers:
                queries = layer.views(held, seen)["queries"]
            elif self.observed is not None:
                queries = last_in(queries, self.observed)
            given["queries"] = queries
        for name in ("positions", *layer.state):
            given[name] = buffers[name][:, :, :held]
        inputs = {
            name: x if (x := given[name]).flags.c_contiguous else x.copy()
            for name in evictor.inputs
        }
        heads = buffers["positions"].shape[1]
        gone = np.empty((1, heads, held - stay), np.int64)
        outputs: dict[str, Array] = {"gone": gone}
        for name in self._states:
            outputs[f"next_{name}"] = np.empty((1, heads, held), buffers[name].dtype)
        evictor.run(inputs, outputs)
        for name in self._states:
            buffers[name][:, :, :held] = outputs[f"next_{name}"]
        return gone

    @cached_property
    def windows(self) -> dict[int, WindowSlots]:
        """Return the layers that keep a sliding window, by their index."""
        return {i: x for i, x in enumerate(self.layers) if isinstance(x, WindowSlots)}

    @cached_property
    def capped(self) -> list[LayerSlots]:
        """Return the layers from which a policy evicts, in order."""
        return [layer for layer in self.layers if isinstance(layer, LayerSlots)]

    @property
    def held(self) -> list[int]:
        """Return the slots of a head in use, by layer."""
        return [layer.held for layer in self.layers]

    @held.setter
    def held(self, slots: Sequence[int]) -> None:
        for layer, count in zip(self.layers, slots, strict=True):
            layer.held = count

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of all buffers, of the table of rotations and of scales."""
        table = 0 if self.turns is None else self.turns.nbytes
        table += sum(x.scales.nbytes for x in self.layers if x.scales is not None)
        return table + sum(x.nbytes for layer in self.layers for x in layer.buffers.values())

    @property
    def room(self) -> int:
        """Return how many tokens the next block has at most: a slot each, behind those in use."""
        return min(self.block_size, *(layer.capacity - layer.held for layer in self.layers))

    def used_bytes(self, seen: int) -> int:
        """Return the bytes of the slots in use after `seen` tokens, in all buffers."""
        return sum(x.nbytes for x in self.state(seen, self.held).values())

    def positions(self, seen: int) -> list[Int32]:
        """Return the positions of the kept tokens, by capped layer: [K, held], ascending."""
        return [layer.positions(seen) for layer in self.capped]

    def state(self, seen: int, held: Sequence[int]) -> Mapping[str, Array]:
        """Return views of all layers' buffers by name, with `held` slots after `seen` tokens.

        Raises:
            ValueError: there are not so many slots.
        """
        views: dict[str, Array] = {}
        for i, (layer, count) in enumerate(zip(self.layers, held, strict=True)):
            least = min(layer.budget, seen) if i in self.windows else min(1, seen)
            if not least <= count <= min(seen, layer.capacity - 1):
                raise ValueError(f"{count} slots of layer {i} cannot be held after {seen} tokens")
            views |= {f"{name}.{i}": x for name, x in layer.views(count, seen).items()}
        return views
