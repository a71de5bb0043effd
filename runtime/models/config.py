"""Reads capped layers, head counts and positions from a model's config.

This is where it is decided which architectures run; the others are refused with their reason.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.latents import Latent, latent_of
from kvcap.runtime.models.rope import Rope, has_rope, heads_of, layer_config, rope_of
from kvcap.runtime.models.states import KEPT, StateShape, states_of
from kvcap.runtime.units import layers_named

if TYPE_CHECKING:
    from kvcap.runtime.models.trial import Trial

FAMILIES = (
    "apertus", "arcee", "axk1", "bitnet", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3",
    "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text",
    "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granite",
    "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium",
    "hyperclovax", "internlm3", "iquestcoder", "jais2", "lfm2", "lfm2_moe", "lfm3", "llama",
    "longcat_flash", "mellum", "minicpm3", "ministral", "ministral3", "mistral", "mixtral",
    "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi", "phi3",
    "phimoe", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "seed_oss", "smollm3", "stablelm",
    "starcoder2", "vaultgemma", "youtu", "zaya",
)  # fmt: skip
"""Lists the model types that the tests hold to full attention over the kept tokens.

A model of another type is tried as a small random copy (`trial.py`).
"""
SINCE_5 = ("apertus", "axk1", "deepseek_v2", "deepseek_v3", "falcon_h1",
           "glm4_moe_lite", "granitemoe", "granitemoeshared", "longcat_flash",
           "minicpm3", "nemotron", "olmo3", "olmoe", "phimoe", "qwen2_moe", "stablelm",
           "youtu")  # fmt: skip
"""Lists the families that are tried like any other type with transformers 4.57.

Its code of them differs from that of transformers 5.
"""
INTERLEAVED = (
    "cohere",
    "cohere2",
    "deepseek_v2",
    "ernie4_5",
    "ernie4_5_moe",
    "glm",
    "glm4",
    "helium",
)
"""Lists the families whose RoPE rotates neighbours (2i, 2i + 1); the others' rotates halves."""
SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa")
"""Lists the families whose attention has a learned sink logit per query head, in all layers."""

KINDS = {  # words for types of layers that are refused, by transformers' names
    "chunked_attention": "attention within chunks",
    "compressed_sparse_attention": "sparse attention over compressed keys",
    "heavily_compressed_attention": "attention over compressed keys",
    "hybrid_sliding": "attention over a window and a recurrent state in one layer",
    "indexed_attention": "sparse attention by an index of its own",
}
EXPERTS = ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts")
"""Names that configs have for the number of experts."""
FULL = {"full_attention", "hybrid"}  # types of layers in a config: that attend to all tokens,
ATTENTIONS = FULL | {"sliding_attention"}  # layers that attend
STATES = {"linear_attention", "conv", "mamba", "hybrid"}  # layers with a state of fixed size
WITHOUT = {"mlp", "moe"}  # layers that hold nothing
AMONG_EXPERTS = "every token chooses among experts"
LayerKind = Literal["capped", "sliding", "shared", "state", "none"]


@dataclass(frozen=True)
class LayerShape:
    """A record of a layer's sizes: of its keys and values, or of its recurrent state.

    `capped`: keys and values of tokens that the policy chose, in slots; in some models a recurrent
    state beside them. `sliding`: those of its own last tokens, which transformers' cache layer
    keeps, as the model's window bounds them already. `shared`: nothing; its queries attend to the
    keys and values of an earlier layer. `state`: a recurrent layer's state, of one size however
    long the text is. `none`: nothing.
    """

    kind: LayerKind
    window: int | None  # the last tokens that the model lets it see; None: all
    rope: Rope | None  # None: the layer has no positions
    kv_heads: int  # K; 0 where it has no keys and values
    head_size: int  # D
    reads: int | None = None  # the layer whose keys and values a shared layer attends to
    states: tuple[StateShape, ...] = ()  # of a recurrent layer, or beside slots
    sinks: bool = False  # a learned logit per query head stands in softmax beside those of slots
    experts: bool = False  # its MLP is a mixture of experts
    latent: Latent | None = None  # its slots hold latents: one KV head, values are part of keys

    @property
    def numbers(self) -> int:
        """Return how many numbers of keys and values it holds of one token."""
        if self.kind == "shared":
            return 0
        return self.kv_heads * self.head_size * (2 if self.latent is None else 1)


