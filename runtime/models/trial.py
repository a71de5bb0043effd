"""Tries a model that kvcap was not tested with, as a small random copy of its config.

It shows what a cache with a cap relies on: that layers attend through transformers' interface to
what the cache returns, that kvcap's attention gives the model's own logits, and how keys depend on
their position.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from kvcap.policies.base import Logits
from kvcap.runtime.attention.functions import attend
from kvcap.runtime.attention.latents import (
    LatentBlock,
    absorbed,
    attend_absorbed,
    rotated_first,
)
from kvcap.runtime.attention.masks import Slots
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.arguments import cache_argument
from kvcap.runtime.models.latents import Latent, expansion_of, latent_of
from kvcap.runtime.models.rope import Rope, has_rope, heads_of, moved_by, rope_of
from kvcap.runtime.types import ATTENTION
from kvcap.runtime.units import layers_named

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "sliding_window": 24,
    # Mixtures of experts: four experts, two of which a token takes.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    # Latent attention; its heads keep their sizes, of which others in a config are made.
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
}
TOKENS, SHIFT = 12, 37
OWN_CODE = "its layers compute attention by code of their own, outside of transformers' interface"
MOST_WEIGHTS = 50_000_000
LOGITS, KEYS = 1e-3, 1e-4  # the largest differences that count as rounding, next to the largest


Keys = Literal["none", "still", "halves", "neighbours", "other"]
"""Says how a layer's keys depend on the position that they are read at.

There are none; they do not; by a rotation of halves or of neighbours with the frequencies of its
config; or in another way.
"""


@dataclass(frozen=True)
class Trial:
    """A result of trying a small copy of a model."""

    obstacle: str  # why it cannot run under a cap; '': it can
    keys: tuple[Keys, ...] = ()  # of every layer
    sinks: bool = False  # its attention has sink logits


def try_model(config: Any) -> Trial:
    """Try a model of this config; the same config is tried once.

    Args:
        config: of the text model, from transformers.
    """
    kind: Any = type(config)
    return _try_model(kind, json.dumps(config.to_dict(), sort_keys=True, default=str))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings about a config of odd sizes."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


@lru_cache(maxsize=64)
def _try_model(kind: Any, values: str) -> Trial:
    from transformers import AutoModelForCausalLM  # here, as it takes seconds to import

    try:
        with _quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            small = small_copy(kind, json.loads(values))
            with torch.device("meta"):
                large = AutoModelForCausalLM.from_config(small).num_parameters() > MOST_WEIGHTS
            if large:
                return Trial("a copy of it cannot be made small enough to be tried")
            models = [_random_model(copy.deepcopy(small), how) for how in ("eager", ATTENTION)]
            models[1].load_state_dict(models[0].state_dict())
            return _compare(small, *models)
    except UnsupportedModel as error:
        return Trial(str(error))
    except KeyError as error:
        if error.args != (ATTENTION,):
            return Trial(f"a small copy of it cannot be tried here (it has no {error})")
        return Trial(OWN_CODE)
    except Exception as error:  # whatever transformers makes of sizes that it does not expect
        reason = str(error).strip().partition("\n")[0]
        return Trial(f"a small copy of it cannot be tried here ({type(error).__name__}: {reason})")


def small_copy(kind: Any, values: dict[str, Any]) -> Any:
    """Return a config of this kind and layers, for a model of some thousand weights a layer."""
    own = {name: kind.attribute_map.get(name, name) for name in SIZES}  # GPT-2 has others
    sizes: dict[str, Any] = {own[k]: v for k, v in SIZES.items() if values.get(own[k]) is not None}
    heads, kv_heads = values.get(own["num_attention_heads"]), values.get("num_key_value_heads")
    if kv_heads is not None:
        sizes["num_key_value_heads"] = 4 if kv_heads == heads else 2
    if "head_dim" in values and not values.get("kv_lora_rank"):
        sizes["head_dim"] = 16
    named = {
        "model_type",
        "architectures",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "id2label",
        "label2id",
        "quantization_config",
        "_name_or_path",
    }
    kept = {k: v for k, v in values.items() if k not in named and not k.startswith("_")}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return kind(**{**kept, **sizes, **tokens})


def _random_model(config: Any, attention: str) -> Any:
    """Return a random model, with weights large enough for attention to distinguish tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    for name, weight in model.named_parameters():
        flat = weight.dim() == 1
        nn.init.normal_(weight, 1.0 if flat and "norm" in name else 0.0, 0.1 if flat else 0.15)
    return model.eval()


