"""Puts a model's weights into the graphs that read them: as they are, or in blocks of 4 or 8 bits.

A traced graph has its weights as inputs, by their names in the model. Weights are read one by one
and appended to a file that all graphs share, so that memory holds one at a time. Knows ONNX files;
no model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.errors import GraphBroken
from kvcap.runtime.models.rounding import Rounding, in_blocks, nearest, steps_of

ACCURACY = 4  # MatMulNBits' level for fast kernels, which round activations to int8 block by block
LARGE = 1 << 16  # least numbers of a matrix or table for it to be quantised
INLINE = 1024  # a tensor of fewer bytes stays in the graph's own file
PAGE = 4096  # large tensors begin at multiples of this, so that a file can be mapped into memory
ALIGNED = 64  # other tensors begin at multiples of this
MAPPED = 1 << 16  # least bytes of a tensor that begins at a page
ROWS = 1 << 20  # numbers that are quantised at once
MICROSOFT = "com.microsoft"  # ONNX Runtime's own operations
NAMES = ("numbers", "scales", "zeros")
"""Lists the parts of a packed matrix; a part's tensor is called NAME.PART."""
KINDS = dict(zip(NAMES, (np.uint8, np.float32, np.uint8), strict=True))
TABLE = ".table"  # follows the part, if a graph looks up rows in the same bytes
TURNED = ".turned"  # follows the name, if the model has the matrix as [K, N]
JOINED = "+"  # joins the names of matrices that are stacked into one


class Packed(NamedTuple):
    """A matrix [N, K] rounded in blocks, in the layout of MatMulNBits and GatherBlockQuantized.

    A row has `C = ceil(K / block)` blocks.
    """

    numbers: (
        Tensor  # uint8 [N, C, block * bits / 8]; of two 4-bit numbers the first is the low half
    )
    scales: Tensor  # float32 [N, C]
    zeros: Tensor | None  # uint8 [N, ceil(C * bits / 8)]

    def part(self, name: str) -> Tensor:
        """Return the part of this name, one of `NAMES`."""
        tensor: Tensor = getattr(self, name)
        return tensor


