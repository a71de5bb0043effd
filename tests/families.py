"""Defines small configs of every model type that is tested, besides the twelve of `conftest.py`.

A key is a model type, and the peculiarity of the config if a type has several.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FAMILIES as CORE
from conftest import SIZES
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvcap.runtime.models.config import SINCE_5
from kvcap.runtime.models.states import KEPT

OLD = not KEPT  # whether this is transformers 4.57

FULL, SLIDING = "full_attention", "sliding_attention"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
MIXED = {"sliding_window": 24, "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]}
FAMILIES: dict[str, dict[str, Any]] = {
    **CORE,
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cwm": {"head_dim": 16, **MIXED},
    "dots1": {**EXPERTS, **GROUPS, "head_dim": 16, "first_k_dense_replace": 1},
    "glm4_moe": {**EXPERTS, **GROUPS, "head_dim": 16, "first_k_dense_replace": 1},
    "granitemoe": LOCAL,
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 32},
    "hyperclovax": {},
    "internlm3": {"head_dim": 16},
    "iquestcoder": {"head_dim": 16},
    "jais2": {},
    "mellum": {**EXPERTS, "head_dim": 16, **MIXED},
    "ministral": {"head_dim": 16, **MIXED},
    "ministral3": {"head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "mixtral": {**LOCAL, "head_dim": 16, "sliding_window": None},
    "nemotron": {"head_dim": 16},
    "olmo": {},
    "olmo3": MIXED,
    "olmoe": EXPERTS,
    "phi": {},
    "phimoe": {**LOCAL, "sliding_window": None},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "stablelm": {},
    "vaultgemma": {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 24},
}  # fmt: skip
TRIED: dict[str, dict[str, Any]] = {  # types outside kvcap's list, which it tries on a small copy
    "afmoe": {**EXPERTS, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 24,
              "layer_types": [SLIDING, FULL, SLIDING, FULL]},
    "flex_olmo": EXPERTS,
    "gpt_neox": {"num_key_value_heads": 4},
    "hunyuan_v1_dense": {"head_dim": 16},
    "minimax_m2": {**LOCAL, "head_dim": 16, "rotary_dim": 8},
    "persimmon": {"num_key_value_heads": 4},
    "solar_open": {**EXPERTS, **GROUPS, "head_dim": 16},
}  # fmt: skip
HALF = {
    "num_hidden_layers": 4,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
WHOLE = {"sliding_window": None, "layer_types": ["full_attention"] * 2}
NEIGHBOURS: dict[str, dict[str, Any]] = {  # types that rotate neighbours, and one to compare with
    "cohere": {"logit_scale": 1.0},
    "cohere normed": {"logit_scale": 1.0, "use_qk_norm": True},
    "cohere2": {"logit_scale": 1.0, **HALF},
    "ernie4_5": {"head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": HALF,
    "exaone4 full": WHOLE,
    "glm": {"head_dim": 16},  # rotates half of a head
    "glm4": {"head_dim": 16},
    "helium": {"head_dim": 16},
    "llama": {"head_dim": 16},  # by halves, to compare with
}

# Types with recurrent layers.
DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SHARED_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
STATES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SHARED_EXPERTS},
    "qwen3_next": {**DELTA, **SHARED_EXPERTS, "decoder_sparse_step": 1},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4, "rope_parameters": None},
    "lfm2": CONV,
    "lfm2_moe": {**CONV, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "lfm3": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_types": ["conv", "full_attention", "sliding_attention", "full_attention"],
    },
    "granitemoehybrid": MAMBA,
    "falcon_h1": {  # each layer has slots and a state
        "head_dim": 16,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "key_multiplier": 0.5,
        "ssm_multipliers": [0.7, 0.8, 1.1, 1.2, 0.9],
    },
    "zaya": {  # each layer has slots and a state, of inputs of the key and value projections
        "head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "router_hidden_size": 16,
        "cca_time0": 3,
    },
    "nemotron_h": {
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "layers_block_type": ["mlp", "linear_attention", "full_attention", "moe"] * 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
}
# Types whose last layers read an earlier layer's keys and values.
PATTERN = ["sliding_attention", "full_attention"]
COMMON = {
    "head_dim": 16,
    "sliding_window": 24,
    "num_hidden_layers": 8,
    "layer_types": PATTERN * 4,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}
# The last four layers read layers 2 (sliding) and 3 (full); no other layer reads layer 1.
READERS: dict[str, dict[str, Any]] = {
    "gemma3n": {
        **COMMON,
        "num_kv_shared_layers": 4,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.5, *[0.0] * 6],
    },
    "gemma4": {**COMMON, "num_kv_shared_layers": 4, "global_head_dim": 32,
               "use_double_wide_mlp": True},
    # As in larger models, nothing is shared, keys are values, full layers have larger heads.
    "gemma4 k=v": {**COMMON, "num_hidden_layers": 4, "layer_types": PATTERN * 2,
                   "global_head_dim": 32, "num_global_key_value_heads": 1,
                   "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
}  # fmt: skip
# Types with a sink logit per query head.
SINKS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 24,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 32,
        },
    },
    "granite_swa": {
        "head_dim": 16,
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "layer_rope_theta": [5e5, 1e4, 0, 1e4],  # its third layer has no positions
        "attention_multiplier": 0.3,
    },
    "granitemoe_swa": {
        "head_dim": 16,
        "sliding_window": 24,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_local_experts": 4,
        "attention_multiplier": 0.3,
    },
}  # fmt: skip
# Sizes for multi-head latent attention, all different, and none a power of two.
LATENT = {
    "kv_lora_rank": 28,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
MLA: dict[str, dict[str, Any]] = {
    "axk1": {**LATENT, **EXPERTS, **GROUPS, "moe_layer_freq": 1, "first_k_dense_replace": 1},
    "deepseek_v2": {**LATENT, **EXPERTS, **GROUPS, "first_k_dense_replace": 1,
                    "topk_method": "greedy"},
    "deepseek_v2 yarn": {**LATENT, **EXPERTS, **GROUPS, "q_lora_rank": None,
                         "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    "deepseek_v3": {**LATENT, **EXPERTS, **GROUPS, "first_k_dense_replace": 1},
    "deepseek_v3 halves": {**LATENT, **EXPERTS, **GROUPS, "rope_interleave": False},
    "glm4_moe_lite": {**LATENT, **EXPERTS, **GROUPS, "v_head_dim": 20},
    "longcat_flash": {**LATENT, "head_dim": 8, "ffn_hidden_size": 96, "n_routed_experts": 4,
                      "moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 32},
    "minicpm3": LATENT,
    "youtu": LATENT,
}  # fmt: skip

ALL = {**FAMILIES, **TRIED}  # types that tests/runtime/models/test_models.py tests
ELSEWHERE = NEIGHBOURS | STATES | READERS | SINKS | MLA  # types that have test files of their own


def model_type(name: str) -> str:
    """Return the model type of a key of these tables."""
    family = name.split()[0]
    return f"{family}_text" if family in ("gemma3n", "gemma4") else family


def config_of(name: str, **changes: Any) -> Any:
    """Return the small config; skip the test if this transformers does not have the family."""
    family = model_type(name)
    unknown = {*SINCE_5, "gpt_neox", "persimmon", *STATES}
    if family not in CONFIG_MAPPING or (OLD and family in unknown):
        pytest.skip(f"this transformers has no {family}")
    sizes = {**SIZES, **(ALL | ELSEWHERE)[name], **changes}
    if family == "nemotron_h":  # counts its layers by their types
        del sizes["num_hidden_layers"]
    if family == "gpt_oss" and OLD:
        rope = dict(sizes.pop("rope_parameters"))
        sizes |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    return AutoConfig.for_model(family, **sizes)


def longrope(length: int) -> dict[str, Any]:
    """Return changes that give Phi-3 other factors beyond a length; skip where it has none."""
    if not hasattr(config_of("phi3"), "rope_parameters"):
        pytest.skip("transformers 5 has rope_parameters")
    known = {"original_max_position_embeddings": length}
    short, long = [1.0 + 0.1 * i for i in range(8)], [4.0 + i for i in range(8)]
    rope = {"rope_theta": 10000.0, "short_factor": short, "long_factor": long, **known}
    return {"rope_parameters": {"rope_type": "longrope", **rope}, **known}


def model_of(
    name: str, attention: str = "kvcap", dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """Make a random model; weights depend on family and changes, but not on the attention."""
    torch.manual_seed(0)
    config = config_of(name, **changes)
    return randomised(
        AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    )


def randomised(model: Any) -> Any:
    """Give a model random weights, for which a wrong position or a bias left out shows."""
    for part, weight in model.named_parameters():
        # Norms of one and biases of zero would hide that one is forgotten. Larger projections make
        # attention choose tokens, so that a wrong position changes the logits.
        if part.endswith("sinks"):  # sink logits that take a large share of attention
            torch.nn.init.normal_(weight, 1.0, 1.0)
        else:
            flat = weight.dim() == 1
            mean = 1.0 if flat and "norm" in part else 0.0
            torch.nn.init.normal_(weight, mean, 0.1 if flat else 0.15)
    return model.eval()
