"""Loads a decoder's model and tokenizer, and refuses models that one graph cannot run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcap.dtypes import short, torch_dtype
from kvcap.export.decoder.depth import layers_of
from kvcap.policies import Eviction
from kvcap.policies.base.component import ATTENTION_VIEWS
from kvcap.runtime.cache.layout import CacheLayout, default_positions
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import NotExportable
from kvcap.runtime.models import formats
from kvcap.runtime.models.checkpoint import Checkpoint, empty_model
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.files import (
    check_generation,
    load_config,
    load_model,
    load_tokenizer,
)
from kvcap.runtime.models.names import resolve

ROUNDINGS = {
    name: rounding
    for name in formats.NAMES
    if (rounding := formats.matrix_of(name).rounding) is not None
}
# The cache's type by that of the weights.
CACHE = {"fp32": "fp32", "fp16": "fp16", **dict.fromkeys(ROUNDINGS, "fp32")}
WITHIN = "model."  # prefix of the model's names within the module that is traced
LOADED = 256 << 20  # bytes up to which a model is loaded and checked as a whole


@dataclass(frozen=True)
class Source:
    """A model with what belongs to it: its name, tokenizer and checkpoint."""

    name: str
    model: Any
    tokenizer: Any  # None: the directory gets none
    checkpoint: Checkpoint | None = None  # has the weights if the model was made without them

    @property
    def config(self) -> Any:
        """Return the model's config."""
        return self.model.config


def layout_for(config: Any, settings: CacheSettings) -> CacheLayout:
    """Return the layout of the cache that a decoder is made for.

    Raises:
        NotExportable: no one graph of fixed sizes does that.
        UnsupportedModel, PlanInfeasible, PolicyError: nor would PyTorch.
    """
    (tokens, block), eviction = settings.sizes, settings.eviction
    shape = ModelShape.of(config.get_text_config(decoder=True), tokens + block)
    _check(shape, eviction)
    if settings.kv_dtype is not None and len(sizes := _slot_sizes(shape)) > 1:
        raise NotExportable(
            f"--kv-dtype {settings.kv_dtype} needs KV heads of one size in all layers, and in this "
            f"{shape.family} there are {', '.join(f'{k} of {d}' for k, d in sizes)}; leave it out"
        )
    chosen = settings.positions or default_positions(shape, unchanging=True)
    layout = CacheLayout(shape, eviction, tokens, block, chosen)
    layout.eviction.check(tokens, len(shape.capped), shape.kv_heads)
    return layout


def load(model: str | Path, dtype: str) -> Source:
    """Load the model's weights and tokenizer.

    Raises:
        ModelFilesBroken, UnsupportedModel: they cannot be used.
    """
    where = resolve(model)
    config = load_config(where)
    tokenizer = load_tokenizer(where)
    check_generation(where)
    loaded = load_model(where, config, torch_dtype(CACHE[check_dtype(dtype)])).eval()
    return Source(str(model), loaded, tokenizer)


def open_model(model: str | Path, dtype: str) -> Source:
    """Open the model with its weights in their files, where they are large and can stay there.

    Args:
        model: a directory, a GGUF file, a repository, or pocket.
        dtype: of the export.

    Raises:
        ModelFilesBroken, UnsupportedModel: it cannot be used.
    """
    where = resolve(model)
    config, kind = load_config(where), torch_dtype(CACHE[check_dtype(dtype)])
    empty = empty_model(where, config, kind).eval()
    nbytes = sum(p.nbytes for p in empty.parameters())
    weights = Checkpoint.of(where, empty, kind, WITHIN) if nbytes > LOADED else None
    if weights is None or layers_of(empty) is None:
        return load(model, dtype)
    check_generation(where)
    return Source(str(model), empty, load_tokenizer(where), weights)


def check_dtype(dtype: str) -> str:
    """Return the name of a type of weights as manifests have it: fp32, fp16, int8 or int4.

    Raises:
        NotExportable: there are none of that type; names those there are.
    """
    known_name = short(dtype)
    if known_name not in CACHE:
        how = "; PyTorch alone runs it: --backend torch" if dtype in formats.NAMES else ""
        raise NotExportable(f"no dtype {dtype!r} of a decoder; there are {', '.join(CACHE)}{how}")
    return known_name


def _slot_sizes(shape: ModelShape) -> list[tuple[int, int]]:
    """Return each pair of a number of KV heads and their size that layers have, once."""
    return sorted({(layer.kv_heads, layer.head_size) for layer in shape.layers})


def _check(shape: ModelShape, eviction: Eviction) -> None:
    """Refuse a model or an eviction that a graph with buffers of fixed sizes cannot run."""
    name = eviction.name or "the policy"
    if why := shape.not_exportable:
        raise NotExportable(
            f"in this {shape.family} there is what the decoder's graph does not do: {why}; export "
            "a model whose layers attend fully or slide, with RoPE of type default, linear, llama3 "
            "or yarn, or run this one with the PyTorch backend (--backend torch --weights int4 "
            "for its weights in 4 bits)"
        )
    if shape.sinks and eviction.observes & ATTENTION_VIEWS:
        raise NotExportable(
            f"the attention of this {shape.family} has sink logits, learned numbers beside the "
            f"slots' logits, and {name} reads attention, which the graph that evicts computes "
            "without them; export it with a policy that does not, such as keydiff or knorm, or "
            "run it with the PyTorch backend (--backend torch)"
        )
    if not eviction.policy.evicts:
        raise NotExportable(
            f"{name} never evicts, so there is nothing to put into the graph; "
            "kvcap policies lists policies that do"
        )
    if eviction.head_budget is not None or eviction.layers_move:
        moved = (
            "gives the heads of a layer unequal numbers of slots"
            if eviction.head_budget is not None
            else "moves slots from one layer to another during a run"
        )
        raise NotExportable(
            f"{name} {moved}, and the buffers of an exported graph have fixed sizes; use the score "
            "that it builds on, such as snapkv or keydiff, or pyramidkv, whose layers are fixed"
        )
    if eviction.corrector is not None:
        raise NotExportable(
            f"{name} attends to evicted tokens too, which the graph does not keep; export its "
            "base without the corrector"
        )
