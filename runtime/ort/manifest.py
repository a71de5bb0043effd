"""kvcap.json, the manifest of an exported decoder: read, checked against its files, or refused.

Two kinds share the schema. `fused`: one graph decodes and evicts, its state is fed back. `evictor`:
a decoder that others exported, as it is, with graphs beside it that evict. Knows no ONNX Runtime.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvcap.runtime.errors import ManifestError, ModelFilesBroken, ModelNotFound, NotExportable

NAME, SCHEMA = "kvcap.json", "kvcap.decoder/1"
FUSED, EVICTOR = "fused", "evictor"
HASHED = 64 << 20  # larger files, which hold weights, are told by their size alone
NUMBERS = ("layers", "heads", "kv_heads", "head_dim", "hidden_size", "mlp_size", "vocabulary",
           "trained_length", "weights_bytes")  # fmt: skip
NEEDED: dict[str, type | tuple[type, ...]] = {
    "kind": str, "model": dict, "positions": str, "budget_tokens": int, "block_size": int,
    "dtype": str, "generation": dict, "files": list, "graphs": dict,
}  # fmt: skip
OF_KIND: dict[str, dict[str, type | tuple[type, ...]]] = {
    FUSED: {"policy": dict, "budgets": list, "state": list},
    EVICTOR: {"evictors": list, "cache_dtype": str},
}


@dataclass(frozen=True)
class Manifest:
    """What a directory says of its decoder; all of `NEEDED` is there, and every file."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def fused(self) -> bool:
        """Whether eviction is in the decoder's graph."""
        return bool(self.facts["kind"] == FUSED)

    @property
    def model(self) -> Mapping[str, Any]:
        """Name, family and sizes."""
        found: Mapping[str, Any] = self.facts["model"]
        return found

    @property
    def decoder(self) -> Path:
        """The decoder's graph."""
        return self.file(self.facts["graphs"]["decoder"]["file"])

    @property
    def fingerprint(self) -> str:
        """Of the decoder: its files and how it places tokens."""
        decoder = str(self.facts["graphs"]["decoder"]["file"])
        told = sorted(
            (entry["file"], entry["sha256"])
            for entry in self.facts["files"]
            if entry["file"].startswith(decoder) or entry["bytes"] > HASHED
        )
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def file(self, name: str) -> Path:
        """A file of the directory."""
        return self.folder / name


def read(folder: Path) -> Manifest:
    """The manifest of a directory, whose files are there and are those it was written with.

    Raises:
        ModelNotFound: no such directory.
        NotExportable: a directory without a manifest; says how one is made.
        ManifestError: it cannot be read, or is of another schema.
        ModelFilesBroken: a file is missing, or is another than the manifest says.
    """
    if not folder.is_dir():
        raise ModelNotFound(
            f"no directory {str(folder)!r}; the onnxruntime backend runs what "
            "`kvcap export decoder MODEL -o DIR` wrote"
        )
    path = folder / NAME
    if not path.exists():
        raise _unprepared(folder)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{str(path)!r} cannot be read: {error}; export it again") from error
    _check(facts, path)
    found = Manifest(folder, facts)
    for entry in facts["files"]:
        _unchanged(found, entry)
    return found


def _unprepared(folder: Path) -> NotExportable:
    if any(folder.glob("*.onnx")) or any(folder.glob("onnx/*.onnx")):
        return NotExportable(
            f"{str(folder)!r} holds an ONNX model without {NAME}; prepare it once with: "
            f"kvcap export decoder {folder} --exporter existing"
        )
    return NotExportable(
        f"{str(folder)!r} has no {NAME}, so it is no exported decoder; make one with: "
        f"kvcap export decoder {folder} -o {folder.name}-onnx, and give that directory; or leave "
        "--backend onnxruntime out"
    )


def _check(facts: Any, path: Path) -> None:
    """Refuse a manifest that lacks something, by its first fault."""

    def refuse(why: str) -> ManifestError:
        return ManifestError(f"{str(path)!r} {why}; export it again")

    schema = facts.get("schema") if isinstance(facts, dict) else None
    if schema != SCHEMA:
        raise refuse(f"has schema {schema!r}, and this kvcap reads {SCHEMA!r}")
    if facts.get("kind") not in OF_KIND:
        raise refuse(f"is of kind {facts.get('kind')!r}, and there are {', '.join(OF_KIND)}")
    for name, kind in {**NEEDED, **OF_KIND[facts["kind"]]}.items():
        if not isinstance(facts.get(name), kind) or isinstance(facts[name], bool):
            raise refuse(f"lacks {name!r}, or says something else there")
    for name in NUMBERS:
        if type(facts["model"].get(name)) is not int or facts["model"][name] < 1:
            raise refuse(f"lacks the model's {name!r}")
    if min(facts["budget_tokens"], facts["block_size"]) < 1:
        raise refuse("has a budget or a block below 1")
    if facts["positions"] not in ("compact", "true"):
        raise refuse(f"has positions {facts['positions']!r}")
    for entry in facts["files"]:
        plain = isinstance(entry, dict) and isinstance(entry.get("file"), str)
        if not (plain and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)):
            raise refuse("lists a file without its name, bytes and sha256")
        pure = PurePosixPath(entry["file"])
        if pure.is_absolute() or ".." in pure.parts or "\\" in entry["file"]:
            raise refuse(f"names the file {entry['file']!r}, which is not in the directory")
    listed = {entry["file"] for entry in facts["files"]}
    graphs = [facts["graphs"].get("decoder"), *facts.get("evictors", [])]
    for graph in graphs:
        if not isinstance(graph, dict) or graph.get("file") not in listed:
            raise refuse("has a graph that is not among its files")


def _unchanged(manifest: Manifest, entry: Mapping[str, Any]) -> None:
    path = manifest.file(entry["file"])
    try:
        size = path.stat().st_size
        same = size == entry["bytes"]
        if same and size <= HASHED:
            same = hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
    except OSError as error:
        raise ModelFilesBroken(
            f"{entry['file']} is not in {str(manifest.folder)!r} ({error.strerror}); get the files "
            "again, or export it again"
        ) from error
    if not same:
        raise ModelFilesBroken(
            f"{entry['file']} in {str(manifest.folder)!r} is not the file that {NAME} was written "
            "with; get the files again, or export it again"
        )
