"""Prepares a decoder that others exported to run under a cap: adds evictor graphs and a manifest.

Two kinds of decoder are taken. Those of optimum and most others have input_ids, attention_mask,
position_ids and past_key_values.N.key/value as inputs, logits and present.N.key/value as outputs.
Those of onnxruntime-genai's builder and onnx-community attend by GroupQueryAttention and count
positions by themselves (`grouped.py`). A few runs show whether a decoder stays right when tokens
are evicted (`trial.py`, `grouped_trial.py`). The decoder's own file stays as it is.
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
    """Prepare a decoder's directory; return its manifest.

    Args:
        where: a directory with one decoder, its config and its tokenizer; or the decoder's file.
        out: a directory to prepare instead, which gets copies (links where it can).
        policies: the policies to write evictors for; by default all that can run beside such a
            decoder, with their default options.
        budget_tokens: slots that a run keeps by default; the graphs take any number.
        block_size: tokens that a run reads at once by default.
        positions: 'compact' or 'true', which a run uses by default; if None, 'compact' where that
            is exact.
        exporter: the name of the tool that made the decoder, for the manifest.
        variant: the name of one of several graphs in the directory, such as 'q4' (`VARIANTS`).
        config: the model that the decoder was made from, if no config.json lies beside it.

    Raises:
        ModelNotFound: the directory has no decoder, several, or no config.
        UnsupportedModel: the decoder has another signature, or is wrong once tokens are evicted.
        NotExportable: a policy reads more than the decoder shows.
        ToleranceError: an evictor computes something else than its policy. Nothing is written.
    """
    require()
    file = decoder_in(where, variant)
    folder = file.parent.parent if file.parent.name == "onnx" else file.parent
    source = _config_of(folder, config)
    settings, shape, decoder, compact = examined(folder, file, source)
    modes = ("compact", "true") if compact else ("true",)
    if decoder.nodes is not None:  # GroupQueryAttention counts positions by its slots
        modes = ("compact",)
    if positions not in (None, *modes):
        raise UnsupportedModel(
            f"positions='{positions}' are not exact for {file.name}; leave them out"
        )
    manifest = _describe(folder, source, settings, shape, decoder)
    manifest |= {"budget_tokens": budget_tokens, "block_size": block_size, "exporter": exporter}
    chosen = list(policies) or [load_policy(name) for name in revealed()]
    manifest |= {"positions": positions or modes[0], "default_policy": chosen[0].name}
    target = folder if out is None else out
    fresh = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        pairs = [(eviction, mode) for eviction in chosen for mode in modes]
        manifest["evictors"] = _evictors(target, pairs, decoder, shape)
        if source != str(folder):
            settings.save_pretrained(target)
            _generation(source, settings).save_pretrained(target)
        _finish(target, folder, file, manifest)
    except BaseException:  # Ctrl-C too
        if fresh:
            shutil.rmtree(target, ignore_errors=True)
        raise
    return manifest


def examined(
    folder: Path, file: Path, source: str | None = None
) -> tuple[Any, ModelShape, DecoderPorts, bool]:
    """Check a decoder, its config and its tokenizer, and try it with evicted tokens.

    Args:
        folder: the directory of its tokenizer.
        file: the decoder.
        source: the directory of its config, if that is not `folder`.

    Returns:
        The config, the model's shape, the decoder's ports, and whether compact positions are exact.

    Raises:
        GraphBroken: the file is no graph.
        NotExportable: the model's attention has sink logits.
        UnsupportedModel: the decoder is wrong once tokens are evicted, or the config is of another
            model.
    """
    source = source or str(folder)
    config = load_config(source)
    shape = ModelShape.of(config.get_text_config(decoder=True))
    refuse_sinks(shape)
    decoder = read_ports(file)
    if decoder.nodes is not None and not decoder.head_dim:
        decoder = replace(decoder, head_dim=shape.head_size)
    _agree(shape, decoder)
    if decoder.nodes is not None:
        check_nodes(decoder.nodes, shape, file.name)
        decoder, compact = replace(decoder, nodes=checked(decoder, decoder.nodes, shape)), True
    else:
        compact = check_evictable(decoder, shape)
    check_generation(source)
    check_tokenizer(folder)
    return config, shape, decoder, compact


def _evictors(
    target: Path, pairs: Iterable[tuple[Eviction, str]], decoder: DecoderPorts, shape: ModelShape
) -> list[dict[str, Any]]:
    """Write all evictors into `target`, or none; return their entries of the manifest."""
    with tempfile.TemporaryDirectory(prefix=".kvcap-", dir=target) as name:
        part = Path(name)
        entries = [_write(part, eviction, decoder, shape, mode) for eviction, mode in pairs]
        for path in sorted(part.iterdir()):
            os.replace(path, target / path.name)
    return entries


def _finish(target: Path, folder: Path, file: Path, manifest: dict[str, Any]) -> None:
    """Copy the decoder, its config and its tokenizer to `target`, and write the manifest last."""
    names = files_of(folder, file)
    names += [n for n in COMPANIONS if (folder / n).is_file() or (target / n).is_file()]
    names += sorted(
        f"{NAMED_TEMPLATES}/{path.name}" for path in folder.glob(f"{NAMED_TEMPLATES}/*.jinja")
    )
    for name in names if target != folder else ():
        if (folder / name).is_file():
            link_or_copy(folder / name, target / name)
    names += [entry["file"] for entry in manifest["evictors"]]
    manifest["files"] = [{**file_entry(target / name), "file": name} for name in names]
    manifest["graphs"] = {"decoder": manifest["files"][0]}
    manifest["tokenizer"] = {k: v if v in names else None for k, v in facts.TOKENIZER.items()}
    facts.write(target, manifest)


def decoder_in(where: Path, variant: str | None = None) -> Path:
    """Find the decoder's file at `where`.

    Raises:
        ModelNotFound: there is no decoder, none of that variant, or several without a usual name.
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
    paths = sorted(path for path in where.glob("*.onnx") if "kvcap-" not in path.name)
    if len(paths) != 1:
        which = ", ".join(path.name for path in paths)
        several = f"several .onnx files ({which}), none of a usual name; give the decoder's file"
        none = "no .onnx file; give a directory that holds an ONNX decoder"
        raise ModelNotFound(f"{str(where)!r} holds {several if paths else none}")
    return paths[0]


