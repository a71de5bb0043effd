"""Lets a block attend to slots in int8 as to floats, where a single token reads int8 itself.

ONNX Runtime's attention over int8 is quick for one query, as it reads fewer bytes, and slow for
many: 128 queries over 1,152 slots take four times as long as over float32. So each such node
becomes an `If`. For one token it is the node as it was. For a block, the layer's slots in use are
turned into float32, the node for floats attends to them, and the block's keys and values are
rounded and written behind the slots. Either way past and present are one memory, and nothing that
is held is copied. Knows ONNX graphs; no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcap.export.decoder.attention import QUANTISED
from kvcap.export.decoder.fuse import ATTENTION
from kvcap.runtime.backends.onnxruntime.library import library

TOTAL = 6  # index of the node's input with the number of slots in use, the block's included
BUFFERS = {3: 12, 4: 13}  # indices of its inputs for keys and values: those of their scales
CONSTANTS = {
    "zero": np.array([0]),
    "one": np.array(1),
    "axis": np.array([2]),  # a buffer's axis of slots
    "last": np.array([-1]),
    "slot": np.array([0, 0, 1]),  # from a slot's index to the next one's: batch, head, slot
    "unit": np.array(1, np.float32),
    "no_zero": np.array(0, np.int8),
}


def attend_by_length(model: Any, tokens: str) -> None:
    """Give every attention over int8 of an onnx.ModelProto its way for blocks, in place.

    Args:
        model: whose layers all hold slots in int8.
        tokens: its input [1, T].
    """
    make, graph = library("onnx.helper").make_node, model.graph
    attentions = [node for node in graph.node if node.op_type == ATTENTION]
    (heads,) = {a.i for node in attentions for a in node.attribute if a.name == "kv_num_heads"}
    firsts = np.zeros((1, heads, 1, 3), np.int64)  # every head's first slot: batch, head, slot
    firsts[0, :, 0, 1] = np.arange(heads)
    for name, value in {**CONSTANTS, "firsts": firsts}.items():
        graph.initializer.append(library("onnx.numpy_helper").from_array(value, _shared(name)))
    nodes = [
        make("Shape", [tokens], [_shared("length")], start=1, end=2),
        make("Squeeze", [_shared("length"), _shared("zero")], [_shared("tokens")]),
        make("Greater", [_shared("tokens"), _shared("one")], [_shared("several")]),
        *(_choice(node) if node.op_type == ATTENTION else _copy(node) for node in graph.node),
    ]
    del graph.node[:]
    graph.node.extend(nodes)


def _shared(name: str) -> str:
    """Return the name of a tensor that all layers read."""
    return f"block.{name}"


def _copy(node: Any) -> Any:
    return type(node).FromString(node.SerializeToString())


def _choice(node: Any) -> Any:
    """Make the `If` that takes the place of an attention, and gives its outputs."""
    token = _copy(node)
    token.output[:] = [f"{name}.token" for name in node.output]
    return library("onnx.helper").make_node(
        "If",
        [_shared("several")],
        node.output,
        then_branch=_branch("block", *_of_block(node)),
        else_branch=_branch("token", [token], token.output),
    )


def _branch(name: str, nodes: list[Any], outputs: Sequence[str]) -> Any:
    """Make a subgraph that reads outer values, and gives attention's output, keys and values."""
    helper, types = library("onnx.helper"), library("onnx").TensorProto
    kinds = zip(outputs, (types.FLOAT, types.INT8, types.INT8), strict=True)
    values = [helper.make_tensor_value_info(output, kind, None) for output, kind in kinds]
    return helper.make_graph(nodes, name, [], values)


def _of_block(node: Any) -> tuple[list[Any], list[str]]:
    """Return the nodes by which a block attends in place of one over int8, and their outputs."""
    helper, types, nodes = library("onnx.helper"), library("onnx").TensorProto, list[Any]()

    def add(kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        output = f"{node.output[0]}.{name}"
        nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    zero, one, axis, last, slot, unit, no_zero, firsts = map(_shared, (*CONSTANTS, "firsts"))
    total = add("Cast", [node.input[TOTAL]], "total", to=types.INT64)
    begin = add("Sub", [total, _shared("tokens")], "begin")  # the block's first slot
    start = add("Unsqueeze", [begin, last], "start")  # [1]
    stop = add("Unsqueeze", [total, last], "stop")  # [1]
    attention = _copy(node)
    for buffer, scale in BUFFERS.items():
        used = add("Slice", [node.input[buffer], zero, stop, axis], f"used_{buffer}")
        plain = add("Cast", [used], f"plain_{buffer}", to=types.FLOAT)
        attention.input[buffer] = add("Mul", [plain, node.input[scale]], f"floats_{buffer}")
    del attention.input[min(BUFFERS.values()) :]
    floats = [a for a in node.attribute if a.name not in QUANTISED]
    del attention.attribute[:]
    attention.attribute.extend(floats)
    attention.output[:] = [f"{name}.floats" for name in node.output]
    nodes.append(attention)

    numbers = add("Unsqueeze", [add("Range", [begin, total, one], "range"), last], "numbers")
    rows = add("Add", [firsts, add("Mul", [numbers, slot], "steps")], "rows")  # [1, K, T, 3]
    outputs = [attention.output[0]]
    for (buffer, scale), state in zip(BUFFERS.items(), attention.output[1:], strict=True):
        new = add("Slice", [state, start, stop, axis], f"new_{buffer}")  # [1, K, T, D]
        scaled = add("Div", [new, node.input[scale]], f"scaled_{buffer}")
        rounded = add("QuantizeLinear", [scaled, unit, no_zero], f"rounded_{buffer}")
        outputs.append(add("ScatterND", [node.input[buffer], rows, rounded], f"present_{buffer}"))
    return nodes, outputs
