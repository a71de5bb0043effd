"""Prepares a decoder that others exported to run under a cap: adds evictor graphs and a manifest.

Taken are decoders with the signature of optimum and of most that are found: input_ids,
attention_mask, position_ids and past_key_values.N.key/value in, logits and present.N.key/value out;
and those of onnxruntime-genai's builder and onnx-community, which attend by GroupQueryAttention and
count positions by themselves (`grouped.py`). Whether one can lose tokens is not believed but tried,
see `trial.py` and `grouped_trial.py`. The decoder's own file stays as it is.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

import kvcap
from kvcap.dtypes import short, torch_dtype
from kvcap.export.adopted import check as evictors
from kvcap.export.adopted.evictor import AdoptedEvictionGraph, Selector, revealed, trace
from kvcap.export.adopted.grouped import Nodes, check_nodes
from kvcap.export.adopted.grouped_trial import checked
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
from kvcap.runtime.backends.onnxruntime.manifest import EVICTOR, GROUPED, SCHEMA
from kvcap.runtime.backends.onnxruntime.tokenizer import NAMED_TEMPLATES
from kvcap.runtime.cache.settings import BLOCK_SIZE, BUDGET_TOKENS
from kvcap.runtime.errors import ModelNotFound, NotExportable, UnsupportedModel
from kvcap.runtime.models.config import ModelShape, layer_kinds
from kvcap.runtime.models.files import check_generation, load_config
from kvcap.runtime.models.names import CONFIG, resolve

VARIANTS = {  # files by transformers.js's names of types; the first that exists is taken
    "fp32": "model", "q4": "model_q4", "int8": "model_int8", "q8": "model_quantized",
    "uint8": "model_uint8", "fp16": "model_fp16", "q4f16": "model_q4f16", "bnb4": "model_bnb4",
}  # fmt: skip
COMPANIONS = (
    "config.json",
    "generation_config.json",
    *facts.TOKENIZER.values(),
    "special_tokens_map.json",
)
GROUPED_RULE = [
    "allocate past_key_values of every layer once, with room for the budget and a block; bind it "
    "and present to one memory: a run writes the block's T slots behind the held ones",
    "feed attention_mask as ones for held + T, position_ids (where taken) from held on, "
    "num_logits_to_keep (where taken) 1; states from the last run, zeros at first",
    "note the tokens' positions, add T to held, and give each layer that holds more than the "
    "budget to the evictor: gone are slots. Move the survivors behind the budget into the holes "
    "before it, and set held to the budget. In generation this may wait for some tokens",
    "of a layer that rotates, turn the keys of survivors back by the number of older slots that "
    "went, by the angles inv_freq; float16 ones from how they were written",
]
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
    budget_tokens: int = BUDGET_TOKENS,
    block_size: int = BLOCK_SIZE,
    positions: str | None = None,
    exporter: str = "existing",
    variant: str | None = None,
    config: str | None = None,
) -> dict[str, Any]:
    """Prepare a decoder's directory; returns its manifest.

    Args:
        where: a directory with one decoder, its config and its tokenizer; or the decoder's file.
        out: a directory to prepare instead, which gets copies (links where it can).
        policies: to evict by; by default all that such a decoder can, with their own options.
        budget_tokens: slots that a run keeps by default; the graphs take any number.
        block_size: likewise, tokens read at once.
        positions: likewise, 'compact' or 'true'; compact where that is exact.
        exporter: what made the decoder, for the manifest.
        variant: of the graphs in the directory the one of this name, such as 'q4' (`VARIANTS`).
        config: the model that it was made from, where no config.json lies beside it.

    Raises:
        ModelNotFound: no decoder there, or several, or no config.
        UnsupportedModel: not that signature, or one that cannot lose tokens.
        NotExportable: a policy that reads more than the decoder shows.
        ToleranceError: a graph that evicts is not what its policy does. Nothing is written.
    """
    require()
    file = decoder_in(where, variant)
    folder = file.parent.parent if file.parent.name == "onnx" else file.parent
    source = _config_of(folder, config)
    settings, shape, found, compact = examined(folder, file, source)
    modes = ("compact", "true") if compact else ("true",)
    if found.nodes is not None:  # GroupQueryAttention counts positions by its slots
        modes = ("compact",)
    if positions not in (None, *modes):
        raise UnsupportedModel(
            f"positions='{positions}' are not exact for {file.name}; leave them out"
        )
    said = _describe(folder, source, settings, shape, found)
    said |= {"budget_tokens": budget_tokens, "block_size": block_size, "exporter": exporter}
    chosen = list(policies) or [load_policy(name) for name in revealed()]
    said |= {"positions": positions or modes[0], "default_policy": chosen[0].name}
    target = folder if out is None else out
    fresh = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        pairs = [(eviction, mode) for eviction in chosen for mode in modes]
        said["evictors"] = _evictors(target, pairs, found, shape)
        if source != str(folder):
            settings.save_pretrained(target)
            _generation(source, settings).save_pretrained(target)
        _finish(target, folder, file, said)
    except BaseException:  # Ctrl-C too
        if fresh:
            shutil.rmtree(target, ignore_errors=True)
        raise
    return said


def examined(
    folder: Path, file: Path, source: str | None = None
) -> tuple[Any, ModelShape, DecoderPorts, bool]:
    """Try a decoder with what belongs to it.

    Args:
        folder: with its tokenizer.
        file: the decoder.
        source: the directory of its config, if that is another.

    Returns:
        Its config, the shape that follows, its ports, and whether compact positions are exact.

    Raises:
        GraphBroken: a file that is no graph.
        NotExportable: the model's attention has sink logits.
        UnsupportedModel: it cannot lose tokens, or is not of one model with its config.
    """
    source = source or str(folder)
    config = load_config(source)
    shape = ModelShape.of(config.get_text_config(decoder=True))
    refuse_sinks(shape)
    found = read_ports(file)
    if found.nodes is not None and not found.head_dim:
        found = replace(found, head_dim=shape.head_size)
    _agree(shape, found)
    if found.nodes is not None:
        check_nodes(found.nodes, shape, file.name)
        found, compact = replace(found, nodes=checked(found, found.nodes, shape)), True
    else:
        compact = check_evictable(found, shape)
    check_generation(source)
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
    names = files_of(folder, file)
    names += [n for n in COMPANIONS if (folder / n).is_file() or (target / n).is_file()]
    names += sorted(
        f"{NAMED_TEMPLATES}/{path.name}" for path in folder.glob(f"{NAMED_TEMPLATES}/*.jinja")
    )
    for name in names if target != folder else ():
        if (folder / name).is_file():
            link_or_copy(folder / name, target / name)
    names += [entry["file"] for entry in said["evictors"]]
    said["files"] = [{**file_entry(target / name), "file": name} for name in names]
    said["graphs"] = {"decoder": said["files"][0]}
    said["tokenizer"] = {k: v if v in names else None for k, v in facts.TOKENIZER.items()}
    facts.write(target, said)


def decoder_in(where: Path, variant: str | None = None) -> Path:
    """Find the decoder's file at `where`.

    Raises:
        ModelNotFound: there is none, or not that variant, or more than one and none of the usual
            names.
    """
    if where.is_file():
        return where
    there = variants_in(where)
    if variant is not None:
        named = {**there, **{path.stem.removeprefix("model_"): path for path in there.values()}}
        if variant in named:
            return named[variant]
        which = ", ".join(f"{name} ({path.name})" for name, path in there.items()) or "none"
        raise ModelNotFound(
            f"{str(where)!r} holds no decoder of variant {variant!r}; there are {which}"
        )
    if there:
        return next(iter(there.values()))
    found = sorted(path for path in where.glob("*.onnx") if "kvcap-" not in path.name)
    if len(found) != 1:
        which = ", ".join(path.name for path in found)
        several = f"several .onnx files ({which}), none of a usual name; give the decoder's file"
        none = "no .onnx file; give a directory that holds an ONNX decoder"
        raise ModelNotFound(f"{str(where)!r} holds {several if found else none}")
    return found[0]


def variants_in(where: Path) -> dict[str, Path]:
    """Return the decoders in a directory whose names are usual ones, by variant, best first."""
    names = [*VARIANTS.items(), ("with_past", "decoder_with_past_model")]
    found = dict[str, Path]()
    for folder in (where, where / "onnx"):
        for variant, stem in names:
            if (path := folder / f"{stem}.onnx").is_file():
                found.setdefault(variant, path)
    order = [variant for variant, _ in names]
    return {variant: found[variant] for variant in sorted(found, key=order.index)}


def _config_of(folder: Path, config: str | None) -> str:
    """Return the directory of a decoder's config.

    Raises:
        ModelNotFound: there is none.
    """
    if config is not None:
        where = Path(config)
        return str(where.parent) if where.name == CONFIG and where.is_file() else resolve(config)
    if not (folder / CONFIG).is_file():
        raise ModelNotFound(
            f"no {CONFIG} beside the decoder in {str(folder)!r} (onnxruntime-genai's builder "
            "writes none); name the model that it was made from with --config MODEL"
        )
    return str(folder)


def _agree(shape: ModelShape, found: DecoderPorts) -> None:
    """Refuse a config that is not the graph's, and layers that are not capped."""
    # Grouped decoders may have recurrent layers, whose states the runtime carries along.
    carried = found.nodes is not None and not (shape.slides or shape.shared)
    if not shape.all_capped and not carried:
        raise UnsupportedModel(
            f"in this {shape.family} {shape.uncapped}, which its graph finds by where slots lie, "
            "or keeps by itself; run the model itself, without --backend onnxruntime"
            + ("" if shape.not_exportable else ", or what kvcap export decoder makes of it")
        )
    if shape.latent is not None:
        raise UnsupportedModel(
            f"in this {shape.family} {shape.not_exportable}, whose slots hold latents; run the "
            "model itself, without --backend onnxruntime"
        )
    mine = (found.layers, found.kv_heads, found.head_dim)
    said = (len(shape.capped), shape.kv_heads, shape.head_size)
    if mine != said:
        raise UnsupportedModel(
            f"config.json says {said[0]} layers of {said[1]} KV heads of {said[2]}, and "
            f"{found.file.name} has {mine[0]} of {mine[1]} of {mine[2]}; they are not of one model"
        )


