"""Exports decoders with the usual signature, past_key_values in, present out, and with faults."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from conftest import CACHE, as_cache
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

Fault = Literal["none", "own positions", "window of slots"]
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


class Standard(nn.Module):
    """A transformers model with that signature."""

    def __init__(self, model: Any, fault: Fault) -> None:
        super().__init__()
        self.model, self.fault = model, fault

    def forward(self, ids: Tensor, mask: Tensor, places: Tensor, *past: Tensor) -> Any:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(past[::2], past[1::2], strict=True)):
            cache.update(keys, values, layer)
        held, length = past[0].shape[2], ids.shape[1]
        slots = torch.arange(held + length)
        here = torch.arange(held + length)[held:, None]
        seen = (slots <= here) & (mask[0] > 0)  # [T, n]
        if self.fault == "window of slots":
            seen = seen & (slots > here - 5)
        if self.fault == "own positions":  # counts held slots, as graphs with RoPE inside do
            places = here[:, 0][None] + 0 * places
        bias = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -1e9)[None, None]
        out = self.model(input_ids=ids, attention_mask=bias, position_ids=places, **as_cache(cache))
        return out.logits, *(x for one in out[CACHE].layers for x in (one.keys, one.values))


def save(source: Path, folder: Path, fault: Fault = "none") -> Path:
    """Write the model in `source` to `folder` as such a decoder, with config and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    config, layers = model.config, model.config.num_hidden_layers
    folder.mkdir(parents=True, exist_ok=True)
    past = torch.zeros(1, config.num_key_value_heads, 5, config.head_dim)
    names = [f"{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    auto = torch.export.Dim.AUTO
    given = (
        torch.ones(1, 3).long(),
        torch.ones(1, 8).long(),
        torch.arange(5, 8)[None],
        *[past.clone() for _ in names],
    )
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Standard(model, fault),
            given,
            dynamo=True,
            opset_version=18,
            verbose=False,
            input_names=[
                "input_ids",
                "attention_mask",
                "position_ids",
                *(f"past_key_values.{name}" for name in names),
            ],
            output_names=["logits", *(f"present.{name}" for name in names)],
            dynamic_shapes=({1: auto}, {1: auto}, {1: auto}, tuple({2: auto} for _ in names)),
            external_data=False,
        )
    proto = program.model_proto
    for value in (*proto.graph.input, *proto.graph.output):  # names axes as optimum does
        dims = value.type.tensor_type.shape.dim
        if value.name.startswith("past"):
            dims[2].dim_param = "past_sequence_length"
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    for name in COMPANIONS:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    return folder
