"""Exports a decoder's directory: traced, saved and checked; it appears only when all is done."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcap.export.decoder import embeddings, manifest
from kvcap.export.decoder.blocks import attend_by_length
from kvcap.export.decoder.calibrate import calibrate, pieces, refuse_text
from kvcap.export.decoder.check import (
    CheckedRun,
    DecoderReport,
    as_rounded,
    check,
    check_filled,
    check_streaming,
)
from kvcap.export.decoder.companions import check_tokenizer
from kvcap.export.decoder.depth import LEAST, enough, first_layers, kinds_of, numbered
from kvcap.export.decoder.evictor import evictors_of
from kvcap.export.decoder.evictor import trace as trace_evictor
from kvcap.export.decoder.fuse import fuse
from kvcap.export.decoder.graph import TOKENS, DecoderGraph
from kvcap.export.decoder.repeat import repeat
from kvcap.export.decoder.slot_scales import measure, sample
from kvcap.export.decoder.spec import ROUNDINGS, WITHIN, Source, check_dtype
from kvcap.export.files import refuse_other
from kvcap.export.graphs.trace import OPSET, trace_without_weights
from kvcap.export.weights import Packed, Store, place, rounded_in
from kvcap.runtime.backends.onnxruntime.library import library, require
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.errors import ManifestError
from kvcap.runtime.models.checkpoint import empty, fill
from kvcap.runtime.models.rounding import Rounding
from kvcap.runtime.session.ends import end_ids
from kvcap.runtime.types import MANIFEST

FEW = "few.onnx"  # temporary file of the first layers' graph, which is checked alone


def write(
    source: Source,
    layout: CacheLayout,
    dtype: str,
    out: Path,
    quick: bool = False,
    note: Callable[[str], None] = lambda text: None,
    force: bool = False,
    text: str | None = None,
    kv_dtype: str | None = None,
) -> tuple[dict[str, Any], DecoderReport]:
    """Export a model and its evictions as one directory.

    Args:
        source: the model, in the type of its cache.
        layout: of the cache.
        dtype: of the weights: fp32, fp16, int8 or int4.
        out: the directory; it may hold the same export, which is replaced.
        quick: check over one block past the budget only.
        note: called with what is being done.
        force: replace another export too.
        text: to calibrate weights in int4 on, and slots in int8; None: weights are rounded to the
            nearest, and slots are measured on Python's documentation.
        kv_dtype: 'int8' to hold keys and values in 8 bits; None: in the type of the cache.

    Returns:
        The manifest and what checking found.

    Raises:
        ExtraMissing: an optional package is not installed.
        NotExportable: there is no such decoder, or the text is too short.
        ManifestError, ExportExists: `out` holds something else, or another export.
        ToleranceError, ShapeError: the graph is not what the model computes; nothing is written.
    """
    require()
    dtype = check_dtype(dtype)
    out = out.resolve()
    check_out(
        out,
        None if force else manifest.settings_of(source.name, layout, dtype, text, kv_dtype),
    )
    refuse_text(text, dtype, kv_dtype)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kvcap-", dir=out.parent) as name:
        folder = Path(name) / "decoder"
        folder.mkdir()
        export = _Export(source, layout, dtype, folder, quick, note, text, kv_dtype)
        export.calibrate()
        facts, report = export.made()
        manifest.write(folder, {**facts, "verified": report.as_dict(), "sample": report.sample})
        if out.exists():
            os.replace(out, Path(name) / "before")
        os.replace(folder, out)
    return facts, report


@dataclass
class _Export:
    """An export of one decoder that writes a directory."""

    source: Source
    layout: CacheLayout
    dtype: str
    folder: Path
    quick: bool
    note: Callable[[str], None]
    text: str | None
    kv_dtype: str | None
    scales: Tensor | None = None  # [L, 2, K, D], scales of slots in int8
    packed: dict[str, Packed] = field(default_factory=dict)  # matrices rounded by a text (GPTQ)
    evictors: list[dict[str, Any]] = field(default_factory=list)  # their entries in the manifest

    @property
    def rounding(self) -> Rounding | None:
        """Return how weights are rounded; None where they are floats."""
        return ROUNDINGS.get(self.dtype)

    def calibrate(self) -> None:
        """Round matrices by the text, if there is one, and measure the scales of slots."""
        source, text, shape = self.source, self.text, self.layout.shape
        decoder = DecoderGraph(source.model, self.layout)
        if self.kv_dtype is not None:
            self.note("measuring keys and values")
            ids = sample(source.tokenizer, text, shape.vocabulary, shape.trained_length)
            self.scales = measure(decoder, ids, source.checkpoint)
        if text is not None and self.rounding is not None and self.dtype == "int4":
            ids = pieces(source.tokenizer, text, shape.trained_length)
            self.packed = calibrate(decoder, ids, self.rounding, source.checkpoint, self.note)

    def made(self) -> tuple[dict[str, Any], DecoderReport]:
        """Write all files but the manifest, and check them.

        Returns:
            What the manifest says, and what was found. Of a model whose weights stay in their
            files a few layers are checked at length, and all of them over a few tokens.
        """
        source, checkpoint = self.source, self.source.checkpoint
        self.note(f"tracing {source.name}")
        decoder = DecoderGraph(source.model, self.layout, self.scales)
        store = Store(self.folder / manifest.WEIGHTS)
        model, rows = self._traced(decoder, store)
        self.note("writing its weights")
        weights = decoder.state_dict() if checkpoint is None else checkpoint
        file = self.folder / manifest.GRAPH
        nodes = save(model, decoder, weights, store, file, self.rounding, self.packed)
        facts = self._files(decoder, nodes)
        self.note("checking it beside PyTorch")
        if checkpoint is None:
            with as_rounded(decoder, rounded_in(file)):
                report = check(self.folder, decoder, self.dtype, self.quick)
        else:
            report = check_streaming(self.folder, decoder, self.dtype, checkpoint)
            report = replace(report, rows=[*rows, *report.rows])
        report.require()
        return facts, report

    def _traced(self, decoder: DecoderGraph, store: Store) -> tuple[Any, list[CheckedRun]]:
        """Trace the graph of all layers, whose weights are inputs.

        Returns:
            The onnx.ModelProto; and of a model without weights what checking its first layers
            found, as it is not checked at length as a whole.
        """
        model, checkpoint, rows = decoder.model, self.source.checkpoint, list[CheckedRun]()
        kinds = kinds_of(model, self.layout)
        count = enough(kinds)
        if count is not None or checkpoint is not None:
            capped = self.layout.shape.capped[0] + 1  # one that evicts is among those checked
            first = count or min(max(LEAST, capped), len(kinds))
            with first_layers(model, self.layout, first) as layout:
                scales = None if self.scales is None else self.scales[:first]
                few = DecoderGraph(model, layout, scales)
                with _blank(few):
                    graph = trace(few)
                    if count is not None:
                        decoder.scales = [few.scales[kinds.index(kind)] for kind in kinds]
                    self._save_evictors(few if count is None else decoder)
                if checkpoint is not None:
                    rows = self._check_few(graph, few, store, checkpoint)
            if count is not None and repeat(graph, numbered(model, WITHIN), count, kinds):
                return graph, rows
        with _blank(decoder):
            self._save_evictors(decoder)
            return trace(decoder), rows

    def _save_evictors(self, decoder: DecoderGraph) -> None:
        """Write the graphs that evict, replacing earlier ones."""
        for entry in self.evictors:
            (self.folder / entry["file"]).unlink()
        self.evictors = save_evictors(decoder, self.folder)

    def _check_few(
        self, graph: Any, few: DecoderGraph, store: Store, weights: Mapping[str, Tensor]
    ) -> list[CheckedRun]:
        """Check the layers that were traced beside PyTorch, at length."""
        count = len(few.layers)
        self.note(f"checking {count} of its layers beside PyTorch")
        file = self.folder / FEW
        save(copy.deepcopy(graph), few, weights, store, file, self.rounding, self.packed)
        report = check_filled(self.folder, few, self.dtype, weights, self.quick, FEW)
        report.require()
        file.unlink()
        return [replace(row, who=f"{row.who}, {count} layers") for row in report.rows]

    def _files(self, decoder: DecoderGraph, nodes: int) -> dict[str, Any]:
        """Write the files beside the graph; return the manifest."""
        source, folder = self.source, self.folder
        source.config.save_pretrained(folder)
        source.model.generation_config.save_pretrained(folder)
        if source.tokenizer is not None:
            # Several templates would be files in folders, which an export has none of.
            in_one_file = not isinstance(source.tokenizer.chat_template, dict)
            source.tokenizer.save_pretrained(folder, save_jinja_files=in_one_file)
            check_tokenizer(folder)
        if self.scales is not None:
            np.save(folder / manifest.SLOT_SCALES, self.scales.numpy())
        has_rows = embeddings.write(folder / manifest.GRAPH, folder / manifest.EMBEDDINGS)
        facts = manifest.describe(source.name, decoder, self.dtype, self.text)
        ends = end_ids(source.tokenizer, source.model.generation_config, source.config)
        facts["generation"]["eos_token_id"] = ends
        facts |= manifest.file_facts(folder)
        entries = {entry["file"]: entry for entry in facts["files"]}
        facts["opset"], facts["evictors"] = OPSET, self.evictors
        facts["graphs"] = {"decoder": {**entries[manifest.GRAPH], "nodes": nodes}}
        if has_rows:
            facts["graphs"]["embeddings"] = entries[manifest.EMBEDDINGS]
        facts["model"]["weights_bytes"] = entries[manifest.WEIGHTS]["bytes"]
        return facts


@contextmanager
def _blank(decoder: DecoderGraph) -> Iterator[None]:
    """Give parameters that are on the meta device memory that is never written, to be traced."""
    parameters = [x for x in decoder.named_parameters(remove_duplicate=False) if x[1].is_meta]
    filled = fill(decoder, {name: torch.empty_like(x, device="cpu") for name, x in parameters})
    try:
        yield
    finally:
        empty(filled)


def trace(decoder: DecoderGraph) -> Any:
    """Trace a decoder, whose weights are inputs; return the onnx.ModelProto."""
    ports = decoder.inputs, decoder.outputs
    model = trace_without_weights(decoder, *ports, _example(decoder), _open_axes(decoder))
    fuse(model)
    return model


def save(
    model: Any,
    decoder: DecoderGraph,
    weights: Mapping[str, Tensor],
    store: Store,
    file: Path,
    rounding: Rounding | None,
    packed: Mapping[str, Packed],
) -> int:
    """Write a traced graph with its weights into `file` and `store`; returns how many nodes."""
    place(model, weights, store, rounding, packed)
    if decoder.slot_scales is not None:
        attend_by_length(model, TOKENS.name)
    for values, ports in (
        (model.graph.input, decoder.inputs),
        (model.graph.output, decoder.outputs),
    ):
        order = {port.name: index for index, port in enumerate(ports)}
        values.sort(key=lambda value: order[value.name])
    file.write_bytes(model.SerializeToString())
    library("onnx.checker").check_model(str(file))
    return len(model.graph.node)


def save_evictors(decoder: DecoderGraph, folder: Path) -> list[dict[str, Any]]:
    """Trace the graphs that evict into `folder`; return each one's entry in the manifest."""
    facts = []
    evictors = evictors_of(decoder)
    for i, (evictor, layers) in enumerate(evictors):
        model = trace_evictor(evictor)
        file = folder / manifest.evictor_name(i, len(evictors))
        file.write_bytes(model.SerializeToString())
        taken = {port.name for port in model.graph.input}
        facts.append(manifest.evictor_facts(file, evictor, layers, taken))
    return facts


