"""Runs decoders of others whose attention is GroupQueryAttention, by slots that are never copied.

Such a graph writes a block behind the slots in use where past and present are bound to one memory,
and counts positions by how many slots are in use: that is a compact position. So survivors of an
eviction move into the places of what goes, and their keys are turned back to where they count now.
A graph beside it says which slots go. What recurrent layers hold is carried from run to run.

A graph that goes by the length of its past is given arrays of just that length: then slots in use
are copied there before a run, and the block from what it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.onnxruntime.decoder import (
    RUNS,
    SPANS,
    DecoderBuffer,
    InPlace,
    spans_array,
)
from kvcap.runtime.backends.onnxruntime.graph import TYPES, Array, Binding, Buffer, Graph
from kvcap.runtime.backends.onnxruntime.manifest import Manifest
from kvcap.runtime.backends.onnxruntime.slots import LayerSlots, Turns
from kvcap.runtime.types import Span

IDS, MASK, PLACES, KEPT = "input_ids", "attention_mask", "position_ids", "num_logits_to_keep"


def grouped_buffers(manifest: Manifest, budget: int, block: int) -> list[DecoderBuffer]:
    """Return the buffers of a decoder that keeps `budget` slots and reads blocks of up to `block`.

    In float16, a layer whose keys turn also keeps them as they were written (`LayerSlots`). Where
    past and present are arrays of their own, their memory is counted as `copies`.
    """
    facts, found = manifest.facts, list[DecoderBuffer]()
    cache = np.dtype(facts["cache_dtype"])
    heads, size = facts["model"]["kv_heads"], facts["model"]["head_dim"]
    slots = (1, heads, budget + block)
    for layer, rotates in enumerate(facts["rotates"]):
        again = rotates and cache.itemsize < 4
        vectors = ("keys", "values", *(["arrived"] if again else []))
        if not facts["one_buffer"]:
            found.append(DecoderBuffer("copies", layer, (2, 2, *slots, size), cache))
        found += [DecoderBuffer(name, layer, (*slots, size), cache) for name in vectors]
        counts = ("positions", *(["shifts"] if again else []))
        found += [DecoderBuffer(name, layer, slots, np.dtype(np.int32)) for name in counts]
    return found


def grouped_turns(manifest: Manifest, budget: int, block: int) -> Turns | None:
    """Return the rotations of its keys; None where no layer has positions."""
    facts = manifest.facts
    if not any(facts["rotates"]):
        return None
    return Turns(facts["inv_freq"], budget + block + 1, facts["interleaved"])


def state_bytes(manifest: Manifest) -> int:
    """Return the bytes of recurrent states, which exist twice: one is read, the other written."""
    found: int = 2 * sum(
        prod(state["shape"]) * np.dtype(state["dtype"]).itemsize
        for state in manifest.facts["states"]
    )
    return found


class GroupedRun(NamedTuple):
    """A run that reads blocks of one length into a grouped decoder, with arrays that stay bound."""

    binding: Binding
    ids: Array  # [1, T]
    places: Array  # [1, T], where the graph takes positions
    logits: Array  # [1, T, V], or [1, 1, V] of the last token alone


class GroupedDecoder(InPlace):
    """A decoder exported by others that writes a block behind the slots in use.

    Args:
        manifest: of kind `grouped`.
        graph: of the decoder.
        evictor: the manifest's entry for the graph that says which slots go.
        budget: slots per KV head that are kept.
        block_size: tokens read at once.
        sinks: first tokens that are never evicted.
        recents: newest tokens that are never evicted.
        evict_every: in generation, evict every so many tokens, at most `block_size`.

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
        evict_every: int = 1,
    ) -> None:
        facts = manifest.facts
        self.block_size, self.evict_every, self.sinks = block_size, evict_every, sinks
        self.ports = [int(n) for n in facts["kv_layers"]]  # the graph's numbers for its layers
        self.budgets, self.recents = [budget] * len(self.ports), [recents] * len(self.ports)
        self.graph, self.version = graph, graph.version
        self.evictor = Graph(manifest.file(evictor["file"]), graph.threads)
        self.turns = grouped_turns(manifest, budget, block_size)
        buffers: list[dict[str, Array]] = [{} for _ in self.ports]
        self._copies: list[list[Buffer]] = []  # of a layer: past key, value, present key, value
        for spec in grouped_buffers(manifest, budget, block_size):
            if spec.name == "copies":
                self._copies.append([Buffer(spec.shape[2:], spec.dtype) for _ in range(4)])
            else:
                buffers[spec.layer][spec.name] = np.zeros(spec.shape, spec.dtype)
        self.layers = [
            LayerSlots(found, budget, self.turns if rotates else None)
            for found, rotates in zip(buffers, facts["rotates"], strict=True)
        ]
        self._present = {state["name"]: state["present"] for state in facts["states"]}
        self._states, self._next = (
            {x["name"]: np.zeros(x["shape"], x["dtype"]) for x in facts["states"]} for _ in range(2)
        )
        self._require()
        self._mask = np.ones((1, budget + block_size), np.int64)
        self._vocabulary = int(manifest.model["vocabulary"])
        self._last_only = bool(facts["last_only"])
        kind = TYPES[graph.outputs["logits"].type]
        rows = 1 if self._last_only else block_size
        self._logits = Buffer((1, rows, self._vocabulary), kind)
        self._runs: dict[int, GroupedRun] = {}
        self._counts = {name: np.zeros((), np.int32) for name in ("seen", "stay", "recents")}
        self._counts["recents"][...] = recents
        self._spans = np.zeros((SPANS, 2), np.int32)

    def _require(self) -> None:
        """Refuse graphs that have other inputs or outputs; some inputs are optional."""
        kinds = ("key", "value")
        past = {f"past_key_values.{n}.{kind}" for n in self.ports for kind in kinds}
        present = {f"present.{n}.{kind}" for n in self.ports for kind in kinds}
        optional = {PLACES, KEPT} & set(self.graph.inputs)
        self.graph.require(
            {IDS, MASK, *optional, *past, *self._present},
            {"logits", *present, *self._present.values()},
        )
        known = {"seen", "stay", "recents", "spans", "keys", "values", "positions"}
        self.evictor.require(known & set(self.evictor.inputs), {"gone"})

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of all buffers, of states and of the table of rotations."""
        states = (*self._states.values(), *self._next.values())
        copies = sum(x.nbytes for four in self._copies for x in four)
        return super().nbytes + sum(x.nbytes for x in states) + copies

    def state(self, seen: int, held: Sequence[int]) -> Mapping[str, Array]:
        """Return views of everything that is held; see `ExportedDecoder.state`."""
        return {**super().state(seen, held), **self._states}

    def run(self, ids: Sequence[int], seen: int, spans: Sequence[Span]) -> NDArray[np.float32]:
        """Read a block and evict where it is time; see `ExportedDecoder.run`."""
        length, held = len(ids), self.held[0]
        run = self._runs.get(length) or self._bound(length)
        run.ids[0], run.places[0] = ids, np.arange(held, held + length)
        if not seen:
            for state in self._states.values():
                state[...] = 0
        present = {self._present[name]: x for name, x in self._next.items()}
        inputs = {MASK: self._mask[:, : held + length], **self._states}
        self.graph.rebind(run.binding, inputs, present)
        written = self._copied(run.binding, held, held + length) if self._copies else []
        self.graph.run_bound(run.binding)
        for buffer, x in written:
            buffer[:, :, held : held + length] = x[:, :, held:]
        self._states, self._next = self._next, self._states
        for layer in self.layers:
            layer.append(seen, length, {})
        self._evict(seen + length, 1 if length > 1 else self.evict_every, spans)
        last: NDArray[np.float32] = run.logits[:, -1]
        return last

    def _copied(self, binding: Binding, held: int, whole: int) -> list[tuple[Array, Array]]:
        """Bind copies of the slots in use; return buffers and what a run writes for them."""
        written, kinds = list[tuple[Array, Array]](), ("key", "value")
        for port, layer, copies in zip(self.ports, self.layers, self._copies, strict=True):
            for name, kind, past, present in zip(
                ("keys", "values"), kinds, copies[:2], copies[2:], strict=True
            ):
                buffer = layer.buffers[name]
                heads, size = buffer.shape[1], buffer.shape[3]
                given, made = past.at((1, heads, held, size)), present.at((1, heads, whole, size))
                given[...] = buffer[:, :, :held]
                ports = f"past_key_values.{port}.{kind}", f"present.{port}.{kind}"
                self.graph.rebind(binding, {ports[0]: given}, {ports[1]: made})
                written.append((buffer, made))
        return written

    def _bound(self, length: int) -> GroupedRun:
        """Return what stays the same for all blocks of a length; the last few lengths are kept."""
        ids, places = (np.zeros((1, length), np.int64) for _ in range(2))
        logits = self._logits.at((1, 1 if self._last_only else length, self._vocabulary))
        inputs: dict[str, Array] = {IDS: ids}
        more = {PLACES: places, KEPT: np.array(1, np.int64)}
        inputs |= {name: x for name, x in more.items() if name in self.graph.inputs}
        outputs: dict[str, Array] = {"logits": logits}
        for port, layer in zip(self.ports, self.layers, strict=True):
            for name, kind in (("keys", "key"), ("values", "value")):
                buffer = layer.buffers[name]
                inputs[f"past_key_values.{port}.{kind}"] = buffer
                outputs[f"present.{port}.{kind}"] = buffer
        if len(self._runs) == RUNS:
            del self._runs[next(iter(self._runs))]
        self._kept = inputs.get(KEPT)  # its memory is read by every run
        self._runs[length] = found = GroupedRun(
            self.graph.bind(inputs, outputs), ids, places, logits
        )
        return found

    def _evict(self, seen: int, least: int, spans: Sequence[Span]) -> None:
        """Evict every layer down to its budget, where at least so many tokens are to go."""
        self._counts["seen"][...] = seen
        for layer in self.capped:
            if layer.held - layer.budget < least:
                continue
            self._counts["stay"][...] = layer.budget
            buffers, held = layer.buffers, layer.held
            given: dict[str, Array] = {
                **self._counts,
                "spans": spans_array([(0, self.sinks), *spans], self._spans),
                "keys": buffers["keys"],
                "values": buffers["values"],
                "positions": buffers["positions"][:, :, :held].copy(),
            }
            gone = np.empty((1, buffers["keys"].shape[1], held - layer.budget), np.int64)
            self.evictor.run({name: given[name] for name in self.evictor.inputs}, {"gone": gone})
            layer.give_up(gone[0])
