"""Small configs of every model type that the tests hold, beside the twelve of `conftest.py`.

A key is a model type, and what is special about the config where there are several.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FAMILIES as CORE
from conftest import SIZES
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FULL, SLIDING = "full_attention", "sliding_attention"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
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
TRIED: dict[str, dict[str, Any]] = {  # not in the list: they run by what a small copy shows
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
NEIGHBOURS: dict[str, dict[str, Any]] = {  # by their model type, and what is special about them
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

ALL = {**FAMILIES, **TRIED}  # that tests/runtime/models/test_models.py holds
ELSEWHERE = NEIGHBOURS  # that files beside it hold to the same


def config_of(name: str, **changes: Any) -> Any:
    """The small config; a family that this transformers does not know skips the test."""
    family = name.split()[0]
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    return AutoConfig.for_model(family, **{**SIZES, **(ALL | ELSEWHERE)[name], **changes})


def model_of(name: str, attention: str = "kvcap", **changes: Any) -> Any:
    """A random model, whose weights are as those of `conftest.tiny_model`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config_of(name, **changes), attn_implementation=attention, dtype=torch.float32
    )
    for part, weight in model.named_parameters():
        flat = weight.dim() == 1
        mean = 1.0 if flat and "norm" in part else 0.0
        torch.nn.init.normal_(weight, mean, 0.1 if flat else 0.15)
    return model.eval()
