"""Runs exported decoders over slots in buffers that are allocated once.

`SharedDecoder`: kvcap's own export (`kvcap export decoder`). Past and present of a layer are one
buffer: the decoder's graph writes a block behind the slots in use, another graph says which slots
go, and survivors move into their places. Nothing else that is held is moved or copied.

`GroupedDecoder` (`grouped.py`): the same for decoders of others whose attention can do that too.

`PairedDecoder`: a decoder that others exported, and a graph beside it that evicts
(`export/adopt.py`). The decoder writes all that it was given, and the block, as `present`; the
other graph takes from it what stays. Where positions are compact, every key is also kept rotated to
position 0, and a copy is rotated to its present position, so that no error adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

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
    rotations,
)
from kvcap.runtime.errors import ManifestError
from kvcap.runtime.types import Span

RUNS = 4  # lengths of blocks whose buffers are kept bound
SCALED = "key", "value"  # these have scales where slots are int8, in this order
SPANS = 9  # spans that the fixed buffer holds: a policy's sinks, and eight of the user's


class ExportedDecoder(Protocol):
    """A decoder that runs an exported model over its slots, and evicts after every block."""

    budgets: list[int]  # slots that a KV head keeps, by layer
    block_size: int
    version: str  # of ONNX Runtime
    sinks: int  # first tokens that the policy pins
    recents: list[int]  # newest tokens that it pins, by layer
    held: list[int]  # slots of a head in use, by layer

    @property
    def windows(self) -> Mapping[int, WindowSlots]:
        """Return the layers that keep a sliding window; no policy evicts there."""

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of all buffers, which never grow."""

    @property
    def room(self) -> int:
        """Return how many tokens the next block has at most."""

    def used_bytes(self, seen: int) -> int:
        """Return the bytes of the slots in use after `seen` tokens, in all buffers."""

    def run(self, ids: Sequence[int], seen: int, spans: Sequence[Span]) -> NDArray[np.float32]:
        """Read up to `room` tokens after `seen`, and evict; return the last one's logits [1, V].

        Raises:
            MemoryCapExceeded: the system refused memory; the slots are no longer whole.
        """

    def positions(self, seen: int) -> list[Int32]:
        """Return the positions of the kept tokens, by capped layer: [K, held] each, ascending."""

    def state(self, seen: int, held: Sequence[int]) -> Mapping[str, Array]:
        """Return views of what `held` slots of each layer have after `seen` tokens, by name.

        Raises:
            ValueError: there are not so many slots.
        """


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
    """A buffer that a shared or grouped decoder allocates for one layer."""

    name: str
    layer: int
    shape: tuple[int, ...]
    dtype: Any  # of NumPy

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of the buffer."""
        return int(np.prod(self.shape)) * int(self.dtype.itemsize)


def buffers_of(manifest: Manifest, block: int) -> list[DecoderBuffer]:
    """Return the buffers of a shared decoder that reads blocks of up to `block` tokens.

    Raises:
        ManifestError: the manifest does not describe them, or contradicts itself.
    """
    facts, found, missing = manifest.facts, list[DecoderBuffer](), set[tuple[str, int]]()
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
        found.append(DecoderBuffer(name, layer, tuple(shape), np.dtype(entry["dtype"])))
    if missing or len({(spec.name, spec.layer) for spec in found}) < len(found):
        raise _no_state(manifest, f"{len(found)} buffers, and lacks {sorted(missing)[:1]}")
    return found


def _no_state(manifest: Manifest, what: str) -> ManifestError:
    return ManifestError(
        f"the manifest in {str(manifest.folder)!r} describes {what}, which is no state of this "
        "decoder; export it again"
    )


def turns_of(manifest: Manifest, block: int) -> Turns | None:
    """Return the rotations of a shared decoder's keys; None where positions are true."""
    facts = manifest.facts
    if not any(facts["rotates"]):
        return None
    turning = zip(facts["budgets"], facts["rotates"], strict=True)
    span = max(budget for budget, rotates in turning if rotates) + block + 1
    return Turns(facts["inv_freq"], span, facts["interleaved"])


