"""Puts a loaded model under a cap, whoever calls it: generate(), a pipeline, an evaluation harness.

PyTorch's hooks on the model's decoder give every call a `BudgetCache` and read long inputs block by
block. Knows transformers' models, no text.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvcap.runtime.attention.masks import READY_MADE, check
from kvcap.runtime.attention.uncompiled import run_uncompiled
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.layer import refuse_reordering
from kvcap.runtime.cache.settings import CacheSettings, SettingNames, usual_block
from kvcap.runtime.errors import PaddingUnsupported, PositionMismatch, UnsupportedModel
from kvcap.runtime.models.arguments import CACHE_NAMES, cache_argument, cache_of
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.wrappers import M_ROPE, is_wrapper, text_config
from kvcap.runtime.types import ATTENTION

if TYPE_CHECKING:
    from typing_extensions import Unpack

MARK = "kvcap_cap"  # the attribute in which a decoder keeps its `Cap`
HEAD_ARGUMENTS = ("labels", "logits_to_keep", "return_dict")
TYPES_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")  # of a wrapper: 0 is text
TOKEN_ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position")


def _refuse_paging(*_: Any, **__: Any) -> None:
    """Refuse continuous batching, which holds keys and values in a cache of its own."""
    raise UnsupportedModel(
        "generate_batch and cache_implementation='paged' hold keys and values in a cache of pages "
        "that grows, which kvcap.cap does not cap; call generate, or take kvcap.Runtime.batch for "
        "many conversations at once"
    )


# What `generate` calls of the model itself, in every version, where it needs more than a cache.
REFUSED = {
    "_get_candidate_generator": refuse_reordering,  # assisted decoding, before it reads anything
    "init_continuous_batching": _refuse_paging,
}


def cap(model: Any, *given: Any, **named: Unpack[SettingNames]) -> Cap:
    """Put a loaded transformers model under a cap, whoever calls it, with no cache passed.

    Afterwards `model.generate(...)`, `transformers.pipeline("text-generation", model, ...)` and
    whatever is built on them hold at most `budget_tokens` slots per KV head and layer, and a block.
    A call without a cache begins a conversation; pass the cache that it returns to continue. An
    empty `DynamicCache` that a program passes becomes a capped one, in place. A plain
    `model(input_ids)` gives the logits of all tokens, read block by block as they would be in a
    chat; with `use_cache=False`, too. Tokens may be padded on the right where nobody reads their
    logits, without a mask; padded prompts, beam search, assisted decoding, other caches and
    gradients are refused by name. A model that reads more than text, such as Gemma 3 or Qwen3-VL,
    may be given text alone.

    Works by hooks and by `attn_implementation='kvcap'`, which the model is switched to. The result
    undoes both, by `remove()` or as a context manager. `torch.compile`, before or after, compiles
    the model's layers; attention and cache run as they are between its graphs.

    Args:
        model: a model of transformers, such as from `AutoModelForCausalLM.from_pretrained`.
        given: whole `CacheSettings`; or its budget_tokens, block_size and policy in that order.
        named: settings by their names.

    Raises:
        UnsupportedModel: the model cannot be capped, or already is.
        PolicyError, PlanInfeasible: as `BudgetCache`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=32,
    ...                      intermediate_size=64, vocab_size=100)
    >>> model = LlamaForCausalLM(config).eval()
    >>> with cap(model, budget_tokens=16, block_size=8) as capped:
    ...     ids = model.generate(torch.arange(3, 60)[None], max_new_tokens=4, do_sample=False)
    >>> capped.cache.held
    16
    """
    model = getattr(model, "_orig_mod", model)  # of what torch.compile gave
    if not isinstance(model, nn.Module) and isinstance(
        getattr(model, "model", None), PreTrainedModel
    ):
        raise UnsupportedModel(
            f"kvcap.cap takes a model of transformers, and {type(model).__name__} runs one; cap "
            "that: kvcap.cap(pipeline.model, ...)"
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"kvcap.cap takes a model of transformers, and {type(model).__name__} is none; of a "
            "wrapper give what it wraps (of peft: model.get_base_model())"
        )
    text_config(model.config)  # refuses wrappers whose text model does not run
    inner = model.config.get_text_config(decoder=True).model_type
    if inner in M_ROPE and transformers.__version__ < "5":
        raise UnsupportedModel(
            f"{type(model).__name__} counts positions by itself in transformers "
            f"{transformers.__version__}, whatever was read; install transformers 5, or load its "
            "text model by kvcap.Runtime.from_pretrained"
        )
    if hasattr(model.get_decoder(), MARK):
        raise UnsupportedModel("the model is already under a cap; remove() that one first")
    settings = CacheSettings.of(given, named, "budget_tokens", "block_size", "policy")
    config = model.config.get_text_config(decoder=True)
    if settings.block_size is None:
        most, tokens = ModelShape.of(config).most_slots, settings.sizes[0]
        settings = replace(settings, block_size=usual_block(tokens, model.device, most))
    make = partial(BudgetCache, config, settings)
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        BlockLoop(model, trial := make(), graphs=False)  # refuses what cannot run
    except Exception:
        model.set_attn_implementation(before)
        raise
    return Cap(model, make, trial.terms, before)


class _Hidden(NamedTuple):
    """A block's output without its cache, which would keep itself alive here."""

    last: Tensor  # [B, T, hidden]
    states: tuple[Tensor, ...] | None  # of every layer, if asked for
    routed: tuple[Tensor, ...] | None  # a router's logits of every layer, likewise

    @classmethod
    def of(cls, output: Any) -> _Hidden:
        """Take them from a decoder's output."""
        routed = getattr(output, "router_logits", None)
        return cls(output.last_hidden_state, output.hidden_states, routed)


