"""A decoder that others exported, made ready to run under a cap: graphs that evict, and a manifest.

Taken are decoders with the signature of optimum and of most that are found: input_ids,
attention_mask, position_ids and past_key_values.N.key/value in, logits and present.N.key/value out.
Whether one can lose tokens is not believed but tried, see `trial.py`. The decoder's own file stays
as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

import kvcap
from kvcap.export.decoder import manifest as facts
from kvcap.export.evictor import Evictor, example, trace
from kvcap.export.libraries import library, require
from kvcap.export.spec import recipe
from kvcap.export.trial import tried
from kvcap.policies import Eviction, load_policy
from kvcap.runtime.errors import ModelNotFound, NotExportable, ToleranceError, UnsupportedModel
from kvcap.runtime.model_files import check_generation, load_config, load_tokenizer
from kvcap.runtime.model_shape import ModelShape, layer_kinds
from kvcap.runtime.ort.graph import TYPES, Graph
from kvcap.runtime.ort.manifest import EVICTOR, SCHEMA
from kvcap.runtime.ort.tokenizer import Tokenizer
from kvcap.runtime.plan import BLOCK_SIZE
from kvcap.runtime.text import render

POLICIES = ("keydiff", "knorm", "streaming_llm", "random")
PREFERRED = ("model.onnx", "onnx/model.onnx", "decoder_with_past_model.onnx")
COMPANIONS = ("config.json", "generation_config.json", *facts.TOKENIZER.values(),
              "special_tokens_map.json")  # fmt: skip
PORT = re.compile(r"past_key_values\.(\d+)\.(key|value)")
FLOATS = ("tensor(float)", "tensor(float16)")
CASES = ((0, 5, 5), (0, 1, 1), (20, 7, 27), (64, 1, 64), (64, 16, 64), (1, 1, 1), (64, 9, 40))
CLOSE = {torch.float32: 1e-5, torch.float16: 1e-2}
TEXT = "Hello! Zwölf Boxkämpfer, 42 <b>ships</b>\n and 你好."
RULE = [
    "run the decoder on a block with what is kept as past_key_values, attention_mask all ones, and "
    "position_ids from `seen` (true positions) or from the number of kept slots (compact)",
    "run the evictor on all layers' present; what it keeps is past_key_values of the next block",
    "stay = min(budget, kept slots + block); table[p] = cosine and sine of p * inv_freq",
]


@dataclass(frozen=True)
class Found:
    """A decoder's graph and what its ports say."""

    graph: Graph
    file: Path
    layers: int
    kv_heads: int
    head_dim: int
    cache: Any  # the NumPy type of keys and values


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
    config = load_config(str(folder))
    shape = ModelShape.of(config.get_text_config(decoder=True))
    found = look(file)
    _agree(shape, found)
    compact = tried(found, shape)
    check_generation(str(folder))
    check_tokenizer(folder)
    modes = ("compact", "true") if compact else ("true",)
    if positions not in (None, *modes):
        raise UnsupportedModel(f"positions='compact' are not exact for {file.name}; leave them out")
    said = _describe(folder, config, shape, found)
    said |= {"budget_tokens": budget_tokens, "block_size": block_size, "exporter": exporter}
    chosen = list(policies) or [load_policy(name) for name in POLICIES]
    target = folder if out is None else out
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kvcap-", dir=target) as name:
        part = Path(name)
        said["evictors"] = [
            _write(part, eviction, found, shape, mode) for eviction in chosen for mode in modes
        ]
        said["positions"] = positions or modes[0]
        said["default_policy"] = chosen[0].name
        for path in sorted(part.iterdir()):
            os.replace(path, target / path.name)
    names = [*_files(folder, file), *(name for name in COMPANIONS if (folder / name).is_file())]
    for name in names if target != folder else ():
        _bring(folder / name, target / name)
    names += [entry["file"] for entry in said["evictors"]]
    said["files"] = [{**facts.entry(target / name), "file": name} for name in names]
    said["graphs"] = {"decoder": said["files"][0]}
    said["tokenizer"] = {k: v if v in names else None for k, v in facts.TOKENIZER.items()}
    facts.write(target, said)
    return said


