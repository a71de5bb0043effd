"""Exports one graph: traces, describes and checks it; its files appear only if all succeeds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from torch import Tensor

from kvcap.export.files import refuse_other, sha256
from kvcap.export.graphs import manifest
from kvcap.export.graphs.cases import Case, inputs
from kvcap.export.graphs.check import GraphReport, check, feed, session
from kvcap.export.graphs.spec import Spec
from kvcap.export.graphs.trace import OPSET, trace
from kvcap.runtime.backends.onnxruntime.library import require

FEW = 12  # slots of a sample


def write(
    spec: Spec, folder: Path, quick: bool = False, force: bool = False
) -> tuple[Path, GraphReport]:
    """Export one graph with its manifest and samples into `folder`.

    Args:
        spec: the graph to export.
        folder: the directory, which is made if it is missing.
        quick: check without the long case.
        force: replace a graph of that name with other settings.

    Returns:
        The .onnx file and the report of its check.

    Raises:
        ExtraMissing: an optional package is not installed.
        NotExportable: there is no such graph.
        ExportExists: a graph of that name with other settings is there.
        ToleranceError, ShapeError: the graph computes something else than its policy; nothing is
            written.
    """
    require()
    graph = spec.graph()
    there = folder / f"{spec.stem()}.onnx"
    if there.exists() and not force:
        refuse_other(there.with_suffix(".json"), manifest.settings_of(spec, graph))
    case = Case("random", _sample_slots(spec))
    feeds = inputs(graph, case, spec.torch_dtype)
    model = trace(graph, feeds)
    used = {value.name for value in model.graph.input}
    facts = manifest.describe(spec, graph, used, graph.outputs(feeds))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kvcap-", dir=folder) as name:
        file = Path(name) / f"{spec.stem()}.onnx"
        file.write_bytes(model.SerializeToString())
        facts["opset"] = OPSET
        facts["graph"] = {
            **_entry(file),
            "bytes": file.stat().st_size,
            "nodes": len(model.graph.node),
        }
        report = check(file, facts, quick)
        report.require()
        facts["verified"] = report.as_dict()
        samples = _samples(file, feeds)
        facts["samples"] = {**_entry(samples), "format": "safetensors; in.NAME and out.NAME"}
        manifest.write(facts, file.with_suffix(".json"))
        for part in (samples, file.with_suffix(".json"), file):
            shutil.move(part, folder / part.name)
    return folder / file.name, report


def _sample_slots(spec: Spec) -> int:
    """Return how many slots the sample has: few, but more than the budget of an evict graph."""
    if spec.shape.slots is not None:
        return spec.shape.slots
    return spec.shape.budget + 4 if spec.stage == "evict" else FEW


def _samples(file: Path, feeds: dict[str, Tensor]) -> Path:
    """Write the sample's inputs and outputs beside the graph."""
    from safetensors.numpy import save

    run = session(file)
    names = [port.name for port in run.get_inputs()]
    tensors = {f"in.{name}": feeds[name].contiguous().numpy() for name in names}
    tensors |= {f"out.{name}": value for name, value in feed(run, feeds).items()}
    path = file.with_suffix("").with_name(file.stem + manifest.SAMPLES)
    path.write_bytes(save(tensors))
    return path


def _entry(path: Path) -> dict[str, str]:
    return {"file": path.name, "sha256": sha256(path)}
