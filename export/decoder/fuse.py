"""Fuses nodes of a decoder's graph, since node overhead dominates a single token.

At a single token a node that computes next to nothing still takes some microseconds, and a layer of
a traced decoder has dozens. ONNX Runtime fuses RMS norms by itself if they divide, but not with the
sum before them; of rotary embeddings it has a node, but finds none. Its attention takes queries,
keys and values as one product gives them, and rotates them itself. Only what matches in full is
replaced; the export is checked afterwards in any case. Knows ONNX graphs; no model.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from kvcap.runtime.backends.onnxruntime.library import library

MS = "com.microsoft"
ATTENTION = "GroupQueryAttention"
GIVEN = 7  # the node's inputs before its cosines, sines and positions
Sizes = list[int]  # sizes of a tensor's axes, 0 for an open one


def fuse(model: Any) -> None:
    """Fuse nodes of an onnx.ModelProto, in place."""
    graph = Fusing(model.graph, _shapes(model))
    for kind, fused in (
        ("Mul", graph.divide),
        ("Add", graph.rotate),
        (ATTENTION, graph.attend),
        ("Reshape", graph.reshape),
        ("Mul", graph.norm),
    ):
        for node in list(model.graph.node):
            if node.op_type == kind:
                fused(node)
        graph.clean()
    if MS not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(library("onnx.helper").make_opsetid(MS, 1))


def _shapes(model: Any) -> dict[str, Sizes]:
    """Return the shapes of tensors, as far as they are known."""
    copy, onnx = type(model).FromString(model.SerializeToString()), library("onnx")
    ports = {value.name: value.type.tensor_type for value in copy.graph.input}
    for node in copy.graph.node:
        if node.op_type == ATTENTION:  # ONNX does not know its shapes
            keys = ports[node.input[3]]
            (heads,) = (a.i for a in node.attribute if a.name == "num_heads")
            shape = [1, None, heads * keys.shape.dim[3].dim_value]
            kind, floats = keys.elem_type, onnx.TensorProto.FLOAT
            kind = floats if kind == onnx.TensorProto.INT8 else kind
            info = onnx.helper.make_tensor_value_info(node.output[0], kind, shape)
            copy.graph.value_info.append(info)
    inferred = onnx.shape_inference.infer_shapes(copy).graph
    values = (*inferred.value_info, *inferred.input)
    return {x.name: [d.dim_value for d in x.type.tensor_type.shape.dim] for x in values}


class WeightProduct(NamedTuple):
    """A product that a graph computes with a weight: `x @ weight.T`, and a sum with a bias."""

    x: str
    weight: str  # [K, N]: the model's, transposed
    bias: str | None  # [N]


class Fusing:
    """A graph whose nodes are replaced by fewer.

    Args:
        graph: an onnx.GraphProto, changed in place.
        shapes: of tensors, where they are known.
    """

    def __init__(self, graph: Any, shapes: dict[str, Sizes]) -> None:
        self.graph, self.shapes = graph, shapes
        self.make = library("onnx.helper").make_node
        self.inputs = {value.name for value in graph.input}
        self.outputs = {value.name for value in graph.output}
        self.halves: dict[tuple[str, int], str] = {}  # cosines or sines [T, R/2] by [T, R]
        self.pairs: dict[str, int] = {}  # R/2 by the name of these halves
        self.padded: dict[tuple[str, str], str] = {}  # halves padded to a row for every slot
        self.token_indices: dict[str, str] = {}  # 0, 1, ... for a block's tokens [1, T], by halves
        self.constants = {x.name: x for x in graph.initializer}
        self._survey()

    def _survey(self) -> None:
        """Note the node that makes each tensor, and how often the tensor is read."""
        nodes = self.graph.node
        self.made = {name: node for node in nodes for name in node.output if name}
        self.uses = Counter(name for node in nodes for name in node.input)
        self.uses.update(self.outputs)

    def divide(self, node: Any) -> None:
        """Turn `x · (1 / √y)` into `x / √y`, by which RMS norms are known."""
        for factor, other in (node.input, reversed(node.input)):
            inverse = self._alone(other, "Reciprocal")
            if inverse is not None and self._alone(inverse.input[0], "Sqrt") is not None:
                node.op_type = "Div"
                node.input[:] = [factor, inverse.input[0]]
                return

    def rotate(self, node: Any) -> None:
        """Turn `x · cos + [-x₂, x₁] · sin` into RotaryEmbedding, of x [1, h, T, R]."""
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
        if pairs is None or cuts != (0, pairs) or self._width(x) != 2 * pairs:
            return
        angles = [self._angles(name, pairs) for name in (plain.input[1], turned.input[1])]
        if None not in angles:
            del node.attribute[:]
            node.op_type, node.domain = "RotaryEmbedding", MS
            node.input[:] = [x, self._constant("first_place", np.zeros(1, np.int64)), *angles]

    def _angles(self, name: str, pairs: int) -> str | None:
        """Return the name of cosines or sines [T, R/2] for a rotation's [1, 1, T, R]."""
        wide = self.made.get(name)
        if wide is None or wide.op_type != "Unsqueeze" or self._sizes(wide.input[1]) != [1]:
            return None  # heads lie behind tokens (Gemma 4), or these are no angles
        whole = wide.input[0]
        if (whole, pairs) not in self.halves:
            bounds = [
                self._constant(f"bound_{number}", np.array([number], np.int64))
                for number in (0, pairs, 2)
            ]
            halved = f"{whole}_half"
            nodes = [
                self.make("Slice", [whole, *bounds], [f"{halved}_kept"]),
                self.make("Squeeze", [f"{halved}_kept", bounds[0]], [halved]),
            ]
            self._insert(nodes, list(self.graph.node).index(self.made[whole]) + 1)
            self.halves[whole, pairs], self.pairs[halved] = halved, pairs
        return self.halves[whole, pairs]

    def attend(self, node: Any) -> None:
        """Move rotations into GroupQueryAttention, and make its inputs by one product.

        It takes them as [1, T, h · D], so that nothing is turned to [1, h, T, D] and back. Angles
        are given as rows for all slots, of which only the block's are read.
        """
        head = self._width(node.input[3])
        turned = [self._rotation(name) for name in node.input[:2]]
        if turned[0] is None or turned[1] is None or turned[0].input[1:] != turned[1].input[1:]:
            return
        first, cos, sin = turned[0].input[1:]
        pairs = self.pairs.get(cos, 0)
        if first != "first_place" or not pairs or pairs % 8 or head % 16:
            return
        flat = [self._before_heads(rotation.input[0]) for rotation in turned]
        if None in flat:
            return
        for name, source in zip(node.input[:2], flat, strict=True):
            self.made[name].input[0] = source  # heads side by side again, not rotated
        angles = [self._rows(rotation, node.input[6], node) for rotation in (cos, sin)]
        inputs, further = node.input[:GIVEN], node.input[GIVEN + 3 :]  # scales of 8 bits, if any
        node.input[:] = [*inputs, *angles, self._token_indices(cos, node), *further]
        node.attribute.append(library("onnx.helper").make_attribute("do_rotary", 1))
        self._join(node)

    def _rotation(self, name: str) -> Any:
        """Return the RotaryEmbedding node whose [1, h, T, D] becomes `name` [1, T, h · D]."""
        flat = self._alone(name, "Reshape")
        turned = None if flat is None else self._alone(flat.input[0], "Transpose")
        if turned is None or not _swaps(turned):
            return None
        return self._alone(turned.input[0], "RotaryEmbedding")

    def _before_heads(self, name: str) -> str | None:
        """Return the tensor [1, T, h, D] that was transposed to [1, h, T, D]."""
        turned = self._alone(name, "Transpose")
        return turned.input[0] if turned is not None and _swaps(turned) else None

    def _rows(self, angles: str, total: str, node: Any) -> str:
        """Return angles [T, R/2] with rows behind them, as many as slots."""
        if (angles, total) not in self.padded:
            padded, count = f"{angles}_rows_{total}", f"{total}_rows"
            none = self._constant("bound_0", np.zeros(1, np.int64))
            nodes = []
            if count not in self.made:
                two = self._constant("no_rows", np.zeros(2, np.int64))
                nodes += [
                    self.make(
                        "Cast", [total], [f"{count}_long"], to=library("onnx").TensorProto.INT64
                    ),
                    self.make("Unsqueeze", [f"{count}_long", none], [f"{count}_one"]),
                    self.make("Concat", [two, f"{count}_one", none], [count], axis=0),
                ]
            nodes.append(self.make("Pad", [angles, count], [padded]))
            self._before(node, nodes)
            self.padded[angles, total] = padded
        return self.padded[angles, total]

    def _token_indices(self, angles: str, node: Any) -> str:
        """Return 0, 1, ... for a block's tokens, int64 [1, T]."""
        if angles not in self.token_indices:
            indices = f"{angles}_places"
            zero, one = (self._constant(f"place_{n}", np.array(n, np.int64)) for n in (0, 1))
            none = self._constant("bound_0", np.zeros(1, np.int64))
            nodes = [
                self.make("Shape", [angles], [f"{indices}_shape"], start=0, end=1),
                self.make("Squeeze", [f"{indices}_shape", none], [f"{indices}_count"]),
                self.make("Range", [zero, f"{indices}_count", one], [f"{indices}_flat"]),
                self.make("Unsqueeze", [f"{indices}_flat", none], [indices]),
            ]
            self._before(node, nodes)
            self.token_indices[angles] = indices
        return self.token_indices[angles]

    def _join(self, node: Any) -> None:
        """Join the products of one activation for queries, keys and values into one."""
        producers = [self._product(name) for name in node.input[:3]]
        products = [product for product in producers if product is not None]
        if len(products) < 3 or len({(p.x, p.bias is None) for p in products}) > 1:
            return
        last = joined = f"{node.output[0]}_given"
        biases = [p.bias for p in products if p.bias is not None]
        if biases:
            joined = f"{last}_plain"
        matrix = f"{last}_weights"
        nodes = [
            self.make("Concat", [p.weight for p in products], [matrix], axis=1),
            self.make("MatMul", [products[0].x, matrix], [joined]),
        ]
        if biases:
            nodes += [
                self.make("Concat", biases, [f"{last}_bias"], axis=0),
                self.make("Add", [joined, f"{last}_bias"], [last]),
            ]
        self._before(node, nodes)
        node.input[:3] = [last, "", ""]

    def _product(self, name: str) -> WeightProduct | None:
        """Return the product [1, T, N] of an activation and a weight that gives `name`."""
        while (view := self._alone(name, "Reshape")) is not None:
            name = view.input[0]
        bias, matmul = None, self._alone(name, "MatMul")
        if (added := self._alone(name, "Add")) is not None:
            for term, other in (added.input, reversed(added.input)):
                if other in self.inputs and len(self.shapes[other]) == 1:
                    bias, matmul = other, self._alone(term, "MatMul")
        weight = None if matmul is None else self._alone(matmul.input[1], "Transpose")
        if matmul is None or weight is None or weight.input[0] not in self.inputs:
            return None
        if self.uses[weight.input[0]] > 1 or len(self.shapes.get(matmul.input[0], [])) != 3:
            return None
        return WeightProduct(matmul.input[0], matmul.input[1], bias)

    def reshape(self, node: Any) -> None:
        """Replace a view that gives a tensor [1, T, W] its own shape again by the tensor."""
        shape, source = self._sizes(node.input[1]), node.input[0]
        while (view := self.made.get(source)) is not None and view.op_type == "Reshape":
            source = view.input[0]
        if shape is None or shape != [1, -1, self._width(source)]:
            return
        if len(self.shapes[source]) == 3 and node.output[0] not in self.outputs:
            self._replace(node.output[0], source)

    def norm(self, node: Any) -> None:
        """Turn an RMS norm of a sum into SkipSimplifiedLayerNormalization, which gives both."""
        for normed, gain in (node.input, reversed(node.input)):
            rms = self._rms(normed)
            if rms is None or len(self.shapes.get(gain, [])) != 1 or gain in self.made:
                continue
            total, epsilon = rms
            added = self.made.get(total)
            if added is None or added.op_type != "Add" or total in self.outputs:
                continue
            sides = [self.shapes.get(name, []) for name in added.input]
            if any(len(side) != 3 or side[-1] != self._width(gain) for side in sides):
                continue
            index = list(self.graph.node).index(added)
            fused = self.make(
                "SkipSimplifiedLayerNormalization",
                [*added.input, gain],
                [node.output[0], "", "", total],
                domain=MS,
                epsilon=epsilon,
            )
            self.graph.node.insert(index, fused)
            self.graph.node.remove(added)
            self.graph.node.remove(node)
            del self.made[total]
            return

    def _rms(self, name: str) -> tuple[str, float] | None:
        """Return the tensor that is divided by its root mean square, and the epsilon in that."""
        divided = self._alone(name, "Div")
        root = None if divided is None else self._alone(divided.input[1], "Sqrt")
        added = None if root is None else self._alone(root.input[0], "Add")
        if divided is None or added is None:
            return None
        for term, other in (added.input, reversed(added.input)):
            mean, epsilon = self._alone(term, "ReduceMean"), self._number(other)
            square = None if mean is None else self._alone(mean.input[0], "Pow")
            if square is None or epsilon is None or square.input[0] != divided.input[0]:
                continue
            axes = self._sizes(mean.input[1]) if len(mean.input) > 1 else None
            if axes == [-1] and self._number(square.input[1]) == 2:
                return str(square.input[0]), epsilon
        return None

    def _replace(self, name: str, other: str) -> None:
        """Have all that read a tensor read another."""
        for node in self.graph.node:
            for i, read in enumerate(node.input):
                if read == name:
                    node.input[i] = other

    def _before(self, node: Any, nodes: list[Any]) -> None:
        self._insert(nodes, list(self.graph.node).index(node))

    def _insert(self, nodes: list[Any], index: int) -> None:
        for i, node in enumerate(nodes):
            self.graph.node.insert(index + i, node)
            self.made |= dict.fromkeys(node.output, node)
            self.uses.update(node.input)

    def _constant(self, name: str, value: Any) -> str:
        if name not in self.constants:
            tensor = library("onnx.numpy_helper").from_array(value, name)
            self.graph.initializer.append(tensor)
            self.constants[name] = tensor
        return name

    def _alone(self, name: str, kind: str) -> Any:
        """Return the node of this kind that makes a tensor which nothing else reads."""
        node = self.made.get(name)
        return node if node is not None and node.op_type == kind and self.uses[name] == 1 else None

    def _width(self, name: str) -> int:
        """Return the last size of a tensor; 0 where it is not known."""
        return (self.shapes.get(name) or [0])[-1]

    def _whole(self, name: str) -> int | None:
        """Return the whole number that a constant holds."""
        number = self._number(name)
        return None if number is None else int(number)

    def _number(self, name: str) -> float | None:
        """Return the number that a constant holds."""
        value = self._value(name)
        return float(value.item()) if value is not None and value.size == 1 else None

    def _sizes(self, name: str) -> Sizes | None:
        """Return the numbers that a constant lists."""
        value = self._value(name)
        return None if value is None or value.ndim != 1 else [int(x) for x in value]

    def _value(self, name: str) -> Any:
        tensor = self.constants.get(name)
        if tensor is None or tensor.external_data:  # weights
            return None
        return library("onnx.numpy_helper").to_array(tensor)

    def clean(self) -> None:
        """Remove nodes that nothing reads any more."""
        while True:
            read = self.outputs | {name for node in self.graph.node for name in node.input if name}
            idle = [node for node in self.graph.node if not read & set(node.output)]
            if not idle:
                break
            for node in idle:
                self.graph.node.remove(node)
        for tensor in [x for x in self.graph.initializer if x.name not in read]:
            self.graph.initializer.remove(tensor)
            del self.constants[tensor.name]
        self._survey()


def _swaps(transpose: Any) -> bool:
    """Return whether [1, h, T, D] becomes [1, T, h, D], or the other way round."""
    get = library("onnx.helper").get_attribute_value
    return any(a.name == "perm" and list(get(a)) == [0, 2, 1, 3] for a in transpose.attribute)
