"""A decoder's directory, checked again: against the model it was made of, or what it evicts by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvcap.export import adopt, parity
from kvcap.export.decoder.graph import Decoder
from kvcap.export.decoder.spec import check_dtype, layout_for, load
from kvcap.export.decoder.verify import Report, check
from kvcap.export.manifest import sha256
from kvcap.export.verify import signature
from kvcap.policies import Eviction, load_policy
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.backends.onnxruntime.manifest import HASHED, Manifest, read
from kvcap.runtime.errors import ManifestError, ModelFilesBroken
from kvcap.runtime.models.files import load_config
from kvcap.runtime.models.names import resolve
from kvcap.runtime.types import MANIFEST


def is_decoder(path: Path) -> bool:
    """Whether a directory is one that `kvcap export decoder` wrote."""
    return (path / MANIFEST).is_file()


def recheck(folder: Path, model: str | None = None, quick: bool = False) -> Report | parity.Report:
    """Run the graph of an exported decoder beside PyTorch, or those that evict for another's.

    Args:
        folder: with its manifest.
        model: where the model is, if not where it was when it was exported.
        quick: over one block past the budget only.

    Raises:
        ManifestError, ModelFilesBroken: the directory is not as it was written.
        ModelNotFound: the model is not where it was.
        GraphBroken, ShapeError: the graph cannot be run, or is another.
        UnsupportedModel: a decoder of others that cannot lose tokens.
    """
    found = read(folder)
    _large_files(found)
    if not found.fused:
        if model is not None:
            raise ManifestError(
                f"{folder.name} holds another exporter's decoder, which is not held to a model; "
                "leave --model out"
            )
        return _evictors(found)
    facts = found.facts
    name = model or str(found.model["name"])
    try:
        eviction = _policy(facts)
        check_dtype(facts["dtype"])
        sizes = facts["budget_tokens"], facts["block_size"], facts["positions"]
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{MANIFEST} describes no decoder known here: {error}") from error
    config = load_config(resolve(name))
    layout = layout_for(config, eviction, *sizes)
    return check(folder, Decoder(load(name, facts["dtype"]).model, layout), facts["dtype"], quick)


def _large_files(found: Manifest) -> None:
    """Refuse one that is another: `read` tells them by their size alone."""
    for entry in found.facts["files"]:
        if entry["bytes"] > HASHED and sha256(found.file(entry["file"])) != entry["sha256"]:
            raise ModelFilesBroken(
                f"{entry['file']} in {str(found.folder)!r} is not the file that "
                f"{MANIFEST} was written with; get the files again, or export it again"
            )


def _policy(entry: Mapping[str, Any]) -> Eviction:
    policy = entry["policy"]
    return load_policy(policy["parts"], **policy["parameters"])


def _evictors(found: Manifest) -> parity.Report:
    """Try the decoder again, and hold every graph that evicts to its policy."""
    _, shape, ports, compact = adopt.examined(found.folder, found.decoder)
    rows = []
    for entry in found.facts["evictors"]:
        try:
            eviction, positions = _policy(entry), entry["positions"]
            pins = entry["policy"]["pins"]
            exact = compact and _near(found.facts["inv_freq"], adopt.frequencies(shape))
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"{MANIFEST} describes no evictor known here: {error}") from error
        if pins != adopt.pins(eviction):
            raise _otherwise(f"pins of {eviction.name}", "this policy has")
        if positions == "compact" and not exact:
            raise _otherwise("inv_freq", "this decoder turns keys by")
        evictor, dtype = adopt.module(eviction, ports, shape, positions)
        graph = Graph(found.file(entry["file"]))
        signature(graph.session, entry)
        rows.append(parity.check(graph, evictor, dtype))
    return parity.Report(found.folder.name, ports.graph.version, rows)


def _near(told: list[float], wanted: list[float]) -> bool:
    """Whether frequencies are equal but for how a processor rounds them."""
    return len(told) == len(wanted) and bool(np.allclose(told, wanted, rtol=1e-5, atol=0))


def _otherwise(said: str, what: str) -> ManifestError:
    return ManifestError(f"{MANIFEST} says other {said} than {what}; export it again")
