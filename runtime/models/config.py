"""Reads from a model's config what kvcap must know: capped layers, head counts, positions.

This is where it is decided which architectures run; the others are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.rope import Rope, rope_of

FAMILIES = (
    "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2",
    "qwen3", "smollm3", "starcoder2",
)  # fmt: skip


@dataclass(frozen=True)
class LayerShape:
    """A layer: capped by kvcap, or native, as its own sliding window already bounds it."""

    window: int | None  # tokens that a native sliding layer sees; None: capped
    rope: Rope | None  # None: the layer has no positions (SmolLM3's NoPE layers)


@dataclass(frozen=True)
class ModelShape:
    """The part of a config on which memory and positions depend."""

    family: str
    layers: tuple[LayerShape, ...]
    heads: int  # H
    kv_heads: int  # K
    head_size: int  # D
    hidden_size: int
    mlp_size: int
    vocabulary: int
    softcap: float | None
    trained_length: int  # the longest sequence, in tokens, that the model was trained on

    @property
    def groups(self) -> int:
        """`G`: query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def capped(self) -> list[int]:
        """Indices of the layers that kvcap caps."""
        return [i for i, layer in enumerate(self.layers) if layer.window is None]

    @property
    def moves_exactly(self) -> bool:
        """Whether the keys of all capped layers can be moved to other positions exactly."""
        ropes = [self.layers[i].rope for i in self.capped]
        return all(rope is None or rope.exact for rope in ropes)

    @property
    def rope_kinds(self) -> str:
        """The types of RoPE of the capped layers, for messages."""
        return ", ".join(sorted({r.kind for i in self.capped if (r := self.layers[i].rope)}))

    @property
    def all_capped(self) -> bool:
        """Whether no layer keeps its own sliding window."""
        return len(self.capped) == len(self.layers)

    @classmethod
    def of(cls, config: Any, slots: int = 0) -> ModelShape:
        """Read a transformers config.

        Args:
            config: of a causal language model, from transformers 4.57 or 5.x.
            slots: the most slots a capped layer will hold. A model whose layers all slide runs
                capped if its window is at least this long, since no token is then out of reach.

        Raises:
            UnsupportedModel: the architecture is not in `FAMILIES`, or has no layer to cap.
        """
        family = getattr(config, "model_type", None) or type(config).__name__
        if family not in FAMILIES:
            raise UnsupportedModel(
                f"model type {family!r} is not supported: its cache could not be capped without "
                f"wrong logits; supported: {', '.join(FAMILIES)}"
            )
        kinds = layer_kinds(config)
        sliding = "sliding_attention" in kinds
        window: int | None = config.sliding_window if sliding else None
        if window is not None and "full_attention" not in kinds:
            if window < slots:
                raise UnsupportedModel(
                    f"every layer of this {family} slides over {window} tokens, which already "
                    f"bounds its memory; a budget and block of {slots} slots would see further "
                    f"than it was built to, use at most {window} slots"
                )
            kinds, window = ["full_attention"] * len(kinds), None
        rotated = getattr(config, "no_rope_layers", None) or [1] * len(kinds)  # 1: has RoPE
        rope = rope_of(config)
        return cls(
            family=family,
            layers=tuple(
                LayerShape(
                    window if kind == "sliding_attention" else None,
                    rope if rotated[i] else None,
                )
                for i, kind in enumerate(kinds)
            ),
            heads=config.num_attention_heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_size=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            hidden_size=config.hidden_size,
            mlp_size=config.intermediate_size,
            vocabulary=config.vocab_size,
            softcap=getattr(config, "attn_logit_softcapping", None),
            trained_length=config.max_position_embeddings,
        )


def layer_kinds(config: Any) -> list[str]:
    """The kind of every layer, 'full_attention' or 'sliding_attention'.

    Raises:
        UnsupportedModel: it has layers of another kind.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Mistral, Phi-3 and Starcoder 2 slide in every layer or in none.
        kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        return [kind] * config.num_hidden_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(
            f"layers of type {', '.join(sorted(unknown))} have no keys and values to cap"
        )
    return list(kinds)
