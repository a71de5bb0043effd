"""Small random models of every supported family, and settings all tests share."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from transformers import AutoConfig, AutoModelForCausalLM

import kvcap  # noqa: F401  # registers attn_implementation='kvcap'

torch.set_num_threads(1)  # tests run in two processes on two cores
settings.register_profile("kvcap", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("kvcap")

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 24},
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "granite": {},
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "olmo2": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {"num_hidden_layers": 4},  # its fourth layer has no positions
    "starcoder2": {"sliding_window": None},
}


def tiny_config(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})


def tiny_model(
    family: str, attention: str = "kvcap", dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A random model; the same weights for the same family and changes, whatever the attention."""
    torch.manual_seed(0)
    config = tiny_config(family, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    for name, weight in model.named_parameters():
        # Norms start at one and biases at zero, which would hide a forgotten one; and larger
        # projections make attention pick tokens, so that a wrong position shows in the logits.
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.1)
        else:
            torch.nn.init.normal_(weight, 0.0, 0.15)
    return model.eval()


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    def make(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, VOCABULARY, (batch, length), generator=generator)

    return make
