"""Reads from a model's config what kvcap must know: capped layers, head counts, positions.

This is where it is decided which architectures run; the others are refused with their reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.rope import Rope, has_rope, rope_of
from kvcap.runtime.models.states import KEPT, StateShape, states_of
from kvcap.runtime.models.trial import Trial, heads_of, layers_named, try_model

FAMILIES = (
    "apertus", "arcee", "bitnet", "cwm", "dots1", "gemma", "gemma2", "gemma3_text", "glm4_moe",
    "granite", "granitemoe", "granitemoeshared", "hyperclovax", "internlm3", "iquestcoder",
    "jais2", "llama", "mellum", "ministral", "ministral3", "mistral", "mixtral", "nemotron",
    "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
    # partly recurrent
    "granitemoehybrid", "lfm2", "lfm2_moe", "lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next",
)  # fmt: skip
"""Model types that the tests hold to full attention over the kept tokens. A model of another type
is tried as a small random copy (`trial.py`)."""

KINDS = {  # of layers that are refused, as transformers names them
    "chunked_attention": "attention within chunks",
    "compressed_sparse_attention": "sparse attention over compressed keys",
    "heavily_compressed_attention": "attention over compressed keys",
    "hybrid": "attention and a recurrent state in one layer",
    "hybrid_sliding": "attention and a recurrent state in one layer",
    "indexed_attention": "sparse attention by an index of its own",
}


LayerKind = Literal["capped", "sliding", "state", "none"]
ATTENTIONS = {"full_attention", "sliding_attention"}  # types of layers in a config
STATES = {"linear_attention", "conv", "mamba"}  # that keep a state of fixed size
WITHOUT = {"mlp", "moe"}  # that hold nothing


@dataclass(frozen=True)
class LayerShape:
    """What a layer holds of a conversation.

    `capped`: keys and values of tokens that the policy chose, in slots. `sliding`: those of its own
    last tokens, which transformers' cache layer keeps, as the model's window bounds them already.
    `state`: a recurrent layer's state, of one size however long the text is. `none`: nothing.
    """

    kind: LayerKind
    window: int | None  # the last tokens that the model lets it see; None: all
    rope: Rope | None  # None: the layer has no positions (SmolLM3's NoPE layers)
    kv_heads: int  # K; 0 where it has no keys and values
    head_size: int  # D
    states: tuple[StateShape, ...] = ()  # of a recurrent layer

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
    def obstacle(self) -> str:
        """Why keys of capped layers cannot be moved exactly, for messages; '' where they can."""
        ropes = [rope for i in self.capped if (rope := self.layers[i].rope)]
        found = sorted({f"RoPE of type {r.kind}: {r.obstacle}" for r in ropes if not r.exact})
        return "; ".join(found)

    @property
    def longest_compact(self) -> int | None:
        """Tokens of the longest sequence in which keys move exactly; None: in any."""
        ropes = [rope for i in self.capped if (rope := self.layers[i].rope)]
        return min((r.longest for r in ropes if r.longest is not None), default=None)

    def can_be_compact(self, slots: int = 0) -> bool:
        """Whether positions may be compact where the longest head and its block hold `slots`."""
        return self.moves_exactly and slots <= (self.longest_compact or slots)

    @property
    def all_capped(self) -> bool:
        """Whether every layer is capped: none has a sliding window of its own, or a state."""
        return len(self.capped) == len(self.layers)

    @property
    def slides(self) -> bool:
        """Whether some layers keep a sliding window of their own."""
        return bool(self.of_kind("sliding"))

    @property
    def uncapped(self) -> str:
        """The layers that are not capped, by index and kind, for messages."""
        told = {"sliding": "slide over a window of their own", "state": "keep a recurrent state",
                "none": "hold no keys and values"}  # fmt: skip
        kinds = [kind for kind in get_args(LayerKind) if kind in told and self.of_kind(kind)]
        return ", ".join(f"{layers_named(self.of_kind(kind))} {told[kind]}" for kind in kinds)

    @classmethod
    def of(cls, config: Any, slots: int = 0) -> ModelShape:
        """Read a transformers config.

        Args:
            config: of a causal language model, from transformers 4.57 or 5.x.
            slots: the most slots a capped layer will hold. A model whose layers all slide runs
                capped if its window is at least this long, since no token is then out of reach.

        Raises:
            UnsupportedModel: the model cannot run under a cap, with the reason.
        """
        family = getattr(config, "model_type", None) or type(config).__name__
        kinds = layer_kinds(config)
        states = {i: states_of(config, one) for i, one in enumerate(kinds) if one in STATES}
        if states and not KEPT:
            raise refusal(
                family,
                f"{layers_named([*states])} are recurrent, and this version of transformers keeps "
                "no states in a cache: install 5.23 or newer",
            )
        if unknown := [i for i, found in states.items() if not found]:
            raise refusal(
                family,
                f"{layers_named(unknown)} are recurrent, but no gated delta net, short convolution "
                "or Mamba 2 as Granite 4 and Nemotron-H have it, and their states of unknown size",
            )
        trial = None if family in FAMILIES else try_model(config)
        if trial is not None and trial.obstacle:
            raise refusal(family, trial.obstacle)
        slides = [kind == "sliding_attention" for kind in kinds]
        capped = [kind == "full_attention" for kind in kinds]
        window: int | None = config.sliding_window if any(slides) else None
        if window is not None and all(slides):
            if window < slots:
                raise UnsupportedModel(
                    f"every layer of this {family} slides over {window} tokens, which already "
                    f"bounds its memory; a budget and block of {slots} slots would see further "
                    f"than it was built to, use at most {window} slots"
                )
            capped = [True] * len(kinds)
        if not any(capped):
            raise refusal(
                family,
                "no layer attends to all tokens, so its memory has a bound already and there is "
                "nothing to cap",
            )
        heads, kv_heads, head_size = heads_of(config)
        ropes = _ropes(config, kinds, trial)
        mlp_size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        return cls(
            family=family,
            layers=tuple(
                LayerShape(
                    kind="capped" if capped[i] else "sliding",
                    window=window if slides[i] else None,
                    rope=ropes[i],
                    kv_heads=kv_heads,
                    head_size=head_size,
                )
                if kind in ATTENTIONS
                else LayerShape("none", None, None, 0, 0)
                if kind in WITHOUT
                else LayerShape("state", None, None, 0, 0, states[i])
                for i, kind in enumerate(kinds)
            ),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            hidden_size=config.hidden_size,
            mlp_size=mlp_size if isinstance(mlp_size, int) else max(mlp_size),
            vocabulary=config.vocab_size,
            softcap=getattr(config, "attn_logit_softcapping", None),
            trained_length=config.max_position_embeddings,
        )


def refusal(family: str, why: str) -> UnsupportedModel:
    """The error for a model type that cannot run, and what can."""
    return UnsupportedModel(
        f"model type {family!r} is not supported: {why}; models of full and sliding attention, "
        "such as llama, qwen3 and gemma3_text, run (docs/models.md lists them)"
    )


def _ropes(config: Any, kinds: list[str], trial: Trial | None) -> list[Rope | None]:
    """The rotary embedding of every layer, as its family has it or as a trial showed it.

    Raises:
        UnsupportedModel: a trial showed positions that are no rotation, and no limit to them.
    """
    if trial is None:
        rope = rope_of(config) if _rotates(config) else None
        rotated = getattr(config, "no_rope_layers", None) or [1] * len(kinds)  # 1: has RoPE
        return [rope if one else None for one in rotated]
    rope = rope_of(config) if has_rope(config) else Rope("none", None)
    if rope.kind == "none" and "other" in trial.keys:
        raise refusal(
            config.model_type,
            "its positions are no rotation of keys, and end at the length that it was built for",
        )
    still = Rope(rope.kind, None, obstacle="its keys are no rotation of themselves elsewhere")
    found = {"none": None, "still": None, "rotated": rope}
    return [found.get(one, still if rope.exact else rope) for one in trial.keys]


def layer_kinds(config: Any) -> list[str]:
    """The type of every layer: one of `ATTENTIONS`, `STATES` or `WITHOUT`.

    Raises:
        UnsupportedModel: it has layers of another type, or is no causal language model.
    """
    family = getattr(config, "model_type", None) or type(config).__name__
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise refusal(
            family, "transformers has no causal language model of it that reads tokens alone"
        )
    count = getattr(config, "num_hidden_layers", None)
    try:
        heads = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    except Exception as error:  # transformers' own, where layers differ
        raise refusal(family, "its layers have unequal heads") from error
    if not count or not heads[0]:
        raise refusal(family, "its config names no layers with attention heads")
    if getattr(config, "kv_lora_rank", None):
        raise refusal(
            family,
            f"{layers_named([*range(count)])} are multi-head latent attention, whose cache holds a "
            "latent vector and no keys",
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise refusal(
            family,
            f"its last {config.num_kv_shared_layers} layers read the keys and values of earlier "
            "layers",
        )
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Mistral, Phi-3 and Starcoder 2 slide in every layer or in none.
        kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        return [kind] * count
    unknown = set(kinds) - ATTENTIONS - STATES - WITHOUT
    if unknown:
        those = "; ".join(
            f"{layers_named([i for i, kind in enumerate(kinds) if kind == one])} are "
            f"{KINDS.get(one, one)}"
            for one in sorted(unknown)
        )
        raise refusal(family, those)
    return list(kinds)


def _rotates(config: Any) -> bool:
    """Whether any layer has rotary positions: hybrids may do without."""
    if config.model_type == "nemotron_h":
        return False
    if config.model_type == "granitemoehybrid":
        return bool(config.position_embedding_type == "rope")
    parameters = getattr(config, "rope_parameters", None)
    return config.model_type != "olmo_hybrid" or (parameters or {}).get("rope_theta") is not None
