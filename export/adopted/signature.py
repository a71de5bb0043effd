"""Reads the sizes and types of a decoder's inputs and outputs, and refuses unusual ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcap.export.adopted.grouped import OTHER, Nodes, nodes_of, read_nodes
from kvcap.runtime.backends.onnxruntime.graph import TYPES, Graph
from kvcap.runtime.errors import UnsupportedModel

PORT = re.compile(r"past_key_values\.(\d+)\.(key|value)")
FLOATS = ("tensor(float)", "tensor(float16)")


@dataclass(frozen=True)
class DecoderPorts:
    """A decoder's graph, with the layers, heads, sizes and types of its inputs and outputs."""

    graph: Graph
    file: Path
    layers: int
    kv_heads: int
    head_dim: int  # 0 if the axis is open
    cache: Any  # the NumPy type of keys and values
    nodes: Nodes | None = None  # set if its attention can run over slots that stay in place


def read_ports(file: Path) -> DecoderPorts:
    """Load a decoder and read its inputs and outputs.

    Raises:
        GraphBroken: the file cannot be loaded, or data beside it is missing.
        UnsupportedModel: the inputs or outputs are not those of a decoder with its cache.
    """
    graph = Graph(file)
    ports, grouped = graph.inputs, read_nodes(file)
    past = {name: port for name, port in ports.items() if PORT.fullmatch(name)}
    layers = len(past) // 2
    if grouped is not None and past:
        nodes = nodes_of(grouped, graph, file)
        _check_integers(file, ports)
        return DecoderPorts(graph, file, layers, *_sizes(file, past), nodes)
    names = {f"past_key_values.{i}.{kind}" for i in range(layers) for kind in ("key", "value")}
    if "position_ids" not in ports and past:
        raise UnsupportedModel(
            f"{file.name} has no position_ids, nor nodes of GroupQueryAttention: it counts by "
            "itself, which is wrong once tokens are evicted; export the model again with "
            "position_ids, or with kvcap export decoder MODEL"
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
    _check_integers(file, ports)
    heads, size, cache = _sizes(file, past)
    if not size:
        raise UnsupportedModel(
            f"past_key_values of {file.name} have an open head size, which must be fixed; {OTHER}"
        )
    return DecoderPorts(graph, file, layers, heads, size, cache)


def _check_integers(file: Path, ports: dict[str, Any]) -> None:
    """Refuse tokens, masks and positions of another type than int64.

    Raises:
        UnsupportedModel: naming the first such input.
    """
    for name in ("input_ids", "attention_mask", "position_ids", "num_logits_to_keep"):
        if name in ports and ports[name].type != "tensor(int64)":
            raise UnsupportedModel(
                f"{file.name} takes {name} as {ports[name].type}, not int64; {OTHER}"
            )


def _sizes(file: Path, past: dict[str, Any]) -> tuple[int, int, Any]:
    """Return KV heads, the size of a head (0 where its axis is open), and the type of numbers.

    Raises:
        UnsupportedModel: layers differ, the length is fixed, or numbers are not of float(16).
    """
    kinds = {(port.type, str(port.shape[1]), str(port.shape[3])) for port in past.values()}
    lengths = {str(port.shape[2]) for port in past.values()}
    if len(kinds) > 1 or len(lengths) > 1:
        raise UnsupportedModel(
            f"layers of {file.name} hold unequally many slots or heads ({len(lengths)} lengths), "
            "so that one mask cannot serve them; export the model itself with kvcap export decoder"
        )
    ((kind, heads, size),) = kinds
    (length,) = lengths
    size = size if size.isdigit() else "0"
    if length.isdigit() or not heads.isdigit() or kind not in FLOATS:
        raise UnsupportedModel(
            f"past_key_values of {file.name} are [batch, {heads}, {length}, {size}] of {kind}; "
            "their length must be open, the other sizes fixed, of float or float16"
        )
    return int(heads), int(size), TYPES[kind]
