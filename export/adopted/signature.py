"""Reads a decoder's inputs and outputs: whether they are the usual ones, and their sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcap.runtime.backends.onnxruntime.graph import TYPES, Graph
from kvcap.runtime.errors import UnsupportedModel

PORT = re.compile(r"past_key_values\.(\d+)\.(key|value)")
FLOATS = ("tensor(float)", "tensor(float16)")


@dataclass(frozen=True)
class DecoderPorts:
    """A decoder's graph and what its ports say."""

    graph: Graph
    file: Path
    layers: int
    kv_heads: int
    head_dim: int
    cache: Any  # the NumPy type of keys and values


def read_ports(file: Path) -> DecoderPorts:
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
    return DecoderPorts(graph, file, layers, int(heads), int(size), TYPES[kind])
