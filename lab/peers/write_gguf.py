"""Writes the GGUF file of a Llama from its checkpoint, quantised by llama.cpp itself.

The file has no tokenizer, as benchmarks pass tokens as numbers.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int32, c_uint32
from pathlib import Path
from typing import Any

from kvcap.runtime.backends.llamacpp.library import SPARE, Library
from kvcap.runtime.errors import LibraryUnusable

FILE_TYPES = {"Q4_0": 2, "Q8_0": 7}
"""Holds the library's numbers of types that files are quantised to."""
TYPES = ("F16", *FILE_TYPES)
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def written(library: Library, model: Path, files: Path, kind: str) -> Path:
    """Return the model's file with weights of a type of `TYPES`; write it if it is missing.

    Raises:
        ValueError: the model is no plain Llama, or there is no such type.
    """
    if kind not in TYPES:
        raise ValueError(f"no GGUF file is written in {kind}; give one of {', '.join(TYPES)}")
    config = json.loads((model / "config.json").read_text())
    if fault := _unlike_llama(config):
        raise ValueError(f"a GGUF file is written of plain Llama models only; this one {fault}")
    files.mkdir(parents=True, exist_ok=True)
    whole = files / f"{model.name}-F16.gguf"
    if not whole.exists():
        _write(model, config, part := whole.with_suffix(".part"))
        part.rename(whole)
    file = files / f"{model.name}-{kind}.gguf"
    if not file.exists():
        quantise(library, whole, part := file.with_suffix(".part"), kind)
        part.rename(file)
    return file


class QuantiseSettings(ctypes.Structure):
    """The first part of the library's structure of settings of its quantiser."""

    _fields_ = (
        ("threads", c_int32),
        ("file_type", c_int32),
        ("spare", ctypes.c_ubyte * SPARE),
    )


def quantise(library: Library, whole: Path, out: Path, kind: str) -> None:
    """Write the GGUF file `whole` to `out` with weights of another type, one of `FILE_TYPES`.

    Raises:
        LibraryUnusable: the build has no quantiser, as xllamacpp's, or cannot do it.
    """
    given = (c_char_p, c_char_p, POINTER(QuantiseSettings))
    call = library.symbol("llama_model_quantize", c_uint32, given)
    settings = library.symbol("llama_model_quantize_default_params", QuantiseSettings, ())()
    settings.file_type = FILE_TYPES[kind]
    if call(str(whole).encode(), str(out).encode(), ctypes.byref(settings)):
        raise LibraryUnusable(f"{library.file} cannot quantise {whole.name} to {kind}")


def _unlike_llama(config: dict[str, Any]) -> str | None:
    if config["model_type"] != "llama":
        return f"is {config['model_type']}"
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        return f"has {rope['rope_type']} RoPE"
    return "has biases" if config.get("attention_bias") or config.get("mlp_bias") else None


def _write(model: Path, config: dict[str, Any], out: Path) -> None:
    from gguf import GGUFWriter

    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads, size = config["num_key_value_heads"], config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or {}
    writer = GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, array in _tensors(model):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        for part, rows in (("q_proj", heads), ("k_proj", kv_heads)):
            if f"{part}.weight" in name:
                array = _neighbours(array, rows)
        flat = array.ndim == 1  # norms stay in float32
        writer.add_tensor(_renamed(name), array.astype("float32" if flat else "float16"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name: str) -> str:
    if name in ENDS:
        return ENDS[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.weight"


def _neighbours(rows: Any, heads: int) -> Any:
    """Return a projection's rows in the order in which RoPE rotates neighbours, not halves."""
    size = rows.shape[0] // heads
    halves = rows.reshape(heads, 2, size // 2, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _tensors(model: Path) -> Iterator[tuple[str, Any]]:
    """Yield the float32 arrays of all safetensors files."""
    import numpy

    for path in sorted(model.glob("*.safetensors")):
        data = numpy.memmap(path, numpy.uint8, "r")
        length = int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
            if name == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            raw = data[8 + length + start : 8 + length + stop]
            if entry["dtype"] == "BF16":  # bfloat16 is the upper half of a float32
                array = (raw.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
            else:
                kinds = {"F32": numpy.float32, "F16": numpy.float16}
                array = raw.view(kinds[entry["dtype"]]).astype(numpy.float32)
            yield name, array.reshape(entry["shape"])
