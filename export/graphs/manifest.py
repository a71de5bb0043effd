"""Writes the manifest beside a graph: all that a device needs to feed it and to check it.

Plain JSON; samples are a safetensors file beside it (a JSON header and raw little-endian numbers).
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
    """Describe a graph before its file is written.

    Args:
        spec: what was asked for.
        graph: as traced.
        used: the inputs that it reads.
        outputs: what it returns.
    """
    part = graph.form.eviction
    sizes, element = graph.sizes, full(spec.dtype)

    def said(ports: list[Port]) -> list[dict[str, Any]]:
        return [port.as_dict(element, sizes) for port in ports]

    return {
        "schema": SCHEMA,
        **asked(spec, graph),
        "formula": "; ".join(c.formula for c in part.components),
        "paper": "; ".join(c.paper for c in part.components),
        "inputs": said([port for port in graph.inputs if port.name in used]),
        "outputs": said(outputs),
        "notes": spec.notes(),
        "producer": {
            "kvcap": kvcap.__version__,
            **{name: version(name) for name in ("torch", "onnx", "onnxscript")},
        },
    }


def asked(spec: Spec, graph: StageGraph) -> dict[str, Any]:
    """Return the part of a manifest that was asked for: two graphs are the same if this is."""
    return {
        "policy": spec.recipe(),
        "stage": spec.stage,
        "formulation": graph.form.name,
        "dtype": spec.dtype,
        "shape": spec.shape.as_dict(),
    }


def read(graph: Path, expected: str = SCHEMA) -> dict[str, Any]:
    """Read the manifest of a graph's file, which is checked to be the one it was made with.

    Raises:
        ManifestError: it is missing, unreadable, of another schema, or of another file.
    """
    path = graph.with_suffix(".json")
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ManifestError(
            f"{graph.name} has no manifest {path.name} beside it; export it again"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"manifest {path.name} cannot be read: {error}") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != expected:
        raise ManifestError(
            f"{path.name} has schema {str(schema)[:40]!r}, expected is {expected!r}"
        )
    check(found, path.name)
    for part in ("graph", "samples"):
        _unchanged(graph.parent, found[part], path.name)
    if found["graph"]["file"] != graph.name:
        raise ManifestError(f"{path.name} describes {found['graph']['file']}, not {graph.name}")
    return found


def schema_in(file: Path) -> Any:
    """Return the schema that a JSON file names; None if it names none, or is no JSON."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("schema") if isinstance(found, dict) else None


def write(said: dict[str, Any], path: Path) -> None:
    """Write a manifest.

    Raises:
        ManifestError: it is not what its schema says.
    """
    check(said, path.name)
    text = json.dumps(said, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def check(said: dict[str, Any], name: str) -> None:
    """Hold what a manifest says to the schema.

    Raises:
        ManifestError: `name` and the first fault.
    """
    wrong = fault(said, SCHEMA_FILE)
    if wrong is not None:
        raise ManifestError(f"{name} is no {said['schema']}: {wrong}; export it again")


def _unchanged(folder: Path, entry: dict[str, Any], manifest: str) -> None:
    """Refuse where a file that the manifest names is not the one it was written with."""
    file, expected = folder / entry["file"], entry["sha256"]
    try:
        got = sha256(file)
    except OSError as error:
        raise ManifestError(
            f"{manifest} names {file.name}, which cannot be read: {error}"
        ) from error
    if got != expected:
        raise ManifestError(
            f"{file.name} is not the file {manifest} was written with: its sha256 is {got[:12]}…, "
            f"the manifest says {expected[:12]}…; export it again"
        )


def spec_of(found: dict[str, Any]) -> Spec:
    """Return the spec a manifest describes.

    Raises:
        ManifestError: it describes none that this kvcap knows.
    """
    try:
        return recalled(
            found["policy"],
            found["shape"],
            stage=found["stage"],
            formulation=found["formulation"],
            dtype=found["dtype"],
        )
    except (TypeError, ValueError) as error:
        raise ManifestError(f"the manifest's policy or shape cannot be used: {error}") from error