def pack(matrix: Tensor, rounding: Rounding) -> Packed:
    """Round a matrix [N, K] to the nearest numbers, in blocks along its rows.

    In a symmetric block the weight of the largest magnitude becomes the lowest integer, -8 or -128,
    so that all integers are used. In an asymmetric block the integers span the least weight, the
    greatest, and 0.
    """
    parts = matrix.split(max(1, ROWS // matrix.shape[1]))
    return below([_pack(rows, rounding) for rows in parts])


def below(parts: list[Packed]) -> Packed:
    """Stack packed matrices [N, K] with the same K into one, row below row."""
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Packed(
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(zeros) if zeros else None,
    )


def _pack(rows: Tensor, rounding: Rounding) -> Packed:
    blocks = in_blocks(rows.float(), rounding.block)
    scales, zeros = steps_of(blocks, rounding)
    return joined(nearest(blocks, scales, zeros, rounding), scales, zeros, rounding)


def joined(numbers: Tensor, scales: Tensor, zeros: Tensor, rounding: Rounding) -> Packed:
    """Pack a matrix, given as its numbers [N, C, block], and scales and zeros [N, C, 1]."""
    kept = None if rounding.symmetric else _halves(zeros[..., 0].to(torch.uint8), rounding)
    return Packed(_halves(numbers.to(torch.uint8), rounding), scales[..., 0], kept)


def unpack(packed: Packed, columns: int, rounding: Rounding) -> Tensor:
    """Return the float32 matrix [N, K] that a packed one stands for; `columns` is K."""
    numbers = _whole(packed.numbers, rounding).float()
    zeros: Tensor | float = rounding.middle
    if packed.zeros is not None:
        zeros = _whole(packed.zeros, rounding)[:, : packed.scales.shape[1], None].float()
    numbers.sub_(zeros).mul_(packed.scales[..., None])
    return numbers.flatten(1)[:, :columns]


def _halves(numbers: Tensor, rounding: Rounding) -> Tensor:
    """Pack 4-bit numbers along the last axis, two in a byte; return 8-bit numbers unchanged."""
    if rounding.bits == 8:
        return numbers
    even = torch.nn.functional.pad(numbers, (0, numbers.shape[-1] % 2))
    packed: Tensor = even[..., 0::2] | (even[..., 1::2] << 4)
    return packed


def _whole(numbers: Tensor, rounding: Rounding) -> Tensor:
    if rounding.bits == 8:
        return numbers
    return torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)


class Store:
    """A file to which tensors are appended, each once however many graphs read it.

    Args:
        file: the file to write; graphs lie beside it.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._ranges: dict[str, tuple[int, int]] = {}  # offset and bytes by name
        file.touch()

    def __contains__(self, name: str) -> bool:
        return name in self._ranges

    def tensor(self, name: str, make: Callable[[], Tensor], kind: int, shape: list[int]) -> Any:
        """Return an onnx.TensorProto that refers to a tensor in the file.

        Args:
            name: the tensor's name in the file.
            make: makes the tensor, if the file does not have it yet.
            kind: the ONNX type that a graph reads its bytes as.
            shape: the shape that a graph reads its bytes in.
        """
        onnx = library("onnx")
        if name not in self._ranges:
            data = make().contiguous().numpy()
            with self.file.open("ab") as file:
                file.write(bytes(-file.tell() % (PAGE if data.nbytes >= MAPPED else ALIGNED)))
                self._ranges[name] = file.tell(), data.nbytes
                data.tofile(file)
        offset, length = self._ranges[name]
        tensor = onnx.TensorProto(
            name=name, data_type=kind, dims=shape, data_location=onnx.TensorProto.EXTERNAL
        )
        entries = {"location": self.file.name, "offset": str(offset), "length": str(length)}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
        return tensor


class Placed(NamedTuple):
    """The sizes of a weight that a graph has in blocks."""

    rows: int  # N
    columns: int  # K
    turned: bool  # the model has it as [K, N]


def place(
    model: Any,
    weights: Mapping[str, Tensor],
    store: Store,
    rounding: Rounding | None = None,
    packed: Mapping[str, Packed] | None = None,
) -> dict[str, Placed]:
    """Replace the weights among the inputs of an onnx.ModelProto by initialisers, in place.

    With a rounding, products of activations and a matrix become MatMulNBits, and embeddings that
    are looked up in a table GatherBlockQuantized; a table that is a matrix too is stored once.
    Matrices that a graph puts side by side for one product are stored as one.

    Args:
        model: a graph whose weights are inputs.
        weights: the weights by the names of those inputs, in the types of the graph.
        store: the file that they are written to.
        rounding: how matrices and embeddings are rounded; None: weights stay as they are.
        packed: matrices [N, K] that are rounded already, other than to the nearest, by name.

    Returns:
        The rounded weights, by name.
    """
    graph, rounded, tensors = model.graph, dict[str, Placed](), dict[str, Any]()
    # In the order of the model's names, so that every export of a model has the same file.
    values = {x.name: x for x in sorted(graph.input, key=attrgetter("name")) if x.name in weights}
    nodes = _Nodes(graph)
    for joint in nodes.joints(values.keys()):
        first, names = values[joint.names[0]], list(joint.names)
        sizes = [[dim.dim_value for dim in values[x].type.tensor_type.shape.dim] for x in names]
        placed = [Placed(rows, columns, False) for rows, columns in sizes]
        nodes.replace([*joint.transposes, joint.concat], lambda node: [])
        if rounding is not None:
            rounded |= dict(zip(names, placed, strict=True))
            matrix = _Matrix(names, placed, rounding, store, weights, packed or {})
            nodes.replace(joint.products, matrix.product)
            tensors |= matrix.tensors
        else:
            shape = [placed[0].columns, sum(part.rows for part in placed)]
            make = partial(_side_by_side, weights, names)
            tensor = _plain(store, first, make, shape, JOINED.join(names))
            for node in joint.products:
                node.input[1] = tensor.name
            graph.initializer.append(tensor)
        for name in names:
            graph.input.remove(values.pop(name))
    for value in values.values():
        name, shape = value.name, [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        uses = nodes.uses(name)
        if rounding is not None and len(shape) == 2 and uses.fit_blocks(prod(shape)):
            rows, columns = shape[::-1] if uses.turned else shape
            rounded[name] = Placed(rows, columns, uses.turned)
            matrix = _Matrix([name], [rounded[name]], rounding, store, weights, packed or {})
            nodes.replace(uses.transposes, lambda node: [])
            nodes.replace(uses.products, matrix.product)
            nodes.replace(uses.lookups, matrix.lookup)
            tensors |= matrix.tensors
        elif uses.transposes and not uses.others:  # transpose once, and not in every run
            nodes.replace(uses.transposes, lambda node: [])
            for node in uses.products:
                node.input[1] = name
            graph.initializer.append(
                _plain(store, value, partial(_transposed, weights, name), shape[::-1])
            )
        else:
            graph.initializer.append(
                _plain(store, value, partial(weights.__getitem__, name), shape)
            )
        graph.input.remove(value)
    graph.initializer.extend(tensors.values())
    nodes.write()
    if rounded and MICROSOFT not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(library("onnx.helper").make_opsetid(MICROSOFT, 1))
    return rounded


class _Uses(NamedTuple):
    """The nodes that read one weight, by how they use it."""

    transposes: list[Any]
    products: list[Any]  # MatMul of an activation and the weight, transposed or not
    lookups: list[Any]  # Gather of rows
    others: list[Any]  # all nodes that read it as it is, lookups too

    @property
    def turned(self) -> bool:
        """Return whether products read the weight without a Transpose: it is [K, N]."""
        return bool(self.products) and not self.transposes

    def fit_blocks(self, numbers: int) -> bool:
        """Return whether all nodes can read the weight in blocks, and it is large enough."""
        if len(self.others) > len(self.lookups) or (self.turned and self.lookups):
            return False
        return bool(self.products) or (bool(self.lookups) and numbers >= LARGE)


class _Joint(NamedTuple):
    """Weights [N, K] that a graph transposes and puts side by side for products."""

    names: list[str]
    transposes: list[Any]
    concat: Any
    products: list[Any]


class _Nodes:
    """A list of a graph's nodes that collects replacements and then writes them."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.nodes = graph, list(graph.node)
        self.instead: dict[int, list[Any]] = {}  # nodes by the `id` of the one that they replace
        self.readers = defaultdict[str, list[Any]](list)
        for node in self.nodes:
            for name in set(node.input):
                self.readers[name].append(node)

    def uses(self, name: str) -> _Uses:
        """Return the nodes that read a weight, by how they use it."""
        readers = self.readers[name]
        turned = [
            n for n in readers if n.op_type == "Transpose" and _attribute(n, "perm") == [1, 0]
        ]
        after = [node for transpose in turned for node in self.readers[transpose.output[0]]]
        outputs = {node.output[0] for node in turned}
        if not all(_is_product(node, outputs) for node in after):
            turned, after = [], []
        products = after or [node for node in readers if _is_product(node, {name})]
        others = [node for node in readers if node not in turned and node not in products]
        lookups = [
            node
            for node in others
            if node.op_type == "Gather" and node.input[0] == name and not _attribute(node, "axis")
        ]
        return _Uses(turned, products, lookups, others)

    def joints(self, names: Collection[str]) -> list[_Joint]:
        """Return the weights of these names that are put side by side and read in no other way."""
        turned = {
            node.output[0]: node
            for node in self.nodes
            if node.op_type == "Transpose" and node.input[0] in names
            if _attribute(node, "perm") == [1, 0] and len(self.readers[node.input[0]]) == 1
        }
        joined = []
        for node in self.nodes:
            products = self.readers[node.output[0]] if node.op_type == "Concat" else []
            if not products or not turned.keys() >= set(node.input):
                continue
            alone = all(len(self.readers[name]) == 1 for name in node.input)
            if alone and all(_is_product(n, {node.output[0]}) for n in products):
                parts = [turned[name] for name in node.input]
                joined.append(_Joint([part.input[0] for part in parts], parts, node, products))
        return joined

    def replace(self, nodes: list[Any], by: Callable[[Any], list[Any]]) -> None:
        """Note that each of these nodes is replaced by the nodes that `by` makes of it."""
        self.instead |= {id(node): by(node) for node in nodes}

    def write(self) -> None:
        """Put the nodes and their replacements into the graph."""
        if self.instead:
            nodes = [new for node in self.nodes for new in self.instead.get(id(node), [node])]
            copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
            del self.graph.node[:]
            self.graph.node.extend(copies)


def _is_product(node: Any, weights: set[str]) -> bool:
    return node.op_type == "MatMul" and node.input[1] in weights and node.input[0] not in weights


class _Matrix:
    """A matrix in blocks that makes the nodes that read it, and is written on first use.

    Several matrices of the model with the same K may be stacked in it.
    """

    def __init__(
        self,
        names: list[str],
        parts: list[Placed],
        rounding: Rounding,
        store: Store,
        weights: Mapping[str, Tensor],
        packed: Mapping[str, Packed],
    ) -> None:
        self.names, self.parts, self.rounding, self.store = names, parts, rounding, store
        placed = parts[0]._replace(rows=sum(part.rows for part in parts))
        self.placed, stem = placed, JOINED.join(names)
        self.stem = stem + TURNED if placed.turned else stem
        self._weights, self._prepacked = weights, packed
        self._ready: Packed | None = None
        self.tensors: dict[str, Any] = {}
        count = -(-placed.columns // rounding.block)
        types = library("onnx").TensorProto
        self._count, self._size = count, rounding.block * rounding.bits // 8
        whole = [placed.rows, count, self._size]
        numbers = self.tensors[self._part("numbers", types.UINT8, whole)]
        for name, part in zip(names, parts, strict=True):
            if len(names) > 1:
                numbers.metadata_props.add(key=name, value=str(part.rows))
        block_inputs = [self._part("scales", types.FLOAT, [placed.rows, count])]
        if not rounding.symmetric:
            width = -(-count * rounding.bits // 8)
            block_inputs.append(self._part("zeros", types.UINT8, [placed.rows, width]))
        self._block_inputs = block_inputs
        self._ready = None  # all parts are written, so the packed copy can be freed
        self._attributes: dict[str, Any] = {"domain": MICROSOFT, "bits": rounding.bits}
        self._attributes["block_size"] = rounding.block

    def product(self, node: Any) -> list[Any]:
        """Return nodes that replace a MatMul."""
        make, (x,), (y,) = library("onnx.helper").make_node, node.input[:1], node.output
        product = make(
            "MatMulNBits",
            [x, f"{self.stem}.numbers", *self._block_inputs],
            [y],
            K=self.placed.columns,
            N=self.placed.rows,
            accuracy_level=ACCURACY,
            **self._attributes,
        )
        return [product]

    def lookup(self, node: Any) -> list[Any]:
        """Return nodes that replace a Gather of rows; they read the same bytes as `product`."""
        helper, types = library("onnx.helper"), library("onnx").TensorProto
        shape = [self.placed.rows, self._count * self._size]
        table = self._part("numbers", types.UINT8, shape, TABLE)
        (out,), whole = node.output, self._count * self.rounding.block == self.placed.columns
        wide = out if whole else f"{out}.wide"
        nodes = [
            helper.make_node(
                "GatherBlockQuantized",
                [table, node.input[1], *self._block_inputs],
                [wide],
                gather_axis=0,
                quantize_axis=1,
                **self._attributes,
            )
        ]
        if not whole:
            numbers = {"from": 0, "to": self.placed.columns, "axis": -1}
            ends = [f"{self.stem}.{end}" for end in numbers]
            for end, count in zip(ends, numbers.values(), strict=True):
                self.tensors[end] = helper.make_tensor(end, types.INT64, [1], [count])
            nodes.append(helper.make_node("Slice", [wide, *ends], [out]))
        return nodes

    def _part(self, part: str, kind: int, shape: list[int], more: str = "") -> str:
        """Add one part of the packed matrix to the graph; return its name, which ends in `more`."""
        stored = f"{self.stem}.{part}"
        tensor = self.store.tensor(stored, lambda: self._make().part(part), kind, shape)
        tensor.name += more
        self.tensors[tensor.name] = tensor
        return str(tensor.name)

    def _make(self) -> Packed:
        if self._ready is None:
            parts = [self._prepacked.get(name) or self._packed(name) for name in self.names]
            self._ready = parts[0] if len(parts) == 1 else below(parts)
        return self._ready

    def _packed(self, name: str) -> Packed:
        matrix = self._weights[name]
        return pack(matrix.T if self.placed.turned else matrix, self.rounding)


def _plain(
    store: Store, value: Any, make: Callable[[], Tensor], shape: list[int], name: str | None = None
) -> Any:
    """Return the onnx.TensorProto of a weight that is not rounded; only large ones are stored."""
    kind, name = value.type.tensor_type.elem_type, name or value.name
    width = library("onnx.helper").tensor_dtype_to_np_dtype(kind).itemsize
    if prod(shape) * width >= INLINE:
        return store.tensor(name, make, kind, shape)
    return library("onnx.numpy_helper").from_array(make().contiguous().numpy(), name)


def _transposed(weights: Mapping[str, Tensor], name: str) -> Tensor:
    return weights[name].T


def _side_by_side(weights: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """Return weights [N, K], each transposed, as [K, N + N + ...]."""
    return torch.cat([weights[name] for name in names]).T


def _attribute(node: Any, name: str) -> Any:
    """Return a node's attribute of this name; None if it has none."""
    get = library("onnx.helper").get_attribute_value
    return next((get(attribute) for attribute in node.attribute if attribute.name == name), None)


class Rounded(NamedTuple):
    """A matrix in blocks that lies in a file beside a graph."""

    file: Path
    parts: dict[str, tuple[int, list[int]]]  # offset in bytes and shape, by the names of `NAMES`
    columns: int  # K
    rounding: Rounding
    turned: bool  # the model has it as [K, N]

    def rows(self, start: int, count: int) -> Rounded:
        """Return `count` rows from `start` on as a matrix of their own."""
        parts = {
            name: (at + start * prod(size[1:]) * np.dtype(KINDS[name]).itemsize, [count, *size[1:]])
            for name, (at, size) in self.parts.items()
        }
        return self._replace(parts=parts)

    def read(self) -> Tensor:
        """Read the weights in float32, transposed as the model has them."""
        parts: dict[str, Any] = dict.fromkeys(NAMES)
        for name, (at, size) in self.parts.items():
            read = np.fromfile(self.file, KINDS[name], prod(size), offset=at)
            parts[name] = torch.from_numpy(read.reshape(size))
        packed = Packed(**parts)
        matrix = unpack(packed, self.columns, self.rounding)
        return matrix.T if self.turned else matrix


def rounded_in(file: Path) -> dict[str, Rounded]:
    """Return the weights that a graph has in blocks, by their names in the model.

    Raises:
        GraphBroken: the file is no graph.
    """
    try:
        graph = library("onnx").load(str(file), load_external_data=False).graph
    except Exception as error:  # protobuf's own, and the system's
        raise GraphBroken(f"{file.name} is no graph that can be loaded: {error}") from error
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    by_name = {}
    for node in graph.node:
        if node.op_type not in ("MatMulNBits", "GatherBlockQuantized") or node.domain != MICROSOFT:
            continue
        table = node.op_type == "GatherBlockQuantized"
        name = node.input[0 if table else 1].removesuffix(TABLE)
        stem, _, part = name.rpartition(".")
        if part != NAMES[0] or stem in by_name:
            continue
        bits, block = (_attribute(node, kind) for kind in ("bits", "block_size"))
        parts = {x: tensors[f"{stem}.{x}"] for x in NAMES if f"{stem}.{x}" in tensors}
        locations = {
            x: {e.key: e.value for e in tensor.external_data} for x, tensor in parts.items()
        }
        stored = {
            x: (int(locations[x]["offset"]), list(tensor.dims)) for x, tensor in parts.items()
        }
        rows, count = parts["scales"].dims
        stored["numbers"] = stored["numbers"][0], [rows, count, block * bits // 8]
        end = tensors.get(f"{stem}.to")
        columns = _attribute(node, "K") or (end.int64_data[0] if end else count * block)
        whole = Rounded(
            file.with_name(locations["numbers"]["location"]),
            stored,
            columns,
            Rounding(bits, "zeros" not in parts, block),
            stem.endswith(TURNED),
        )
        within = [(entry.key, int(entry.value)) for entry in parts["numbers"].metadata_props]
        start = 0
        for name, length in within or [(stem, rows)]:
            by_name[name] = whole.rows(start, length)
            start += length
    return {stem.removesuffix(TURNED): rounded for stem, rounded in by_name.items()}