@dataclass(frozen=True)
class ModelShape:
    """A summary of a config: the sizes that memory and positions depend on."""

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
        """Return `G`, the query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def capped(self) -> list[int]:
        """Return the indices of the layers that kvcap caps."""
        return self.of_kind("capped")

    def of_kind(self, kind: LayerKind) -> list[int]:
        """Return the indices of the layers of a kind."""
        return [i for i, layer in enumerate(self.layers) if layer.kind == kind]

    def readers(self, index: int) -> int:
        """Return how many layers attend to the slots of layer `index`, itself included."""
        return 1 + sum(layer.reads == index for layer in self.layers)

    @property
    def shared(self) -> str:
        """Say which layers read which other layers' slots, for messages; '' if none do.

        The readers are the last layers.
        """
        readers = self.of_kind("shared")
        read = sorted({reads for layer in self.layers if (reads := layer.reads) is not None})
        if not readers:
            return ""
        return f"layers {readers[0]} to {readers[-1]} read {' and '.join(map(str, read))}"

    @property
    def capped_ropes(self) -> list[Rope]:
        """Return the rotary embeddings of the capped layers that have one."""
        return [rope for i in self.capped if (rope := self.layers[i].rope)]

    @property
    def moves_exactly(self) -> bool:
        """Return whether the keys of all capped layers can be moved to other positions exactly."""
        return all(rope.exact for rope in self.capped_ropes)

    @property
    def obstacle(self) -> str:
        """Return why keys of capped layers cannot be moved exactly; '' where they can."""
        ropes = [rope for rope in self.capped_ropes if not rope.exact]
        return "; ".join(sorted({f"RoPE of type {rope.kind}: {rope.obstacle}" for rope in ropes}))

    @property
    def longest_compact(self) -> int | None:
        """Return the longest sequence, in tokens, in which keys move exactly; None: any."""
        lengths = [rope.longest for rope in self.capped_ropes]
        return min((length for length in lengths if length is not None), default=None)

    def can_be_compact(self, slots: int = 0) -> bool:
        """Return whether positions may be compact if a head and its block hold `slots` at most."""
        return self.moves_exactly and slots <= (self.longest_compact or slots)

    @cached_property
    def trained_window(self) -> int:
        """Return the longest text, in tokens, that the model can read at true positions.

        With longrope it is as long as its short factors are for, since keys move exactly by these
        alone.
        """
        return min(self.trained_length, self.longest_compact or self.trained_length)

    @cached_property
    def most_slots(self) -> int:
        """Return how many slots a head and its block may have within the trained window."""
        windows = {self.layers[i].window for i in self.capped} - {None}
        return min([self.trained_window, *filter(None, windows)])

    @cached_property
    def all_capped(self) -> bool:
        """Return whether every layer holds slots: none slides, reads another's, or has a state."""
        return len(self.capped) == len(self.layers) and not self.recurrent

    @cached_property
    def recurrent(self) -> list[int]:
        """Return the indices of the layers that have a recurrent state, alone or beside slots."""
        return [i for i, layer in enumerate(self.layers) if layer.states]

    @cached_property
    def slides(self) -> bool:
        """Return whether some layers keep a sliding window of their own."""
        return bool(self.of_kind("sliding"))

    @cached_property
    def sinks(self) -> bool:
        """Return whether the attention of capped layers has sink logits."""
        return any(self.layers[i].sinks for i in self.capped)

    @cached_property
    def latent(self) -> Latent | None:
        """Return the sizes of the capped layers' latent attention; None if they have none."""
        return self.layers[self.capped[0]].latent

    @property
    def uncapped(self) -> str:
        """Return the layers that are not capped, by index and kind, for messages."""
        slides = layers_named(self.of_kind("sliding")) if self.slides else ""
        words = f"{slides} slide over a window of their own" if slides else ""
        return ", ".join(filter(None, (words, self.neither)))

    @property
    def neither(self) -> str:
        """Return the layers that neither hold slots alone nor slide, by index and kind."""
        without = self.of_kind("none")
        words = [f"{layers_named(self.recurrent)} keep a recurrent state"] * bool(self.recurrent)
        words += [f"{layers_named(without)} hold no keys and values"] * bool(without)
        return ", ".join(filter(None, (*words, self.shared)))

    @property
    def held(self) -> str:
        """Describe in words what each kind of layer holds."""
        ropes = {rope.kind for rope in self.capped_ropes}
        rope = f"RoPE {', '.join(sorted(ropes))}" if ropes else "no positions"
        beside = any(self.layers[i].states for i in self.capped)
        rope += ", sink logits" * self.sinks + ", a recurrent state beside" * beside
        latents = "latents, " if self.latent else ""
        names = {
            "capped": f"capped ({latents}{rope})",
            "sliding": "over a window of their own",
            "shared": "that read another's slots",
            "state": "with a recurrent state",
            "none": "without a cache",
        }
        return ", ".join(
            f"{n} {names[kind]}" for kind in get_args(LayerKind) if (n := len(self.of_kind(kind)))
        )

    @property
    def position_modes(self) -> str:
        """Return in words how positions can be kept."""
        if not self.moves_exactly:
            return f"true only ({self.obstacle})"
        most = self.longest_compact
        if most is None:
            return "compact, true or auto"
        return f"compact or auto up to {most:,} tokens held, or true"

    @property
    def not_exportable(self) -> str:
        """Return why no graph of open but equal lengths can run the model; '' if one can."""
        if self.neither:
            return self.neither
        if self.latent is not None:
            return f"{layers_named(self.capped)} are multi-head latent attention"
        if any(layer.experts for layer in self.layers):
            return AMONG_EXPERTS
        if not self.moves_exactly:
            return self.obstacle
        if any(rope.kind == "longrope" for rope in self.capped_ropes):
            return "RoPE of type longrope: its frequencies depend on the length"
        return ""

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
        states = _states(config, kinds)
        trial = None if is_listed(family) else _tried(config)
        if trial is not None and trial.obstacle:
            raise refusal(family, trial.obstacle)
        slides = [kind == "sliding_attention" for kind in kinds]
        window: int | None = config.sliding_window if any(slides) else None
        full = FULL
        if window is not None and all(slides):
            if window < slots:
                raise UnsupportedModel(
                    f"every layer of this {family} slides over {window} tokens, which already "
                    f"bounds its memory; a budget and block of {slots} slots would see further "
                    f"than it was built to, use at most {window} slots"
                )
            full = {"sliding_attention"}
        reads = _read_layers(config, kinds)
        sinks = family in SINKS if trial is None else trial.sinks
        experts = any((getattr(config, name, None) or 0) > 1 for name in EXPERTS)
        own: list[LayerKind] = [
            ("state" if states[i] else "none")
            if kind not in ATTENTIONS
            else "shared"
            if reads[i] is not None
            else "capped"
            if kind in full
            else "sliding"
            for i, kind in enumerate(kinds)
        ]
        sizes = [
            heads_of(layer_config(config, i))[1:] if kind in ATTENTIONS else (0, 0)
            for i, kind in enumerate(kinds)
        ]
        latent = latent_of(config)
        if latent is not None:
            sizes = [(1, latent.slot) if kind in ATTENTIONS else (0, 0) for kind in kinds]
        kv_heads, head_size = _slot_sizes(
            family, {sizes[i] for i, kind in enumerate(own) if kind == "capped"}
        )
        ropes = _ropes(config, kinds, trial)
        layers = [
            LayerShape(
                kind=kind,
                window=window if slides[i] else None,
                rope=ropes[i] if kinds[i] in ATTENTIONS else None,
                kv_heads=sizes[i][0],
                head_size=sizes[i][1],
                reads=reads[i],
                states=states[i],
                sinks=sinks and kinds[i] in ATTENTIONS,
                experts=experts,
                latent=latent if kinds[i] in ATTENTIONS else None,
            )
            for i, kind in enumerate(own)
        ]
        return cls(
            family=family,
            layers=tuple(layers),
            heads=config.num_attention_heads,
            kv_heads=kv_heads,
            head_size=head_size,
            hidden_size=config.hidden_size,
            mlp_size=_mlp_size(config),
            vocabulary=config.vocab_size,
            softcap=getattr(config, "attn_logit_softcapping", None),
            trained_length=config.max_position_embeddings,
        )


