"""Compiles a graph ahead of time for Qualcomm's Hexagon NPU, with a manifest beside it.

The compiled graph is a single QNN context node. The package onnxruntime-qnn compiles on an x86
computer and simulates the NPU there, which shows nothing of speed. Simulated results are compared
with eager, with float16's tolerance, as the NPU has no float32. The package runs in a process of
its own (`worker.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcap.export.files import sha256
from kvcap.export.graphs import compare, manifest
from kvcap.export.graphs.cases import Case, cases, inputs
from kvcap.export.graphs.check import SEED, CheckedCase, GraphReport
from kvcap.export.graphs.spec import Spec
from kvcap.export.graphs.stages import StageGraph
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.errors import (
    ExtraMissing,
    GraphBroken,
    NotExportable,
    first_line,
    how_to_install,
)

SCHEMA = "kvcap.qnn/1"
SUFFIX = ".qnn.onnx"
RTOL = 1e-2  # error allowed of sums in float16, relative to the largest value
TWICE = 0.95  # least overlap with the slots kept in float64, if a rescorer makes a second choice
LARGEST = 65504.0  # the largest float16; larger numbers are clipped to it
# By chip: its number in Qualcomm's SDK, and its Hexagon's version. Phones first, newest first.
CHIPS = {
    "SM8850": (87, 81), "SM8750": (69, 79), "SM8650": (57, 75), "SM8550": (43, 73),
    "SM8475": (42, 69), "SM8450": (36, 69), "SM8350": (30, 68), "SM8845": (97, 81),
    "QCS9100": (77, 73), "QCM6490": (93, 68), "SXR2330P": (75, 79), "SXR2230P": (53, 69),
}  # fmt: skip


@dataclass(frozen=True)
class CompileTarget:
    """A chip that a graph is compiled for."""

    chip: str  # a key of CHIPS
    soc_model: int  # its number in Qualcomm's SDK
    hexagon: int  # version of its Hexagon processor

    @property
    def options(self) -> dict[str, str]:
        """Return the options of the execution provider."""
        return {
            "htp_arch": str(self.hexagon),
            "soc_model": str(self.soc_model),
            "enable_htp_fp16_precision": "1",  # for float32 numbers of the graph, too
        }


class Simulated(GraphReport):
    """A report on cases in the NPU's simulator; differences due to float16 are excused."""

    where = "Hexagon simulated"

    def excused(self, row: CheckedCase) -> str:
        """Excuse outliers beyond float16's range, and wrong choices among equal scores."""
        if row.kind == "outliers":
            return "beyond float16"
        tied = row.kind == "all zero" and row.finite and row.error <= row.allowed
        return "ties" if tied else ""


def target_of(name: str, spec: Spec) -> CompileTarget:
    """Return the target called `name`: a chip such as SM8650, or a Hexagon version such as v75.

    Raises:
        NotExportable: there is no such target, or it cannot run the graph.
        ExtraMissing: the package that compiles is not installed.
    """
    for chip, (model, hexagon) in CHIPS.items():
        if name.upper() in (chip, f"V{hexagon}"):
            require(spec)
            return CompileTarget(chip, model, hexagon)
    versions = sorted({f"v{hexagon}" for _, hexagon in CHIPS.values()})
    raise NotExportable(
        f"no chip {name!r} for QNN; there are {', '.join(versions)} and {', '.join(CHIPS)}"
    )


def require(spec: Spec | None = None) -> None:
    """Refuse a graph that cannot be compiled, before it is written.

    Raises:
        ExtraMissing: onnxruntime-qnn is not installed.
        NotExportable: the graph has open sizes, or is of float32.
    """
    if spec is not None and (spec.shape.slots is None or spec.dtype != "fp16"):
        raise NotExportable("QNN takes fixed sizes and float16: add --static N --dtype fp16")
    try:
        version("onnxruntime-qnn")
    except PackageNotFoundError as error:
        raise ExtraMissing(
            "graphs for QNN need onnxruntime-qnn, which is not installed; "
            f"{how_to_install('qnn')} (Python 3.11 or newer, on x86-64)"
        ) from error


def write(file: Path, target: CompileTarget, quick: bool = False) -> tuple[Path, GraphReport]:
    """Compile an exported graph, check it, and write it and its manifest beside the graph.

    Args:
        file: an exported .onnx of fixed sizes and float16, with its manifest and samples beside it.
        target: the chip.
        quick: simulate random inputs alone.

    Returns:
        The compiled file and the report of its simulation.

    Raises:
        NotExportable: QNN cannot compile the graph, or leaves nodes to the CPU.
        ToleranceError, ShapeError: the compiled graph computes something else.
    """
    facts = manifest.read(file)
    spec = manifest.spec_of(facts)
    require(spec)
    with tempfile.TemporaryDirectory(prefix=".kvcap-", dir=file.parent) as name:
        context = Path(name) / f"{file.stem}.{target.chip.lower()}{SUFFIX}"
        job = {"compile": True, "graph": str(file.resolve()), "cases": []}
        producer = _work(Path(name), context, target.options, job)
        compatibility = _one_context(context, facts)
        facts |= {
            "schema": SCHEMA,
            "source": facts["graph"],
            "target": {**asdict(target), "options": target.options, "says": compatibility},
            "producer": {**facts["producer"], **producer},
            "graph": {
                "file": context.name,
                "sha256": sha256(context),
                "bytes": context.stat().st_size,
                "nodes": 1,
            },
        }
        report = _simulated(context, facts, quick)
        report.require()
        del facts["verified"]
        facts["simulated"] = report.as_dict()
        manifest.write(facts, context.with_suffix(".json"))
        for part in (context.with_suffix(".json"), context):
            shutil.move(part, file.parent / part.name)
    return file.parent / context.name, report


