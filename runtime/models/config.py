"""Reads from a model's config what kvcap must know: capped layers, head counts, positions.

This is where it is decided which architectures run; the others are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.rope import Rope, rope_of

FAMILIES = (
    "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2",
    "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_vl_text", "smollm3", "starcoder2",
)  # fmt: skip


LayerKind = Literal["capped", "sliding"]


@dataclass(frozen=True)
class LayerShape:
    """What a layer holds of a conversation.

    `capped`: keys and values of tokens that the policy chose, in slots. `sliding`: those of its own
    last tokens, which transformers' cache layer keeps, as the model's window bounds them already.
    """

    kind: LayerKind
    window: int | None  # the last tokens that the model lets it see; None: all
    rope: Rope | None  # None: the layer has no positions (SmolLM3's NoPE layers)
    kv_heads: int  # K
    head_size: int  # D

    @property
    def vector(self) -> int:
        """Numbers of the keys, or of the values, of one token."""
        return self.kv_heads * self.head_size


@dataclass(frozen=True)
class ModelShape:
    """The part of a config on which memory and positions depend."""

    family: str
    layers: tuple[LayerShape, ...]
    heads: int  # H
    kv_heads: int  # K, of the capped layers
    head_size: int  # D, of the capped layers
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
        return self.of_kind("capped")

    def of_kind(self, kind: LayerKind) -> list[int]:
        """Indices of the layers of a kind."""
        return [i for i, layer in enumerate(self.layers) if layer.kind == kind]

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
        slides = [kind == "sliding_attention" for kind in kinds]
        capped = [not one for one in slides]
        if window is not None and all(slides):
            if window < slots:
                raise UnsupportedModel(
                    f"every layer of this {family} slides over {window} tokens, which already "
                    f"bounds its memory; a budget and block of {slots} slots would see further "
                    f"than it was built to, use at most {window} slots"
                )
            capped = [True] * len(kinds)
        rotated = getattr(config, "no_rope_layers", None) or [1] * len(kinds)  # 1: has RoPE
        rope, heads = rope_of(config), config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            family=family,
            layers=tuple(
                LayerShape(
                    kind="capped" if capped[i] else "sliding",
                    window=window if slides[i] else None,
                    rope=rope if rotated[i] else None,
                    kv_heads=kv_heads,
                    head_size=head_size,
                )
                for i in range(len(kinds))
            ),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
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
