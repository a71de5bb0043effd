"""Holds the settings of a cache in one object, which is passed on whole.

Names, defaults and checks of all of them are here; what a policy or a model refuses, these say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict, get_args

from kvcap.runtime.errors import PlanInfeasible
from kvcap.runtime.types import DEFAULT_POLICY, Positions

if TYPE_CHECKING:  # PyTorch stands behind them
    from kvcap.policies import Eviction, Policy

BUDGET_TOKENS, BLOCK_SIZE = 256, 128  # where neither is asked for and bytes are not few
MOST = 1 << 40  # tokens: PyTorch cannot count the bytes of many more
GPU_BLOCK = 512  # on CUDA, where it is at most half the slots: prompts are read much faster
IN_BYTES = (
    "{}: use a whole number of tokens from 1, such as 1024; for a size in bytes give a Runtime or "
    "a plan kv_budget='64MiB', and a cache kvcap.MemoryPlan.of(model.config, kv_budget='64MiB')"
    ".budget_tokens, with the policy and block_size that it gets"
)
"""Refuses a size in bytes where tokens are counted."""


class SettingNames(TypedDict, total=False):
    """Names the settings of a cache for keyword arguments; see `CacheSettings`."""

    budget_tokens: int | None
    block_size: int | None
    policy: str | Eviction | Policy
    positions: Positions | None
    evict_every: int | None
    kv_dtype: str | None
    sink_tokens: int | None
    kv_budget: str | int | None


@dataclass(frozen=True)
class CacheSettings:
    """Says how much a cache keeps, what it evicts, and how it holds the rest.

    `kvcap.cap`, `BudgetCache`, `MemoryPlan.of` and `Runtime.from_pretrained` take it whole, or by
    name: `cap(model, CacheSettings(budget_tokens=1024))` is `cap(model, budget_tokens=1024)`. The
    command line has its fields as options of the same names, such as `--budget-tokens`.

    Args:
        budget_tokens: slots per KV head and layer that stay after every block (`N`); 256 if no
            budget is given. A plan and a `Runtime` take the model's context, or what memory holds
            of it, for a policy that never evicts.
        block_size: tokens read at once (`T`); by default 128, on CUDA 512 from 1,024 slots on, and
            fewer under a small budget in bytes.
        policy: a name (see `kvcap policies`), an `Eviction` from `load_policy` or a `Policy`.
        positions: 'compact', 'true' or 'auto': true as long as the text fits the length that the
            model was trained on, compact from then on. The default is compact if that is exact and
            the model has kvcap's attention, else true. Under M-RoPE it is exact for text alone, so
            a model that also reads images has true positions.
        evict_every: number of generated tokens between evictions, at most `block_size`. With 1 an
            answer never holds more than its budget, and sessions can be answered together
            (`Batch`). None: 64 in a `Runtime` on a CPU, 1 otherwise.
        kv_dtype: 'int8', 'int8-int4' (keys in 8 bits, values in 4) or 'int4' to quantise what
            slots hold, so that the same bytes hold more of them, with kvcap's attention; by default
            they hold the model's own numbers.
        sink_tokens: first tokens that are never evicted, the attention sink; 4 by default, fewer
            if the policy leaves less than 32 slots unpinned. With 0 the policy pins only what its
            paper pins.
        kv_budget: in place of `budget_tokens`, bytes for the whole cache, an integer or such as
            '256KiB' or '2GB': a plan takes the most slots that fit.

    Raises:
        PlanInfeasible: a size is no whole number from 1, there are two budgets, `evict_every` is
            above the block, or the positions are unknown.

    >>> CacheSettings(budget_tokens=64, policy="keydiff").eviction.name
    'keydiff'
    """

    budget_tokens: int | None = None
    block_size: int | None = None
    policy: str | Eviction | Policy = DEFAULT_POLICY
    positions: Positions | None = None
    evict_every: int | None = 1
    kv_dtype: str | None = None
    sink_tokens: int | None = None
    kv_budget: str | int | None = None

    def __post_init__(self) -> None:
        for name in ("budget_tokens", "block_size", "evict_every"):
            if (size := getattr(self, name)) is not None:
                check_size(name, size)
        if self.budget_tokens is not None and self.kv_budget is not None:
            raise PlanInfeasible("give budget_tokens or kv_budget (bytes), not both")
        if self.evict_every and self.block_size and self.evict_every > self.block_size:
            raise PlanInfeasible(
                f"evict_every={self.evict_every}, block_size={self.block_size}: evict every 1 to "
                "block_size tokens"
            )
        if self.positions not in (None, *get_args(Positions)):
            raise PlanInfeasible(
                f"positions={self.positions!r}: use 'compact', 'true' or 'auto' (true until the "
                "length that the model was trained on would be left, then compact)"
            )

    @classmethod
    def of(cls, given: Sequence[Any], named: Mapping[str, Any], *order: str) -> CacheSettings:
        """Return the settings that a caller gave whole or one by one.

        Args:
            given: by position: `CacheSettings`, or settings in an order.
            named: by name; they replace those that were given whole.
            *order: the names of settings that may be given by position.
        """
        whole, rest = cls(), given
        if given and isinstance(given[0], cls):
            whole, *rest = given
        if len(rest) > len(order):
            raise TypeError(f"{rest[len(order)]!r}: give settings of a cache by their names")
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in named if name not in known]:
            raise TypeError(f"no setting {unknown[0]!r} of a cache; known: {', '.join(known)}")
        return replace(whole, **dict(zip(order, rest, strict=False)), **named)

    @property
    def sizes(self) -> tuple[int, int]:
        """Return slots per KV head and layer, and tokens of a block, where no plan says them."""
        return self.budget_tokens or BUDGET_TOKENS, self.block_size or BLOCK_SIZE

    @cached_property
    def eviction(self) -> Eviction:
        """Return the policy with all its parts, and the first tokens that are pinned besides.

        Raises:
            PolicyError: unknown names, refused values.
        """
        from kvcap.policies import as_eviction

        return as_eviction(self.policy, self.sink_tokens)


def usual_block(tokens: int, device: Any, most: int) -> int:
    """Return the tokens of a block for so many slots where none are asked for.

    Args:
        tokens: slots of a head.
        device: of the run; None stands for a CPU.
        most: slots that the model can use, or was trained with.
    """
    large = str(device).startswith("cuda") and tokens >= 2 * GPU_BLOCK
    return GPU_BLOCK if large and tokens + GPU_BLOCK <= most else BLOCK_SIZE


def check_size(name: str, size: Any) -> None:
    """Refuse a size that is no whole number from 1, or beyond all memory.

    Raises:
        PlanInfeasible: it is none.
    """
    if isinstance(size, str):
        raise PlanInfeasible(IN_BYTES.format(f"{name}={size!r}"))
    if type(size) is not int or not 1 <= size <= MOST:
        upto = f" to {MOST:,}" if type(size) is int and size > MOST else ""
        raise PlanInfeasible(f"{name}={size!r}: use a whole number of tokens from 1{upto}")
