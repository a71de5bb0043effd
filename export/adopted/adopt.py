"""Prepares a decoder that others exported to run under a cap: adds evictor graphs and a manifest.

Taken are decoders with the signature of optimum and of most that are found: input_ids,
attention_mask, position_ids and past_key_values.N.key/value in, logits and present.N.key/value out.
Whether one can lose tokens is not believed but tried, see `trial.py`. The decoder's own file stays
as it is.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

import kvcap
from kvcap.dtypes import short, torch_dtype
from kvcap.export.adopted import check as evictors
from kvcap.export.adopted.evictor import Evictor, revealed, trace
from kvcap.export.adopted.signature import DecoderPorts, read_ports
from kvcap.export.adopted.trial import check_evictable
from kvcap.export.decoder import manifest as facts
from kvcap.export.decoder.companions import check_tokenizer, files_of, link_or_copy
from kvcap.export.files import file_entry
from kvcap.export.graphs.shape import refuse_sinks
from kvcap.export.graphs.spec import recipe
from kvcap.policies import Eviction, load_policy
from kvcap.runtime.backends.onnxruntime.graph import Graph
from kvcap.runtime.backends.onnxruntime.library import require
from kvcap.runtime.backends.onnxruntime.manifest import EVICTOR, SCHEMA
from kvcap.runtime.errors import ModelNotFound, NotExportable, UnsupportedModel
from kvcap.runtime.models.config import ModelShape, layer_kinds
from kvcap.runtime.models.files import check_generation, load_config
from kvcap.runtime.planning.plan import BLOCK_SIZE

PREFERRED = ("model.onnx", "onnx/model.onnx", "decoder_with_past_model.onnx")
COMPANIONS = ("config.json", "generation_config.json", *facts.TOKENIZER.values(),
              "special_tokens_map.json")  # fmt: skip
RULE = [
    "run the decoder on a block with what is kept as past_key_values, attention_mask all ones, and "
    "position_ids from `seen` (true positions) or from the number of kept slots (compact)",
    "run the evictor on all layers' present; what it keeps is past_key_values of the next block",
    "stay = min(budget, kept slots + block); table[p] = cosine and sine of p * inv_freq",
]


def adopt(
    where: Path,
    out: Path | None = None,
    policies: Iterable[Eviction] = (),
    *,
    budget_tokens: int = 256,
    block_size: int = BLOCK_SIZE,
    positions: str | None = None,
    exporter: str = "existing",
) -> dict[str, Any]:
    """Prepare a decoder's directory; returns its manifest.

    Args:
        where: a directory with one decoder, its config and its tokenizer; or the decoder's file.
        out: a directory to prepare instead, which gets copies (links where it can).
        policies: to evict by; by default all that such a decoder can, with their own options.
        budget_tokens: slots that a run keeps if it is not told; the graphs take any number.
        block_size: likewise, tokens read at once.
        positions: likewise, 'compact' or 'true'; compact where that is exact.
        exporter: what made the decoder, for the manifest.

    Raises:
        ModelNotFound: no decoder there, or several.
        UnsupportedModel: not that signature, or one that cannot lose tokens.
        NotExportable: a policy that reads more than the decoder shows.
        ToleranceError: a graph that evicts is not what its policy does. Nothing is written.
    """
    require()
    file = _decoder_in(where)
    folder = file.parent.parent if file.parent.name == "onnx" else file.parent
    config, shape, found, compact = examined(folder, file)
    modes = ("compact", "true") if compact else ("true",)
    if positions not in (None, *modes):
        raise UnsupportedModel(f"positions='compact' are not exact for {file.name}; leave them out")
    said = _describe(folder, config, shape, found)
    said |= {"budget_tokens": budget_tokens, "block_size": block_size, "exporter": exporter}
    chosen = list(policies) or [load_policy(name) for name in revealed()]
    said |= {"positions": positions or modes[0], "default_policy": chosen[0].name}
    target = folder if out is None else out
    fresh = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        pairs = [(eviction, mode) for eviction in chosen for mode in modes]
        said["evictors"] = _evictors(target, pairs, found, shape)
        _finish(target, folder, file, said)
    except BaseException:  # Ctrl-C too
        if fresh:
            shutil.rmtree(target, ignore_errors=True)
        raise
    return said


def examined(folder: Path, file: Path) -> tuple[Any, ModelShape, DecoderPorts, bool]:
    """Try a decoder with what belongs to it.

    Args:
        folder: with its config and its tokenizer.
        file: the decoder.

    Returns:
        Its config, the shape that follows, its ports, and whether compact positions are exact.

    Raises:
        GraphBroken: a file that is no graph.
        NotExportable: the model's attention has sink logits.
        UnsupportedModel: it cannot lose tokens, or is not of one model with its config.
    """
    config = load_config(str(folder))
    shape = ModelShape.of(config.get_text_config(decoder=True))
    refuse_sinks(shape)
    found = read_ports(file)
    _agree(shape, found)
    compact = check_evictable(found, shape)
    check_generation(str(folder))
    check_tokenizer(folder)
    return config, shape, found, compact


def _evictors(
    target: Path, pairs: Iterable[tuple[Eviction, str]], found: DecoderPorts, shape: ModelShape
) -> list[dict[str, Any]]:
    """Write the graphs that evict into `target`, all or none; returns their entries."""
    with tempfile.TemporaryDirectory(prefix=".kvcap-", dir=target) as name:
        part = Path(name)
        entries = [_write(part, eviction, found, shape, mode) for eviction, mode in pairs]
        for path in sorted(part.iterdir()):
            os.replace(path, target / path.name)
    return entries


def _finish(target: Path, folder: Path, file: Path, said: dict[str, Any]) -> None:
    """Bring what belongs to the decoder, and write the manifest last."""
    names = [*files_of(folder, file), *(name for name in COMPANIONS if (folder / name).is_file())]
    for name in names if target != folder else ():
        link_or_copy(folder / name, target / name)
    names += [entry["file"] for entry in said["evictors"]]
    said["files"] = [{**file_entry(target / name), "file": name} for name in names]
    said["graphs"] = {"decoder": said["files"][0]}
    said["tokenizer"] = {k: v if v in names else None for k, v in facts.TOKENIZER.items()}
    facts.write(target, said)


def _decoder_in(where: Path) -> Path:
    """The decoder's file at `where`.

    Raises:
        ModelNotFound: there is none, or more than one and none of the usual names.
    """
    if where.is_file():
        return where
    for name in PREFERRED:
        if (where / name).is_file():
            return where / name
    found = sorted(path for path in where.glob("*.onnx") if "kvcap-" not in path.name)
    if len(found) != 1:
        which = ", ".join(path.name for path in found) or "none"
        raise ModelNotFound(
            f"{str(where)!r} holds not one .onnx ({which}); give the decoder's file"
        )
    return found[0]


def _agree(shape: ModelShape, found: DecoderPorts) -> None:
    """Refuse a config that is not the graph's, and layers that are not capped."""
    if not shape.all_capped:
        raise UnsupportedModel(
            f"in this {shape.family} {shape.uncapped}, which its graph finds by where slots lie, "
            "or keeps by itself; run the model itself, without --backend onnxruntime"
        )
    if shape.latent is not None:
        raise UnsupportedModel(
            f"in this {shape.family} {shape.not_exportable}, whose slots hold latents; run the "
            "model itself, without --backend onnxruntime"
        )
    mine = (found.layers, found.kv_heads, found.head_dim)
    said = (len(shape.layers), shape.kv_heads, shape.head_size)
    if mine != said:
        raise UnsupportedModel(
            f"config.json says {said[0]} layers of {said[1]} KV heads of {said[2]}, and "
            f"{found.file.name} has {mine[0]} of {mine[1]} of {mine[2]}; they are not of one model"
        )