@dataclass
class _Call:
    """A record of a decoder's call, kept from the hook before it to the hook after it."""

    cached: bool  # the caller gets the cache
    as_tuple: bool
    earlier: list[_Hidden]  # of the blocks before the last


class Cap:
    """Keeps a model under a cap until `remove()` is called, or a `with` block ends.

    The model owns it, by its hooks, and not the other way round.
    """

    cache: BudgetCache | None = None
    """Holds the cache of the last call, for its figures."""

    def __init__(
        self, model: Any, make: partial[BudgetCache], terms: dict[str, Any], attention: str
    ) -> None:
        self._model, self._name, self._make = ref(model), type(model).__name__, make
        self._terms = terms  # of every cache that it takes
        self._attention, decoder = attention, model.get_decoder()
        self._wraps = is_wrapper(model.config)
        self._mask: Any = None  # the mask that the wrapper was called with
        self._calls: WeakKeyDictionary[BudgetCache, _Call] = WeakKeyDictionary()
        run_uncompiled(Cap, "_before_model", "_before_decoder", "_after_decoder")
        self._hooks = [
            decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True),
            decoder.register_forward_hook(self._after_decoder, with_kwargs=True),
        ]
        if model is not decoder:
            self._hooks.append(
                model.register_forward_pre_hook(self._before_model, with_kwargs=True)
            )
        setattr(decoder, MARK, self)
        for name, refuse in REFUSED.items():
            if hasattr(model, name):
                setattr(model, name, refuse)
        self._generation = getattr(model, "generation_config", None)
        if self._generation is not None:  # some models ask for a cache of their own
            self._implementation = self._generation.cache_implementation
            self._generation.cache_implementation = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the model, or a pickled one, takes along: no cache, no calls."""
        left_out = ("_calls", "cache")
        kept = {name: value for name, value in vars(self).items() if name not in left_out}
        return kept | {"_model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become the cap of the model's copy."""
        vars(self).update(state)
        self._model, self._calls = ref(state["_model"]), WeakKeyDictionary()

    def __repr__(self) -> str:
        """Return a line for people about the cap and its last cache."""
        return f"Cap({self._name}, {self.cache or self._make()!r})"

    def __enter__(self) -> Cap:
        """Return the cap, which is in force already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Remove the cap."""
        self.remove()

    def remove(self) -> None:
        """Take the cap off, so that the model is as it was before; twice does no harm."""
        model = self._model()
        if model is None or getattr(model.get_decoder(), MARK, None) is not self:
            return
        for hook in self._hooks:
            hook.remove()
        delattr(model.get_decoder(), MARK)
        for name in REFUSED.keys() & vars(model).keys():
            delattr(model, name)
        model.set_attn_implementation(self._attention)
        if self._generation is not None:
            self._generation.cache_implementation = self._implementation

    def _before_model(self, model: Any, args: Any, kwargs: Any) -> Any:
        """Read all blocks of which no logits are needed, before the whole model runs."""
        given = _named(model, args, kwargs)
        if self._wraps:
            given = _text_alone(model, given)
            self._mask = given.get("attention_mask")
        logits = given.get("logits_to_keep")
        if not isinstance(logits, int) or logits < 1 or _needs_all(model, given):
            return (), given
        cache = self._cache_for(given)
        if cache is not None:
            given |= cache_argument(model, cache)
            for _ in self._blocks(model.get_decoder(), given, cache, logits):
                pass
        return (), given

    def _before_decoder(self, decoder: Any, args: Any, kwargs: Any) -> Any:
        """Give the decoder a cache and read all blocks but the last, before it runs."""
        given = _named(decoder, args, kwargs)
        cache = self._cache_for(given)
        if cache is None:
            return None
        made = given.get("attention_mask")
        if self._wraps and made is not None and not (isinstance(made, Tensor) and made.dim() == 2):
            given["attention_mask"] = self._mask  # the wrapper made another without the cache
        cached = given.get("use_cache")
        cached = getattr(decoder.config, "use_cache", True) if cached is None else cached
        as_tuple = given.pop("return_dict", None) is False
        given |= cache_argument(decoder, cache) | {"use_cache": True}
        earlier = [_Hidden.of(part) for part in self._blocks(decoder, given, cache)]
        if earlier:
            given.pop("logits_to_keep", None)  # Gemma 4's decoder would shorten the last block
        self._calls[cache] = _Call(bool(cached), as_tuple, earlier)
        return (), given

    def _after_decoder(self, decoder: nn.Module, _: Any, kwargs: Any, output: Any) -> Any:
        """Join the outputs of all blocks, after the decoder ran."""
        cache = cache_of(kwargs)
        if not isinstance(cache, BudgetCache) or (call := self._calls.pop(cache, None)) is None:
            return None
        parts = [*call.earlier, _Hidden.of(output)]
        last = torch.cat([part.last for part in parts], dim=1)
        named: dict[str, Any] = {"last_hidden_state": last}
        if call.cached:
            named |= cache_argument(decoder, cache)
        states = [part.states for part in parts if part.states is not None]
        if states:
            named["hidden_states"] = tuple(torch.cat(x, dim=1) for x in zip(*states, strict=True))
        routed = [part.routed for part in parts if part.routed is not None]
        if routed:
            layers = zip(*routed, strict=True)
            named["router_logits"] = tuple(_joined(x, len(last)) for x in layers)
        joined = type(output)(**named)
        return joined.to_tuple() if call.as_tuple else joined

    def _cache_for(self, given: dict[str, Any]) -> BudgetCache | None:
        """Return the cache of a call; None where kvcap's own block loop makes the call.

        Raises:
            UnsupportedModel: the call has a cache that is not capped, or capped otherwise.
        """
        past = cache_of(given)
        if isinstance(past, BudgetCache):
            if past.context.start is not None:
                return None
            if past.terms != self._terms:
                raise UnsupportedModel(
                    f"the cache has {_listed(past.terms)}, and the cap in force has "
                    f"{_listed(self._terms)}; leave the cache out to begin another conversation, "
                    "or cap the model with the settings of the cache to continue this one"
                )
        elif past is None:
            past = self._make()
        elif type(past) is DynamicCache and past.get_seq_length() == 0:
            # In place, as the program that made it passes it again and asks it how much was read.
            past.__class__ = BudgetCache
            past.__init__(*self._make.args)
        else:
            what = type(past).__name__
            raise UnsupportedModel(
                f"under kvcap.cap a {what} is not capped, or was filled before; leave the cache "
                "and cache_implementation out, or pass the cache of a call before, or an empty "
                "DynamicCache, which becomes a capped one"
            )
        self.cache = past
        return past

    def _blocks(
        self, decoder: Any, given: dict[str, Any], cache: BudgetCache, logits: int = 0
    ) -> Any:
        """Read whole blocks until one, or the last `logits` tokens, are left; yields their outputs.

        The call's arguments in `given` become those of what is left.

        Raises:
            PaddingUnsupported, PositionMismatch, MemoryCapExceeded: before anything is read.
        """
        name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
        tokens: Tensor | None = given.get(name)
        least = max(logits, 1)  # tokens that are left
        if tokens is None or tokens.shape[1] - cache.room < least:
            return
        self._check(decoder, given, cache, tokens)
        rest = {key: value for key, value in given.items() if key not in TOKEN_ARGUMENTS}
        every = {key: value for key, value in rest.items() if key not in HEAD_ARGUMENTS}
        every |= cache_argument(decoder, cache) | {"use_cache": True}
        while tokens.shape[1] - cache.room >= least:
            block, tokens = tokens[:, : cache.room], tokens[:, cache.room :]
            yield decoder.forward(**every, **{name: block})
        given.clear()
        given.update(rest | {name: tokens})

    def _check(
        self, decoder: Any, given: dict[str, Any], cache: BudgetCache, tokens: Tensor
    ) -> None:
        """Refuse, before anything is read, a mask or positions that blocks cannot have."""
        length = tokens.shape[1]
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise PaddingUnsupported(READY_MADE)
        check({"attention_mask": mask, "q_length": length}, cache.seen)
        expected = torch.arange(cache.seen, cache.seen + length, device=tokens.device)
        if positions is not None and not bool((positions == expected).all()):
            raise PositionMismatch(
                f"position_ids do not count on from the {cache.seen} tokens that were read; leave "
                "them out, the cache keeps count. Packed sequences need a call each"
            )
        BlockLoop(decoder, cache, graphs=False).check_room(length)


