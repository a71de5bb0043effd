"""Exports a decoder's directory: traced, saved and checked; it appears only when all is done."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcap.export.decoder import manifest
from kvcap.export.decoder.check import Report, check
from kvcap.export.decoder.companions import check_tokenizer
from kvcap.export.decoder.evictor import evictors_of, trace
from kvcap.export.decoder.fuse import fuse
from kvcap.export.decoder.graph import Decoder
from kvcap.export.decoder.int8 import require_quantiser, to_int8
from kvcap.export.decoder.spec import Source, check_dtype
from kvcap.export.files import refuse_other
from kvcap.export.graphs.trace import IR_VERSION, OPSET, program_of, slim
from kvcap.runtime.backends.onnxruntime.library import library, require
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.errors import ManifestError
from kvcap.runtime.types import MANIFEST


def write(
    source: Source,
    layout: CacheLayout,
    dtype: str,
    out: Path,
    quick: bool = False,
    note: Callable[[str], None] = lambda text: None,
    force: bool = False,
) -> tuple[dict[str, Any], Report]:
    """Export a model and its evictions as one directory.

    Args:
        source: the model, in the type of its cache.
        layout: of the cache.
        dtype: of the weights: fp32, fp16 or int8.
        out: the directory; it may hold the same export, which is replaced.
        quick: check over one block past the budget only.
        note: told what is being done.
        force: replace another export too.

    Returns:
        The manifest and what checking found.

    Raises:
        ExtraMissing: an optional package is not installed.
        NotExportable: there is no such decoder.
        ManifestError, ExportExists: `out` holds something else, or another export.
        ToleranceError, ShapeError: the graph is not what the model computes; nothing is written.
    """
    require()
    dtype = check_dtype(dtype)
    if dtype == "int8":
        require_quantiser()
    out = out.resolve()
    check_out(out, None if force else manifest.asked(source.name, layout, dtype))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kvcap-", dir=out.parent) as name:
        folder = Path(name) / "decoder"
        folder.mkdir()
        decoder = Decoder(source.model, layout)
        note(f"tracing {source.name}")
        said = _files(source, decoder, dtype, folder)
        note("checking it beside PyTorch")
        report = check(folder, decoder, dtype, quick)
        report.require()
        manifest.write(folder, {**said, "verified": report.as_dict(), "sample": report.sample})
        if out.exists():
            os.replace(out, Path(name) / "before")
        os.replace(folder, out)
    return said, report


def _files(source: Source, decoder: Decoder, dtype: str, folder: Path) -> dict[str, Any]:
    """Write all files but the manifest; returns what it says of them."""
    nodes = save(decoder, folder / manifest.GRAPH, dtype)
    evictors = save_evictors(decoder, folder)
    source.config.save_pretrained(folder)
    source.model.generation_config.save_pretrained(folder)
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(folder)
        check_tokenizer(folder)
    said = manifest.describe(source.name, decoder, dtype) | manifest.file_facts(folder)
    entries = {entry["file"]: entry for entry in said["files"]}
    said["opset"], said["evictors"] = OPSET, evictors
    said["graphs"] = {"decoder": {**entries[manifest.GRAPH], "nodes": nodes}}
    said["model"]["weights_bytes"] = entries[manifest.WEIGHTS]["bytes"]
    return said


def save(decoder: Decoder, file: Path, dtype: str) -> int:
    """Trace into `file`, weights beside it; returns the number of nodes."""
    onnx, ir = library("onnx"), library("onnx_ir")
    program = program_of(decoder, decoder.inputs, _example(decoder), _open_axes(decoder))
    ir.save(program.model, str(file), external_data=manifest.WEIGHTS)
    model = onnx.load(str(file), load_external_data=False)
    model.ir_version = min(model.ir_version, IR_VERSION)
    axes = {port.name: port.axes for port in (*decoder.inputs, *decoder.outputs)}
    slim(model, [port.name for port in decoder.outputs], axes)
    fuse(model)
    file.write_bytes(model.SerializeToString())
    if dtype == "int8":
        to_int8(file)
    library("onnx.checker").check_model(str(file))
    return len(onnx.load(str(file), load_external_data=False).graph.node)


def save_evictors(decoder: Decoder, folder: Path) -> list[dict[str, Any]]:
    """Trace the graphs that evict into `folder`; what the manifest says of each."""
    found = []
    evictors = evictors_of(decoder)
    for i, (evictor, layers) in enumerate(evictors):
        model = trace(evictor)
        file = folder / manifest.evictor_name(i, len(evictors))
        file.write_bytes(model.SerializeToString())
        taken = {port.name for port in model.graph.input}
        found.append(manifest.evictor_facts(file, evictor, layers, taken))
    return found


def _example(decoder: Decoder) -> list[Tensor]:
    """Inputs to trace on: lengths that are neither 0 nor 1 nor equal, which would be frozen."""
    lengths = {"tokens": max(2, decoder.layout.block_size - 1)}
    sizes = decoder.sizes
    found = []
    for port in decoder.inputs[: len(decoder.inputs) - len(decoder.past)]:
        shape = [sizes[axis] or lengths[axis] for axis in port.axes]
        found.append(torch.zeros(shape, dtype=decoder.dtype(port)))
    return found + decoder.empty()


def _open_axes(decoder: Decoder) -> dict[str, Any]:
    """The lengths that are open, and how far."""
    dim = torch.export.Dim
    found = {"tokens": dim("tokens", min=1, max=max(2, decoder.layout.block_size))}
    for state in decoder.past:
        axis = state.port.axes[2]
        found.setdefault(axis, dim(axis, min=1, max=max(4, 2 * state.full[2])))
    return found


def check_out(out: Path, asked: dict[str, Any] | None) -> None:
    """Refuse to replace what is not an earlier export, or one of something else.

    Args:
        out: the directory.
        asked: what is to be exported, from `manifest.asked`; None replaces any export.

    Raises:
        ManifestError: `out` holds something else than an export.
        ExportExists: it holds another one.
    """
    if (out / MANIFEST).is_file():
        if asked is not None:
            refuse_other(out / MANIFEST, asked)
    elif out.exists() and (out.is_file() or any(out.iterdir())):
        raise ManifestError(
            f"{str(out)!r} holds something else than an exported decoder, which would be "
            "replaced; give another directory"
        )
