"""Writes the manifest beside a graph: all that a device needs to feed it and to check it.

A manifest is plain JSON. Samples lie beside it in a safetensors file: a JSON header and raw
little-endian numbers.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvcap
from kvcap.dtypes import full
from kvcap.export.files import sha256
from kvcap.export.graphs.ports import Port
from kvcap.export.graphs.spec import Spec, recalled
from kvcap.export.graphs.stages import StageGraph
from kvcap.runtime.errors import ManifestError
from kvcap.schema import fault

SCHEMA = "kvcap.export/1"
SCHEMA_FILE = Path(__file__).with_name("graph.schema.json")
SAMPLES = ".samples.safetensors"


def describe(spec: Spec, graph: StageGraph, used: set[str], outputs: list[Port]) -> dict[str, Any]:
    """Return the parts of a manifest that are known before the graph's file is written.

    Args:
        spec: the settings of the export.
        graph: the module that was traced.
        used: names of the inputs that the traced graph reads.
        outputs: the ports of its outputs.
    """
    part = graph.form.eviction
    sizes, element = graph.sizes, full(spec.dtype)

    def described(ports: list[Port]) -> list[dict[str, Any]]:
        return [port.as_dict(element, sizes) for port in ports]

    return {
        "schema": SCHEMA,
        **settings_of(spec, graph),
        "formula": "; ".join(c.formula for c in part.components),
        "paper": "; ".join(c.paper for c in part.components),
        "inputs": described([port for port in graph.inputs if port.name in used]),
        "outputs": described(outputs),
        "notes": spec.notes(),
        "producer": {
            "kvcap": kvcap.__version__,
            **{name: version(name) for name in ("torch", "onnx", "onnxscript")},
        },
    }


def settings_of(spec: Spec, graph: StageGraph) -> dict[str, Any]:
    """Return the settings of an export, as its manifest has them; equal ones give equal graphs."""
    return {
        "policy": spec.recipe(),
        "stage": spec.stage,
        "formulation": graph.form.name,
        "dtype": spec.dtype,
        "shape": spec.shape.as_dict(),
    }


def read(graph: Path) -> dict[str, Any]:
    """Read the manifest of a graph, and check that graph and samples are the files it was made for.

    Raises:
        ManifestError: the manifest is missing, unreadable, of another schema, or of other files.
    """
    path = graph.with_suffix(".json")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ManifestError(
            f"{graph.name} has no manifest {path.name} beside it; export it again"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"manifest {path.name} cannot be read: {error}") from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise ManifestError(f"{path.name} has schema {str(schema)[:40]!r}, expected is {SCHEMA!r}")
    check(manifest, path.name)
    for part in ("graph", "samples"):
        _unchanged(graph.parent, manifest[part], path.name)
    if manifest["graph"]["file"] != graph.name:
        raise ManifestError(f"{path.name} describes {manifest['graph']['file']}, not {graph.name}")
    return manifest


def schema_in(file: Path) -> Any:
    """Return the schema that a JSON file names; None if it names none, or is no JSON."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return document.get("schema") if isinstance(document, dict) else None


def write(manifest: dict[str, Any], path: Path) -> None:
    """Write a manifest.

    Raises:
        ManifestError: the manifest does not follow its schema.
    """
    check(manifest, path.name)
    text = json.dumps(manifest, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def check(manifest: dict[str, Any], name: str) -> None:
    """Check a manifest against its schema.

    Raises:
        ManifestError: naming the file `name` and the first fault.
    """
    wrong = fault(manifest, SCHEMA_FILE)
    if wrong is not None:
        raise ManifestError(f"{name} is no {manifest['schema']}: {wrong}; export it again")


def _unchanged(folder: Path, entry: dict[str, Any], manifest: str) -> None:
    """Refuse a file with another checksum than its entry in the manifest.

    Raises:
        ManifestError: the file differs or cannot be read.
    """
    file, expected = folder / entry["file"], entry["sha256"]
    try:
        checksum = sha256(file)
    except OSError as error:
        raise ManifestError(
            f"{manifest} names {file.name}, which cannot be read: {error}"
        ) from error
    if checksum != expected:
        raise ManifestError(
            f"{file.name} is not the file {manifest} was written with: its sha256 is "
            f"{checksum[:12]}…, the manifest says {expected[:12]}…; export it again"
        )


def spec_of(manifest: dict[str, Any]) -> Spec:
    """Return the spec that a manifest describes.

    Raises:
        ManifestError: this kvcap knows no such policy, or cannot use the shape.
    """
    try:
        return recalled(
            manifest["policy"],
            manifest["shape"],
            stage=manifest["stage"],
            formulation=manifest["formulation"],
            dtype=manifest["dtype"],
        )
    except (TypeError, ValueError) as error:
        raise ManifestError(f"the manifest's policy or shape cannot be used: {error}") from error
