"""Writes decoders like those of onnxruntime-genai's builder, whose attention rotates by itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import masked
import numpy as np
import onnx
import torch
from families import model_of
from onnx import TensorProto, helper, numpy_helper
from standard_decoder import COMPANIONS
from tools import made
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcap import pocket
from kvcap.runtime.models.config import ModelShape

MICROSOFT = "com.microsoft"


class Graph:
    """A builder of one graph, which names all tensors."""

    def __init__(self, kind: Any) -> None:
        self.kind, self.nodes, self.weights, self.count = kind, [], {}, 0

    def weight(self, x: Any, name: str = "") -> str:
        x = x.detach().float().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
        x = x.astype(self.kind) if x.dtype.kind == "f" else x
        name = name or f"w{len(self.weights)}"
        self.weights.setdefault(name, numpy_helper.from_array(np.ascontiguousarray(x), name))
        return name

    def op(
        self, kind: str, *inputs: str, outputs: Any = 1, domain: str = "", **attributes: Any
    ) -> Any:
        self.count += 1
        names = outputs if outputs != 1 else [f"x{self.count}"]
        node = helper.make_node(
            kind, list(inputs), names, f"n{self.count}", domain=domain, **attributes
        )
        self.nodes.append(node)
        return names[0]

    def linear(self, x: str, layer: Any) -> str:
        return self.op("MatMul", x, self.weight(layer.weight.T))

    def norm(self, x: str, layer: Any) -> str:
        eps = getattr(layer, "variance_epsilon", getattr(layer, "eps", 1e-6))
        square = self.op("Mul", x, x)
        mean = self.op("ReduceMean", square, self.weight(np.array([-1])), keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.weight(np.array(eps, np.float32))))
        return self.op("Mul", self.op("Div", x, root), self.weight(layer.weight))

    def heads(self, x: str, layer: Any, size: int) -> str:
        """Add the norms of heads, if the model has some; return the result's name."""
        if layer is None:
            return x
        split = self.op("Reshape", x, self.weight(np.array([0, 0, -1, size])))
        return self.op("Reshape", self.norm(split, layer), self.weight(np.array([0, 0, -1])))