def _describe(folder: Path, config: Any, shape: ModelShape, found: DecoderPorts) -> dict[str, Any]:
    """What can be said before any graph is written."""
    generation = GenerationConfig.from_model_config(config)
    if (folder / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(str(folder))
    rotated = frequencies(shape)
    slides = "sliding_attention" in layer_kinds(config)  # in all, or it was refused
    weights = sum((folder / name).stat().st_size for name in files_of(folder, found.file))
    return {
        "schema": SCHEMA,
        "kind": EVICTOR,
        "model": {
            "name": folder.name,
            **facts.model_facts(shape),
            "weights_bytes": weights,
            "rotated_pairs": len(rotated),
            "window": config.sliding_window if slides else None,
        },
        "dtype": short(str(found.cache)),
        "cache_dtype": str(found.cache),
        "inv_freq": rotated,
        "rule": RULE,
        "generation": facts.generation_facts(generation),
        "producer": {"kvcap": kvcap.__version__, "torch": torch.__version__},
    }


def frequencies(shape: ModelShape) -> list[float]:
    """The inverse frequencies of the layers, which share them; none where they cannot be moved."""
    rope = shape.layers[0].rope
    return [] if rope is None or rope.inv_freq is None else rope.inv_freq.tolist()


def _write(
    folder: Path, eviction: Eviction, found: DecoderPorts, shape: ModelShape, positions: str
) -> dict[str, Any]:
    """Trace an evictor into `folder`, check it; returns its entry of the manifest."""
    evictor, dtype = module(eviction, found, shape, positions)
    path = folder / f"kvcap-evict.{eviction.name}.{positions}.onnx"
    path.write_bytes(trace(evictor, dtype).SerializeToString())
    evictors.check(Graph(path), evictor, dtype).require()
    sizes, element = evictor.sizes, str(found.cache)
    return {
        **file_entry(path),
        "policy": {**recipe(eviction), "pins": pins(eviction)},
        "formula": "; ".join(c.formula for c in eviction.components),
        "paper": "; ".join(c.paper for c in eviction.components),
        "positions": positions,
        "inputs": [port.as_dict(element, sizes) for port in evictor.inputs],
        "outputs": [port.as_dict(element, sizes) for port in evictor.outputs],
    }


def module(
    eviction: Eviction, found: DecoderPorts, shape: ModelShape, positions: str
) -> tuple[Evictor, torch.dtype]:
    """What a decoder's evictor is traced from, and the type of its keys and values."""
    pairs = len(frequencies(shape)) if positions == "compact" else 0
    rope = shape.layers[0].rope
    evictor = Evictor(eviction, found.layers, found.kv_heads, found.head_dim, pairs,
                      interleaved=rope is not None and rope.interleaved)  # fmt: skip
    return evictor, torch_dtype(str(found.cache))


def pins(eviction: Eviction) -> dict[str, Any]:
    """What the policy pins by itself at any budget N: sinks, and max(recents, share of N) newest.

    Raises:
        NotExportable: it pins otherwise.
    """
    share, fixed = getattr(eviction.policy, "recent", 0.0), eviction.recent_tokens
    if any(eviction.recents(n) != max(int(share * n), fixed) for n in (16, 100, 999)):
        raise NotExportable(f"{eviction.name} pins newest tokens by a rule that no manifest knows")
    return {"sinks": eviction.sinks(), "recents": fixed, "share": share}