def verify(context: Path, quick: bool = False) -> GraphReport:
    """Simulate a compiled graph on fresh inputs and compare with eager.

    Raises:
        ManifestError: the manifest is missing, or of other files.
        GraphBroken: the graph does not run in the simulator.
        ExtraMissing: onnxruntime-qnn is not installed.
    """
    facts = manifest.read(context, SCHEMA)
    require()
    return _simulated(context, facts, quick)


def _one_context(context: Path, facts: dict[str, Any]) -> str:
    """Return the compatibility that a compiled model states; refuse more than one context node.

    Raises:
        NotExportable: naming the nodes outside of the context.
    """
    model = library("onnx").load(context)
    outside = sorted({node.op_type for node in model.graph.node} - {"EPContext"})
    if outside or len(model.graph.node) != 1:
        raise NotExportable(
            f"{facts['policy']['name']} does not compile into one QNN context; outside of it are "
            f"{', '.join(outside) or 'connections'} (the ONNX graph itself is written)"
        )
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    return next((value for key, value in metadata.items() if "compatibility" in key), "")


def _simulated(context: Path, facts: dict[str, Any], quick: bool) -> GraphReport:
    spec = manifest.spec_of(facts)
    graph = spec.graph()
    wanted = [case for case in cases(graph) if case.kind == "random" or not quick]
    feeds = [inputs(graph, case, spec.torch_dtype, SEED) for case in wanted]
    with tempfile.TemporaryDirectory(prefix="kvcap-") as name:
        folder = Path(name)
        for i, tensors in enumerate(feeds):
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(whole, folder / f"{i}.in")
        job = {"compile": False, "cases": [str(i) for i in range(len(feeds))]}
        done = _work(folder, context, facts["target"]["options"], job)
        with torch.inference_mode():
            rows = [
                _row(graph, case, tensors, _output(folder / f"{i}.out"))
                for i, (case, tensors) in enumerate(zip(wanted, feeds, strict=True))
            ]
    return Simulated(context.name, rows, done["onnxruntime"])


def _row(graph: StageGraph, case: Case, feeds: compare.Named, got: compare.Named) -> CheckedCase:
    compared = compare.compared(graph, feeds, got, RTOL)
    if graph.form.eviction.rescorer is not None:
        # A rescorer chooses twice: a slot that rounding moves across its first choice gets quite
        # another value, so kept sets need only overlap.
        valued = compared.finite and compared.error <= compared.allowed
        compared = compared._replace(ok=valued and compared.overlap >= TWICE)
    return CheckedCase(case.kind, case.slots, *compared)


def _output(file: Path) -> dict[str, Tensor]:
    """Return the simulator's outputs; numbers clipped to float16's largest become marks again."""
    outputs = load_file(file)
    mark = 2 * compare.HUGE
    for name, tensor in outputs.items():
        if tensor.dtype == torch.float32:
            outputs[name] = torch.where(tensor.abs() >= LARGEST, tensor.sign() * mark, tensor)
    return outputs


def _work(
    folder: Path, context: Path, options: dict[str, str], job: dict[str, Any]
) -> dict[str, Any]:
    """Run a job of `worker.py` in a process of its own; return the versions of its libraries.

    Args:
        folder: a directory for the job and the files that it reads and writes.
        context: the compiled graph, to write or to run.
        options: options of the execution provider.
        job: whether to compile and which graph, and the names of cases to simulate.

    Raises:
        NotExportable: the graph does not compile.
        GraphBroken: the compiled graph does not run.
    """
    text = json.dumps({**job, "context": str(context.resolve()), "options": options})
    (folder / "job.json").write_text(text, encoding="utf-8")
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", "kvcap.export.qnn.worker", str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        check=False,
    )
    if done.returncode == 0:
        versions: dict[str, Any] = json.loads((folder / "done.json").read_text(encoding="utf-8"))
        return versions
    failed = folder / "failed.txt"
    why = (
        first_line(RuntimeError(failed.read_text(encoding="utf-8")))
        if failed.exists()
        else f"its process ended with {done.returncode}: {done.stderr[-300:].decode()}"
    )
    if job["compile"]:
        raise NotExportable(f"QNN cannot compile {Path(job['graph']).name}: {why}")
    raise GraphBroken(f"{context.name} does not run in QNN's simulator: {why}")
