"""Traces a module into an ONNX model with short names, without paths and notes of its source."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvcap.export.graphs.portable import translations
from kvcap.export.graphs.ports import DYNAMIC, Port
from kvcap.export.graphs.stages import StageGraph
from kvcap.runtime.backends.onnxruntime.library import library

OPSET = 18  # newer files fail on the runtimes that phones have
IR_VERSION = 10  # newer files fail on those runtimes, too
FOLDED = 64  # most numbers of a folded constant; a device computes larger ones when it loads


def trace(graph: StageGraph, feeds: dict[str, Tensor]) -> Any:
    """Trace a graph on example inputs by name; return the stripped onnx.ModelProto."""
    open_axes = {
        axis: torch.export.Dim(axis, min=1) for axis in DYNAMIC if graph.sizes[axis] is None
    }
    tensors = [feeds[port.name] for port in graph.inputs]
    program = program_of(graph, graph.inputs, tensors, open_axes, optimize=False)
    library("onnxscript.optimizer").optimize_ir(program.model, output_size_limit=FOLDED)
    model = program.model_proto
    model.ir_version = min(model.ir_version, IR_VERSION)
    outputs = graph.outputs(feeds)
    axes = {port.name: port.axes for port in (*graph.inputs, *outputs)}
    slim(model, [port.name for port in outputs], axes)
    library("onnx.checker").check_model(model)
    return model


def trace_without_weights(
    module: nn.Module,
    ports: list[Port],
    outputs: list[Port],
    tensors: list[Tensor],
    open_axes: dict[str, Any],
) -> Any:
    """Trace a module into an onnx.ModelProto whose weights are inputs, by their names.

    Weights are neither copied nor folded, and equal ones are not merged.

    Args:
        module: the module; its state dict has the weights, and other tensors become constants.
        ports: its inputs, in order.
        outputs: its outputs, in order.
        tensors: example inputs, in order.
        open_axes: a torch.export.Dim for each axis without a fixed size.

    Returns:
        The stripped onnx.ModelProto.
    """
    program = program_of(module, ports, tensors, open_axes, optimize=False)
    ir, graph = library("onnx_ir"), program.model.graph
    for name in module.state_dict().keys() & graph.initializers.keys():
        weight = graph.initializers.pop(name)
        weight.const_value = None
        graph.inputs.append(weight)
    library("onnxscript.optimizer").optimize_ir(program.model)
    model = ir.to_proto(program.model)
    model.ir_version = min(model.ir_version, IR_VERSION)
    axes = {port.name: port.axes for port in (*ports, *outputs)}
    weights = {v.name: tuple(v.type.tensor_type.shape.dim) for v in model.graph.input}
    slim(model, [port.name for port in outputs], weights | axes)
    return model


def program_of(
    module: nn.Module,
    ports: list[Port],
    tensors: list[Tensor],
    open_axes: dict[str, Any],
    optimize: bool = True,
) -> Any:
    """Trace a module by torch.export; return the torch.onnx.ONNXProgram.

    Args:
        module: the module.
        ports: its inputs, in order.
        tensors: example inputs, in order.
        open_axes: a torch.export.Dim for each axis without a fixed size.
        optimize: let torch fold constants and merge equal ones.
    """
    shapes = tuple(
        {i: open_axes[axis] for i, axis in enumerate(port.axes) if axis in open_axes}
        for port in ports
    )
    with _quiet(), torch.inference_mode():
        program = torch.onnx.export(
            module.eval(),
            tuple(tensors),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=(shapes,),
            input_names=[port.name for port in ports],
            external_data=False,
            verbose=False,
            optimize=optimize,
            custom_translation_table=translations(),
        )
    assert program is not None
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's advice to its callers, and deprecations inside torch, off the screen."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="# The axis name")
            warnings.filterwarnings("ignore", message=".*LeafSpec")
            yield
    finally:
        logger.setLevel(level)


def slim(model: Any, names: list[str], axes: dict[str, tuple[str, ...]]) -> None:
    """Strip and rename an onnx.ModelProto in place.

    Args:
        model: the model, as the exporter wrote it.
        names: names for its outputs, in order.
        axes: the axes of every input and output; open ones get these names.
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
    """Write `Where(Not(x), a, b)` as `Where(x, b, a)`, and `Max(x, 0)` as `Relu(x)`.

    The results are the same from fewer nodes, which accelerators have for tensors of five axes too.
    """
    array = library("onnx.numpy_helper").to_array
    negated = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Not"}
    zeros = {t.name for t in graph.initializer if t.dims in ([], [1]) and array(t).sum() == 0}
    for node in graph.node:
        if node.op_type == "Where" and node.input[0] in negated:
            condition, chosen, other = node.input
            node.input[:] = [negated[condition], other, chosen]
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
    """Give outputs the names `names` and inner tensors short ones.

    A tensor that is returned twice, or is an input too, gets an Identity node per further name.
    """
    new_names = {value.name: value.name for value in graph.input}
    twice = []
    for value, name in zip(graph.output, names, strict=True):
        if value.name in new_names:
            twice.append((new_names[value.name], name))
        new_names.setdefault(value.name, name)
        value.name = name

    def short(name: str) -> str:
        return new_names.setdefault(name, f"v{len(new_names)}") if name else ""

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
