"""A decoder that others exported, and a graph beside it that evicts; see `export/adopt.py`.

After every block the decoder has written all that it was given, and the block, as `present`. The
evictor takes from it what stays. Where positions are compact it also keeps every key turned to
position 0, and turns a copy to where it counts now: no error adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.onnxruntime.decoder import Int32, held, spans_array
from kvcap.runtime.backends.onnxruntime.graph import TYPES, Array, Buffer, Graph
from kvcap.runtime.backends.onnxruntime.manifest import Manifest
from kvcap.runtime.types import Span

SPANS = 9  # the policy's sinks, and eight of the user's


def sizes(
    model: Mapping[str, Any], budget: int, block: int, cache: Any, compact: bool
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and type of every buffer that holds slots, all layers in one.

    `base` and `positions` are there twice: read and written.
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
    """Cosines and sines of every position below `span`, [span, 2, R/2]; exact, from float64."""
    angles = np.arange(span, dtype=np.float64)[:, None] * np.array(inv_freq, np.float64)
    return np.stack((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)


class Paired:
    """The decoder of a manifest of kind `evictor`.

    Args:
        manifest: of it.
        graph: it.
        evictor: the manifest's entry of the graph that evicts.
        budget: slots per KV head that stay.
        block_size: tokens read at once.
        sinks: first tokens that are never evicted.
        recents: newest ones.

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
        kinds = sizes(model, budget, block_size, cache, self.compact)
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
        """What the evictor keeps besides keys and values."""
        return ("positions", "base") if self.compact else ("positions",)

    @staticmethod
    def _names(prefix: str, layer: int) -> tuple[str, str]:
        return f"{prefix}.{layer}.key", f"{prefix}.{layer}.value"

    @property
    def nbytes(self) -> int:
        """Exact bytes of all that holds slots, and of the table of rotations."""
        table = 0 if self._table is None else self._table.nbytes
        return table + sum(buffer.nbytes for buffer in self._buffers.values())

    def used_bytes(self, seen: int) -> int:
        """The same without free slots."""
        share = held(self.budget, seen) / self.budget
        return int(self.nbytes * share)

    def run(self, ids: Sequence[int], seen: int, spans: Sequence[Span]) -> NDArray[np.float32]:
        """Read a block and evict; see `Decoder.run`."""
        past, length = held(self.budget, seen), len(ids)
        logits = self._decode(ids, past, past if self.compact else seen)
        self._evict(seen, past, length, spans)
        last: NDArray[np.float32] = logits[:, -1]
        return last

    def _decode(self, ids: Sequence[int], past: int, first: int) -> Array:
        """Run the decoder over what is held; tokens are at the positions from `first` on."""
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
        """Take over from `present` what stays."""
        stay = held(self.budget, seen + length)
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
        """The kept tokens' places in the conversation, by layer: [K, held]."""
        return list(self._held("positions", held(self.budget, seen)))

    def state(self, seen: int) -> Mapping[str, Array]:
        """Everything that is held, by name (views)."""
        names = ("keys", "values", *self._state)
        return {name: self._held(name, held(self.budget, seen)) for name in names}
