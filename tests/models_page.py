"""Makes docs/models.md out of the families that the tests hold."""

from __future__ import annotations

from families import ALL, ELSEWHERE, TRIED, config_of, model_type

from kvcap.runtime.models.config import INTERLEAVED, LayerShape, ModelShape
from kvcap.runtime.models.wrappers import M_ROPE

HEAD = """# Models

To see whether kvcap runs your model, ask for its plan, or find its type below; it stands in \
`config.json`:

```sh
kvcap plan MODEL
```

You see the layers that are capped, how positions are counted, and what the model takes in memory; \
or a refusal with its reason.

The tests compare these models with full attention over the tokens that were kept: past the \
budget, in every position mode, for `keydiff`, `snapkv`, `h2o`, `dropkv` and `streaming_llm`. Keys \
that were moved are compared with those that the model itself makes there. `scripts/list-models` \
writes the table.

| model type | layers | positions | exported to ONNX Runtime | transformers |
|---|---|---|---|---|
"""
TAIL = """
`capped` layers hold what the policy keeps. `sliding` layers keep a window of their own, which \
bounds them already, as they do without kvcap; `state` layers keep a recurrent state of one size, \
which some models have beside slots in one layer; \
`shared` layers read the slots of an earlier layer and hold nothing; `none` layers have no \
attention. A capped layer without RoPE has no positions to keep. A mixture of experts is \
not exported.

Slots of multi-head latent attention (DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3, Youtu and \
others) hold `latents`: the compressed latent of a token and the rotated part of its key, and no \
keys and values of heads. Queries are taken to the latents, or, for large blocks, slots are \
expanded to every head's keys and values, whichever costs less; both are exact. Load such a model \
with `attn_implementation="kvcap"`; its `kv_b_proj` must not be quantised. What policies make of \
latents is in [Know what a policy does](policy-facts.md#latents).

Types marked * are not listed in kvcap. Like any other that is not in this table, they are tried \
as a small random copy of their config when a model is loaded. That shows whether the layers \
attend through transformers' interface, whether kvcap's attention gives the model's own logits, \
and how keys depend on their position. So a new family often runs at once; if not, the refusal \
names the layers and the reason.

## Models that read more than text

Gemma 3 (4B, 12B, 27B), Mistral 3, Llava, InternVL, Idefics 3, Qwen2-VL, Qwen2.5-VL, Qwen3-VL and \
other wrappers of these text models run as text models: the text model alone is loaded, without \
the vision tower. `kvcap.cap` also takes a whole one, and text. Of quantised ones those run whose \
weights are unpacked. Qwen3.5's checkpoints are read as text models, too. PaliGemma, which reads a \
prompt in both directions, is refused.

## What is refused

| layers | models |
|---|---|
| attention within chunks | Llama 4 |
| sparse attention by an index, or over compressed keys | DeepSeek V3.2 and V4, GLM-5, A.X K2 |
| attention and a recurrent state of another kind in one layer | Zamba, Zamba 2 |
| attention over a window and a recurrent state in one layer | Inkling |
| states of a size that is not known | Bamba, Jamba, MiniMax, Kimi Linear |
| positions that are learned for each place, and no rotation of keys | GPT-2, OPT, BERT |
| attention that does not go through transformers' interface | BLOOM, JetMoE, RoFormer |

What is refused is never run uncapped or wrong.

## Weights, numbers and devices

| | |
|---|---|
| numbers | float32, bfloat16, float16 |
| devices | CPU, CUDA, MPS |
| transformers | 4.57 and 5.x |
| quantised checkpoints | those of bitsandbytes and torchao stay packed; FP8, MXFP4 (gpt-oss) and \
compressed-tensors are unpacked when they are loaded, and planned so \
(`pip install '.[quantised]'`) |
| GGUF files | of the families above that transformers maps (`pip install '.[gguf]'`); on a CPU \
their [weights stay in their bits](weights.md#run-a-gguf-file), elsewhere they are unpacked |
| files | safetensors and GGUF only; pickles and a model's own code are refused by name |
| adapters (`adapter_config.json`) | beside a model's weights: not applied, with a warning; alone: \
refused. Merge one once, by peft's `merge_and_unload`. It is the same whether peft is installed \
or not |
| a tokenizer with more tokens than the model | runs; a message with a token that the model has no \
embedding of is refused before it is read (`TokenUnknown`, in the server a 400) |

## Layers that are not capped

| layers | what happens |
|---|---|
| native sliding layers (Gemma 2, 3, 3n and 4, Granite SWA, gpt-oss) | stay as they are and are \
counted in the plan; their global layers are capped. They forget pinned tokens with their window |
| layers that read an earlier layer's keys and values (Gemma 3n and 4) | hold nothing |
| recurrent layers (gated delta nets, short convolutions, Mamba 2) | hold a state of one size: \
transformers' own, allocated once, counted in the plan to the byte and saved with a session. A \
state has read every token, evicted ones too, and cannot go back: after a pass that failed \
half-way the cache asks for `reset()`. Such models run eagerly, without CUDA graphs |
| a state and keys and values in one layer (Falcon-H1, Zaya) | run; where the two are of kinds \
that kvcap does not know, the model is refused |
"""


def page() -> str:
    """The whole page."""
    rows = {name: _row(name) for name in sorted(ALL | ELSEWHERE)}
    for wrapped in M_ROPE:
        rows[wrapped] = (
            f"| `{wrapped}` | as `{M_ROPE[wrapped]}` | as `{M_ROPE[wrapped]}` | no | 5.x |"
        )
    return HEAD + "\n".join(rows[name] for name in sorted(rows)) + "\n" + TAIL


def _row(name: str) -> str:
    """A family's line of the table."""
    config, family = config_of(name), model_type(name)
    shape = ModelShape.of(config)
    special = name.partition(" ")[2]
    title = f"`{family}`{'*' if name in TRIED else ''}{f', {special}' if special else ''}"
    kinds = dict.fromkeys(_kind(layer, family) for layer in shape.layers)
    old = "4.57 and 5.x" if family in OLD else "5.x"
    exported = "no" if shape.not_exportable else "yes"
    return f"| {title} | {', '.join(kinds)} | {shape.position_modes} | {exported} | {old} |"


def _kind(layer: LayerShape, family: str) -> str:
    """A layer's kind and its positions."""
    if layer.kind != "capped":
        return layer.kind
    if layer.rope is None:
        return "capped without RoPE"
    beside = ", a recurrent state beside" if layer.states else ""
    turning = ", neighbours together" if family in INTERLEAVED else ""
    latents = "latents, " if layer.latent else ""
    sinks = ", sink logits" if layer.sinks else ""
    return f"capped ({latents}RoPE {layer.rope.kind}{turning}{sinks}{beside})"


OLD = {  # that transformers 4.57 has and runs alike
    "arcee", "bitnet", "cohere", "cohere2", "dots1", "ernie4_5", "ernie4_5_moe",
    "exaone4", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "glm", "glm4",
    "glm4_moe", "gpt_oss", "granite", "helium",
    "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2",
    "phi", "phi3", "qwen2", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "starcoder2", "vaultgemma",
}  # fmt: skip
