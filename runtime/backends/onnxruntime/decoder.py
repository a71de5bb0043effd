"""Runs exported decoders, of two kinds, over slots in buffers that are allocated once.

`Fused`: one graph decodes and evicts (`kvcap export decoder`). Its state goes in and comes out of
every run, so there are two sets of buffers: one is read, the other written, and they change places.

`Paired`: a decoder that others exported, and a graph beside it that evicts (`export/adopt.py`). The
decoder writes all that it was given, and the block, as `present`; the other graph takes from it
what stays. Where positions are compact, every key is also kept rotated to position 0, and a copy is
rotated to its present position, so that no error adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.onnxruntime.graph import TYPES, Array, Buffer, Graph
from kvcap.runtime.backends.onnxruntime.manifest import Manifest
from kvcap.runtime.errors import ManifestError
from kvcap.runtime.types import Span

Int32 = NDArray[np.int32]
SPANS = 9  # for which a place is kept: a policy's sinks, and eight of the user's


class Decoder(Protocol):
    """Runs a model over its slots, which lie in order of time, and evicts after every block."""

    budgets: list[int]  # slots that a KV head keeps, by layer
    block_size: int
    version: str  # of ONNX Runtime
    sinks: int  # first tokens that the policy pins
    recents: list[int]  # newest tokens that it pins, by layer

    @property
    def nbytes(self) -> int:
        """Exact bytes of all buffers, which never grow."""

    def used_bytes(self, seen: int) -> int:
        """Bytes of the slots in use after `seen` tokens, in all buffers."""

    def run(self, ids: Sequence[int], seen: int, spans: Sequence[Span]) -> NDArray[np.float32]:
        """Read up to `block_size` tokens after `seen`, and evict; the last one's logits [1, V].

        Raises:
            MemoryCapExceeded: the system refused memory; the slots are no longer whole.
        """

    def positions(self, seen: int) -> list[Int32]:
        """The positions of the kept tokens in the conversation, by layer: [K, held]."""

    def state(self, seen: int) -> Mapping[str, Array]:
        """Everything that is held after `seen` tokens, by name, as views."""


def slots_in_use(budget: int, seen: int) -> int:
    """The slots in use of a head that keeps `budget` of `seen` tokens."""
    return min(budget, seen)


def spans_array(spans: Sequence[Span], buffer: Int32) -> Int32:
    """Spans as the rows [S, 2] of a graph's input; an empty span where there are none.

    They are written into `buffer` [S_max, 2] where they fit, so that their address stays the same.
    """
    rows = np.array(spans or [(0, 0)], np.int32)
    if len(rows) > len(buffer):
        return rows
    buffer[: len(rows)] = rows
    return buffer[: len(rows)]


class StateTensor:
    """A tensor of a fused decoder's state, whose `open_axis` grows from 0 to its size in `full`."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.input, self.output = str(entry["input"]), str(entry["output"])
        self.name, self.layer = str(entry["name"]), int(entry["layer"])
        self.dtype = np.dtype(str(entry["dtype"]))
        self.full = tuple(int(size) for size in entry["full"])
        self.axis = int(entry["open_axis"])
        self.full[self.axis]  # or it is no axis

    @property
    def nbytes(self) -> int:
        """Its bytes when it is full, in one set of buffers."""
        return int(np.prod(self.full)) * self.dtype.itemsize

    def shape(self, seen: int) -> tuple[int, ...]:
        """Its shape after `seen` tokens."""
        size = slots_in_use(self.full[self.axis], seen)
        return (*self.full[: self.axis], size, *self.full[self.axis + 1 :])


def state_of(manifest: Manifest) -> list[StateTensor]:
    """The tensors that a fused decoder is fed back after every run.

    Raises:
        ManifestError: the manifest does not describe them, or contradicts itself.
    """
    try:
        found = [StateTensor(entry) for entry in manifest.facts["state"]]
    except (LookupError, TypeError, ValueError) as error:
        raise ManifestError(
            f"the manifest in {str(manifest.folder)!r} describes no state that can be fed back "
            f"({error!r}); export it again"
        ) from error
    budgets = manifest.facts["budgets"]
    slots = {(t.name, t.layer): t.full[t.axis] for t in found if t.name == "positions"}
    if slots != {("positions", layer): budget for layer, budget in enumerate(budgets)}:
        raise ManifestError(
            f"the manifest in {str(manifest.folder)!r} has other budgets than slots; export it "
            "again"
        )
    return found


