"""Says of a decoder's graph in few nodes what it says in many: a token's time is theirs, too.

At a single token a node that computes next to nothing still takes some microseconds, and a layer of
a traced decoder has dozens. ONNX Runtime fuses RMS norms by itself if they divide; of rotary
embeddings it has a node, but finds none. Only what matches in full is replaced; the export is
checked afterwards in any case. Knows ONNX graphs; no model.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from kvcap.runtime.backends.onnxruntime.library import library

MS = "com.microsoft"


def fuse(model: Any) -> None:
    """Fuse what can be in an onnx.ModelProto, in place."""
    inferred = library("onnx.shape_inference").infer_shapes(model).graph
    shapes = {x.name: x.type.tensor_type.shape.dim for x in (*inferred.value_info, *inferred.input)}
    graph = Fusing(model.graph, {name: dims[-1].dim_value for name, dims in shapes.items() if dims})
    for node in list(model.graph.node):
        if node.op_type == "Mul":
            graph.divide(node)
        if node.op_type == "Add":
            graph.rotate(node)
    graph.clean()


class Fusing:
    """A graph whose nodes are replaced by fewer.

    Args:
        graph: an onnx.GraphProto, changed in place.
        widths: the last size of tensors, where it is known.
    """

    def __init__(self, graph: Any, widths: dict[str, int]) -> None:
        self.graph, self.widths = graph, widths
        self.made = {name: node for node in graph.node for name in node.output}
        self.uses = Counter(name for node in graph.node for name in node.input)
        self.uses.update(value.name for value in graph.output)
        self.halves: dict[tuple[str, int], str] = {}  # cosines or sines [T, R/2] by their whole
        self.constants = {x.name: x for x in graph.initializer}

    def divide(self, node: Any) -> None:
        """`x · (1 / √y)` as `x / √y`, by which RMS norms are known."""
        for one, other in (node.input, reversed(node.input)):
            inverse = self._alone(other, "Reciprocal")
            if inverse is not None and self._alone(inverse.input[0], "Sqrt") is not None:
                node.op_type = "Div"
                node.input[:] = [one, inverse.input[0]]
                return

    def rotate(self, node: Any) -> None:
        """`x · cos + [-x₂, x₁] · sin` as RotaryEmbedding, of x [1, h, T, R]."""
        plain, turned = (self._alone(name, "Mul") for name in node.input)
        if plain is None or turned is None:
            return
        halves = self._alone(turned.input[0], "Concat")
        if halves is None or len(halves.input) != 2:
            return
        x, negated = plain.input[0], self._alone(halves.input[0], "Neg")
        first = self._alone(halves.input[1], "Slice")
        second = None if negated is None else self._alone(negated.input[0], "Slice")
        if first is None or second is None or {first.input[0], second.input[0]} != {x}:
            return
        pairs = self._whole(first.input[2])
        cuts = self._whole(first.input[1]), self._whole(second.input[1])
        if pairs is None or cuts != (0, pairs) or self.widths.get(x) != 2 * pairs:
            return
        angles = [self._angles(name, pairs) for name in (plain.input[1], turned.input[1])]
        if None not in angles:
            del node.attribute[:]
            node.op_type, node.domain = "RotaryEmbedding", MS
            node.input[:] = [x, self._constant("first_place", np.zeros(1, np.int64)), *angles]

    def _angles(self, name: str, pairs: int) -> str | None:
        """Cosines or sines [1, 1, T, R] of a rotation as those [T, R/2] of its node."""
        wide = self.made.get(name)
        if wide is None or wide.op_type != "Unsqueeze":
            return None
        whole = wide.input[0]
        if (whole, pairs) not in self.halves:
            bounds = [
                self._constant(f"bound_{number}", np.array([number], np.int64))
                for number in (0, pairs, 2)
            ]
            make, found = library("onnx.helper").make_node, f"{whole}_half"
            nodes = [
                make("Slice", [whole, *bounds], [f"{found}_kept"]),
                make("Squeeze", [f"{found}_kept", bounds[0]], [found]),
            ]
            after = list(self.graph.node).index(self.made[whole]) + 1
            for i, node in enumerate(nodes):
                self.graph.node.insert(after + i, node)
            self.halves[whole, pairs] = found
        return self.halves[whole, pairs]

    def _constant(self, name: str, value: Any) -> str:
        if name not in self.constants:
            made = library("onnx.numpy_helper").from_array(value, name)
            self.graph.initializer.append(made)
            self.constants[name] = made
        return name

    def _alone(self, name: str, kind: str) -> Any:
        """The node of this kind that makes a tensor which nothing else reads."""
        node = self.made.get(name)
        return node if node is not None and node.op_type == kind and self.uses[name] == 1 else None

    def _whole(self, name: str) -> int | None:
        """The number that a constant holds."""
        tensor = self.constants.get(name)
        if tensor is None or tensor.external_data:  # weights
            return None
        value = library("onnx.numpy_helper").to_array(tensor)
        return int(value.item()) if value.size == 1 else None

    def clean(self) -> None:
        """Remove nodes that nothing reads any more."""
        outputs = {value.name for value in self.graph.output}
        while True:
            read = outputs | {name for node in self.graph.node for name in node.input}
            idle = [node for node in self.graph.node if not read & set(node.output)]
            if not idle:
                break
            for node in idle:
                self.graph.node.remove(node)
        for tensor in [x for x in self.graph.initializer if x.name not in read]:
            self.graph.initializer.remove(tensor)
