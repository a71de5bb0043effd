"""Reads kvcap.json, the manifest of an exported decoder, and checks it against its files.

Past and present of the decoder are one buffer, and graphs beside it say which slots go. Knows no
ONNX Runtime: of a graph, it finds only the names of the files that hold its weights.
"""

from __future__ import annotations

import hashlib
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvcap.runtime.errors import (
    GraphBroken,
    ManifestError,
    ModelFilesBroken,
    ModelNotFound,
    NotExportable,
)
from kvcap.runtime.files import check_plain, read_json
from kvcap.runtime.types import MANIFEST, ModelKind
from kvcap.schema import fault

SCHEMA = "kvcap.decoder/2"
SCHEMA_FILE = Path(__file__).parents[2] / "schemas" / "decoder.schema.json"
KIND = "shared"  # past and present are one buffer
KV_DTYPE = "int8"  # of slots that are quantised
HASHED = 64 << 20  # bytes; of larger files, which hold weights, only the size is checked
LOCATION = re.compile(rb"\x0a\x08location(?:\x12(.))?", re.DOTALL)
"""Finds where an ONNX file names one of weights: the entry's key, then the length of its value."""


@dataclass(frozen=True)
class Manifest:
    """A manifest: the checked content of kvcap.json, and the directory that holds its files."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def model(self) -> Mapping[str, Any]:
        """Return the model's name, family and sizes."""
        model: Mapping[str, Any] = self.facts["model"]
        return model

    @property
    def kind(self) -> ModelKind:
        """Return the model's family and size."""
        return ModelKind(self.model.get("family", ""), self.model["hidden_size"])

    @property
    def decoder(self) -> Path:
        """Return the file of the decoder's graph."""
        return self.file(self.facts["graphs"]["decoder"]["file"])

    @property
    def embeddings(self) -> Path | None:
        """Return the file of the graph that gives tokens' embeddings; None: there is none."""
        entry = self.facts["graphs"].get("embeddings")
        return None if entry is None else self.file(entry["file"])

    @property
    def fingerprint(self) -> str:
        """Return a digest of the decoder's files that differs between decoders."""
        decoder = str(self.facts["graphs"]["decoder"]["file"])
        described = sorted(
            (entry["file"], entry["sha256"])
            for entry in self.facts["files"]
            if entry["file"].startswith(decoder) or entry["bytes"] > HASHED
        )
        return hashlib.sha256(repr(described).encode()).hexdigest()

    @property
    def listed(self) -> frozenset[str]:
        """Return the names of the files that belong to the decoder; no others are read."""
        return frozenset(entry["file"] for entry in self.facts["files"])

    def file(self, name: str) -> Path:
        """Return the path of a file in the directory."""
        return self.folder / name


def refuse_cache(positions: str | None, kv_dtype: str | None) -> None:
    """Refuse positions and a type of slots that caches in PyTorch have and no export has.

    Raises:
        NotExportable: says why, and which there are.
    """
    if positions == "auto":
        raise NotExportable(
            "positions='auto' change while a text is read, and an exported decoder has them of one "
            "kind; leave them out, say 'compact' or 'true', or run the model by PyTorch"
        )
    if kv_dtype not in (None, KV_DTYPE):
        raise NotExportable(
            f"--kv-dtype {kv_dtype} is not for exported decoders: ONNX Runtime's attention takes "
            "one scale for each channel and none for a token or a group, which 4 bits need; use "
            f"{KV_DTYPE}, or run the model by PyTorch"
        )


def read(folder: Path) -> Manifest:
    """Return a directory's manifest, if it is sound and its files are those it was written with.

    Raises:
        ModelNotFound: no such directory.
        NotExportable: a directory without a manifest; says how one is made.
        ManifestError: it cannot be read, or breaks the schema.
        ModelFilesBroken: a file is missing or was changed.
        GraphBroken: a graph takes weights from a file that is not listed.
    """
    if not folder.is_dir():
        raise ModelNotFound(
            f"no directory {str(folder)!r}; the onnxruntime backend runs what "
            "`kvcap export decoder MODEL -o DIR` wrote"
        )
    path = folder / MANIFEST
    if not path.exists():
        raise _unprepared(folder)
    try:
        facts = read_json(path)
    except (OSError, ValueError) as error:
        raise ManifestError(f"{str(path)!r} cannot be read: {error}; export it again") from error
    check(facts, repr(str(path)))
    manifest = Manifest(folder, facts)
    for entry in facts["files"]:
        _unchanged(manifest, entry)
    for graph in _graphs(facts):
        _complete(manifest, graph)
    return manifest


def _unprepared(folder: Path) -> NotExportable:
    if any(folder.glob("*.onnx")) or any(folder.glob("onnx/*.onnx")):
        return NotExportable(
            f"{str(folder)!r} holds an ONNX model of another exporter, whose cache cannot be "
            "capped; export the model that it was made from with: kvcap export decoder MODEL"
        )
    return NotExportable(
        f"{str(folder)!r} has no {MANIFEST}, so it is no exported decoder; make one with: "
        f"kvcap export decoder {folder} -o {folder.name}-onnx, and give that directory; or run the "
        "model in PyTorch"
    )


