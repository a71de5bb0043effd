"""Reads decoders of others whose attention is GroupQueryAttention, node by node.

onnxruntime-genai's builder and onnx-community write such graphs. The node rotates queries and keys
itself (`do_rotary=1`): positions count the slots in use, and cosines and sines are constants of the
graph. kvcap moves kept keys by the frequencies of the model's config, so it first compares the
constants with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.onnxruntime.graph import TYPES, Graph
from kvcap.runtime.backends.onnxruntime.grouped import IDS, KEPT, MASK, PLACES
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.rope import Rope

NODE = "GroupQueryAttention"
PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
STATE = re.compile(r"past(_key_values)?[._](\d+[._])?(conv|recurrent|ssm)(_state)?([._]\d+)?")
PAST_KEY, COS, SIN, BIAS, SINK, SCALE = 3, 7, 8, 10, 11, 12  # indices of the node's inputs
ROUNDING = {"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger", "QLinearMatMul"}
CLOSE = {"float32": 1e-3, "float16": 3e-3, "bfloat16": 2e-2}  # errors allowed of cosines
DRIFT = 4e-7  # the error of an angle in float32, relative to the angle
ROWS = 4096  # rows of cosines that are compared at once
OTHER = "export the model itself with kvcap export decoder MODEL"


@dataclass(frozen=True)
class Attention:
    """A GroupQueryAttention node: how one layer attends, by its attributes and inputs."""

    layer: int  # the number N of its past_key_values.N
    heads: int
    kv_heads: int
    rotates: bool
    interleaved: bool
    window: int | None  # most slots that a token sees; None: all
    cosines: str  # the name of the constant with the cosines
    sines: str  # the name of the constant with the sines


@dataclass(frozen=True)
class RecurrentState:
    """A recurrent layer's state: an input that the graph reads, an output with its next value."""

    name: str  # the name of the input
    present: str  # the name of the output
    shape: tuple[int, ...]
    dtype: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for the manifest."""
        return {
            "name": self.name,
            "present": self.present,
            "shape": list(self.shape),
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class Nodes:
    """Facts that `nodes_of` reads from the nodes of a decoder with GroupQueryAttention."""

    attention: tuple[Attention, ...]
    states: tuple[RecurrentState, ...]
    tables: Mapping[str, NDArray[Any]]  # cosines and sines by name, [positions, pairs]
    weights: str | None  # 'int4' or 'int8' if matrices are stored as integers
    rounds: bool  # whether activations are rounded to integers
    one_buffer: bool  # whether past and present may share memory, as only attention reads them
    last_only: bool = False  # whether only a block's last token has logits

    @property
    def layers(self) -> list[int]:
        """Return the numbers of the layers that hold slots, as past_key_values has them."""
        return [node.layer for node in self.attention]

    @property
    def window(self) -> int | None:
        """Return the smallest window of any layer; None if all layers see every slot."""
        return min((node.window for node in self.attention if node.window), default=None)

    @property
    def longest(self) -> int | None:
        """Return how many positions have cosines; None if no node rotates."""
        return min((len(table) for table in self.tables.values()), default=None)


def read_nodes(file: Path) -> Any | None:
    """Return the onnx.GraphProto without its weights; None if it has no GroupQueryAttention."""
    try:
        graph = library("onnx").load(str(file), load_external_data=False).graph
    except Exception:  # protobuf's own; ONNX Runtime still decides whether it can load the graph
        return None
    return graph if any(node.op_type == NODE for node in graph.node) else None


def nodes_of(graph: Any, runtime: Graph, file: Path) -> Nodes:
    """Read the facts of a graph's nodes; refuse a graph that cannot run over slots in any order.

    Args:
        graph: the result of `read_nodes`.
        runtime: the same graph in ONNX Runtime.
        file: the file of the graph.

    Raises:
        UnsupportedModel: the signature is another, or attention depends on where slots lie.
    """
    name = file.name
    attention = sorted(
        (_attention(node, name) for node in graph.node if node.op_type == NODE),
        key=lambda node: node.layer,
    )
    past = {
        port: f"present.{hit[1]}.{hit[2]}"
        for port in runtime.inputs
        if (hit := PAST.fullmatch(port))
    }
    layers = sorted(int(port.split(".")[1]) for port in past if port.endswith("key"))
    if [node.layer for node in attention] != layers:
        raise UnsupportedModel(
            f"{name} has past_key_values of layers {layers} and nodes of {NODE} for "
            f"{[node.layer for node in attention]}; all layers must attend by one each; {OTHER}"
        )
    states = _states(runtime, name)
    wanted = {IDS, MASK, *past, *(state.name for state in states)}
    outputs = {"logits", *past.values(), *(state.present for state in states)}
    odd = sorted(
        ((wanted | ({PLACES, KEPT} & set(runtime.inputs))) ^ set(runtime.inputs))
        | (outputs ^ set(runtime.outputs))
    )
    if odd:
        raise UnsupportedModel(
            f"{name} has not the signature of a decoder with its cache ({', '.join(odd[:4])} is "
            f"too much or missing); taken are {IDS}, {MASK}, past_key_values.N.key/value, and "
            f"{PLACES}, {KEPT}, past_conv.N, past_recurrent.N, past_ssm.N where there are any"
        )
    held = {*past, *past.values()}
    alone = not any(held & set(node.input) for node in graph.node if node.op_type != NODE)
    return Nodes(tuple(attention), states, _tables(graph, attention, file), *_weights(graph), alone)


def _attention(node: Any, name: str) -> Attention:
    """Return one node's facts.

    Raises:
        UnsupportedModel: the node has a bias, sink logits or quantised slots, or depends on where
            slots lie.
    """
    attributes = {a.name: library("onnx").helper.get_attribute_value(a) for a in node.attribute}
    inputs = [*node.input, *[""] * (SCALE + 1 - len(node.input))]
    for place, what in (
        (BIAS, "adds a bias by where slots lie"),
        (SINK, "has sink logits"),
        (SCALE, "holds quantised keys and values"),
    ):
        if inputs[place]:
            raise UnsupportedModel(f"the attention {node.name!r} of {name} {what}; {OTHER}")
    for flag in ("smooth_softmax", "sliding_window_cache"):
        if attributes.get(flag, 0) > 0:
            raise UnsupportedModel(f"the attention {node.name!r} of {name} has {flag}; {OTHER}")
    hit = PAST.fullmatch(inputs[PAST_KEY])
    if hit is None:
        raise UnsupportedModel(
            f"the attention {node.name!r} of {name} does not read past_key_values as they are, "
            f"but {inputs[PAST_KEY] or 'nothing'!r}; {OTHER}"
        )
    window = int(attributes.get("local_window_size", -1))
    return Attention(
        layer=int(hit[1]),
        heads=int(attributes["num_heads"]),
        kv_heads=int(attributes["kv_num_heads"]),
        rotates=bool(attributes.get("do_rotary", 0)),
        interleaved=bool(attributes.get("rotary_interleaved", 0)),
        window=window if window > 0 else None,
        cosines=inputs[COS],
        sines=inputs[SIN],
    )


def _states(runtime: Graph, name: str) -> tuple[RecurrentState, ...]:
    """Return the recurrent states among a graph's inputs.

    Raises:
        UnsupportedModel: a state has an open size, or a type other than float and float16.
    """
    states = []
    for port in runtime.inputs.values():
        if not STATE.fullmatch(port.name):
            continue
        present = re.sub(r"^past(_key_values)?", "present", port.name)
        shape = [1, *port.shape[1:]]
        if not all(type(size) is int for size in shape) or port.type not in TYPES:
            raise UnsupportedModel(
                f"{port.name} of {name} is {port.shape} of {port.type}: a recurrent state must "
                f"have fixed sizes but for the batch, of float or float16; {OTHER}"
            )
        states.append(RecurrentState(port.name, present, tuple(shape), str(TYPES[port.type])))
    return tuple(states)


def _tables(graph: Any, nodes: Sequence[Attention], file: Path) -> dict[str, NDArray[Any]]:
    """Return the cosines and sines that nodes rotate by, by the names of the constants.

    Raises:
        UnsupportedModel: the graph computes some, as those that depend on the prompt's length.
    """
    onnx = library("onnx")
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        values = [a.t for a in node.attribute if a.name == "value"]
        if node.op_type == "Constant" and values:
            constants[node.output[0]] = values[0]
    tables = {}
    for name in {n for node in nodes if node.rotates for n in (node.cosines, node.sines)}:
        if name not in constants:
            raise UnsupportedModel(
                f"{name or 'cos_cache'} of {file.name} is computed in its graph, as where angles "
                f"depend on the length, so that keys cannot be moved by it; {OTHER}"
            )
        tensor = constants[name]
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            library("onnx.external_data_helper").load_external_data_for_tensor(
                tensor, str(file.parent)
            )
        tables[name] = onnx.numpy_helper.to_array(tensor)
    return tables


def _weights(graph: Any) -> tuple[str | None, bool]:
    """Return the type of integer matrices ('int4', 'int8', None), and whether activations round."""
    bits, rounds = 0, False
    for node in graph.node:
        attributes = {a.name: a.i for a in node.attribute}
        if node.op_type == "MatMulNBits":
            bits = max(bits, attributes.get("bits", 4))
            rounds |= attributes.get("accuracy_level", 0) == 4
        elif node.op_type in ROUNDING:
            bits, rounds = max(bits, 8), True
    return (("int4" if bits <= 4 else "int8") if bits else None), rounds


def check_nodes(nodes: Nodes, shape: ModelShape, name: str) -> None:
    """Compare the nodes with the config: sizes, which layers rotate, and by which angles.

    Raises:
        UnsupportedModel: naming what differs.
    """
    if nodes.layers != shape.capped:
        raise UnsupportedModel(
            f"{name} holds slots in layers {nodes.layers}, and config.json says {shape.capped}; "
            "they are not of one model"
        )
    if bool(nodes.states) != bool(shape.recurrent):
        raise UnsupportedModel(
            f"{name} has {len(nodes.states)} recurrent states, and config.json says that "
            f"{len(shape.recurrent)} layers have some; they are not of one model"
        )
    if not shape.moves_exactly:
        raise UnsupportedModel(
            f"keys of this {shape.family} cannot be moved ({shape.obstacle}), and {name} counts "
            f"positions by its slots; {OTHER}"
        )
    ropes = [shape.layers[i].rope for i in shape.capped]
    frequencies = [
        rope.inv_freq for rope in ropes if rope is not None and rope.inv_freq is not None
    ]
    if any(not x.equal(frequencies[0]) for x in frequencies):
        raise UnsupportedModel(f"layers of {name} rotate by different angles; {OTHER}")
    for node, rope in zip(nodes.attention, ropes, strict=True):
        actual, expected = (node.heads, node.kv_heads), (shape.heads, shape.kv_heads)
        if actual != expected:
            raise UnsupportedModel(
                f"the attention of layer {node.layer} in {name} has {actual[0]} heads and "
                f"{actual[1]} KV heads, config.json {expected[0]} and {expected[1]}; they are not "
                "of one model"
            )
        if node.rotates and rope is None:
            raise UnsupportedModel(
                f"layer {node.layer} of {name} rotates, and by config.json it has no positions; "
                "they are not of one model"
            )
        if node.rotates and rope is not None:
            if node.interleaved != rope.interleaved:
                pairs = {True: "neighbours", False: "halves"}
                raise UnsupportedModel(
                    f"layer {node.layer} of {name} rotates {pairs[node.interleaved]}, and a "
                    f"{shape.family} rotates {pairs[rope.interleaved]}; they are not of one model"
                )
            _check_angles(nodes, node, rope, name)


def _check_angles(nodes: Nodes, node: Attention, rope: Rope, name: str) -> None:
    """Refuse cosines and sines that do not follow from the config's frequencies.

    They may share a factor, as YaRN multiplies all of them by one number.

    Raises:
        UnsupportedModel: naming the first position and pair that differ.
    """
    assert rope.inv_freq is not None
    cos, sin = nodes.tables[node.cosines], nodes.tables[node.sines]
    frequencies = rope.inv_freq.double().numpy()
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] != len(frequencies):
        raise UnsupportedModel(
            f"{node.cosines} of {name} is {list(cos.shape)} and {node.sines} {list(sin.shape)}; "
            f"config.json makes {len(frequencies)} pairs of a head's numbers rotate"
        )
    close = CLOSE.get(str(cos.dtype), CLOSE["bfloat16"])
    size = float(np.median(np.hypot(cos[:ROWS].astype(np.float64), sin[:ROWS].astype(np.float64))))
    for start in range(0, len(cos), ROWS):
        angles = np.arange(start, min(start + ROWS, len(cos)))[:, None] * frequencies
        allowed = close + DRIFT * angles
        for table, what, wanted in (
            (node.cosines, cos, np.cos(angles)),
            (node.sines, sin, np.sin(angles)),
        ):
            got = what[start : start + ROWS].astype(np.float64) / (size or 1.0)
            wrong = ~(np.abs(got - wanted) <= allowed)  # NaN counts as wrong, too
            if wrong.any():
                row, pair = np.argwhere(wrong)[0]
                raise UnsupportedModel(
                    f"{table} of {name} is {got[row, pair]:.4f} at position {start + row}, pair "
                    f"{pair}, and RoPE of type {rope.kind} by config.json gives "
                    f"{wanted[row, pair]:.4f}: keys that stay would be moved by other angles than "
                    "they were rotated by; get the config.json of this very model, or its graph "
                    "again"
                )