def evictors_of(manifest: Manifest, threads: int | None) -> list[Graph]:
    """Return the graph that evicts of each capped layer of a shared decoder; many share one.

    Raises:
        GraphBroken: one cannot be loaded.
    """
    found: dict[int, Graph] = {}
    for entry in manifest.facts["evictors"]:
        graph = Graph(manifest.file(entry["file"]), threads)
        found |= dict.fromkeys(entry["layers"], graph)
    return [found[layer] for layer in sorted(found)]


def scales_of(manifest: Manifest) -> Array | None:
    """Return the scales of a shared decoder's slots, [L, 2, K, 1, D] float32; None for floats.

    Raises:
        ManifestError: the file holds something else.
    """
    if (name := manifest.facts.get("slot_scales")) is None:
        return None
    model = manifest.model
    wanted = (len(manifest.facts["budgets"]), 2, model["kv_heads"], model["head_dim"])
    try:
        found = np.load(manifest.file(name), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ManifestError(f"{name!r} cannot be read ({error}); export it again") from error
    if not isinstance(found, np.ndarray) or (found.shape, found.dtype) != (wanted, np.float32):
        raise ManifestError(f"{name!r} does not hold scales {list(wanted)}; export it again")
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise ManifestError(f"{name!r} holds scales that are none; export it again")
    return np.ascontiguousarray(found[:, :, :, None])


class SharedRun(NamedTuple):
    """A run that reads blocks of one length into a shared decoder, with arrays that stay bound."""

    binding: Binding
    ids: Array  # [1, T]
    made: list[dict[str, Array]]  # further inputs of each layer's evictor, by name


class InPlace:
    """A base class of decoders that write behind slots in buffers that never move."""

    layers: list[LayerSlots | WindowSlots]
    turns: Turns | None
    block_size: int

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
        """Return the bytes of what is in use of all buffers."""
        return sum(x.nbytes for x in self.state(seen, self.held).values())

    def positions(self, seen: int) -> list[Int32]:
        """Return the positions of the kept tokens, by capped layer: [K, held], ascending."""
        return [layer.positions(seen) for layer in self.capped]

    def state(self, seen: int, held: Sequence[int]) -> Mapping[str, Array]:
        """Return views of all that is held, by buffer and layer; see `ExportedDecoder.state`."""
        found: dict[str, Array] = {}
        for i, (layer, count) in enumerate(zip(self.layers, held, strict=True)):
            if not min(layer.budget, seen) <= count <= min(seen, layer.capacity - 1):
                raise ValueError(f"{count} slots of layer {i} cannot be held after {seen} tokens")
            found |= {f"{name}.{i}": x for name, x in layer.views(count, seen).items()}
        return found


class SharedDecoder(InPlace):
    """A decoder whose past and present are one buffer, with graphs beside it that evict.

    Args:
        manifest: of kind `shared`.
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
            LayerSlots(found, budget, self.turns if rotates else None, scale)
            if window is None
            else WindowSlots(found, budget, scale)
            for found, budget, rotates, scale, window in zip(
                buffers, self.budgets, facts["rotates"], each, windows, strict=True
            )
        ]
        self._lengths = sorted(set(self.budgets), reverse=True)
        self._held = np.zeros(len(self._lengths), np.int32)
        self._seen, self._stay = np.zeros((), np.int32), np.zeros((), np.int32)
        self._spans = np.zeros((SPANS, 2), np.int32)
        self._logits = np.zeros((1, manifest.model["vocabulary"]), np.float32)
        self._runs: dict[int, SharedRun] = {}
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
        """Read a block; see `ExportedDecoder.run`."""
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

    def _bound(self, length: int) -> SharedRun:
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
        self._runs[length] = found = SharedRun(self.graph.bind(inputs, outputs), ids, made)
        return found

    def _evict(self, seen: int, run: SharedRun, spans: Sequence[Span]) -> None:
        """Bring the policy's state up to date and, where it is time, evict down to the budget."""
        self._seen[...], least = seen, 1 if run.ids.shape[1] > 1 else self.evict_every
        for window in self.windows.values():
            window.slide(least)
        made_by = [made for i, made in enumerate(run.made) if i not in self.windows]
        for layer, evictor, made in zip(self.capped, self.evictors, made_by, strict=True):
            due = layer.held - layer.budget >= least
            if not due and not self._states:
                continue
            stay = layer.budget if due else layer.held
            gone = self._gone(layer, evictor, made.get("queries"), seen, stay, spans)
            if due:
                layer.give_up(gone[0])

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


def paired_buffers(
    model: Mapping[str, Any], budget: int, block: int, cache: Any, compact: bool
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and type of a paired decoder's buffers; each holds the slots of all layers.

    `base` and `positions` exist twice: one is read, the other written.
    """
    rows = (model["layers"], model["kv_heads"])
    slot, whole = (*rows, budget), (*rows, budget + block)
    vector = (model["head_dim"],)
    twice: dict[str, tuple[tuple[int, ...], Any]] = {"positions": (slot, np.int32)}
    if compact:
        twice["base"] = ((*slot, *vector), cache)
    return {
        **dict.fromkeys(("keys", "values"), ((*slot, *vector), cache)),
        **dict.fromkeys(("present_keys", "present_values"), ((*whole, *vector), cache)),
        **{f"{name}{copy}": found for copy in ("", ".next") for name, found in twice.items()},
    }


class PairedDecoder:
    """A decoder that others exported, beside which another graph evicts.

    Args:
        manifest: of kind `evictor`.
        graph: of the decoder.
        evictor: the manifest's entry for the graph that evicts.
        budget: slots per KV head that are kept.
        block_size: tokens read at once.
        sinks: first tokens that are never evicted.
        recents: newest tokens that are never evicted.

    Raises:
        GraphBroken, ShapeError: it is not what the manifest says.
    """

    def __init__(
        self,
        manifest: Manifest,
        graph: Graph,
        evictor: Mapping[str, Any],
        budget: int,
        block_size: int,
        sinks: int = 0,
        recents: int = 0,
    ) -> None:
        model = manifest.model
        self.model, self.block_size, self.budget = model, block_size, budget
        self.windows: Mapping[int, WindowSlots] = {}
        self.layers: int = model["layers"]
        self.budgets, self.recents = [budget] * self.layers, [recents] * self.layers
        self.sinks, self.held = sinks, [0] * self.layers
        self.compact = evictor["positions"] == "compact"
        self.graph, self.version = graph, graph.version
        self.evictor = Graph(manifest.file(evictor["file"]), graph.threads)
        self._past = [self._names("past_key_values", i) for i in range(self.layers)]
        self._present = [self._names("present", i) for i in range(self.layers)]
        self.graph.require(
            {
                "input_ids",
                "attention_mask",
                "position_ids",
                *(n for two in self._past for n in two),
            },
            {"logits", *(name for two in self._present for name in two)},
        )
        cache = np.dtype(manifest.facts["cache_dtype"])
        kinds = paired_buffers(model, budget, block_size, cache, self.compact)
        self._buffers = {name: Buffer(*kind) for name, kind in kinds.items()}
        whole = budget + block_size
        self._ids, self._places = (Buffer((1, block_size), np.int64) for _ in range(2))
        self._mask = np.ones((1, whole), np.int64)
        logits = TYPES[self.graph.outputs["logits"].type]
        self._logits = Buffer((1, block_size, model["vocabulary"]), logits)
        self._counts = {name: np.zeros((), np.int32) for name in ("seen", "recents", "stay")}
        self._spans = np.zeros((SPANS, 2), np.int32)
        self._table = rotations(manifest.facts["inv_freq"], whole) if self.compact else None
        self.evictor.require(
            {*self._counts, "keys", "values", "spans", *self._state, *(["table"] * self.compact)},
            {f"kept_{name}" for name in ("keys", "values", *self._state)},
        )

    @property
    def _state(self) -> tuple[str, ...]:
        """Return the names of what is kept besides keys and values."""
        return ("positions", "base") if self.compact else ("positions",)

    @staticmethod
    def _names(prefix: str, layer: int) -> tuple[str, str]:
        return f"{prefix}.{layer}.key", f"{prefix}.{layer}.value"

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of the buffers of slots and of the table of rotations."""
        table = 0 if self._table is None else self._table.nbytes
        return table + sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def room(self) -> int:
        """Return the tokens of a block."""
        return self.block_size

    def used_bytes(self, seen: int) -> int:
        """Return the bytes of `nbytes` without those of free slots."""
        share = slots_in_use(self.budget, seen) / self.budget
        return int(self.nbytes * share)

    def run(self, ids: Sequence[int], seen: int, spans: Sequence[Span]) -> NDArray[np.float32]:
        """Read a block and evict; see `ExportedDecoder.run`."""
        past, length = slots_in_use(self.budget, seen), len(ids)
        logits = self._decode(ids, past, past if self.compact else seen)
        self._evict(seen, past, length, spans)
        self.held = [slots_in_use(self.budget, seen + length)] * self.layers
        last: NDArray[np.float32] = logits[:, -1]
        return last

    def _decode(self, ids: Sequence[int], past: int, first: int) -> Array:
        """Run the decoder over the slots in use; the tokens' positions begin at `first`."""
        whole = past + len(ids)
        tokens, places = (x.at((1, len(ids))) for x in (self._ids, self._places))
        tokens[0], places[0] = ids, np.arange(first, first + len(ids))
        logits = self._logits.at((1, len(ids), self.model["vocabulary"]))
        mask = self._mask[:, :whole]
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": places}
        outputs: dict[str, Array] = {"logits": logits}
        keys, values = self._held("keys", past), self._held("values", past)
        new_keys, new_values = (self._held(f"present_{x}", whole) for x in ("keys", "values"))
        for layer in range(self.layers):
            key, value = self._past[layer]
            inputs[key], inputs[value] = keys[layer][None], values[layer][None]
            key, value = self._present[layer]
            outputs[key], outputs[value] = new_keys[layer][None], new_values[layer][None]
        self.graph.run(inputs, outputs)
        return logits

    def _evict(self, seen: int, past: int, length: int, spans: Sequence[Span]) -> None:
        """Run the graph that evicts, which copies what stays from `present`."""
        stay = slots_in_use(self.budget, seen + length)
        for name, count in (("seen", seen + length), ("recents", self.recents[0]), ("stay", stay)):
            self._counts[name][...] = count
        inputs: dict[str, Array] = {
            "keys": self._held("present_keys", past + length),
            "values": self._held("present_values", past + length),
            "spans": spans_array([(0, self.sinks), *spans], self._spans),
            **self._counts,
            **{name: self._held(name, past) for name in self._state},
        }
        if self._table is not None:
            inputs["table"] = self._table
        outputs = {
            **{f"kept_{name}": self._held(name, stay) for name in ("keys", "values")},
            **{f"kept_{name}": self._held(f"{name}.next", stay) for name in self._state},
        }
        self.evictor.run(inputs, outputs)
        for name in self._state:
            one, other = name, f"{name}.next"
            self._buffers[one], self._buffers[other] = self._buffers[other], self._buffers[one]

    def _held(self, name: str, slots: int) -> Array:
        """Return a buffer's slots in use, [L, K, slots, ...]."""
        vector = () if name.startswith("positions") else (self.model["head_dim"],)
        return self._buffers[name].at((self.layers, self.model["kv_heads"], slots, *vector))

    def positions(self, seen: int) -> list[Int32]:
        """Return the positions of the kept tokens in the conversation, by layer: [K, held]."""
        return list(self._held("positions", slots_in_use(self.budget, seen)))

    def state(self, seen: int, held: Sequence[int]) -> Mapping[str, Array]:
        """Return views of everything that is held, by name; see `ExportedDecoder.state`."""
        slots = slots_in_use(self.budget, seen)
        if list(held) != [slots] * self.layers:
            raise ValueError(f"{held} slots cannot be held after {seen} tokens")
        return {name: self._held(name, slots) for name in ("keys", "values", *self._state)}