def look(file: Path) -> Found:
    """What a decoder's ports say.

    Raises:
        GraphBroken: it cannot be loaded, or data beside it is missing.
        UnsupportedModel: another signature.
    """
    graph = Graph(file)
    ports = graph.inputs
    past = {name: port for name, port in ports.items() if PORT.fullmatch(name)}
    layers = len(past) // 2
    names = {f"past_key_values.{i}.{kind}" for i in range(layers) for kind in ("key", "value")}
    if "position_ids" not in ports and past:
        raise UnsupportedModel(
            f"{file.name} has no position_ids: it counts positions by itself, which is wrong once "
            "tokens are evicted (so are graphs of GroupQueryAttention with rotary embeddings "
            "inside); export the model again with position_ids, or with kvcap export decoder MODEL"
        )
    wanted = {"input_ids", "attention_mask", "position_ids", *names}
    present = {name.replace("past_key_values", "present") for name in names}
    if not past or set(ports) != wanted or set(graph.outputs) != {"logits", *present}:
        odd = sorted((set(ports) ^ wanted) | (set(graph.outputs) ^ {"logits", *present}))
        raise UnsupportedModel(
            f"{file.name} has not the signature of a decoder with its cache ({', '.join(odd[:4])} "
            "is too much or missing); taken are input_ids, attention_mask, position_ids, "
            "past_key_values.N.key/value to logits, present.N.key/value"
        )
    for name in ("input_ids", "attention_mask", "position_ids"):
        if ports[name].type != "tensor(int64)":
            raise UnsupportedModel(f"{file.name} takes {name} as {ports[name].type}, not int64")
    kinds = {(port.type, str(port.shape[1]), str(port.shape[3])) for port in past.values()}
    lengths = {str(port.shape[2]) for port in past.values()}
    if len(kinds) > 1 or len(lengths) > 1:
        raise UnsupportedModel(
            f"layers of {file.name} hold unequally many slots or heads ({len(lengths)} lengths), "
            "so that one mask cannot serve them; export the model itself with kvcap export decoder"
        )
    ((kind, heads, size),) = kinds
    (length,) = lengths
    if length.isdigit() or not heads.isdigit() or not size.isdigit() or kind not in FLOATS:
        raise UnsupportedModel(
            f"past_key_values of {file.name} are [batch, {heads}, {length}, {size}] of {kind}; "
            "their length must be open, the other sizes fixed, of float or float16"
        )
    return Found(graph, file, layers, int(heads), int(size), np.dtype(TYPES[kind]))


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


def _agree(shape: ModelShape, found: Found) -> None:
    """Refuse a config that is not the graph's, and layers that slide by themselves."""
    mine = (found.layers, found.kv_heads, found.head_dim)
    said = (len(shape.layers), shape.kv_heads, shape.head_size)
    if mine != said:
        raise UnsupportedModel(
            f"config.json says {said[0]} layers of {said[1]} KV heads of {said[2]}, and "
            f"{found.file.name} has {mine[0]} of {mine[1]} of {mine[2]}; they are not of one model"
        )
    if not shape.all_capped:
        raise UnsupportedModel(
            f"some layers of this {shape.family} slide over a window of their own, which its graph "
            "finds by where slots lie; export the model itself with kvcap export decoder"
        )