def _compare(config: Any, plain: Any, ours: Any) -> Trial:
    """Run both models on the same tokens, and the first again at shifted positions; compare."""
    ids = 3 + torch.arange(TOKENS)[None] * 7 % 90
    caches = DynamicCache(config=config), DynamicCache(config=config), _Recorder(config=config)
    further = SHIFT + torch.arange(TOKENS)[None]
    cache_arguments, last = (
        [cache_argument(plain, c) for c in caches[:2]],
        cache_argument(ours, caches[2]),
    )
    expected = plain(input_ids=ids, **cache_arguments[0], use_cache=True).logits
    plain(input_ids=ids, **cache_arguments[1], use_cache=True, position_ids=further)
    logits = ours(input_ids=ids, **last, use_cache=True).logits
    latent = latent_of(config)
    if not caches[2].updated:
        return Trial("it keeps no keys and values of the tokens before")
    if (others := caches[2].not_attended) and not caches[2].attended:
        return Trial(OWN_CODE)
    if others:
        return Trial(
            f"{layers_named(others)} attend to something else than the keys and values "
            "that their cache returns"
        )
    if (error := difference(logits, expected)) > LOGITS:
        return Trial(
            f"kvcap's attention gives other logits than its own, by {error:.1g} of the largest"
        )
    heads, size = heads_of(config)[1:] if latent is None else (1, latent.slot)
    shapes = {(x.shape[1], x.shape[3]) for x in caches[2].tensors} - {(heads, size)}
    if shapes:
        listed = ", ".join(f"{k} of {d}" for k, d in sorted(shapes))
        return Trial(
            f"its config tells of {heads} KV heads of size {size}, and its layers have "
            f"keys or values of {listed}"
        )
    rope = rope_of(config) if has_rope(config) else None
    pairs = zip(caches[0].layers, caches[1].layers, strict=True)
    turned = "keys" if latent is None else "values"  # of latents, the rope parts
    dependences = tuple(
        _dependence(getattr(near, turned, None), getattr(far, turned, None), rope)
        for near, far in pairs
    )
    return Trial("", dependences, bool(caches[2].sinks))


def _dependence(keys: Tensor | None, moved: Tensor | None, rope: Rope | None) -> Keys:
    """Return how the keys of two cache layers differ; the second was read `SHIFT` further on."""
    if keys is None or moved is None or not keys.numel():
        return "none"
    if difference(moved, keys) <= KEYS:
        return "still"
    if rope is None or rope.inv_freq is None or 2 * len(rope.inv_freq) > keys.shape[-1]:
        return "other"
    layouts: tuple[tuple[Keys, bool], ...] = (("halves", False), ("neighbours", True))
    for name, interleaved in layouts:
        back = moved_by(replace(rope, interleaved=interleaved), moved, -SHIFT)
        if difference(back, keys) <= KEYS:
            return name
    return "other"


class _Recorder(DynamicCache):  # type: ignore[misc]
    """A cache that notes which layers attend to the keys and values it returned."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.latent = latent_of(config)
        self.attended: list[int] = []
        self.updated: list[int] = []
        self.sinks: set[int] = set()  # layers whose attention has sink logits
        self.tensors: list[Tensor] = []  # keys and values of layers that could be capped

    @property
    def not_attended(self) -> list[int]:
        """Return the layers that did not attend exactly once to the cache's keys and values."""
        return [i for i in self.updated if self.attended.count(i) != 1]

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the base class's sizes; layers that do not slide answer as a capped layer does."""
        slots, offset = super().get_mask_sizes(*args, **kwargs)
        index = kwargs.get("layer_idx", args[-1] if args else 0)
        sliding = getattr(self.layers[index], "is_sliding", False)
        return slots if sliding else Slots.of(slots), offset

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Update as the base class does, and return keys that note when they are attended to.

        For latents and rope parts it returns what a capped layer does.
        """
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.latent is not None:
            self.updated.append(layer_idx)
            slots = torch.cat((values, keys), dim=-1)
            self.tensors.append(slots)
            layer = _RecordedLayer(self.attended, self.sinks, layer_idx, slots, keys, self.latent)
            return LatentBlock(keys, layer), LatentBlock(values, layer)
        if keys.shape[-1] != values.shape[-1]:
            raise UnsupportedModel(
                f"its keys and values have different sizes, {keys.shape[-1]} and {values.shape[-1]}"
            )
        if getattr(self.layers[layer_idx], "is_sliding", False):
            return keys, values  # it stays transformers' own under a cap
        self.updated.append(layer_idx)
        self.tensors += [keys, values]
        keys = keys.view_as(keys)
        keys.kvcap_layer = _RecordedLayer(self.attended, self.sinks, layer_idx, keys, values)
        return keys, values


@dataclass
class _RecordedLayer:
    """Attends to the given keys and values, and notes that it did."""

    attended: list[int]
    sinks: set[int]
    index: int
    keys: Tensor
    values: Tensor
    latent: Latent | None = None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        logits: Logits,
        position_ids: Tensor | None,
    ) -> Tensor:
        self.attended.append(self.index)
        self.sinks |= {self.index} if logits.sinks is not None else set()
        if self.latent is None:
            return attend(query, self.keys, self.values, logits)
        expansion = expansion_of(module, self.latent)
        taken = absorbed(rotated_first(query, self.latent.rotated), expansion)
        return attend_absorbed(taken, self.keys, expansion, logits)

    def take_back(self) -> None:
        """Do nothing: there is nothing to undo."""


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the second's largest number."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-9))
