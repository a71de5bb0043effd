"""Turns weights into int8: matrices by ONNX Runtime's quantiser, embeddings row by row.

Knows ONNX files; no model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.errors import NotExportable

BLOCK = 32  # weights of a product that share a scale
ACCURACY = 4  # activations are rounded to int8 too, block by block: the fast kernels
LARGE = 1 << 16  # numbers of a table that is worth it


def require_quantiser() -> None:
    """Refuse before anything is traced where ONNX Runtime cannot quantise to 8 bits.

    Raises:
        NotExportable: it is too old; graphs made elsewhere run on it nevertheless.
    """
    if "bits" not in signature(_quantiser()).parameters:
        raise NotExportable(
            f"onnxruntime {library('onnxruntime').__version__} quantises products to 4 bits only; "
            "for int8 run: pip install --upgrade onnxruntime (1.31 is known to do), or use fp16"
        )


def to_int8(file: Path) -> None:
    """Turn a float32 graph with its weights in one file beside it into int8, in place.

    Products become MatMulNBits, an operation of ONNX Runtime's own.
    """
    onnx = library("onnx")
    model = onnx.load(str(file))
    locations = {
        entry.value
        for tensor in onnx.load(str(file), load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    _fold_transposed(model)
    _embeddings(model)
    with _quiet():
        quantiser = _quantiser()(
            model, bits=8, block_size=BLOCK, is_symmetric=True, accuracy_level=ACCURACY
        )
        quantiser.process()
    (weights,) = locations
    for old in (file, file.with_name(weights)):
        old.unlink()
    onnx.save(
        quantiser.model.model,
        str(file),
        save_as_external_data=True,
        location=weights,
        size_threshold=1024,
    )


def _fold_transposed(model: Any) -> None:
    """Write weights that the graph transposes, as those tied to the embedding, transposed."""
    helper = library("onnx.numpy_helper")
    weights = _weights(model)
    for node in [n for n in model.graph.node if n.op_type == "Transpose" and n.input[0] in weights]:
        order = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
        turned = helper.to_array(weights[node.input[0]]).transpose(order)
        model.graph.initializer.append(helper.from_array(turned.copy(), node.output[0]))
        model.graph.node.remove(node)


def _embeddings(model: Any) -> None:
    """Gather rows of int8 and their scales, in place of rows of float32."""
    helper, make = library("onnx.numpy_helper"), library("onnx.helper").make_node
    element, weights, graph = library("onnx").TensorProto.FLOAT, _weights(model), model.graph
    for at, node in list(enumerate(graph.node)):
        table = weights.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None or table.data_type != element or len(table.dims) != 2:
            continue
        if np.prod(table.dims) < LARGE or any(a.name == "axis" and a.i for a in node.attribute):
            continue
        if [n for n in graph.node if n is not node and table.name in n.input]:
            continue  # something else reads it as it is
        rows = helper.to_array(table)
        scale = np.maximum(np.abs(rows).max(-1, keepdims=True), 1e-12) / 127
        name, ids, out = table.name, node.input[1], node.output[0]
        graph.initializer.remove(table)
        graph.initializer.extend([
            helper.from_array(np.rint(rows / scale).astype(np.int8), f"{name}_int8"),
            helper.from_array(scale.astype(np.float32), f"{name}_scale"),
        ])  # fmt: skip
        graph.node.remove(node)
        for i, new in enumerate([
            make("Gather", [f"{name}_int8", ids], [f"{out}_int8"]),
            make("Cast", [f"{out}_int8"], [f"{out}_float"], to=element),
            make("Gather", [f"{name}_scale", ids], [f"{out}_scale"]),
            make("Mul", [f"{out}_float", f"{out}_scale"], [out]),
        ]):  # fmt: skip
            graph.node.insert(at + i, new)
        return


def _quantiser() -> Any:
    with _quiet():
        return library("onnxruntime.quantization.matmul_nbits_quantizer").MatMulNBitsQuantizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the quantiser, which tells of every node and sets up logging for all, to itself."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        root.setLevel(level)
        root.handlers[:] = handlers


def _weights(model: Any) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in model.graph.initializer}
