"""Saves a random model that can chat, the smallest that the command line can load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvcap import pocket


def save(folder: Path, *, template: bool = True) -> str:
    """Write model and tokenizer to `folder`; answers are noise and do not end by themselves."""
    tokenizer = AutoTokenizer.from_pretrained(pocket.path())
    if not template:
        tokenizer.chat_template = None
    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        hidden_size=32,
        intermediate_size=32,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[],
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    generation = {"do_sample": False, "eos_token_id": [], "bos_token_id": tokenizer.bos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer.save_pretrained(folder)
    return str(folder)
