"""A decoder whose graph evicts: `kvcap export decoder`. State goes in and comes out of every run.

Two sets of buffers: one is read, the other written, then they change places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.onnxruntime.decoder import Int32, held, spans_array
from kvcap.runtime.backends.onnxruntime.graph import Array, Buffer, Graph
from kvcap.runtime.backends.onnxruntime.manifest import Manifest
from kvcap.runtime.errors import ManifestError
from kvcap.runtime.types import Span

SPANS = 8


class Tensor:
    """One tensor of the state; its open axis grows from nothing to what `full` says."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.input, self.output = str(entry["input"]), str(entry["output"])
        self.name, self.layer = str(entry["name"]), int(entry["layer"])
        self.dtype = np.dtype(str(entry["dtype"]))
        self.full = tuple(int(size) for size in entry["full"])
        self.axis = int(entry["open_axis"])
        self.full[self.axis]  # or it is no axis

    @property
    def nbytes(self) -> int:
        """Bytes of one set when it is full."""
        return int(np.prod(self.full)) * self.dtype.itemsize

    def shape(self, seen: int) -> tuple[int, ...]:
        """Its shape after `seen` tokens."""
        size = held(self.full[self.axis], seen)
        return (*self.full[: self.axis], size, *self.full[self.axis + 1 :])


def state_of(manifest: Manifest) -> list[Tensor]:
    """The tensors that are fed back.

    Raises:
        ManifestError: they are not described as they must be.
    """
    try:
        found = [Tensor(entry) for entry in manifest.facts["state"]]
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
    """The decoder of a manifest of kind `fused`.

    Args:
        manifest: of it.
        graph: it.
        block_size: tokens read at once, at most what it was exported for.

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
        """Exact bytes of both sets."""
        return sum(buffer.nbytes for one in self._sets for buffer in one)

    def used_bytes(self, seen: int) -> int:
        """Bytes of the slots in use, in both sets."""
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
        """The kept tokens' places in the conversation, by layer: [K, held]."""
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