def check(facts: Any, name: str = MANIFEST) -> None:
    """Refuse a manifest that breaks its schema, or whose parts contradict each other.

    Raises:
        ManifestError: naming the first fault; it calls the manifest `name`.
    """
    schema = facts.get("schema") if isinstance(facts, dict) else None
    if schema != SCHEMA:
        raise ManifestError(
            f"{name} has schema {str(schema)[:40]!r}, and this kvcap reads {SCHEMA!r}; export it "
            "again"
        )
    wrong = fault(facts, SCHEMA_FILE) or _contradiction(facts)
    if wrong is not None:
        raise ManifestError(f"{name} is no {SCHEMA}: {wrong}; export it again")


def _contradiction(facts: Mapping[str, Any]) -> str | None:
    """Return the first contradiction between parts, which a schema cannot find."""
    names = [entry["file"] for entry in facts["files"]]
    if len(set(names)) < len(names):
        return "files: one is listed twice"
    for graph in _graphs(facts):
        if graph not in names:
            return f"{graph!r} is a graph that is not among its files"
    budgets, pins = facts["budgets"], facts["policy"].get("pins", {})
    size = facts["model"]["head_dim"]
    if len(budgets) != facts["model"]["layers"]:
        return f"budgets: of {len(budgets)} layers, and there are {facts['model']['layers']}"
    windows = windows_in(facts)
    if len(windows) != len(budgets):
        return "windows: not said of each layer"
    pairs = list(zip(budgets, windows, strict=True))
    if any(window is not None and budget != max(1, window - 1) for budget, window in pairs):
        return "windows: a layer that has one holds other than its tokens but one"
    capped = [i for i, window in enumerate(windows) if window is None]
    if not capped:
        return "windows: every layer has one, and none is left for the policy"
    if sum(budgets[i] for i in capped) != facts["budget_tokens"] * len(capped):
        return f"budgets: not budget_tokens, {facts['budget_tokens']}, on average"
    recents = pins.get("recents", [0] * len(budgets))
    if len(recents) != len(budgets):
        return "policy/pins/recents: not one of each layer"
    if any(pins.get("sinks", 0) + n > budget for n, budget in zip(recents, budgets, strict=True)):
        return "policy/pins: more than a layer's budget"
    if sorted(i for one in facts["evictors"] for i in one["layers"]) != capped:
        return "evictors: not one of each layer"
    if len(facts["rotates"]) != len(budgets):
        return "rotates: not said of each layer"
    if any(facts["rotates"][i] for i in range(len(budgets)) if windows[i] is not None):
        return "rotates: a layer that has a window counts no ranks"
    scales = facts.get("slot_scales")
    if (facts.get("kv_dtype") is None) != (scales is None):
        return "slot_scales: they belong to kv_dtype, and one of the two is not there"
    if scales is not None and scales not in [entry["file"] for entry in facts["files"]]:
        return f"{scales!r} is not among its files"
    if any(facts["rotates"]) and 2 * len(facts["inv_freq"]) not in range(2, size + 1):
        return f"inv_freq: of {len(facts['inv_freq'])} pairs of a head's {size} numbers"
    return None


def windows_in(facts: Mapping[str, Any]) -> list[int | None]:
    """Return for each layer of a decoder the tokens of its sliding window; None: all."""
    return list(facts.get("windows") or [None] * len(facts["budgets"]))


def _graphs(facts: Mapping[str, Any]) -> list[str]:
    """Return the file names of all graphs."""
    graphs = [*facts["graphs"].values(), *facts.get("evictors", [])]
    return [graph["file"] for graph in graphs]


def _complete(manifest: Manifest, graph: str) -> None:
    """Refuse a graph that takes weights from a file that is not listed."""
    try:
        named = files_named(manifest.file(graph))
    except (OSError, ValueError) as error:
        raise GraphBroken(
            f"{graph} in {str(manifest.folder)!r} is no graph that can be loaded: {error}; get "
            "the files again, or export it again"
        ) from error
    for name in sorted(named):
        if (PurePosixPath(graph).parent / name).as_posix() not in manifest.listed:
            raise GraphBroken(
                f"{graph} takes weights from {name[:200]!r}, which {MANIFEST} does not list; "
                "export it again"
            )


def _unchanged(manifest: Manifest, entry: Mapping[str, Any]) -> None:
    """Refuse a file that is missing or is not the one that the manifest was written with."""
    path = manifest.file(entry["file"])
    try:
        check_plain(path)
        size = path.stat().st_size
        same = size == entry["bytes"]
        if same and size <= HASHED:
            same = hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFilesBroken(
            f"{entry['file']} is not in {str(manifest.folder)!r} ({reason}); get the files again, "
            "or export it again"
        ) from error
    if not same:
        raise ModelFilesBroken(
            f"{entry['file']} in {str(manifest.folder)!r} is not the file that "
            f"{MANIFEST} was written with; get the files again, or export it again"
        )


def files_named(path: Path) -> set[str]:
    """Return the files that a graph takes weights from, relative to its own directory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is empty, or a name is no text or does not stand behind its key.
    """
    names = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for key in LOCATION.finditer(data):
            if key[1] is None:  # as other programs may write it, and as one hides a name
                raise ValueError("it names a file of weights in another way than kvcap does")
            names.add(data[key.end() : key.end() + key[1][0]].decode())
    return names
