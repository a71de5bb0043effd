"""What is left of a traced graph: plain names, no paths of sources, no notes, no unused inputs."""

from __future__ import annotations

from typing import Any

from kvcap.runtime.backends.onnxruntime.library import library


def slim(model: Any, names: list[str], axes: dict[str, tuple[str, ...]]) -> None:
    """Strip and rename an onnx.ModelProto in place.

    Args:
        model: as the exporter wrote it.
        names: of its outputs, in order.
        axes: names of the axes of every input and output, for those left open.
    """
    graph = model.graph
    del model.metadata_props[:], graph.metadata_props[:], graph.value_info[:]
    model.doc_string = graph.doc_string = ""
    _shorten(graph)
    _drop_unused(graph)
    _rename(graph, names)
    for value in (*graph.input, *graph.output):
        del value.metadata_props[:]
        for dim, axis in zip(value.type.tensor_type.shape.dim, axes[value.name], strict=True):
            if not dim.HasField("dim_value"):
                dim.dim_param = axis
    domains = {node.domain for node in graph.node}
    kept = [entry for entry in model.opset_import if entry.domain in domains]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _shorten(graph: Any) -> None:
    """Say a choice by `not x` as the other choice by `x`, the larger of `x` and 0 as Relu.

    The same results from fewer nodes, and nodes that accelerators have for tensors of five axes.
    """
    array = library("onnx.numpy_helper").to_array
    negated = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Not"}
    zeros = {t.name for t in graph.initializer if t.dims in ([], [1]) and array(t).sum() == 0}
    for node in graph.node:
        if node.op_type == "Where" and node.input[0] in negated:
            condition, one, other = node.input
            node.input[:] = [negated[condition], other, one]
        elif node.op_type == "Max" and len(node.input) == 2 and node.input[1] in zeros:
            node.op_type = "Relu"
            del node.input[1]
    read = {name for node in graph.node for name in node.input}
    read |= {value.name for value in graph.output}
    for node in [node for node in graph.node if node.op_type == "Not"]:
        if node.output[0] not in read:
            graph.node.remove(node)


def _drop_unused(graph: Any) -> None:
    """Remove inputs and constants that nothing reads."""
    read = {name for node in graph.node for name in node.input}
    used = [value for value in graph.input if value.name in read]
    del graph.input[:]
    graph.input.extend(used)
    constants = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(constants)


def _rename(graph: Any, names: list[str]) -> None:
    """Short names inside, `names` for the outputs; a tensor returned twice gets an Identity."""
    known = {value.name: value.name for value in graph.input}
    twice = []
    for value, name in zip(graph.output, names, strict=True):
        if value.name in known:
            twice.append((known[value.name], name))
        known.setdefault(value.name, name)
        value.name = name

    def short(name: str) -> str:
        return known.setdefault(name, f"v{len(known)}") if name else ""

    for tensor in graph.initializer:
        tensor.name, tensor.doc_string = short(tensor.name), ""
        del tensor.metadata_props[:]
    for node in graph.node:
        node.name = node.doc_string = ""
        del node.metadata_props[:]
        node.input[:] = [short(name) for name in node.input]
        node.output[:] = [short(name) for name in node.output]
    make = library("onnx.helper").make_node
    graph.node.extend(make("Identity", [source], [name]) for source, name in twice)
