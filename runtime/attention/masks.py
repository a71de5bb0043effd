"""Checks transformers' masks: honours them where nothing is evicted, and refuses them for slots.

Slots of a capped layer are in no order and differ from head to head, so no mask can follow them. A
cache is not shown the mask; but transformers hands the number of slots that the cache names to
whatever makes the mask. That number is a `Slots`, through which the cache checks the mask.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

from torch import Tensor

from kvcap.runtime.errors import (
    CacheMismatch,
    PaddingUnsupported,
    PositionMismatch,
    UnsupportedModel,
)
from kvcap.runtime.types import ATTENTION

OTHER_ATTENTION = (
    "the model has attention {!r}, as after capped.remove(), and slots are read by kvcap's alone; "
    "put the model under kvcap.cap(model), load it with attn_implementation='kvcap', or call "
    "model.set_attn_implementation('kvcap')"
)
MaskRequest = Mapping[str, Any]  # what transformers gives to a function that makes a mask


class Slots(int):
    """A number of slots that a block of a capped layer sees; its `check` gets the mask asked for.

    Where transformers' own attention asks for it, `attention` is that one's name.
    """

    check: Callable[[MaskRequest], object]

    @classmethod
    def of(cls, count: int, check: Callable[[MaskRequest], object] = lambda _: None) -> Slots:
        """Return the number `count` with its check; by default nothing is refused."""
        slots = cls(count)
        slots.check = check
        return slots


@dataclass
class MaskNote:
    """A note of the length of the pass that begins, taken once its mask is checked.

    A cache shares one with its layers, which know nothing else of the cache.
    """

    length: int | None = None
    """Holds the tokens of that pass; None: no mask was checked since the pass before."""

    def check(self, seen: int, batch: int | None, request: MaskRequest) -> None:
        """Check the mask that a pass asks transformers for, and note the pass's length.

        Args:
            seen: tokens that the cache has read.
            batch: sequences that it is allocated for; None: none yet.
            request: for the mask.

        Raises:
            PaddingUnsupported, PositionMismatch: it hides tokens, or does not reach all.
            CacheMismatch: it is of another number of sequences. Nothing is changed.
            UnsupportedModel: the model's attention is not kvcap's.
        """
        if (other := request.get("attention")) is not None:
            raise UnsupportedModel(OTHER_ATTENTION.format(other))
        check(request, seen)
        given = request.get("batch_size")  # transformers 4.57 gives none
        if given is not None and batch is not None and given != batch:
            raise CacheMismatch(
                f"the cache is allocated for {batch} sequences, and a block of {given} sequences "
                "was given; a cache is of one batch size, also after reset(): make a new "
                "BudgetCache"
            )
        self.length = length_of(request)


def attention_mask(**request: Any) -> Tensor | None:
    """Return the mask of kvcap's attention, for transformers' interface; None for a capped layer.

    Where nothing is evicted (no cache, one of transformers', a native sliding layer) it is the mask
    asked for, as bool; None where `attend` is right without one.

    Raises:
        PaddingUnsupported: a capped layer is given a mask that hides tokens.
        PositionMismatch: or one that knows fewer tokens than it has read.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    slots = request["kv_length"]
    if isinstance(slots, Slots):
        slots.check(request)
        return None
    sliding, padding = request.get("local_size") is not None, request.get("attention_mask")
    if not sliding:
        _warn_uncapped()
    plain = request.get("mask_function", causal_mask_function) is causal_mask_function
    if plain and not sliding and request.get("allow_is_causal_skip", True):
        # A block that sees itself, or one token that sees all there is: never a static cache.
        alone = length_of(request) in (1, slots)
        if alone and (padding is None or (padding.shape[-1] >= slots and bool(padding.all()))):
            return None
    return cast(Tensor, sdpa_mask(**{**request, "allow_is_causal_skip": False}))


def watch_stock() -> None:
    """Check the masks that transformers' own attentions ask for where a cache is capped."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    for name, make in dict(ALL_MASK_ATTENTION_FUNCTIONS).items():
        if name != ATTENTION and not hasattr(make, "kvcap_checks"):
            AttentionMaskInterface.register(name, _checking(make, name))


def check(request: MaskRequest, seen: int) -> None:
    """Refuse a mask that hides any of the `seen` tokens of a capped cache, or of the next block.

    Raises:
        PaddingUnsupported: it does.
        PositionMismatch: it does not reach as far.
    """
    from transformers.masking_utils import causal_mask_function

    own = request.get("mask_function", causal_mask_function) is not causal_mask_function
    if own and request.get("local_size") is None:
        raise PaddingUnsupported(f"the model asks for a mask that is not causal; {_WHY}")
    padding: Tensor | None = request.get("attention_mask")
    if padding is None:
        return
    reach, length = padding.shape[-1], length_of(request)
    if reach < seen + length:
        raise PositionMismatch(
            f"the attention mask covers {reach} tokens, but {seen} were read and {length} "
            "more were given: was this prompt read before? Give the whole conversation and its "
            "mask, or use a new cache, or cache.reset()"
        )
    positions: Tensor | None = request.get("cache_position")  # transformers 4.57
    if positions is not None and int(positions[0]) != seen:
        raise PositionMismatch(
            f"tokens were given from position {int(positions[0])} on, but {seen} were read; "
            "transformers before 5 goes back to the start where prefill_chunk_size is given: leave "
            "it out, or use a new cache, or cache.reset()"
        )
    if not bool(padding.all()):
        raise PaddingUnsupported(
            f"the attention mask has zeros, as of a padded batch; {_WHY}. Pass prompts of equal "
            "length, or one at a time and unpadded"
        )


_WHY = "heads evict different tokens, so no mask can follow them"
READY_MADE = (
    "a mask was given ready-made (4-D, or one for each kind of layer), or the model's attention is "
    f"none whose masks transformers makes; {_WHY}. Leave it out, or give ones [batch, tokens]"
)


def length_of(request: MaskRequest) -> int:
    """Return how many tokens a mask's block has; transformers 4.57 gives their places instead."""
    length: int = (
        request["q_length"] if "q_length" in request else request["cache_position"].shape[0]
    )
    return length


def _checking(make: Callable[..., Any], attention: str) -> Callable[..., Any]:
    """Return `make`, a function that makes masks for an attention, with a capped cache's check."""

    @wraps(make)
    def checked(*args: Any, **request: Any) -> Any:
        if isinstance(slots := request.get("kv_length"), Slots):
            slots.check({**request, "attention": attention})
        return make(*args, **request)

    checked.kvcap_checks = True  # type: ignore[attr-defined]
    return checked


_warned = False


def _warn_uncapped() -> None:
    """Warn once a process that this model's memory has no cap."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "attn_implementation='kvcap' runs without a BudgetCache, so keys and values grow "
            "without a cap; call kvcap.cap(model, budget_tokens=…) once, or pass "
            "kvcap.BudgetCache(…) as its cache",
            stacklevel=2,
        )