def _listed(terms: dict[str, Any]) -> str:
    """Return a cache's settings for people."""
    named = {name: getattr(value, "name", value) for name, value in terms.items()}
    return ", ".join(f"{name}={value!r}" for name, value in named.items())


def _joined(blocks: tuple[Tensor, ...], batch: int) -> Tensor:
    """Join numbers of tokens of several blocks, [B·T, E] or [B, T, E] each, as of one block."""
    whole = torch.cat([block.reshape(batch, -1, block.shape[-1]) for block in blocks], dim=1)
    return whole.flatten(0, 1) if blocks[0].dim() == 2 else whole


def _named(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a call by name; the cache has the name that the module uses."""
    names = inspect.signature(module.forward).parameters
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = cache_of(given)
    others = {name: value for name, value in given.items() if name not in CACHE_NAMES}
    return others if cache is None else others | cache_argument(module, cache)


def _text_alone(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Return a wrapper's arguments for text, without those that are empty or say that it is text.

    Raises:
        UnsupportedModel: there is more than text.
    """
    given = {
        k: x for k, x in given.items() if x is not None and not (isinstance(x, dict) and not x)
    }
    more = [
        # What generate has encoded is named by its kinds, such as 'image'.
        " and ".join(f"{kind}s" for kind in value) if name == "mm_encoder_outputs" else name
        for name, value in given.items()
        if name not in (*TOKEN_ARGUMENTS, *HEAD_ARGUMENTS)
        and (bool(value.any()) if name in TYPES_OF_TOKENS else isinstance(value, (Tensor, dict)))
    ]
    if more:
        raise UnsupportedModel(
            f"under kvcap.cap {type(model).__name__} reads text alone, and was given "
            f"{', '.join(more)}; remove() the cap for these, or leave them out"
        )
    return {name: value for name, value in given.items() if name not in TYPES_OF_TOKENS}


def _needs_all(model: Any, given: dict[str, Any]) -> bool:
    """Return whether a call, or the model's config, asks for results of all tokens."""
    names = ("output_hidden_states", "output_router_logits")
    wanted = (given.get(name, getattr(model.config, name, None)) for name in names)
    return given.get("labels") is not None or any(wanted)