def _read_layers(config: Any, kinds: list[str]) -> list[int | None]:
    """Return for each layer the earlier layer whose keys and values it reads; None if its own.

    The last `num_kv_shared_layers` read the last layer of their kind before them (Gemma 3n and 4).
    """
    own = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    last = {kind: i for i, kind in enumerate(kinds[:own])}
    return [None if i < own else last[kind] for i, kind in enumerate(kinds)]


def refusal(family: str, why: str) -> UnsupportedModel:
    """Return the error for a model type that cannot run; it names what can."""
    return UnsupportedModel(
        f"model type {family!r} is not supported: {why}; models of full and sliding attention, "
        "such as llama, qwen3 and gemma3_text, run (docs/models.md lists them)"
    )


def is_listed(family: str) -> bool:
    """Return whether the tests cover a family with this version of transformers."""
    return family in FAMILIES and (KEPT or family not in SINCE_5)


def _tried(config: Any) -> Trial:
    from kvcap.runtime.models.trial import try_model  # here, as a listed model needs none of it

    return try_model(config)


def _ropes(config: Any, kinds: list[str], trial: Trial | None) -> list[Rope | None]:
    """Return the rotary embedding of every layer, as its family has it or as a trial showed it.

    Raises:
        UnsupportedModel: a trial showed positions that are no rotation, and no limit to them.
    """
    if trial is None:
        return _known_ropes(config, kinds)
    neighbours = "neighbours" in trial.keys
    rope = rope_of(config, interleaved=neighbours) if has_rope(config) else Rope("none", None)
    if rope.kind == "none" and "other" in trial.keys:
        raise refusal(
            config.model_type,
            "its positions are no rotation of keys, and end at the length that it was built for",
        )
    still = Rope(
        rope.kind, None, obstacle="a key read at another position is not the same key rotated"
    )
    rope_by_kind = {"none": None, "still": None, "neighbours" if neighbours else "halves": rope}
    return [rope_by_kind.get(kind, still if rope.exact else rope) for kind in trial.keys]


