"""Makes docs/models.md from the families that are tested."""

from __future__ import annotations

from families import ALL, ELSEWHERE, TRIED, config_of, model_type

from kvcap.runtime.models.config import INTERLEAVED, LayerShape, ModelShape
from kvcap.runtime.models.wrappers import M_ROPE

HEAD = """# Models

To see whether kvcap runs your model, ask for its plan, or look up its `model_type` (in \
`config.json`) below:

```sh
kvcap plan MODEL
```

You see which layers are capped, how positions are counted, and what the model takes in memory; \
or a refusal with its reason.

The tests compare each of these models with full attention over the tokens that were kept, after \
evictions, in every position mode, for `keydiff`, `snapkv`, `h2o`, `dropkv` and `streaming_llm`. \
Keys that were rotated to other positions are compared with keys that the model makes at those \
positions. `scripts/list-models` writes the table.

| model type | layers | positions | exported to ONNX Runtime | transformers |
|---|---|---|---|---|
"""
TAIL = """
| layers | hold |
|---|---|
| `capped` | the tokens that the policy keeps; without RoPE, no positions |
| `sliding` | the model's own window of last tokens, which bounds them without kvcap, too |
| `state` | a recurrent state of fixed size; some models have it beside slots in one layer |
| `shared` | nothing: they read the slots of an earlier layer |
| `none` | nothing: they have no attention |

Mixtures of experts are not exported.

Slots of multi-head latent attention (DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3, Youtu and \
others) hold `latents`: for each token one compressed vector and the rotated part of its key, in \
place of keys and values of heads. Attention projects queries to the latents or, for large \
blocks, expands slots to every head's keys and values, whichever costs less; both are exact. \
Load such a model with `attn_implementation="kvcap"`; its `kv_b_proj` must not be quantised. \
[Know what a policy does](policy-facts.md#latents) says how policies score latents.

kvcap has no entry for types marked *, nor for types that are not in this table. When such a \
model is loaded, kvcap first tries a small random model of the same config: whether its layers \
attend through transformers' interface, whether kvcap's attention gives the same logits, and how \
keys depend on positions. So a new family often runs at once; if not, the refusal names the \
layers and the reason.

## Models that read more than text

Gemma 3 (4B, 12B, 27B), Mistral 3, Llava, InternVL, Idefics 3, Qwen2-VL, Qwen2.5-VL, Qwen3-VL \
and other wrappers of these text models run as text models: the text model alone is loaded, \
without the vision tower. `kvcap.cap` also takes a whole one, and then reads text with it. A \
quantised one runs only if its weights are unpacked when they are loaded. Qwen3.5's checkpoints \
are read as text models, too. PaliGemma, which attends in both directions within a prompt, is \
refused.

## What is refused

| layers | models |
|---|---|
| attention within chunks | Llama 4 |
| sparse attention by an index, or over compressed keys | DeepSeek V3.2 and V4, GLM-5, A.X K2 |
| attention and a recurrent state of another kind in one layer | Zamba, Zamba 2 |
| attention over a window and a recurrent state in one layer | Inkling |
| states whose size kvcap does not know | Bamba, Jamba, MiniMax, Kimi Linear |
| positions that are learned for each place, and no rotation of keys | GPT-2, OPT, BERT |
| attention that does not go through transformers' interface | BLOOM, JetMoE, RoFormer |

A refused model is never run uncapped.

## Weights, numbers and devices

| | |
|---|---|
| numbers | float32, bfloat16, float16 |
| devices | CPU, CUDA, MPS |
| transformers | 4.57 and 5.x |
| quantised checkpoints | those of bitsandbytes and torchao stay packed; FP8, MXFP4 (gpt-oss) \
and compressed-tensors are unpacked when they are loaded, and planned so (`pip install \
'.[quantised]'`) |
| GGUF files | all that [llama.cpp's library](llamacpp.md) reads; with `--backend torch` those of \
the families above that transformers maps, unpacked. A tokenizer that cuts up the words of its own \
vocabulary is refused, as transformers 5.17 makes of Gemma 3's files |
| files | safetensors and GGUF only; pickles and a model's own code are refused by name |
| adapters (`adapter_config.json`) | not applied, with a warning, if they lie beside a model's \
weights; refused if they lie alone. Merge an adapter once, by peft's `merge_and_unload` |
| a tokenizer with more tokens than the model | runs; a message with a token that the model has \
no embedding of is refused before it is read (`TokenUnknown`, in the server a 400) |

## Layers that are not capped

| layers | what happens |
|---|---|
| native sliding layers (Gemma 2, 3, 3n and 4, Granite SWA, gpt-oss) | stay as they are and are \
counted in the plan; their global layers are capped. They forget pinned tokens with their window \
|
| layers that read an earlier layer's keys and values (Gemma 3n and 4) | hold nothing |
| recurrent layers (gated delta nets, short convolutions, Mamba 2) | hold a state of one size: \
transformers' own, allocated once, counted in the plan to the byte and saved with a session. A \
state has read every token, evicted ones too, and cannot go back; so after a pass that failed \
half-way the cache asks for `reset()`. Such models run eagerly, without CUDA graphs |
| layers with both a state and keys and values (Falcon-H1, Zaya) | run; if kvcap does not know \
the kinds of the two, the model is refused |
"""


def page() -> str:
    """Return the whole page."""
    rows = {name: _row(name) for name in sorted(ALL | ELSEWHERE)}
    for wrapped in M_ROPE:
        rows[wrapped] = (
            f"| `{wrapped}` | as `{M_ROPE[wrapped]}` | as `{M_ROPE[wrapped]}` | no | 5.x |"
        )
    return HEAD + "\n".join(rows[name] for name in sorted(rows)) + "\n" + TAIL


def _row(name: str) -> str:
    """Return a family's line of the table."""
    config, family = config_of(name), model_type(name)
    shape = ModelShape.of(config)
    special = name.partition(" ")[2]
    title = f"`{family}`{'*' if name in TRIED else ''}{f', {special}' if special else ''}"
    kinds = dict.fromkeys(_kind(layer, family) for layer in shape.layers)
    old = "4.57 and 5.x" if family in OLD else "5.x"
    exported = "no" if shape.not_exportable else "yes"
    return f"| {title} | {', '.join(kinds)} | {shape.position_modes} | {exported} | {old} |"


def _kind(layer: LayerShape, family: str) -> str:
    """Return a layer's kind and its positions, in words."""
    if layer.kind != "capped":
        return layer.kind
    if layer.rope is None:
        return "capped without RoPE"
    beside = ", a recurrent state beside" if layer.states else ""
    turning = ", neighbours together" if family in INTERLEAVED else ""
    latents = "latents, " if layer.latent else ""
    sinks = ", sink logits" if layer.sinks else ""
    return f"capped ({latents}RoPE {layer.rope.kind}{turning}{sinks}{beside})"


OLD = {  # families that transformers 4.57 has and runs in the same way
    "arcee", "bitnet", "cohere", "cohere2", "dots1", "ernie4_5", "ernie4_5_moe",
    "exaone4", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "glm", "glm4",
    "glm4_moe", "gpt_oss", "granite", "helium",
    "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2",
    "phi", "phi3", "qwen2", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "starcoder2", "vaultgemma",
}  # fmt: skip