def save(
    source: Path,
    folder: Path,
    *,
    dtype: Any = np.float32,
    keep: bool = False,
    places: bool = False,
    length: bool = False,
    file: str = "model.onnx",
) -> Path:
    """Write the model in `source` to `folder` as such a decoder, with its config and tokenizer.

    Args:
        source: a Llama, a Qwen 3 or an LFM 2.
        folder: the folder, which is made if it is missing.
        dtype: type of all numbers.
        keep: add the input num_logits_to_keep.
        places: add the input position_ids, and rotate outside of the attention.
        length: count earlier tokens by the length of past_key_values, not by the mask.
        file: name of the graph's file.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    config, g = model.config, Graph(dtype)
    shape = ModelShape.of(config)
    size, kind = shape.head_size, helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    rope = shape.capped_ropes[0]
    angles = torch.arange(config.max_position_embeddings)[:, None] * rope.inv_freq
    cos, sin = g.weight(angles.cos(), "cos_cache"), g.weight(angles.sin(), "sin_cache")
    one = g.weight(np.array([1]))
    total = g.op("ReduceSum", "attention_mask", one, keepdims=0)
    if length:
        past = g.op("Shape", f"past_key_values.{shape.capped[0]}.key", start=2, end=3)
        total = g.op("Add", past, g.op("Shape", "input_ids", start=1, end=2))
    last = g.op("Cast", g.op("Sub", total, g.weight(np.array(1))), to=TensorProto.INT32)
    whole = g.op("Gather", g.op("Shape", "attention_mask"), g.weight(np.array(1)), axis=0)
    whole = g.op("Cast", whole, to=TensorProto.INT32)
    ports, made = [], []
    x = g.op("Gather", g.weight(model.get_input_embeddings().weight, "embedding"), "input_ids")
    for i, layer in enumerate(model.model.layers):
        normed = g.norm(x, _of(layer, "input_layernorm", "operator_norm"))
        if hasattr(layer, "conv"):
            ports.append((f"past_conv.{i}", ["batch", config.hidden_size, config.conv_L_cache - 1]))
            out = _convolution(g, normed, layer.conv, i, config)
        else:
            attention = layer.self_attn
            q, k = (g.linear(normed, x) for x in (attention.q_proj, attention.k_proj))
            q = g.heads(q, _of(attention, "q_norm", "q_layernorm"), size)
            k = g.heads(k, _of(attention, "k_norm", "k_layernorm"), size)
            if places:
                turned = {"domain": MICROSOFT, "interleaved": 0}
                q, k = (
                    g.op("RotaryEmbedding", x, "position_ids", cos, sin, **turned) for x in (q, k)
                )
            past = [f"past_key_values.{i}.{kind}" for kind in ("key", "value")]
            ports += [(name, ["batch", shape.kv_heads, "past", "size"]) for name in past]
            present = [f"present.{i}.{kind}" for kind in ("key", "value")]
            made += present
            tables = ("", "") if places else (cos, sin)
            out = g.op(
                "GroupQueryAttention",
                q,
                k,
                g.linear(normed, attention.v_proj),
                *past,
                last,
                whole,
                *tables,
                outputs=[f"a{i}", *present],
                domain=MICROSOFT,
                num_heads=shape.heads,
                kv_num_heads=shape.kv_heads,
                do_rotary=int(not places),
                rotary_interleaved=0,
                local_window_size=-1,
                scale=float(attention.scaling),
            )
            out = g.linear(out, _of(attention, "o_proj", "out_proj"))
        x = g.op("Add", x, out)
        mlp = _of(layer, "mlp", "feed_forward")
        normed = g.norm(x, _of(layer, "post_attention_layernorm", "ffn_norm"))
        gate = g.linear(normed, _of(mlp, "gate_proj", "w1"))
        gate = g.op("Mul", gate, g.op("Sigmoid", gate))
        up = g.op("Mul", gate, g.linear(normed, _of(mlp, "up_proj", "w3")))
        x = g.op("Add", x, g.linear(up, _of(mlp, "down_proj", "w2")))
    x = g.norm(x, _of(model.model, "norm", "embedding_norm"))
    given = [("input_ids", ["batch", "T"]), ("attention_mask", ["batch", "all"])]
    given += [("position_ids", ["batch", "T"])] * places
    if keep:
        given.append(("num_logits_to_keep", []))
        start = g.op("Unsqueeze", g.op("Neg", "num_logits_to_keep"), g.weight(np.array([0])))
        x = g.op("Slice", x, start, g.weight(np.array([1 << 40])), one)
    g.op("MatMul", x, g.weight(model.get_output_embeddings().weight.T), outputs=["logits"])
    made += [name.replace("past", "present") for name, _ in ports if "conv" in name]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, axes) for name, axes in given]
    inputs += [helper.make_tensor_value_info(name, kind, axes) for name, axes in ports]
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in ("logits", *made)]
    graph = helper.make_graph(g.nodes, "decoder", inputs, outputs, [*g.weights.values()])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, folder / file)
    for name in COMPANIONS:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    return folder


def _of(module: Any, *names: str) -> Any:
    """Return the first of these parts that a module has."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _convolution(g: Graph, x: str, layer: Any, index: int, config: Any) -> str:
    """Add LFM 2's short convolution, whose state are its last inputs; return the result's name."""
    size, length = config.hidden_size, config.conv_L_cache
    parts = [f"b{index}", f"c{index}", f"d{index}"]
    split = g.op("Transpose", g.linear(x, layer.in_proj), perm=[0, 2, 1])
    g.op("Split", split, outputs=parts, axis=1, num_outputs=3)
    new = g.op("Mul", parts[0], parts[2])
    whole = g.op("Concat", f"past_conv.{index}", new, axis=2)
    g.op(
        "Slice",
        whole,
        g.weight(np.array([1 - length])),
        g.weight(np.array([1 << 40])),
        g.weight(np.array([2])),
        outputs=[f"present_conv.{index}"],
    )
    made = g.op("Conv", whole, g.weight(layer.conv.weight), group=size)
    made = g.op("Transpose", g.op("Mul", parts[1], made), perm=[0, 2, 1])
    return g.linear(made, layer.out_proj)