def _known_ropes(config: Any, kinds: list[str]) -> list[Rope | None]:
    """Return the rotary embedding of every layer of one of the `FAMILIES`.

    Raises:
        UnsupportedModel: full layers have several frequencies, and share a table of one.
    """
    thetas = getattr(config, "layer_rope_theta", None)  # Granite SWA; 0: no RoPE
    if thetas is None:
        if not _rotates(config):
            return [None] * len(kinds)
        full = next((kind for kind in kinds if kind in FULL), "full_attention")
        rope = rope_of(config, full, interleaved=config.model_type in INTERLEAVED)
        return [rope if rotates else None for rotates in layers_with_rope(config, kinds)]
    pairs = list(zip(thetas, kinds, strict=True))
    several = sorted({theta for theta, kind in pairs if theta and kind == "full_attention"})
    if len(several) > 1:
        raise UnsupportedModel(
            f"the full attention layers of this {config.model_type} have RoPE of different bases "
            f"(rope_theta {', '.join(f'{theta:g}' for theta in several)}), and capped layers share "
            "one table of rotations; use a model whose full layers have one, or none"
        )
    ropes: dict[Any, Rope | None] = {0: None}
    for theta in {*thetas} - {0}:
        own = copy.deepcopy(config)
        own.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
        ropes[theta] = rope_of(own)
    return [ropes[theta] for theta in thetas]


def _rotates(config: Any) -> bool:
    """Return whether any layer has rotary positions: hybrids may have none."""
    if config.model_type == "nemotron_h":
        return False
    if config.model_type == "granitemoehybrid":
        return bool(config.position_embedding_type == "rope")
    parameters = getattr(config, "rope_parameters", None)
    return config.model_type != "olmo_hybrid" or (parameters or {}).get("rope_theta") is not None