def _example(decoder: DecoderGraph) -> list[Tensor]:
    """Return inputs to trace on: equal lengths, or lengths of 0 or 1, would be frozen."""
    lengths = {"tokens": max(2, decoder.layout.block_size - 1)}
    sizes = decoder.sizes
    tensors = []
    for port in decoder.counts:
        shape = [sizes[axis] or lengths[axis] for axis in port.axes]
        tensors.append(torch.zeros(shape, dtype=decoder.dtype(port)))
    return tensors + decoder.empty()


def _open_axes(decoder: DecoderGraph) -> dict[str, Any]:
    """Return the lengths that are open, and how far."""
    dim = torch.export.Dim
    axes = {"tokens": dim("tokens", min=1, max=max(2, decoder.layout.block_size))}
    for state in decoder.past:
        axis = state.port.axes[2]
        axes.setdefault(axis, dim(axis, min=1, max=max(4, 2 * state.full[2])))
    return axes


def check_out(out: Path, settings: dict[str, Any] | None) -> None:
    """Refuse to replace anything but an earlier export with the same settings.

    Args:
        out: the directory.
        settings: what is to be exported, from `manifest.settings_of`; None replaces any export.

    Raises:
        ManifestError: `out` holds something else than an export.
        ExportExists: it holds another one.
    """
    if (out / MANIFEST).is_file():
        if settings is not None:
            refuse_other(out / MANIFEST, settings)
    elif out.exists() and (out.is_file() or any(out.iterdir())):
        raise ManifestError(
            f"{str(out)!r} holds something else than an exported decoder, which would be "
            "replaced; give another directory"
        )