def variants_in(where: Path) -> dict[str, Path]:
    """Return a directory's decoders of usual names, by variant; `VARIANTS` lists the best first."""
    names = [*VARIANTS.items(), ("with_past", "decoder_with_past_model")]
    paths = dict[str, Path]()
    for folder in (where, where / "onnx"):
        for variant, stem in names:
            if (path := folder / f"{stem}.onnx").is_file():
                paths.setdefault(variant, path)
    order = [variant for variant, _ in names]
    return {variant: paths[variant] for variant in sorted(paths, key=order.index)}


def _config_of(folder: Path, config: str | None) -> str:
    """Return the directory of a decoder's config.

    Raises:
        ModelNotFound: neither `config` nor the folder has one.
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


def _agree(shape: ModelShape, decoder: DecoderPorts) -> None:
    """Refuse a config of another model, and a model with layers that cannot be capped.

    Raises:
        UnsupportedModel: naming what differs, or what such layers hold.
    """
    # Grouped decoders may have recurrent layers, whose states the runtime carries along.
    carried = decoder.nodes is not None and not (shape.slides or shape.shared)
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
    actual = (decoder.layers, decoder.kv_heads, decoder.head_dim)
    expected = (len(shape.capped), shape.kv_heads, shape.head_size)
    if actual != expected:
        raise UnsupportedModel(
            f"config.json says {expected[0]} layers of {expected[1]} KV heads of {expected[2]}, "
            f"and {decoder.file.name} has {actual[0]} of {actual[1]} of {actual[2]}; they are not "
            "of one model"
        )


def _generation(source: str, config: Any) -> GenerationConfig:
    """Return the settings of generation, from their own file or else from the config."""
    if (Path(source) / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(source)
    return GenerationConfig.from_model_config(config)


def _describe(
    folder: Path, source: str, config: Any, shape: ModelShape, decoder: DecoderPorts
) -> dict[str, Any]:
    """Return the parts of a manifest that are known before any graph is written."""
    generation = _generation(source, config)
    rotated = frequencies(shape)
    # `_agree` has refused models in which only some layers slide.
    slides = "sliding_attention" in layer_kinds(config)
    weights = sum((folder / name).stat().st_size for name in files_of(folder, decoder.file))
    nodes = decoder.nodes
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": EVICTOR,
        "model": {
            "name": folder.name,
            **facts.model_facts(shape),
            "weights_bytes": weights,
            "rotated_pairs": len(rotated),
            "window": config.sliding_window if slides else None,
        },
        "dtype": short(str(decoder.cache)),
        "cache_dtype": str(decoder.cache),
        "inv_freq": rotated,
        "rule": RULE,
        "generation": facts.generation_facts(generation),
        "producer": {"kvcap": kvcap.__version__, "torch": torch.__version__},
    }
    return manifest if nodes is None else {**manifest, **_grouped(manifest, nodes, shape)}


def _grouped(manifest: dict[str, Any], nodes: Nodes, shape: ModelShape) -> dict[str, Any]:
    """Return the parts of the manifest that only a decoder whose slots stay in place has."""
    window = manifest["model"]["window"]
    windows = [n for n in (window, nodes.window) if n is not None]
    return {
        "kind": GROUPED,
        "model": {
            **manifest["model"],
            "window": min(windows, default=None),
            "longest": nodes.longest,
        },
        "dtype": nodes.weights or manifest["dtype"],
        "rule": GROUPED_RULE,
        "interleaved": any(rope.interleaved for rope in shape.capped_ropes),
        "kv_layers": nodes.layers,
        "rotates": [shape.layers[i].rope is not None for i in nodes.layers],
        "last_only": nodes.last_only,
        "one_buffer": nodes.one_buffer,
        "states": [state.as_dict() for state in nodes.states],
    }


def frequencies(shape: ModelShape) -> list[float]:
    """Return the inverse RoPE frequencies that layers share; [] if keys cannot be moved."""
    rope = next(iter(shape.capped_ropes), None)
    return [] if rope is None or rope.inv_freq is None else rope.inv_freq.tolist()


def _write(
    folder: Path, eviction: Eviction, decoder: DecoderPorts, shape: ModelShape, positions: str
) -> dict[str, Any]:
    """Trace an evictor into `folder` and check it; return its entry of the manifest."""
    evictor, dtype = module(eviction, decoder, shape, positions)
    path = folder / f"kvcap-evict.{eviction.name}.{positions}.onnx"
    path.write_bytes(trace(evictor, dtype).SerializeToString())
    evictors.check(Graph(path), evictor, dtype).require()
    sizes, element = evictor.sizes, str(decoder.cache)
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
    eviction: Eviction, decoder: DecoderPorts, shape: ModelShape, positions: str
) -> tuple[AdoptedEvictionGraph, torch.dtype]:
    """Return the module that a decoder's evictor is traced from, and the type of its keys."""
    if decoder.nodes is not None:
        selector = Selector(eviction, decoder.kv_heads, decoder.head_dim)
        return selector, torch_dtype(str(decoder.cache))
    pairs = len(frequencies(shape)) if positions == "compact" else 0
    rope = shape.layers[0].rope
    evictor = AdoptedEvictionGraph(
        eviction,
        decoder.layers,
        decoder.kv_heads,
        decoder.head_dim,
        pairs,
        interleaved=rope is not None and rope.interleaved,
    )
    return evictor, torch_dtype(str(decoder.cache))


def pins(eviction: Eviction) -> dict[str, Any]:
    """Return the rule of a policy's pins: its sinks, and `max(recents, share * N)` newest of N.

    Raises:
        NotExportable: the policy pins its newest tokens by another rule.
    """
    share, fixed = getattr(eviction.policy, "recent", 0.0), eviction.recent_tokens
    if any(eviction.recents(n) != max(int(share * n), fixed) for n in (16, 100, 999)):
        raise NotExportable(f"{eviction.name} pins newest tokens by a rule that no manifest knows")
    return {"sinks": eviction.sinks(), "recents": fixed, "share": share}