def _states(config: Any, kinds: list[str]) -> list[tuple[StateShape, ...]]:
    """Return the states of every layer; only recurrent layers have any.

    Raises:
        UnsupportedModel: states of unknown sizes, or a transformers that keeps none in a cache.
    """
    states = [states_of(config, kind) if kind in STATES else () for kind in kinds]
    recurrent = [i for i, kind in enumerate(kinds) if kind in STATES]
    if recurrent and not KEPT:
        raise refusal(
            config.model_type,
            f"{layers_named(recurrent)} are recurrent, and this version of transformers keeps no "
            "states in a cache: install 5.23 or newer",
        )
    if unknown := [i for i in recurrent if not states[i]]:
        raise refusal(
            config.model_type,
            f"{layers_named(unknown)} are recurrent, but no gated delta net, short convolution or "
            "Mamba 2 as Granite 4 and Nemotron-H have it, and their states of unknown size",
        )
    return states


def _slot_sizes(family: str, sizes: set[tuple[int, int]]) -> tuple[int, int]:
    """Return KV heads and head size of the capped layers, which must be alike.

    Raises:
        UnsupportedModel: they are not, or there are none.
    """
    if not sizes:
        raise refusal(
            family,
            "no layer attends to all tokens, so its memory has a bound already and there is "
            "nothing to cap",
        )
    if len(sizes) > 1:
        raise refusal(
            family,
            "the layers that could be capped have KV heads of different numbers and sizes, "
            f"{', '.join(f'{k} of {d}' for k, d in sorted(sizes))}",
        )
    return next(iter(sizes))


def _mlp_size(config: Any) -> int:
    """Return the size of the largest MLP of a layer."""
    sizes = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    largest: int = max(sizes) if isinstance(sizes, list | tuple) else sizes  # Gemma 3n: of each
    wide = getattr(config, "use_double_wide_mlp", False) and config.num_kv_shared_layers
    return 2 * largest if wide else largest  # Gemma 4, in layers that read others


def layer_kinds(config: Any) -> list[str]:
    """Return the type of every layer: one of `ATTENTIONS`, `STATES` or `WITHOUT`.

    Raises:
        UnsupportedModel: it has layers of another type, or is no causal language model.
    """
    family = getattr(config, "model_type", None) or type(config).__name__
    listed = is_listed(family)
    if not listed and not _is_causal(config):
        raise refusal(
            family, "transformers has no causal language model of it that reads tokens alone"
        )
    count = getattr(config, "num_hidden_layers", None)
    if not listed:
        try:
            heads = getattr(config, "num_attention_heads", None)
            heads_of(config) if heads else None
        except Exception as error:  # transformers' own, where layers differ
            raise refusal(family, "its layers have unequal heads") from error
        if not count or not heads:
            raise refusal(family, "its config names no layers with attention heads")
        if latent_of(config) and not KEPT:
            raise refusal(
                family,
                f"{layers_named([*range(count)])} are multi-head latent attention, and this "
                "version of transformers caches no latents: install 5.23 or newer",
            )
        if getattr(config, "index_topk", None):
            raise refusal(
                family, f"{layers_named([*range(count)])} are {KINDS['indexed_attention']}"
            )
        if getattr(config, "num_kv_shared_layers", None):
            raise refusal(
                family,
                f"its last {config.num_kv_shared_layers} layers read the keys and values of "
                "earlier layers",
            )
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Mistral, Phi-3 and Starcoder 2 slide in every layer or in none.
        kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        return [kind] * config.num_hidden_layers
    unknown = set(kinds) - ATTENTIONS - STATES - WITHOUT
    if unknown:
        unsupported = "; ".join(
            f"{layers_named([i for i, kind in enumerate(kinds) if kind == unsupported_kind])} are "
            f"{KINDS.get(unsupported_kind, unsupported_kind)}"
            for unsupported_kind in sorted(unknown)
        )
        raise refusal(family, unsupported)
    return list(kinds)


def _is_causal(config: Any) -> bool:
    """Return whether transformers has a causal language model for a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # here, as it takes seconds to import

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder


def layers_with_rope(config: Any, kinds: Sequence[str]) -> list[bool]:
    """Return for each layer of `kinds` whether it rotates queries and keys; others lack positions.

    Cohere 2 rotates in sliding layers only, EXAONE 4 likewise where its config has a window.
    """
    family = getattr(config, "model_type", None)
    if family == "cohere2" or (family == "exaone4" and config.sliding_window is not None):
        return [kind == "sliding_attention" for kind in kinds]
    return [bool(flag) for flag in getattr(config, "no_rope_layers", None) or [1] * len(kinds)]
