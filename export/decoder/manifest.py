"""Writes the manifest of a decoder's directory: all that a runner without Python needs.

The backend of ONNX Runtime reads it.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import kvcap
from kvcap.export.decoder.evictor import EvictionGraph
from kvcap.export.decoder.graph import DecoderGraph
from kvcap.export.decoder.layer import held_layers
from kvcap.export.decoder.spec import ROUNDINGS
from kvcap.export.files import file_entry
from kvcap.export.graphs.ports import Port
from kvcap.export.graphs.spec import recipe
from kvcap.runtime.backends.onnxruntime.manifest import KIND, KV_DTYPE, SCHEMA, check
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.types import MANIFEST

GRAPH, WEIGHTS = "decoder.onnx", "decoder.onnx.data"
EMBEDDINGS = "embeddings.onnx"
SLOT_SCALES = "slot_scales.npy"
TOKENIZER = {
    "tokenizer": "tokenizer.json",
    "config": "tokenizer_config.json",
    "chat_template": "chat_template.jinja",
}
SETTINGS = (
    "max_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "bos_token_id",
    "pad_token_id",
)
RULE = [
    "allocate every tensor of state once, in its full shape; seen is 0, held is 0 for each budget",
    "read a prompt in runs of block_size tokens, the last one shorter; generate in runs of one",
    "bind keys.i and present_keys.i to one memory, and values.i and present_values.i: a run writes "
    "the block's T slots behind the held ones; note their positions, and 0 or new_NAME as state",
    "then add T to held, and give each layer that holds more than its budget to its evictor, with "
    "stay = its budget: gone are slots. Move the survivors behind the budget into the holes before "
    "it, with all that is theirs, and set held to the budget. In generation this may wait until "
    "some tokens are to go, at most block_size",
    "of a layer that rotates, turn the keys of survivors (and the queries kept) back by the number "
    "of older slots that went, by the angles inv_freq: positions are compact",
]
RULE_OF_WINDOWS = [
    "a layer that has a number in windows holds its last tokens in the order in which they were "
    "read, and has neither positions nor an evictor: where it is to hold no more than its budget, "
    "move its last slots, as many as the budget, to the front. seen is an input of the decoder in "
    "either way of counting",
]
RULE_OF_INT8 = [
    "keys and values are int8: a number is what is held times the scale of its layer, KV head and "
    "channel, from slot_scales [layers, 2, kv_heads, head_dim], keys before values; bind them as "
    "key_scale.i and value_scale.i, and give an evictor its layer's. The block's keys go to "
    "arrived.i too, with 0 to shifts.i: a survivor's shift grows by the older slots that went, and "
    "its key is what arrived, turned back by that, rounded anew",
]


def describe(
    name: str,
    decoder: DecoderGraph,
    dtype: str,
    text: str | None = None,
) -> dict[str, Any]:
    """Describe a decoder before its files are written, with its `settings_of`."""
    layout, kv_dtype = decoder.layout, None if decoder.slot_scales is None else KV_DTYPE
    sizes, slides = decoder.sizes, layout.shape.slides
    element = str(decoder.cache).removeprefix("torch.")

    def described(ports: list[Port]) -> list[dict[str, Any]]:
        return [port.as_dict(element, sizes) for port in ports]

    return {
        "schema": SCHEMA,
        **settings_of(name, layout, dtype, text, kv_dtype),
        **({"slot_scales": SLOT_SCALES} if kv_dtype else {}),
        **({"windows": [layer.window for layer in decoder.layers]} if slides else {}),
        "rule": RULE + (RULE_OF_WINDOWS if slides else []) + (RULE_OF_INT8 if kv_dtype else []),
        "inputs": described(decoder.inputs),
        "outputs": described(decoder.outputs),
        "state": _state(decoder),
        "state_bytes": sum(decoder.dtype(s.port).itemsize * prod(s.full) for s in decoder.state),
        **_turns(layout),
        "generation": generation_facts(decoder.model.generation_config),
        "producer": {
            "kvcap": kvcap.__version__,
            **{name: version(name) for name in ("torch", "transformers", "onnx", "onnxscript")},
        },
    }


def settings_of(
    name: str,
    layout: CacheLayout,
    dtype: str,
    text: str | None = None,
    kv_dtype: str | None = None,
) -> dict[str, Any]:
    """Return an export's settings as its manifest has them; equal settings give equal decoders.

    Args:
        name: of the model.
        layout: of the cache.
        dtype: of the weights.
        text: that they, or slots in int8, were calibrated on.
        kv_dtype: of slots that are quantised.
    """
    calibrated = None if text is None else hashlib.sha256(text.encode()).hexdigest()
    rounding = ROUNDINGS.get(dtype)
    blocks: dict[str, Any] = {"symmetric": rounding.symmetric} if rounding else {}
    if rounding or kv_dtype:
        blocks["calibrated_on"] = calibrated
    if kv_dtype:
        blocks["kv_dtype"] = kv_dtype
    return {
        "kind": KIND,
        "exporter": "kvcap",
        "model": {"name": name, **model_facts(layout.shape)},
        **policy_facts(layout),
        "positions": layout.positions,
        "budget_tokens": layout.budget_tokens,
        "budgets": [layer.budget for layer in held_layers(layout)],
        "block_size": layout.block_size,
        "dtype": dtype,
        **blocks,
    }


def model_facts(shape: ModelShape) -> dict[str, Any]:
    """Describe the model: its family and sizes."""
    return {
        "family": shape.family,
        "layers": len(shape.layers),
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_size": shape.hidden_size,
        "mlp_size": shape.mlp_size,
        "vocabulary": shape.vocabulary,
        "trained_length": shape.trained_length,
    }


def policy_facts(layout: CacheLayout) -> dict[str, Any]:
    """Describe the policy, what it computes, and the slots of each layer that it pins by itself."""
    eviction = layout.eviction
    recents = [
        eviction.recents(layer.budget) if layer.window is None else 0
        for layer in held_layers(layout)
    ]
    return {
        "policy": {**recipe(eviction), "pins": {"sinks": eviction.sinks(), "recents": recents}},
        "formula": "; ".join(c.formula for c in eviction.components),
        "paper": "; ".join(c.paper for c in eviction.components),
    }


def generation_facts(config: Any) -> dict[str, Any]:
    """Return a transformers GenerationConfig as plain values, null where unset."""
    ends = config.eos_token_id
    ends = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
    return {"eos_token_id": ends, **{name: getattr(config, name, None) for name in SETTINGS}}


def file_facts(folder: Path) -> dict[str, Any]:
    """List all `files` but the manifest, and the names of those that the `tokenizer` needs."""
    entries = [file_entry(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST]
    names = {entry["file"] for entry in entries}
    tokenizer = {kind: name if name in names else None for kind, name in TOKENIZER.items()}
    return {"files": entries, "tokenizer": tokenizer}


def write(folder: Path, facts: dict[str, Any]) -> None:
    """Write the manifest into `folder`.

    Raises:
        ManifestError: it is not what its schema says.
    """
    check(facts)
    text = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def evictor_name(index: int, count: int) -> str:
    """Return the file of one of `count` graphs that evict."""
    return f"evictor.{index}.onnx" if count > 1 else "evictor.onnx"


def evictor_facts(
    file: Path, evictor: EvictionGraph, layers: list[int], taken: set[str]
) -> dict[str, Any]:
    """Describe a graph that evicts, which takes some of its module's inputs."""
    sizes, element = evictor.sizes, str(evictor.cache).removeprefix("torch.")
    return {
        **file_entry(file),
        "layers": layers,
        "inputs": [p.as_dict(element, sizes) for p in evictor.inputs if p.name in taken],
        "outputs": [port.as_dict(element, sizes) for port in evictor.outputs],
    }


def _state(decoder: DecoderGraph) -> list[dict[str, Any]]:
    return [
        {
            "name": state.name,
            "layer": state.layer,
            "dtype": str(decoder.dtype(state.port)).removeprefix("torch."),
            "full": list(state.full),
        }
        for state in decoder.state
    ]


def _turns(layout: CacheLayout) -> dict[str, Any]:
    """Return the facts by which a runner turns keys, and which queries an evictor gets."""
    rope = layout.rope
    turning = rope is not None and any(layout.rotates) and rope.inv_freq is not None
    return {
        "queries_observed": layout.eviction.policy.queries_observed,
        "rotates": [layer.rotates for layer in held_layers(layout)],
        "inv_freq": rope.inv_freq.tolist() if turning else [],  # type: ignore[union-attr]
        "interleaved": bool(rope is not None and rope.interleaved),
    }
