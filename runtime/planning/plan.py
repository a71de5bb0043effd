"""What a run will hold in memory, in bytes, from the model's config and its files' headers alone.

The cache's figures are exact: the allocated cache equals them to the byte. So are the weights',
from their files' headers or else the config. A block's workspace is an estimate and says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcap.runtime.errors import PlanInfeasible
from kvcap.runtime.memory.free_memory import FreeMemory, free_memory, process_bytes
from kvcap.runtime.units import parse_bytes, roomy, size

if TYPE_CHECKING:  # a plan is of any backend, and some have no PyTorch
    import torch

    from kvcap.policies import Eviction
    from kvcap.runtime.models.weights import Headers, Weights, WeightsSource
    from kvcap.runtime.types import Positions


LOADING = 64 << 20  # a tokenizer, the mapped file of weights, buffers of the first block
RUNNING = 16 << 20  # the last of these alone
AUTO = "auto"


@dataclass(frozen=True, repr=False)
class MemoryPlan:
    """Bytes per component of a run. `cache` is the sum that a `--kv-budget` caps.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    ...                      hidden_size=64, head_dim=16, intermediate_size=128, vocab_size=100)
    >>> MemoryPlan.of(config, kv_budget_tokens=64, block_size=16).cache_bytes
    48704
    """

    policy: str
    positions: Positions
    budget_tokens: int  # N, slots per KV head and layer kept after a block
    block_size: int  # T
    dtype: str
    keys_values: int
    slot_positions: int  # the tokens' positions, and in compact mode their shifts
    policy_state: int
    evicted_store: int  # evicted tokens that a corrector keeps, in memory or in a file
    query_window: int
    rotation_table: int
    sliding_layers: int  # at most, native layers with a window of their own
    workspace: int  # of a block, one layer at a time; an estimate unless `rehearsed`
    logits: int
    weights: int
    weights_from: WeightsSource = "config"
    rehearsed: bool = False  # the workspace was found by running a block without data
    baseline: int = 0  # the process before any of this, where a cap for all of it was given
    trained_length: int = 0  # tokens that the model was trained on at once
    token_bytes: int = 0  # keys and values of one token in all layers that keep every token
    sliding_token_bytes: int = 0  # the same in layers that keep a window of their own, of
    sliding_window: int = 0  # so many tokens
    least_kv_budget: int = 0  # bytes: the smallest cache that works for model and policy
    least_memory_cap: int = 0  # bytes: the smallest cap of a process, with some room

    @property
    def summary(self) -> str:
        """What is kept in how much, on one line."""
        return (
            f"{self.policy} keeps {self.budget_tokens:,} slots in {size(self.cache_bytes)} of KV "
            f"memory, blocks of {self.block_size:,}, {self.positions} positions"
        )

    def __repr__(self) -> str:
        return f"<MemoryPlan: {self.summary}; {size(self.total_bytes)} in all>"

    @property
    def cache_bytes(self) -> int:
        """Everything the cache holds: what `BudgetCache.nbytes` counts once it is full."""
        return (
            self.keys_values
            + self.slot_positions
            + self.policy_state
            + self.evicted_store
            + self.query_window
            + self.rotation_table
            + self.sliding_layers
        )

    @property
    def run_bytes(self) -> int:
        """Cache, workspace, logits and weights: what a process takes beyond itself."""
        return self.cache_bytes + self.workspace + self.logits + self.weights

    @property
    def total_bytes(self) -> int:
        """The same and, where a cap for all of it was given, the process itself."""
        return self.baseline + self.run_bytes

    def with_weights(self, weights: Weights) -> MemoryPlan:
        """The plan with weights that were counted in another way."""
        return replace(self, weights=weights.nbytes, weights_from=weights.source)

    def uncapped_bytes(self, tokens: int) -> int:
        """Keys and values of a cache without a cap that has read so many tokens."""
        windowed = self.sliding_token_bytes * min(tokens, self.sliding_window)
        return self.token_bytes * tokens + windowed

    def as_dict(self) -> dict[str, Any]:
        """All fields and the two sums, for `kvcap plan --json`."""
        return {
            **asdict(self),
            "cache_bytes": self.cache_bytes,
            "total_bytes": self.total_bytes,
            "fits": True,
        }

    @classmethod
    def of(
        cls,
        config: Any,
        *,
        policy: str | Eviction = "keydiff",
        kv_budget_tokens: int | None = None,
        kv_budget: str | int | None = None,
        block_size: int | None = None,
        dtype: torch.dtype | None = None,
        positions: Positions | None = None,
        batch: int = 1,
        memory_cap: str | int | None = None,
        headers: Headers | None = None,
        loaded: bool = False,
        rehearse: bool = False,
    ) -> MemoryPlan:
        """Plan a run.

        Args:
            config: the model's transformers config.
            policy: a name or an `Eviction`.
            kv_budget_tokens: slots per KV head and layer (`N`); or else
            kv_budget: bytes for the whole cache, an integer or such as '256KiB' or '2GB': the
                largest `N` that fits is taken.
            block_size: tokens read at once; by default 128, less where bytes are few.
            dtype: of keys and values; the config's by default.
            positions: 'compact' or 'true'; compact where exact by default.
            batch: sequences.
            memory_cap: bytes for the whole process, as it is now with weights, cache and
                workspace, or 'auto'; alone, it takes the largest `N` and block that fit.
            headers: of the files of weights, from `read_headers`; without them, the weights are
                those of the config.
            loaded: the weights are in this process already.
            rehearse: find the workspace exactly (on a CPU), in a second or so; and the least
                budget and cap that work.

        Raises:
            PlanInfeasible: nothing fits, naming what would.
            ModelFilesBroken: the files of weights are not those of the config.
        """
        import torch

        from kvcap.policies import load_policy
        from kvcap.runtime.cache.layout import default_positions
        from kvcap.runtime.models.config import ModelShape
        from kvcap.runtime.models.weights import weigh

        whole, config = config, config.get_text_config(decoder=True)
        dtype = dtype or getattr(config, "dtype", None) or torch.float32
        shape = ModelShape.of(config)
        weights = weigh(whole, dtype, headers)
        eviction = load_policy(policy) if isinstance(policy, str) else policy
        positions = positions or default_positions(shape)
        plan = partial(_plan, config, eviction, dtype, positions, batch, weights)
        heads = (len(shape.capped), shape.kv_heads)
        own = process_bytes() + (RUNNING - weights.nbytes if loaded else LOADING)
        cap = None if memory_cap is None else parse_cap(memory_cap)
        exactly = partial(_rehearsed, config, eviction, dtype, batch, 0 if cap is None else own)
        if kv_budget is not None and kv_budget_tokens is not None:
            raise PlanInfeasible("give kv_budget_tokens or kv_budget (bytes), not both")
        if kv_budget is not None:
            found = largest(plan, parse_bytes(kv_budget), block_size, eviction.least(*heads))
        elif kv_budget_tokens is None and cap is not None:
            # Compact positions count what is held, and stay where the model was trained.
            most = shape.trained_length
            found = within(plan, exactly, cap, block_size, eviction.least(*heads), most)
        else:
            tokens = 256 if kv_budget_tokens is None else kv_budget_tokens
            eviction.check(tokens, *heads)
            found = plan(tokens, BLOCK_SIZE if block_size is None else block_size)
        if cap is not None:
            found = fitting(found if found.rehearsed else exactly(found), cap)
        if not rehearse:
            return found
        least = exactly(smallest(plan, block_size, eviction.least(*heads)))
        return replace(
            found if found.rehearsed else exactly(found),
            least_kv_budget=least.cache_bytes,
            least_memory_cap=roomy(own + least.run_bytes),
        )


def check_tokens(tokens: Any) -> None:
    """Refuse a budget that is no number of slots.

    Raises:
        PlanInfeasible: it is none.
    """
    if type(tokens) is not int or tokens < 1:
        raise PlanInfeasible(f"a budget of {tokens!r} slots cannot be; use a whole number above 0")


def parse_cap(cap: str | int) -> int:
    """Bytes of a cap for the whole process: a size, or 'auto' for what it has and all that is free.

    Raises:
        PlanInfeasible: neither.
    """
    return process_bytes() + free_memory().nbytes if cap == AUTO else parse_bytes(cap)


def _plan(
    config: Any,
    eviction: Eviction,
    dtype: torch.dtype,
    positions: Positions,
    batch: int,
    weights: Weights,
    tokens: int,
    block: int,
) -> MemoryPlan:
    from kvcap.runtime.cache.layout import CacheLayout
    from kvcap.runtime.models.config import ModelShape, layer_kinds

    shape = ModelShape.of(config, tokens + block)
    kinds = layer_kinds(config)
    token = 2 * batch * shape.kv_heads * shape.head_size * dtype.itemsize  # of one layer
    layout = CacheLayout(shape, eviction, tokens, block, positions)
    largest = max(map(sum, layout.allotments)) + shape.kv_heads * block  # slots of a layer
    observed = eviction.policy.queries_observed
    rows = block if observed is None else observed  # queries whose attention is recomputed
    hidden = block * (4 * shape.hidden_size + 3 * shape.mlp_size) * dtype.itemsize
    # Norms after the output projection are taken one query head at a time.
    projected = 4 * block * shape.hidden_size * ("output_projection" in eviction.observes)
    rotated = 4 * largest * shape.head_size * 4 * any(layout.rotates)
    sizes: dict[str, Any] = layout.nbytes(batch, dtype)
    return MemoryPlan(
        policy=eviction.name,
        positions=positions,
        budget_tokens=tokens,
        block_size=block,
        dtype=str(dtype).removeprefix("torch."),
        **sizes,
        workspace=batch * (hidden + rotated + 3 * shape.groups * rows * largest * 4 + projected),
        logits=batch * shape.vocabulary * (dtype.itemsize + 4),
        weights=weights.nbytes,
        weights_from=weights.source,
        trained_length=shape.trained_length,
        token_bytes=token * kinds.count("full_attention"),
        sliding_token_bytes=token * kinds.count("sliding_attention"),
        sliding_window=getattr(config, "sliding_window", None) or 0,
    )


def _rehearsed(
    config: Any,
    eviction: Eviction,
    dtype: torch.dtype,
    batch: int,
    baseline: int,
    plan: MemoryPlan,
) -> MemoryPlan:
    """The plan with the workspace that a rehearsal finds, beside the process as it is."""
    from kvcap.runtime.planning.dry_run import rehearse_block

    sizes = (plan.budget_tokens, plan.block_size, dtype, plan.positions, batch)
    workspace = rehearse_block(config, eviction, *sizes)
    return replace(plan, workspace=workspace, rehearsed=True, baseline=baseline)


def warn_if_short(plan: MemoryPlan, free: FreeMemory, memory_cap: str | int | None = None) -> None:
    """Warn where a run, or the cap it is given, takes more than there is.

    Only a warning: there may be swap, and others may give memory back.

    Args:
        plan: made before anything of the run was in memory.
        free: what the process may still take.
        memory_cap: bytes for the whole process, if there is such a cap.
    """
    held = process_bytes()
    capped = 0 if memory_cap in (None, AUTO) else parse_cap(memory_cap) - held
    if (needed := max(plan.run_bytes, capped)) > free.nbytes:
        what = "the plan needs" if needed == plan.run_bytes else "the cap allows"
        warnings.warn(
            f"{what} {needed:,} bytes more than this process has, and {free.nbytes:,} are free "
            f"({free.source}); the largest --memory-cap that there is memory for is about "
            f"{(held + free.nbytes) >> 20}MiB",
            stacklevel=2,
        )


BLOCK_SIZE = 128  # unless bytes are few
SIZES = [BLOCK_SIZE >> i for i in range(8)]  # of blocks, where none is asked for


def largest(
    plan: Callable[[int, int], MemoryPlan], cap: int, block: int | None, pinned: int
) -> MemoryPlan:
    """The plan with the most slots whose cache fits `cap` bytes.

    Args:
        plan: makes one of so many slots and tokens of a block.
        cap: bytes of the cache.
        block: as the user chose it; else it is halved until it takes at most a third of the slots.
        pinned: the fewest slots that the policy accepts.

    Raises:
        PlanInfeasible: too few slots fit, naming the bytes that would do.
    """
    for length in [block] if block else SIZES:
        fixed = plan(0, length).cache_bytes  # bytes grow by the same step with every slot
        step = plan(1, length).cache_bytes - fixed
        tokens = (cap - fixed) // step
        while tokens > 0 and plan(tokens, length).cache_bytes > cap:
            tokens -= 1  # layer budgets may round the rotation table up
        if tokens >= least_slots(length, block, pinned):
            return plan(tokens, length)
    least = smallest(plan, block, pinned)
    raise PlanInfeasible(
        f"a cache of {cap:,} bytes is too small for {least.policy} and blocks of "
        f"{least.block_size:,}; the least that works is {least.cache_bytes:,} bytes"
        + (", less with a smaller block" if block and block > 1 else ""),
        least_kv_budget=least.cache_bytes,
    )


def least_slots(size: int, block: int | None, pinned: int) -> int:
    """The fewest slots beside blocks of `size`, which were asked for if they equal `block`."""
    return max(1, pinned, 0 if block else 2 * size)


def smallest(plan: Callable[[int, int], MemoryPlan], block: int | None, pinned: int) -> MemoryPlan:
    """The plan that takes the least memory."""
    size = block or SIZES[-1]
    return plan(least_slots(size, block, pinned), size)


def within(
    plan: Callable[[int, int], MemoryPlan],
    exactly: Callable[[MemoryPlan], MemoryPlan],
    cap: int,
    block: int | None,
    pinned: int,
    trained_length: int,
) -> MemoryPlan:
    """The plan with the most slots whose process stays within `cap` bytes.

    Args:
        plan: makes one of so many slots and tokens of a block.
        exactly: the same plan with the workspace that it really takes.
        cap: bytes of the process.
        block: as the user chose it; else the largest that leaves room for twice its slots.
        pinned: the fewest slots that the policy accepts.
        trained_length: tokens, beyond which no more are taken.

    Raises:
        PlanInfeasible: not even the least fits, naming what would.
    """
    least = exactly(smallest(plan, block, pinned))
    fits = least.total_bytes <= cap
    for length in ([block] if block else SIZES) if fits else []:
        fewest = least_slots(length, block, pinned)
        found = exactly(plan(fewest, length))
        if found.total_bytes > cap:
            continue
        most = max(fewest, trained_length - length)
        step = plan(fewest + 1, length).total_bytes - plan(fewest, length).total_bytes
        tokens = fewest
        for _ in range(4):  # the workspace grows with the slots too, nearly evenly
            more = (cap - found.total_bytes) // step
            if not more or (more > 0 and tokens == most):
                break
            tokens = min(most, max(fewest, tokens + more))
            found = exactly(plan(tokens, length))
        while found.total_bytes > cap:
            tokens = max(fewest, tokens - max(1, -((cap - found.total_bytes) // step)))
            found = exactly(plan(tokens, length))
        return found
    raise PlanInfeasible(
        f"{_parts(least)} at the least, with {least.budget_tokens:,} slots and blocks of "
        f"{least.block_size:,}, more than the cap of {cap:,}; raise it to "
        f"{roomy(least.total_bytes) >> 20}MiB, or take a smaller model or dtype",
        least_memory_cap=roomy(least.total_bytes),
    )


def fitting(plan: MemoryPlan, cap: int) -> MemoryPlan:
    """The plan, if its process stays within `cap` bytes.

    Raises:
        PlanInfeasible: it does not.
    """
    if plan.total_bytes > cap:
        raise PlanInfeasible(
            f"{_parts(plan)} for {plan.budget_tokens:,} slots and blocks of "
            f"{plan.block_size:,}, more than the cap of {cap:,}; raise it to "
            f"{roomy(plan.total_bytes) >> 20}MiB, or leave the KV budget out to have the largest "
            "taken that fits",
            least_memory_cap=roomy(plan.total_bytes),
        )
    return plan


def _parts(plan: MemoryPlan) -> str:
    """What makes up the total, in words."""
    rest = plan.workspace + plan.logits
    return (
        f"the process takes {plan.baseline:,} bytes, weights {plan.weights:,}, the cache "
        f"{plan.cache_bytes:,} and a block {rest:,}, together {plan.total_bytes:,},"
    )