def _generation(source: str, config: Any) -> GenerationConfig:
    """Return how the model answers, by the files in the directory of its config."""
    if (Path(source) / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(source)
    return GenerationConfig.from_model_config(config)


def _describe(
    folder: Path, source: str, config: Any, shape: ModelShape, found: DecoderPorts
) -> dict[str, Any]:
    """Return the parts of a manifest that are known before any graph is written."""
    generation = _generation(source, config)
    rotated = frequencies(shape)
    slides = "sliding_attention" in layer_kinds(config)  # then all slide, as others were refused
    weights = sum((folder / name).stat().st_size for name in files_of(folder, found.file))
    nodes = found.nodes
    said: dict[str, Any] = {
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
    return said if nodes is None else {**said, **_grouped(said, nodes, shape)}


def _grouped(said: dict[str, Any], nodes: Nodes, shape: ModelShape) -> dict[str, Any]:
    """Return further parts of the manifest of a decoder whose slots stay in place."""
    window = said["model"]["window"]
    windows = [n for n in (window, nodes.window) if n is not None]
    return {
        "kind": GROUPED,
        "model": {
            **said["model"],
            "window": min(windows, default=None),
            "longest": nodes.longest,
        },
        "dtype": nodes.weights or said["dtype"],
        "rule": GROUPED_RULE,
        "interleaved": any(rope.interleaved for rope in shape.capped_ropes),
        "kv_layers": nodes.layers,
        "rotates": [shape.layers[i].rope is not None for i in nodes.layers],
        "last_only": nodes.last_only,
        "one_buffer": nodes.one_buffer,
        "states": [state.as_dict() for state in nodes.states],
    }


def frequencies(shape: ModelShape) -> list[float]:
    """Return the inverse frequencies that layers share; none where keys cannot be moved."""
    rope = next(iter(shape.capped_ropes), None)
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
) -> tuple[AdoptedEvictionGraph, torch.dtype]:
    """Make the module that a decoder's evictor is traced from; return it and its keys' type."""
    if found.nodes is not None:
        selector = Selector(eviction, found.kv_heads, found.head_dim)
        return selector, torch_dtype(str(found.cache))
    pairs = len(frequencies(shape)) if positions == "compact" else 0
    rope = shape.layers[0].rope
    evictor = AdoptedEvictionGraph(
        eviction,
        found.layers,
        found.kv_heads,
        found.head_dim,
        pairs,
        interleaved=rope is not None and rope.interleaved,
    )
    return evictor, torch_dtype(str(found.cache))


def pins(eviction: Eviction) -> dict[str, Any]:
    """Return the pins of a policy at any budget N: sinks, and max(recents, share of N) newest.

    Raises:
        NotExportable: it pins otherwise.
    """
    share, fixed = getattr(eviction.policy, "recent", 0.0), eviction.recent_tokens
    if any(eviction.recents(n) != max(int(share * n), fixed) for n in (16, 100, 999)):
        raise NotExportable(f"{eviction.name} pins newest tokens by a rule that no manifest knows")
    return {"sinks": eviction.sinks(), "recents": fixed, "share": share}