class Fused:
    """A decoder whose own graph evicts.

    Args:
        manifest: of kind `fused`.
        graph: of the decoder.
        block_size: tokens read at once, at most as many as it was exported for.

    Raises:
        ShapeError, ManifestError: it is not what the manifest says.
    """

    def __init__(self, manifest: Manifest, graph: Graph, block_size: int) -> None:
        facts = manifest.facts
        self.block_size, self.budgets = block_size, [int(n) for n in facts["budgets"]]
        pins = facts["policy"].get("pins") or {}
        self.sinks = int(pins.get("sinks", 0))
        self.recents = [int(n) for n in pins.get("recents", [0] * len(self.budgets))]
        self.tensors = state_of(manifest)
        self.graph, self.version = graph, graph.version
        self.graph.require(
            {"input_ids", "seen", "pinned", *(t.input for t in self.tensors)},
            {"logits", *(t.output for t in self.tensors)},
        )
        self._sets = [[Buffer(t.full, t.dtype) for t in self.tensors] for _ in range(2)]
        self._ids = Buffer((1, block_size), np.int64)
        self._logits = np.zeros((1, manifest.model["vocabulary"]), np.float32)
        self._seen, self._spans = np.zeros((), np.int32), np.zeros((SPANS, 2), np.int32)

    @property
    def nbytes(self) -> int:
        """Exact bytes of both sets of buffers."""
        return sum(buffer.nbytes for one in self._sets for buffer in one)

    def used_bytes(self, seen: int) -> int:
        """Bytes of the slots in use, in both sets of buffers."""
        return 2 * sum(array.nbytes for array in self.state(seen).values())

    def run(self, ids: Sequence[int], seen: int, spans: Sequence[Span]) -> NDArray[np.float32]:
        """Read a block; see `Decoder.run`."""
        now, after = self._sets
        tokens = self._ids.at((1, len(ids)))
        tokens[0] = ids
        self._seen[...] = seen
        inputs = {"input_ids": tokens, "seen": self._seen}
        inputs["pinned"] = spans_array(spans, self._spans)
        outputs: dict[str, Array] = {"logits": self._logits}
        for tensor, before, then in zip(self.tensors, now, after, strict=True):
            inputs[tensor.input] = before.at(tensor.shape(seen))
            outputs[tensor.output] = then.at(tensor.shape(seen + len(ids)))
        self.graph.run(inputs, outputs)
        self._sets = [after, now]
        return self._logits

    def positions(self, seen: int) -> list[Int32]:
        """The positions of the kept tokens in the conversation, by layer: [K, held]."""
        found = {
            tensor.layer: buffer.at(tensor.shape(seen))[0]
            for tensor, buffer in zip(self.tensors, self._sets[0], strict=True)
            if tensor.name == "positions"
        }
        return [found[layer] for layer in sorted(found)]

    def state(self, seen: int) -> Mapping[str, Array]:
        """Everything that is held, by the names of the graph's inputs (views)."""
        pairs = zip(self.tensors, self._sets[0], strict=True)
        return {tensor.input: buffer.at(tensor.shape(seen)) for tensor, buffer in pairs}


def paired_buffers(
    model: Mapping[str, Any], budget: int, block: int, cache: Any, compact: bool
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and type of a paired decoder's buffers, each of which holds the slots of all layers.

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


def rotations(inv_freq: Sequence[float], span: int) -> NDArray[np.float32]:
    """Cosines and sines of all positions below `span`, [span, 2, R/2], from float64 angles."""
    angles = np.arange(span, dtype=np.float64)[:, None] * np.array(inv_freq, np.float64)
    return np.stack((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)


class Paired:
    """A decoder beside which another graph evicts.

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
        self.layers: int = model["layers"]
        self.budgets, self.recents = [budget] * self.layers, [recents] * self.layers
        self.sinks = sinks
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
        """The names of what is kept besides keys and values."""
        return ("positions", "base") if self.compact else ("positions",)

    @staticmethod
    def _names(prefix: str, layer: int) -> tuple[str, str]:
        return f"{prefix}.{layer}.key", f"{prefix}.{layer}.value"

    @property
    def nbytes(self) -> int:
        """Exact bytes of the buffers of slots and of the table of rotations."""
        table = 0 if self._table is None else self._table.nbytes
        return table + sum(buffer.nbytes for buffer in self._buffers.values())

    def used_bytes(self, seen: int) -> int:
        """The same bytes without those of free slots."""
        share = slots_in_use(self.budget, seen) / self.budget
        return int(self.nbytes * share)

    def run(self, ids: Sequence[int], seen: int, spans: Sequence[Span]) -> NDArray[np.float32]:
        """Read a block and evict; see `Decoder.run`."""
        past, length = slots_in_use(self.budget, seen), len(ids)
        logits = self._decode(ids, past, past if self.compact else seen)
        self._evict(seen, past, length, spans)
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
        """Run the graph that evicts: it copies what stays from `present`."""
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
        """A buffer's slots in use, [L, K, slots, ...]."""
        vector = () if name.startswith("positions") else (self.model["head_dim"],)
        return self._buffers[name].at((self.layers, self.model["kv_heads"], slots, *vector))

    def positions(self, seen: int) -> list[Int32]:
        """The positions of the kept tokens in the conversation, by layer: [K, held]."""
        return list(self._held("positions", slots_in_use(self.budget, seen)))

    def state(self, seen: int) -> Mapping[str, Array]:
        """Everything that is held, by name (views)."""
        names = ("keys", "values", *self._state)
        return {name: self._held(name, slots_in_use(self.budget, seen)) for name in names}
