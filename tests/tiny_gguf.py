"""Writes small random GGUF files of many architectures, which llama.cpp reads in milliseconds.

The layout is GGUF 3: a header of fields, a table of tensors, then their numbers. All files have the
same byte-level vocabulary and ChatML template.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 3, 64, 4, 2, 64, 96
TRAINED, WINDOW = 512, 32
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "Ġ the", "i n", "a n", "Ġ a", "e r", "Ġ w")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NORMAL, CONTROL = 1, 3  # types of tokens
ALIGNED = 32  # bytes: tensors begin at multiples
Shapes = Mapping[str, tuple[int, ...]]
Q, KV = HEADS * HEAD, KV_HEADS * HEAD


@dataclass(frozen=True)
class Family:
    """A record of how an architecture differs from a Llama: fields, tensors left out and added."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    layer: Shapes = field(default_factory=dict)
    ends: Shapes = field(default_factory=dict)
    hidden: int = HIDDEN


RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
MEAN = {"attention.layer_norm_epsilon": 1e-5}
SLIDING = {"attention.sliding_window": WINDOW}
QK_NORM: Shapes = {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
POST: Shapes = {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
SQUARE = Q  # of architectures whose heads fill the hidden size
BIASES: Shapes = {"attn_q.bias": (Q,), "attn_k.bias": (KV,), "attn_v.bias": (KV,)}
NORM_BIASES: Shapes = {"attn_norm.bias": (SQUARE,), "ffn_norm.bias": (SQUARE,)}
WITHOUT_OUTPUT = frozenset({"output.weight"})
STATES: Shapes = {
    "ssm_in.weight": (4 * HIDDEN, HIDDEN), "ssm_conv1d.weight": (2 * HIDDEN, 4),
    "ssm_conv1d.bias": (2 * HIDDEN,), "ssm_x.weight": (4 + 2 * 16, 2 * HIDDEN),
    "ssm_dt.weight": (2 * HIDDEN, 4), "ssm_dt.bias": (2 * HIDDEN,), "ssm_a": (2 * HIDDEN, 16),
    "ssm_d": (2 * HIDDEN,), "ssm_out.weight": (HIDDEN, 2 * HIDDEN),
}  # fmt: skip
SSM = {"conv_kernel": 4, "inner_size": 2 * HIDDEN, "state_size": 16, "time_step_rank": 4}
EXPERTS, RANK, ROTATED, LATENT = 4, 16, 16, 32
EXPERT_FIELDS = {
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": INNER,
}
EXPERT_MATRICES: Shapes = {
    "ffn_gate_inp.weight": (EXPERTS, HIDDEN), "ffn_gate_exps.weight": (EXPERTS, INNER, HIDDEN),
    "ffn_up_exps.weight": (EXPERTS, INNER, HIDDEN),
    "ffn_down_exps.weight": (EXPERTS, HIDDEN, INNER),
}  # fmt: skip
EXPERT_BIASES: Shapes = {
    "ffn_gate_inp.bias": (EXPERTS,), "ffn_gate_exps.bias": (EXPERTS, INNER),
    "ffn_up_exps.bias": (EXPERTS, INNER), "ffn_down_exps.bias": (EXPERTS, HIDDEN),
}  # fmt: skip
LATENTS: Shapes = {
    "attn_q_a.weight": (RANK, HIDDEN), "attn_q_a_norm.weight": (RANK,),
    "attn_q_b.weight": (Q, RANK), "attn_kv_a_mqa.weight": (LATENT + ROTATED, HIDDEN),
    "attn_kv_a_norm.weight": (LATENT,), "attn_k_b.weight": (HEADS, LATENT, HEAD - ROTATED),
    "attn_v_b.weight": (HEADS, HEAD, LATENT),
}  # fmt: skip
FUSED: Shapes = {
    "attn_qkv.weight": (Q + 2 * KV, SQUARE), "attn_qkv.bias": (Q + 2 * KV,),
    "attn_output.bias": (SQUARE,), "ffn_up.bias": (INNER,), "ffn_down.bias": (SQUARE,),
    **NORM_BIASES,
}  # fmt: skip
NORM_END: Shapes = {"output_norm.bias": (SQUARE,)}
WITHOUT_GATE = frozenset({"ffn_gate.weight"})
SEPARATE = frozenset({"attn_q.weight", "attn_k.weight", "attn_v.weight"})
DENSE = frozenset({"ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"})
MATRICES = tuple(
    f"{part}.weight"
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "qwen2": Family(layer=BIASES, hidden=SQUARE),
    "qwen3": Family(layer=QK_NORM),
    "gemma2": Family(
        {**SLIDING, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        WITHOUT_OUTPUT,
        POST,
    ),
    "gemma3": Family({**SLIDING, "attention.sliding_window_pattern": 2}, layer={**QK_NORM, **POST}),
    "phi3": Family(
        {},
        SEPARATE | WITHOUT_GATE,
        {"attn_qkv.weight": (Q + 2 * KV, SQUARE), "ffn_up.weight": (2 * INNER, SQUARE)},
        hidden=SQUARE,
    ),
    "olmo2": Family(
        {},
        frozenset({"attn_norm.weight", "ffn_norm.weight"}),
        {
            "attn_q_norm.weight": (Q,),
            "attn_k_norm.weight": (KV,),
            **dict.fromkeys(POST, (SQUARE,)),
        },
        hidden=SQUARE,
    ),
    "granite": Family(
        {
            "logit_scale": 4.0,
            "residual_scale": 0.5,
            "embedding_scale": 2.0,
            "attention.scale": 0.1,
        }
    ),
    "stablelm": Family(
        {**MEAN, "rope.dimension_count": HEAD // 2},
        layer=NORM_BIASES,
        ends=NORM_END,
        hidden=SQUARE,
    ),
    "starcoder2": Family(
        MEAN,
        WITHOUT_GATE,
        {
            **NORM_BIASES,
            **BIASES,
            "attn_output.bias": (SQUARE,),
            "ffn_up.bias": (INNER,),
            "ffn_down.bias": (SQUARE,),
        },
        NORM_END,
        hidden=SQUARE,
    ),
    "smollm3": Family(),
    "exaone": Family(),
    "internlm2": Family(hidden=SQUARE),
    "command-r": Family(
        {**MEAN, "logit_scale": 0.5},
        frozenset({"output.weight", "ffn_norm.weight"}),
        hidden=SQUARE,
    ),
    "gemma": Family(without=WITHOUT_OUTPUT),
    "qwen3moe": Family(EXPERT_FIELDS, DENSE, {**QK_NORM, **EXPERT_MATRICES}),
    "gpt2": Family(  # learned positions
        MEAN,
        WITHOUT_GATE | SEPARATE,
        FUSED,
        {**NORM_END, "position_embd.weight": (TRAINED, SQUARE)},
        SQUARE,
    ),
    "gptneox": Family(
        {**MEAN, "use_parallel_residual": True, "rope.dimension_count": HEAD // 2},
        WITHOUT_GATE | SEPARATE,
        FUSED,
        NORM_END,
        SQUARE,
    ),
    "bloom": Family(  # linear biases in place of positions
        MEAN,
        WITHOUT_GATE | SEPARATE,
        FUSED,
        {
            **NORM_END,
            "token_embd_norm.weight": (SQUARE,),
            "token_embd_norm.bias": (SQUARE,),
        },
        SQUARE,
    ),
    "nemotron": Family(MEAN, WITHOUT_GATE, NORM_BIASES, NORM_END, SQUARE),
    "cohere2": Family(
        {**MEAN, **SLIDING, "attention.sliding_window_pattern": 2, "logit_scale": 0.5},
        frozenset({"output.weight", "ffn_norm.weight"}),
        hidden=SQUARE,
    ),
    "glm4": Family(
        without=WITHOUT_GATE,
        layer={"ffn_up.weight": (2 * INNER, SQUARE), **dict.fromkeys(POST, (SQUARE,))},
        hidden=SQUARE,
    ),
    "gpt-oss": Family(  # learned sinks
        {**SLIDING, **EXPERT_FIELDS},
        DENSE | {"ffn_norm.weight"},
        {
            "post_attention_norm.weight": (HIDDEN,),
            "attn_sinks.weight": (HEADS,),
            **BIASES,
            "attn_output.bias": (HIDDEN,),
            **EXPERT_MATRICES,
            **EXPERT_BIASES,
        },
    ),
    "deepseek2": Family(  # latents
        {
            "attention.q_lora_rank": RANK,
            "attention.kv_lora_rank": LATENT,
            "attention.head_count_kv": 1,
            "attention.key_length": LATENT + ROTATED,
            "attention.value_length": LATENT,
            "attention.key_length_mla": HEAD,
            "attention.value_length_mla": HEAD,
            "rope.dimension_count": ROTATED,
            "leading_dense_block_count": LAYERS,
            "expert_shared_count": 0,
            "expert_weights_scale": 1.0,
            **EXPERT_FIELDS,
        },
        SEPARATE,
        LATENTS,
    ),
    "lfm2": Family(
        {"shortconv.l_cache": 3, "attention.head_count_kv": [0, KV_HEADS, 0]},
        frozenset({"output_norm.weight"}),
        ends={"token_embd_norm.weight": (SQUARE,)},
        hidden=SQUARE,
    ),
    "mamba": Family(
        {f"ssm.{name}": n for name, n in SSM.items()},
        frozenset({"ffn_norm.weight", *MATRICES}),
        STATES,
    ),
}
ATTENDING = tuple(name for name in FAMILIES if name != "mamba")
MOVABLE = tuple(name for name in ATTENDING if name != "lfm2")


def written(
    folder: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    trained: int = TRAINED,
    template: str | None = CHATML,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Return the file of a random model of an architecture, written in a folder.

    Args:
        folder: where it is written.
        architecture: one of `FAMILIES`.
        seed: of its random numbers.
        trained: tokens of its longest sequence.
        template: its chat template; None: none.
        fields: further fields of its header.
    """
    family = FAMILIES[architecture]
    header: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": "tiny",  # some names have llama.cpp add tokens
        **{
            f"{architecture}.{name}": value
            for name, value in {
                "context_length": trained,
                "embedding_length": family.hidden,
                "block_count": LAYERS,
                "feed_forward_length": INNER,
                "attention.head_count": HEADS,
                "attention.head_count_kv": KV_HEADS,
                "attention.key_length": HEAD,
                "attention.value_length": HEAD,
                "rope.dimension_count": HEAD,
                "rope.freq_base": 10000.0,
                **RMS,
                **family.fields,
            }.items()
        },
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary(),
        "tokenizer.ggml.token_type": [CONTROL] * len(SPECIAL)
        + [NORMAL] * (len(vocabulary()) - len(SPECIAL)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        **({} if template is None else {"tokenizer.chat_template": template}),
        **(fields or {}),
    }
    file = folder / f"{architecture}-{seed}.gguf"
    _write(file, header, tensors(architecture, seed))
    return file


def tensors(architecture: str, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return the random tensors of an architecture by their names."""
    rng = np.random.default_rng([seed, len(architecture)])
    return {name: _random(rng, name, shape) for name, shape in _shapes(architecture)}


@functools.cache
def vocabulary() -> list[str]:
    """Return the tokens: special ones, a letter for each byte, and those that merges make."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {byte: chr(byte) for byte in printed}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    made = [merge.replace(" ", "") for merge in MERGES]
    return [*SPECIAL, *(letters[byte] for byte in range(256)), *made]


def _shapes(architecture: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor, the last dimension being the rows' own."""
    family, known = FAMILIES[architecture], len(vocabulary())
    hidden = family.hidden
    ends = {"token_embd.weight": (known, hidden), "output_norm.weight": (hidden,),
            "output.weight": (known, hidden), **family.ends}  # fmt: skip
    attends = {"attn_q.weight": (Q, hidden), "attn_k.weight": (KV, hidden),
               "attn_v.weight": (KV, hidden), "attn_output.weight": (hidden, Q)}  # fmt: skip
    rest = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (INNER, hidden), "ffn_up.weight": (INNER, hidden),
            "ffn_down.weight": (hidden, INNER)}  # fmt: skip
    convolves = {"shortconv.conv.weight": (hidden, 3),
                 "shortconv.in_proj.weight": (3 * hidden, hidden),
                 "shortconv.out_proj.weight": (hidden, hidden)}  # fmt: skip
    yield from ((name, shape) for name, shape in ends.items() if name not in family.without)
    for layer in range(LAYERS):
        own: Shapes = {**attends, **rest}
        if architecture == "lfm2":
            own = {**rest, **(convolves if layer != 1 else {**attends, **QK_NORM})}
        own = {name: shape for name, shape in own.items() if name not in family.without}
        for name, shape in {**own, **family.layer}.items():
            yield f"blk.{layer}.{name}", shape


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a tensor's random numbers: matrices as float16, the rest as float32.

    Queries and keys are large, so that attention is to few tokens and differs by what is held.
    """
    values = rng.standard_normal(shape)
    if name.endswith("ssm_a"):
        return -np.exp(values).astype(np.float32)
    if len(shape) == 1 or "bias" in name:
        one = 0.0 if "bias" in name else 1.0
        return (one + 0.1 * values).astype(np.float32)
    large = 2.0 if "attn_q" in name or "attn_k." in name else 1.0
    kind = np.float32 if "conv" in name and "proj" not in name else np.float16
    numbers: NDArray[Any] = (values * large / np.sqrt(shape[-1])).astype(kind)
    return numbers


def _write(file: Path, header: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(header))]
    parts += [_text(name) + _value(value) for name, value in header.items()]
    at = 0
    for name, array in tensors.items():
        shape = array.shape[::-1]
        kind = {"float32": 0, "float16": 1}[array.dtype.name]
        parts.append(_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        parts.append(struct.pack("<IQ", kind, at))
        at += -(-array.nbytes // ALIGNED) * ALIGNED
    head = b"".join(parts)
    body = [head, b"\0" * (-len(head) % ALIGNED)]
    for array in tensors.values():
        body += [array.tobytes(), b"\0" * (-array.nbytes % ALIGNED)]
    file.write_bytes(b"".join(body))


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """Return a field's value behind the number of its type."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        texts = isinstance(value[0], str)
        head = struct.pack("<IIQ", 9, 8 if texts else 5, len(value))
        return head + b"".join(_text(x) if texts else struct.pack("<i", x) for x in value)
    number, code = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}[type(value)]
    return struct.pack(f"<I{code}", number, value)