def _describe(folder: Path, config: Any, shape: ModelShape, found: Found) -> dict[str, Any]:
    """What can be said before any graph is written."""
    generation = GenerationConfig.from_model_config(config)
    if (folder / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(str(folder))
    frequencies = _frequencies(shape)
    slides = "sliding_attention" in layer_kinds(config)  # in all, or it was refused
    weights = sum((folder / name).stat().st_size for name in _files(folder, found.file))
    return {
        "schema": SCHEMA,
        "kind": EVICTOR,
        "model": {
            "name": folder.name,
            **facts.model_facts(shape),
            "weights_bytes": weights,
            "rotated_pairs": len(frequencies),
            "window": config.sliding_window if slides else None,
        },
        "dtype": {"float32": "fp32", "float16": "fp16"}[str(found.cache)],
        "cache_dtype": str(found.cache),
        "inv_freq": frequencies,
        "rule": RULE,
        "generation": facts.generation_facts(generation),
        "producer": {"kvcap": kvcap.__version__, "torch": torch.__version__},
    }


def _frequencies(shape: ModelShape) -> list[float]:
    """The inverse frequencies of the layers, which share them; none where they cannot be moved."""
    rope = shape.layers[0].rope
    return [] if rope is None or rope.inv_freq is None else rope.inv_freq.tolist()


def _write(
    folder: Path, eviction: Eviction, found: Found, shape: ModelShape, positions: str
) -> dict[str, Any]:
    """Trace an evictor into `folder`, check it; returns its entry of the manifest."""
    pairs = len(_frequencies(shape)) if positions == "compact" else 0
    evictor = Evictor(eviction, found.layers, found.kv_heads, found.head_dim, pairs)
    dtype = torch.float16 if found.cache == np.float16 else torch.float32
    path = folder / f"kvcap-evict.{eviction.name}.{positions}.onnx"
    path.write_bytes(trace(evictor, dtype).SerializeToString())
    _verify(path, evictor, dtype)
    sizes, element = evictor.sizes, str(found.cache)
    return {
        **facts.entry(path),
        "policy": {**recipe(eviction), "pins": _pins(eviction)},
        "formula": "; ".join(c.formula for c in eviction.components),
        "paper": "; ".join(c.paper for c in eviction.components),
        "positions": positions,
        "inputs": [port.as_dict(element, sizes) for port in evictor.inputs],
        "outputs": [port.as_dict(element, sizes) for port in evictor.outputs],
    }


def _verify(path: Path, evictor: Evictor, dtype: torch.dtype) -> None:
    """Hold a graph to the module it was traced from.

    Raises:
        ToleranceError: it computes something else.
    """
    graph = Graph(path)
    for past, block, stay in CASES:
        given = example(evictor, dtype, past=past, block=block, stay=stay, seed=past + block)
        with torch.inference_mode():
            wanted = evictor(*given.values())
        got = graph.session.run(None, {name: given[name].numpy() for name in graph.inputs})
        for port, want, array in zip(evictor.outputs, wanted, got, strict=True):
            error = (torch.from_numpy(array).double() - want.double()).abs()
            if want.numel() and float(error.max()) > CLOSE[dtype]:
                raise ToleranceError(
                    f"{path.name} differs by {float(error.max()):.2g} in {port.name}, of "
                    f"{past + block} slots"
                )


def _pins(eviction: Eviction) -> dict[str, Any]:
    """What the policy pins by itself at any budget N: sinks, and max(recents, share of N) newest.

    Raises:
        NotExportable: it pins otherwise.
    """
    share, fixed = getattr(eviction.policy, "recent", 0.0), eviction.recent_tokens
    if any(eviction.recents(n) != max(int(share * n), fixed) for n in (16, 100, 999)):
        raise NotExportable(f"{eviction.name} pins newest tokens by a rule that no manifest knows")
    return {"sinks": eviction.sinks(), "recents": fixed, "share": share}


def _files(folder: Path, file: Path) -> list[str]:
    """The decoder's file and the files of its weights, as names within `folder`."""
    model = library("onnx").load(str(file), load_external_data=False)
    locations = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    files = [file, *(file.parent / name for name in sorted(locations))]
    return [path.relative_to(folder).as_posix() for path in files]


def _bring(source: Path, target: Path) -> None:
    """The same file at another place: a link where that can be, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def check_tokenizer(folder: Path) -> None:
    """See that the tokenizer's files alone give what transformers makes of them.

    Raises:
        UnsupportedModel: they do not.
    """
    theirs, mine = load_tokenizer(str(folder)), Tokenizer(folder)
    for special in (True, False):
        if (
            theirs(TEXT, add_special_tokens=special)["input_ids"]
            != (mine(TEXT, add_special_tokens=special)["input_ids"])
        ):
            raise UnsupportedModel(
                f"tokenizer.json in {str(folder)!r} gives other tokens than transformers do; save "
                "it once with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
    turns = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "Yes."}]
    if theirs.chat_template and render(theirs, turns) != render(mine, turns):
        raise UnsupportedModel(f"the chat template in {str(folder)!r} needs more than jinja2 gives")