def tiny(folder: Path, family: str) -> Path:
    """Write a random model of a family that can chat; return its folder."""
    tokenizer = AutoTokenizer.from_pretrained(pocket.path())
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": None, "pad_token_id": None}
    model = model_of(family, "eager", vocab_size=len(tokenizer), **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


KINDS: dict[str, dict[str, Any]] = {  # kinds of decoders: a family, and options of `save`
    "llama": {},
    "qwen3": {"keep": True},
    "lfm2": {},
    "places": {"family": "llama", "places": True},
    "float16": {"family": "llama", "dtype": np.float16},
    "length": {"family": "llama", "length": True},
}


def ready(factory: Any, kind: str) -> Path:
    """Return a folder with a random model in `model`, and its adopted decoder in `decoder`."""
    options = dict(KINDS[kind])

    def make(folder: Path) -> None:
        from kvcap.export.adopted.adopt import adopt
        from kvcap.policies import load_policy

        tiny(folder / "model", options.pop("family", kind))
        save(folder / "model", folder / "decoder", **options)
        names = ("keydiff", "streaming_llm") if kind in ("llama", "float16") else ("keydiff",)
        policies = [load_policy(name) for name in names]
        adopt(folder / "decoder", None, policies, budget_tokens=24, block_size=8)

    return made(factory, f"grouped-{kind}", make)


def driven(runtime: Any, ids: Any, block: int, single: int) -> tuple[Any, list[int], masked.Kept]:
    """Read a text under a cap: blocks, and at the end tokens one by one.

    Args:
        runtime: the runtime of an adopted decoder.
        ids: the text [1, S].
        block: tokens of a block.
        single: number of last tokens that are read one by one.

    Returns:
        The last logits of every block [blocks, V], the indices of these tokens, and the tokens held
        before each block.
    """
    loop, kept = runtime.loop(), masked.Kept(compact=True)
    logits, ends, start = [], [], 0
    stop = ids.shape[1] - single
    for length in [min(block, stop - at) for at in range(0, stop, block)] + [1] * single:
        layers = runtime.manifest.facts["kv_layers"]
        for layer, rows in zip(layers, loop.cache.positions, strict=True):
            kept.blocks.setdefault(layer, []).append((start, rows.tolist()))
        logits.append(np.array(loop.read(ids[:, start : start + length])[0], np.float64))
        start += length
        ends.append(start - 1)
    return np.stack(logits), ends, kept


def masked_logits(model: Path, ids: Any, kept: masked.Kept) -> Any:
    """Return logits [S, V] of transformers' model, in which each token sees only kept tokens."""
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation=masked.NAME
    ).eval()
    kept.inv_freq = dict.fromkeys(kept.blocks, masked.rotary_frequencies(loaded))
    masked._KEPT = kept
    with torch.no_grad():
        return loaded(torch.from_numpy(ids)).logits[0].double().numpy()


def plain_logits(runtime: Any, ids: Any, ends: list[int], kept: masked.Kept | None) -> Any:
    """Return the last logits of every block by the same graph, over separate arrays in time order.

    Keys are kept in float64 as they are at position 0, and rotated to their ranks for every block.

    Args:
        runtime: the runtime of the decoder.
        ids: the text [1, S].
        ends: indices of the blocks' last tokens.
        kept: the tokens that each block sees; None: all, without a cap.
    """
    facts, session = runtime.manifest.facts, runtime.graph.session
    names = [x.name for x in session.get_outputs()]
    states = {x["name"]: np.zeros(x["shape"], x["dtype"]) for x in facts["states"]}
    cache, frequencies = np.dtype(facts["cache_dtype"]), np.array(facts["inv_freq"])
    sizes = facts["model"]["kv_heads"], 0, facts["model"]["head_dim"]
    held = {(i, kind): np.zeros(sizes) for i in facts["kv_layers"] for kind in ("key", "value")}
    logits, start = [], 0
    for block, end in enumerate(ends):
        given, slots = {"input_ids": ids[:, start : end + 1], **states}, start
        for (layer, kind), x in held.items():
            if kept is not None:
                rows = np.sort(
                    np.array(kept.blocks[layer][block][1], np.int64).reshape(sizes[0], -1)
                )
                x, slots = np.take_along_axis(x, rows[..., None], axis=1), rows.shape[1]
            if kind == "key" and facts["rotates"][facts["kv_layers"].index(layer)]:
                x = _turned(x, np.arange(slots), frequencies)
            given[f"past_key_values.{layer}.{kind}"] = x[None].astype(cache)
        whole = slots + end + 1 - start
        given["attention_mask"] = np.ones((1, whole), np.int64)
        more = {"position_ids": np.arange(slots, whole)[None], "num_logits_to_keep": np.array(1)}
        given |= {name: more[name] for name in runtime.graph.inputs if name in more}
        outputs = dict(zip(names, session.run(names, given), strict=True))
        logits.append(outputs["logits"][0, -1].astype(np.float64))
        states = {x["name"]: outputs[x["present"]] for x in facts["states"]}
        for (layer, kind), x in held.items():
            new = outputs[f"present.{layer}.{kind}"][0, :, slots:].astype(np.float64)
            if kind == "key" and facts["rotates"][facts["kv_layers"].index(layer)]:
                new = _turned(new, -np.arange(slots, whole), frequencies)
            held[layer, kind] = np.concatenate((x, new), axis=1)
        start = end + 1
    return np.stack(logits)


def _turned(x: Any, by: Any, frequencies: Any) -> Any:
    """Return keys [K, n, D] rotated on by so many positions [n], by halves."""
    angles, half = by[:, None] * frequencies, len(frequencies)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin, rest), axis=-1)
