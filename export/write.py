"""Trace a graph, strip it, describe it, check it; files appear only when all of that is done."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvcap.export import manifest
from kvcap.export.cases import Case, inputs
from kvcap.export.graphs import Graph
from kvcap.export.portable import translations
from kvcap.export.ports import DYNAMIC, Port
from kvcap.export.slim import slim
from kvcap.export.spec import Spec
from kvcap.export.verify import Report, check, feed, session
from kvcap.runtime.backends.onnxruntime.library import library, require

OPSET = 18  # newer files fail on the runtimes that phones have
IR_VERSION = 10  # likewise
FEW = 12  # slots of a sample
FOLDED = 64  # numbers of a constant at most: what is larger, a device computes when it loads


def write(
    spec: Spec, folder: Path, quick: bool = False, force: bool = False
) -> tuple[Path, Report]:
    """Export one graph with its manifest and samples into `folder`.

    Args:
        spec: what to export.
        folder: made if it is missing.
        quick: check without the long case.
        force: replace a graph of that name that was made for something else.

    Returns:
        The .onnx file and what checking it found.

    Raises:
        ExtraMissing: an optional package is not installed.
        NotExportable: there is no such graph.
        ExportExists: a graph of that name is there, of other sizes or options.
        ToleranceError, ShapeError: the graph is not what its policy computes; nothing is written.
    """
    require()
    graph = spec.graph()
    there = folder / f"{spec.stem()}.onnx"
    if there.exists() and not force:
        manifest.refuse_other(there.with_suffix(".json"), manifest.asked(spec, graph))
    case = Case("random", _sample_slots(spec))
    given = inputs(graph, case, spec.torch_dtype)
    model = trace(graph, given)
    used = {value.name for value in model.graph.input}
    said = manifest.describe(spec, graph, used, graph.outputs(given))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kvcap-", dir=folder) as name:
        file = Path(name) / f"{spec.stem()}.onnx"
        file.write_bytes(model.SerializeToString())
        said["opset"] = OPSET
        said["graph"] = {**_entry(file), "bytes": file.stat().st_size,
                         "nodes": len(model.graph.node)}  # fmt: skip
        report = check(file, said, quick)
        report.require()
        said["verified"] = report.as_dict()
        samples = _samples(file, given)
        said["samples"] = {**_entry(samples), "format": "safetensors; in.NAME and out.NAME"}
        text = json.dumps(said, indent=1, ensure_ascii=False)
        file.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
        for part in (samples, file.with_suffix(".json"), file):
            shutil.move(part, folder / part.name)
    return folder / file.name, report


def trace(graph: Graph, given: dict[str, Tensor]) -> Any:
    """The stripped onnx.ModelProto of a graph, traced on the inputs `given`."""
    open_axes = {
        axis: torch.export.Dim(axis, min=1) for axis in DYNAMIC if graph.sizes[axis] is None
    }
    tensors = [given[port.name] for port in graph.inputs]
    program = program_of(graph, graph.inputs, tensors, open_axes, optimize=False)
    library("onnxscript.optimizer").optimize_ir(program.model, output_size_limit=FOLDED)
    model = program.model_proto
    model.ir_version = min(model.ir_version, IR_VERSION)
    outputs = graph.outputs(given)
    axes = {port.name: port.axes for port in (*graph.inputs, *outputs)}
    slim(model, [port.name for port in outputs], axes)
    library("onnx.checker").check_model(model)
    return model


def program_of(
    module: nn.Module,
    ports: list[Port],
    tensors: list[Tensor],
    open_axes: dict[str, Any],
    optimize: bool = True,
) -> Any:
    """The torch.onnx.ONNXProgram of a module, traced on `tensors`, its inputs in order.

    `open_axes` are those without a fixed size, as a torch.export.Dim each.
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


def _sample_slots(spec: Spec) -> int:
    """Slots of the sample: few, but some to evict."""
    if spec.shape.slots is not None:
        return spec.shape.slots
    return spec.shape.budget + 4 if spec.stage == "evict" else FEW


def _samples(file: Path, given: dict[str, Tensor]) -> Path:
    """Write the sample's inputs and outputs beside the graph."""
    from safetensors.numpy import save

    run = session(file)
    names = [port.name for port in run.get_inputs()]
    tensors = {f"in.{name}": given[name].contiguous().numpy() for name in names}
    tensors |= {f"out.{name}": value for name, value in feed(run, given).items()}
    path = file.with_suffix("").with_name(file.stem + manifest.SAMPLES)
    path.write_bytes(save(tensors))
    return path


def _entry(path: Path) -> dict[str, str]:
    return {"file": path.name, "sha256": manifest.sha256(path)}


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
