"""Models whose layers are partly recurrent: delta nets, short convolutions and Mamba 2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import SIZES, small_policy
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvcap
from kvcap.runtime.backends.pytorch.loop import BlockLoop

DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
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
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "qwen3_next": {**DELTA, **EXPERTS, "decoder_sparse_step": 1},
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
SOME = ["qwen3_5_text", "lfm2", "nemotron_h"]  # a delta net, a short convolution, Mamba 2


def tiny_model(
    family: str, attention: str = "kvcap", dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A random model, of weights as `conftest.tiny_model`'s."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    torch.manual_seed(0)
    sizes = {**SIZES, **FAMILIES[family], **changes}
    if family == "nemotron_h":
        del sizes["num_hidden_layers"]
    config = AutoConfig.for_model(family, **sizes)
    if not hasattr(DynamicCache, "get_conv_state"):
        pytest.skip("this version of transformers keeps no states in a cache")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.1)
        else:
            torch.nn.init.normal_(weight, 0.0, 0.15)
    return model.eval()
