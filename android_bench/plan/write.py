"""Writes a plan: graphs, their inputs and expected outputs, and the rules of measuring."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvcap.android_bench.documents import PLAN, PLAN_FILE, plan_id, port_bytes, validate
from kvcap.android_bench.errors import PlanBroken, PlanExists
from kvcap.android_bench.plan.decoder import DecoderWork, decoder_entry
from kvcap.android_bench.plan.expected import Folder, SizedGraph
from kvcap.android_bench.plan.presets import PlanPreset, PolicyVariant
from kvcap.android_bench.runner.inputs import GENERATOR, hash11
from kvcap.android_bench.runner.statistics import COLUMNS
from kvcap.export.graphs.formulations import FORMULATIONS
from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.spec import Spec, recalled
from kvcap.export.graphs.stages import StageGraph
from kvcap.export.graphs.write import write

REFERENCE = "keydiff.stateless.score"  # relative times are relative to it at its smallest size


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan: a preset on a layer of some model."""

    name: str  # the preset's
    preset: PlanPreset
    shape: Shape = field(default_factory=Shape)
    model: str = "Llama-3.2-3B"
    decoder: Path | None = None  # the folder of a whole decoder that is timed, too
    work: DecoderWork = field(default_factory=DecoderWork)


def write_plan(wanted: PlanRequest, folder: Path) -> dict[str, Any]:
    """Write plan.json and its files into a new or empty folder.

    Returns:
        The plan.

    Raises:
        PlanExists: the folder is not empty.
        PlanBroken: there is no cell, or not the one that times are relative to.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PlanExists(f"{str(folder)!r} is not empty; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kvcap-", dir=folder.parent) as name:
        whole = Path(name) / "plan"
        whole.mkdir(mode=0o755)
        plan = _planned(wanted, Folder(whole))
        text = json.dumps(plan, indent=1)
        (whole / PLAN_FILE).write_text(text + "\n", encoding="utf-8")
        whole.rename(folder)
    return plan


def _planned(wanted: PlanRequest, folder: Folder) -> dict[str, Any]:
    producer: dict[str, str] = {}
    cells = list(_cells(wanted, folder, producer))
    references = [cell for cell in cells if cell["id"].startswith(REFERENCE)]
    if not cells:
        raise PlanBroken("nothing is left to measure; see --policies, --sizes, --dtypes, --stages")
    reference = min(references or cells, key=lambda cell: int(cell["n"]))
    shape = asdict(wanted.shape)
    plan: dict[str, Any] = {"schema": PLAN, "id": "", "preset": wanted.name}
    kept = ("batch", "kv_heads", "heads", "head_dim", "block")
    plan |= {
        "producer": producer,
        "shape": {"name": wanted.model, **{key: shape[key] for key in kept}},
        "rules": asdict(wanted.preset.rules),
        "threads": list(wanted.preset.threads),
        "reference": reference["id"],
        "generator": {"name": "hash11", "rule": GENERATOR, "check": hash11(1, 8).tolist()},
        "csv": list(COLUMNS),
        "files": sorted(folder.files.values(), key=lambda entry: str(entry["file"])),
        "baselines": _baselines(cells, wanted.shape),
        "cells": cells,
        "formulations": {
            name: sentence
            for name, sentence in FORMULATIONS.items()
            if name in {cell["formulation"] for cell in cells}
        },
    }
    if wanted.decoder is not None:
        plan["decoder"] = decoder_entry(wanted.decoder, wanted.work, folder)
        plan["files"] = sorted(folder.files.values(), key=lambda entry: str(entry["file"]))
    plan["id"] = plan_id(plan)
    validate(plan, PLAN, PLAN_FILE, PlanBroken)
    return plan


def _cells(
    wanted: PlanRequest, folder: Folder, producer: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield every cell, and export each graph once; collect versions in `producer`."""
    for group in wanted.preset.groups:
        for variant, dtype, budget in group.models():
            spec = _spec(wanted.shape, variant, group.stage, dtype, budget)
            manifest, model = _exported(spec, variant, folder)
            producer |= manifest["producer"]
            sizes = group.sizes if budget is None else (budget + wanted.shape.block,)
            for slots in sizes:
                yield _cell(spec, variant, manifest, model, slots, folder)


def _spec(shape: Shape, variant: PolicyVariant, stage: str, dtype: str, budget: int | None) -> Spec:
    sizes = shape.as_dict() | ({} if budget is None else {"budget": budget})
    options = {"stage": stage, "dtype": dtype}
    if variant.formulation is not None:
        options["formulation"] = variant.formulation
    return recalled({"parts": variant.policy, "parameters": variant.options}, sizes, **options)


def _exported(spec: Spec, variant: PolicyVariant, folder: Folder) -> tuple[dict[str, Any], str]:
    """Export and verify a graph; return its manifest and the name of its file in the plan."""
    with tempfile.TemporaryDirectory() as name:
        file, _ = write(spec, Path(name), quick=True)
        manifest: dict[str, Any] = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        stem = file.name.replace(spec.eviction.name, _label(variant), 1)
        return manifest, folder.add(f"models/{stem}", file.read_bytes())


def _label(variant: PolicyVariant) -> str:
    """Return the policy's name followed by its options."""
    parts = [f"{key[0]}{value}" for key, value in sorted(variant.options.items())]
    return "-".join([variant.policy, *parts])


def _cell(
    spec: Spec,
    variant: PolicyVariant,
    manifest: dict[str, Any],
    model: str,
    slots: int,
    folder: Folder,
) -> dict[str, Any]:
    graph = spec.graph()
    queries = _queries(graph, variant, manifest, slots)
    budget = spec.shape.budget if spec.stage == "evict" else None
    label = f"{_label(variant)}.{spec.stage}" + (f".to{budget}" if budget else "")
    inputs, outputs = SizedGraph(graph, manifest, label, slots, queries).describe(folder)
    name = [_label(variant), manifest["formulation"], spec.stage, spec.dtype, f"n{slots}"]
    name += [f"q{queries}"] * bool(queries) + [f"to{budget}"] * bool(budget)
    return {
        "id": ".".join(name),
        "policy": _label(variant),
        "formulation": manifest["formulation"],
        "dtype": spec.dtype,
        "stage": spec.stage,
        "n": slots,
        "queries": queries,
        "budget": budget,
        "model": model,
        "opset": manifest["opset"],
        "bytes": sum(map(port_bytes, (*inputs, *outputs))),
        "inputs": inputs,
        "outputs": outputs,
    }


def _queries(
    graph: StageGraph, variant: PolicyVariant, manifest: dict[str, Any], slots: int
) -> int:
    """Return how many queries are an input, 0 if the graph reads none."""
    if "queries" not in {port["name"] for port in manifest["inputs"]}:
        return 0
    observed = graph.form.eviction.policy.queries_observed or graph.form.shape.block
    return min(variant.queries or observed, slots)


def _baselines(cells: list[dict[str, Any]], shape: Shape) -> list[dict[str, Any]]:
    """Return a baseline for every size that is scored: copying as many bytes as float16 keys."""
    row = shape.batch * shape.kv_heads * shape.head_dim * np.dtype(np.float16).itemsize
    sizes = sorted({cell["n"] for cell in cells if cell["stage"] == "score"})
    return [{"id": f"memcpy.n{n}", "bytes": n * row} for n in sizes]
