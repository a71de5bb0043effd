"""Cuts the lookup of tokens' embeddings out of a decoder's graph, as a small graph of its own.

It reads the same bytes of the file of weights. By its rows texts are compared in meaning.
"""

from __future__ import annotations

from pathlib import Path

from kvcap.runtime.backends.onnxruntime.library import library

ROWS = "rows"


def write(decoder: Path, file: Path) -> bool:
    """Write the graph that gives tokens their rows of the embedding table.

    Args:
        decoder: the file of a decoder's graph, whose weights are in place.
        file: the file to write, beside it.

    Returns:
        False where tokens are looked up in no table, and nothing is written.
    """
    onnx, helper = library("onnx"), library("onnx.helper")
    model = onnx.load(str(decoder), load_external_data=False)
    graph, ports = model.graph, {port.name: port for port in model.graph.input}
    lookups = (node for node in graph.node if "Gather" in node.op_type and node.input[1] in ports)
    lookup = next(lookups, None)
    if lookup is None:
        return False
    # Rows in blocks of which the last is not full are cut to their length.
    cut = [x for x in graph.node if x.op_type == "Slice" and x.input[0] == lookup.output[0]]
    nodes = [type(node).FromString(node.SerializeToString()) for node in (lookup, *cut)]
    nodes[-1].output[0] = ROWS
    read = {name for node in nodes for name in node.input}
    tensors = [tensor for tensor in graph.initializer if tensor.name in read]
    floats = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
    kind = next(tensor.data_type for tensor in tensors if tensor.data_type in floats)
    ids = ports[lookup.input[1]]
    rank = len(ids.type.tensor_type.shape.dim) + 1
    rows = helper.make_tensor_value_info(ROWS, kind, [None] * rank)
    made = helper.make_graph(nodes, file.stem, [ids], [rows], tensors)
    versions = {"opset_imports": model.opset_import, "ir_version": model.ir_version}
    file.write_bytes(helper.make_model(made, **versions).SerializeToString())
    library("onnx.checker").check_model(str(file))
    return True
