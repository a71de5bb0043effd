"""The manifest of a decoder's directory: all that a runner needs that knows no Python.

The backend of ONNX Runtime reads it. What is said of a model and its files is the same for
decoders that others exported, which have evictors beside them.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import kvcap
from kvcap.export.decoder.graph import Decoder
from kvcap.export.files import file_entry
from kvcap.export.graphs.ports import Port
from kvcap.export.graphs.spec import recipe
from kvcap.export.weights import Rounding
from kvcap.runtime.backends.onnxruntime.manifest import FUSED, SCHEMA, check
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.types import MANIFEST

GRAPH, WEIGHTS = "decoder.onnx", "decoder.onnx.data"
TOKENIZER = {
    "tokenizer": "tokenizer.json",
    "config": "tokenizer_config.json",
    "chat_template": "chat_template.jinja",
}
SETTINGS = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p",
            "repetition_penalty", "bos_token_id", "pad_token_id")  # fmt: skip
RULE = [
    "read a prompt in runs of block_size tokens, the last one shorter; generate in runs of one",
    "before the first run every state is empty (its open axis is 0) and seen is 0",
    "after each run, give every output of state back as its input and add the tokens to seen",
    "eviction is in the graph: after a run a layer holds min(its budget, seen) slots, oldest first",
]


def describe(
    name: str, decoder: Decoder, dtype: str, rounding: Rounding | None = None
) -> dict[str, Any]:
    """What can be said of a decoder before its files are written; `name` is its model's."""
    layout = decoder.layout
    sizes, element = decoder.sizes, str(decoder.model.dtype).removeprefix("torch.")

    def said(ports: list[Port]) -> list[dict[str, Any]]:
        return [port.as_dict(element, sizes) for port in ports]

    return {
        "schema": SCHEMA,
        **asked(name, layout, dtype, rounding),
        "rule": RULE,
        "inputs": said(decoder.inputs),
        "outputs": said(decoder.outputs),
        "state": _state(decoder, element),
        "state_bytes": sum(
            decoder.dtype(s.port).itemsize * prod(decoder.shape(s, s.full)) for s in decoder.state
        ),
        "generation": generation_facts(decoder.model.generation_config),
        "producer": {
            "kvcap": kvcap.__version__,
            **{name: version(name) for name in ("torch", "transformers", "onnx", "onnxscript")},
        },
    }


def asked(
    name: str, layout: CacheLayout, dtype: str, rounding: Rounding | None = None
) -> dict[str, Any]:
    """The part of a manifest that was asked for: two decoders are the same if this is."""
    return {
        "kind": FUSED,
        "exporter": "kvcap",
        "model": {"name": name, **model_facts(layout.shape)},
        **policy_facts(layout),
        "positions": layout.positions,
        "budget_tokens": layout.budget_tokens,
        "budgets": layout.budgets,
        "block_size": layout.block_size,
        "dtype": dtype,
        **({} if rounding is None else {"symmetric": rounding.symmetric}),
    }


def model_facts(shape: ModelShape) -> dict[str, Any]:
    """Family and sizes."""
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
    """The policy, what it computes, and the slots of each layer that it pins by itself."""
    eviction = layout.eviction
    recents = [eviction.recents(budget) for budget in layout.budgets]
    return {
        "policy": {**recipe(eviction), "pins": {"sinks": eviction.sinks(), "recents": recents}},
        "formula": "; ".join(c.formula for c in eviction.components),
        "paper": "; ".join(c.paper for c in eviction.components),
    }


def generation_facts(config: Any) -> dict[str, Any]:
    """A transformers GenerationConfig as plain values, null where unset."""
    ends = config.eos_token_id
    ends = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
    return {"eos_token_id": ends, **{name: getattr(config, name, None) for name in SETTINGS}}


def file_facts(folder: Path) -> dict[str, Any]:
    """`files`: every file there is but the manifest; `tokenizer`: which of them it is read from."""
    entries = [file_entry(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST]
    names = {found["file"] for found in entries}
    tokenizer = {kind: name if name in names else None for kind, name in TOKENIZER.items()}
    return {"files": entries, "tokenizer": tokenizer}


def write(folder: Path, said: dict[str, Any]) -> None:
    """Write the manifest into `folder`.

    Raises:
        ManifestError: it is not what its schema says.
    """
    check(said)
    text = json.dumps(said, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _state(decoder: Decoder, element: str) -> list[dict[str, Any]]:
    return [
        {
            "name": state.name,
            "layer": state.layer,
            "input": state.port.name,
            "output": state.kept.name,
            "dtype": state.port.type_in(element),
            "open_axis": 2,
            "empty": decoder.shape(state, 0),
            "full": decoder.shape(state, state.full),
        }
        for state in decoder.state
    ]
