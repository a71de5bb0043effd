"""Checks exported files again: graphs beside their policies, decoders beside their models.

It knows both kinds of exports: graphs of a policy, and directories of decoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvcap.export.decoder import check as decoders
from kvcap.export.decoder.graph import DecoderGraph
from kvcap.export.decoder.manifest import model_facts
from kvcap.export.decoder.spec import check_dtype, layout_for, load
from kvcap.export.files import sha256
from kvcap.export.graphs import check as graphs
from kvcap.export.graphs import manifest
from kvcap.export.weights import rounded_in
from kvcap.policies import Eviction, load_policy
from kvcap.runtime.backends.onnxruntime.decoder import scales_of
from kvcap.runtime.backends.onnxruntime.manifest import HASHED, Manifest, read
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import ManifestError, ModelFilesBroken
from kvcap.runtime.models.files import load_config
from kvcap.runtime.models.names import resolve
from kvcap.runtime.types import MANIFEST

Report = graphs.GraphReport | decoders.DecoderReport


def verify(path: Path, model: str | None = None, quick: bool = False) -> list[Report]:
    """Check a graph with its manifest, every graph of a directory, or a decoder's directory.

    Args:
        path: a .onnx file, a directory of them, or one that `kvcap export decoder` wrote.
        model: where a decoder's model is, if it was moved since the export.
        quick: leave long cases out.

    Raises:
        ManifestError: there is no file to check, or a manifest is missing or of another file.
        GraphBroken: a file is no graph.
        ShapeError: a graph has other inputs or outputs than its manifest says.
        ModelFilesBroken, ModelNotFound, UnsupportedModel: see `verify_decoder`.
    """
    if (path / MANIFEST).is_file():
        return [verify_decoder(path, model, quick)]
    if path.is_dir():
        _refuse_missing(path)
    files = sorted(path.glob("*.onnx")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ManifestError(f"no .onnx file at {str(path)!r}; kvcap export scorer writes some")
    return [graphs.check(file, manifest.read(file), quick) for file in files]


def _refuse_missing(folder: Path) -> None:
    """Refuse a folder in which a manifest describes a graph that is missing."""
    for file in sorted(folder.glob("*.json")):
        graph = file.with_suffix(".onnx")
        if not graph.is_file() and manifest.schema_in(file) == manifest.SCHEMA:
            raise ManifestError(
                f"{file.name} describes {graph.name}, which is missing; export it again"
            )


def verify_decoder(
    folder: Path, model: str | None = None, quick: bool = False
) -> decoders.DecoderReport:
    """Compare an exported decoder with PyTorch.

    Args:
        folder: the decoder's directory, with its manifest.
        model: where the model is, if it was moved since the export.
        quick: read only one block past the budget.

    Raises:
        ManifestError: the directory is not as it was written, or the model is another one.
        ModelFilesBroken: a file is not as it was written.
        ModelNotFound: the model is not there.
        GraphBroken, ShapeError: the graph cannot be run, or has other inputs or outputs.
    """
    exported = read(folder)
    _large_files(exported)
    facts = exported.facts
    name = model or str(exported.model["name"])
    try:
        check_dtype(facts["dtype"])
        settings = CacheSettings(
            facts["budget_tokens"], facts["block_size"], _policy(facts), facts["positions"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{MANIFEST} describes no decoder known here: {error}") from error
    config = load_config(resolve(name))
    layout = layout_for(config, settings)
    _same_model(name, model_facts(layout.shape), exported.model)
    scales = scales_of(exported)
    slots = None if scales is None else torch.from_numpy(scales[:, :, :, 0])
    decoder = DecoderGraph(load(name, facts["dtype"]).model, layout, slots)
    with decoders.as_rounded(decoder, rounded_in(exported.decoder)):
        return decoders.check(folder, decoder, facts["dtype"], quick)


def _same_model(name: str, facts: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a model whose family or sizes are not those that the manifest says."""
    for key, value in facts.items():
        if key in expected and expected[key] != value:
            raise ManifestError(
                f"{name!r} has {key.replace('_', ' ')} {value}, and this export was made from "
                f"{expected['name']!r}, which has {expected[key]}; give that model with --model"
            )


def _large_files(exported: Manifest) -> None:
    """Refuse large files with another checksum; `read` compares only their sizes.

    Raises:
        ModelFilesBroken: naming the file.
    """
    for entry in exported.facts["files"]:
        if entry["bytes"] > HASHED and sha256(exported.file(entry["file"])) != entry["sha256"]:
            raise ModelFilesBroken(
                f"{entry['file']} in {str(exported.folder)!r} is not the file that "
                f"{MANIFEST} was written with; get the files again, or export it again"
            )


def _policy(entry: Mapping[str, Any]) -> Eviction:
    policy = entry["policy"]
    return load_policy(policy["parts"], **policy["parameters"])
