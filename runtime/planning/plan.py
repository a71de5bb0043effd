"""Plans what a run will hold in memory, in bytes, before anything is loaded.

A plan is made from the model's config and the headers of its weights. The cache's figures are
exact: the allocated cache equals them to the byte. So are the weights'. A block's workspace is an
estimate, unless a dry run has found it. Any backend makes plans, so PyTorch is imported only where
a model of transformers is planned.
"""

from __future__ import annotations

import copy
import warnings
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcap.runtime.cache.settings import (
    BLOCK_SIZE,
    BUDGET_TOKENS,
    GPU_BLOCK,
    CacheSettings,
    usual_block,
)
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.memory.free_memory import FreeMemory, free_memory, process_bytes
from kvcap.runtime.recall.settings import vectors_bytes
from kvcap.runtime.types import Positions
from kvcap.runtime.units import format_bytes, parse_bytes, with_margin

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from kvcap.runtime.cache.settings import SettingNames
    from kvcap.runtime.models.weights import Headers, Weights, WeightsSource

BLOCK_SIZES = [BLOCK_SIZE >> i for i in range(8)]  # tried in this order unless one is given
LARGE = f"the default on CUDA from {2 * GPU_BLOCK:,} slots on, where prompts are read faster"
LOADING = 64 << 20  # bytes: a tokenizer, the mapped file of weights, buffers of the first block
RUNNING = 16 << 20  # the last of these alone
TOKENISING = 450  # bytes for each byte of a text, while the tokenizers library has it
AUTO = "auto"  # a cap of all memory that is free


@dataclass(frozen=True, repr=False)
class MemoryPlan:
    """A plan of the bytes that each component of a run takes.

    `cache_bytes` is the sum that `--kv-budget` caps.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    ...                      hidden_size=64, head_dim=16, intermediate_size=128, vocab_size=100)
    >>> MemoryPlan.of(config, budget_tokens=64, block_size=16).cache_bytes
    48704
    """

    policy: str
    positions: Positions
    budget_tokens: int  # N, slots per KV head and layer kept after a block
    block_size: int  # T
    dtype: str
    keys_values: int
    slot_positions: int  # the tokens' positions, and their shifts where they may be compact
    policy_state: int
    evicted_store: int  # evicted tokens that a corrector keeps, where `evicted_in` says
    query_window: int
    rotation_table: int
    sliding_layers: int  # at most; layers that keep a sliding window of their own
    state_layers: int  # the states of recurrent layers
    workspace: int  # of a block; an estimate unless `rehearsed`
    logits: int
    weights: int
    weights_from: WeightsSource = "config"
    rehearsed: bool = False  # a dry run found the workspace
    baseline: int = 0  # bytes the process holds before the run; 0 where it has no cap
    trained_length: int = 0  # tokens that the model was trained on at once
    token_bytes: int = 0  # keys and values of one token in all layers that keep every token
    sliding_token_bytes: int = 0  # likewise in layers that keep a sliding window of their own
    sliding_window: int = 0  # tokens of that window
    least_kv_budget: int = 0  # bytes: the smallest cache that works for model and policy
    least_memory_cap: int = 0  # bytes: the smallest cap of the process, with a margin
    layers: str = ""  # what the model's layers hold, in words
    position_modes: str = ""  # how positions can be kept, in words
    not_exportable: str = ""  # why ONNX Runtime cannot run the model; '': it can
    kv_dtype: str | None = None  # of what slots hold; None: `dtype`
    weights_dtype: str | None = None  # of matrices; None: `dtype`, or the checkpoint's own
    evicted_in: str = ""  # 'device', 'host' or a directory with a file of them; '': none are kept
    recall_store: int = 0  # at most, beside the cache: the index of a conversation's text
    word_vectors: int = 0  # at most, beside the index; by them it is searched by meaning
    tokenising: int = (
        TOKENISING  # bytes for each byte of a text, while the model's tokenizer has it
    )
    block_why: str = ""  # why blocks have this size, in words; '': it was given, or is 128

    @property
    def summary(self) -> str:
        """Return one line: the policy, the slots it keeps, their bytes, blocks and positions."""
        return (
            f"{self.policy} keeps {self.budget_tokens:,} slots in "
            f"{format_bytes(self.cache_bytes)} of KV memory, blocks of {self.block_size:,}, "
            f"{self.positions} positions{f', {self.kv_dtype} slots' if self.kv_dtype else ''}"
        )

    def __repr__(self) -> str:
        return f"<MemoryPlan: {self.summary}; {format_bytes(self.total_bytes)} in all>"

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of the whole cache, as `BudgetCache.nbytes` counts a full one."""
        return (
            self.keys_values
            + self.slot_positions
            + self.policy_state
            + self.evicted_store
            + self.query_window
            + self.rotation_table
            + self.sliding_layers
            + self.state_layers
        )

    @property
    def run_bytes(self) -> int:
        """Return the bytes that the run adds: cache, index, workspace, logits and weights."""
        index = self.recall_store + (self.word_vectors if self.recall_store else 0)
        beside = index + self.workspace + self.logits + self.weights
        return self.cache_bytes + beside

    @property
    def total_bytes(self) -> int:
        """Return `run_bytes` and, under a cap of the whole process, the process before it."""
        return self.baseline + self.run_bytes

    def with_weights(self, weights: Weights) -> MemoryPlan:
        """Return the plan with other figures for the weights."""
        return replace(self, weights=weights.nbytes, weights_from=weights.source)

    def sized(self, settings: CacheSettings) -> CacheSettings:
        """Return the settings of a cache with this plan's sizes, positions and slots."""
        return replace(
            settings,
            budget_tokens=self.budget_tokens,
            block_size=self.block_size,
            positions=self.positions,
            kv_dtype=self.kv_dtype,
            kv_budget=None,
        )

    def uncapped_bytes(self, tokens: int) -> int:
        """Return the bytes of keys and values that an uncapped cache holds after so many tokens."""
        windowed = self.sliding_token_bytes * min(tokens, self.sliding_window)
        return self.token_bytes * tokens + windowed

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and the two sums, for `kvcap plan --json`."""
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
        *given: CacheSettings,
        dtype: torch.dtype | None = None,
        batch: int = 1,
        device: torch.device | str | None = None,
        memory_cap: str | int | None = None,
        headers: Headers | None = None,
        loaded: bool = False,
        rehearse: bool = False,
        weights: str | None = None,
        recall_store: int = 0,
        **named: Unpack[SettingNames],
    ) -> MemoryPlan:
        """Plan a run.

        Args:
            config: the model's transformers config, which stays as it is; of a wrapper, its text
                model is planned.
            given: whole `CacheSettings`, if not by name.
            dtype: the type of keys and values; the config's by default.
            batch: the number of sequences.
            device: of the run, which decides the default block; a CPU by default.
            memory_cap: bytes for the whole process, or 'auto' for all that is free; without a
                budget, the largest `N` and block that fit are taken.
            headers: headers of the files of weights, from `read_headers`; without them, the
                weights are counted from the config.
            loaded: whether the weights are in this process already.
            rehearse: find the workspace by a dry run, in about a second, and the least budget and
                cap that work.
            weights: 'int8' or 'int4', if matrices are rounded so, on a CPU.
            recall_store: bytes of the index by which a conversation finds its evicted text.
            named: settings of the cache by their names, as in `CacheSettings`.

        Raises:
            PlanInfeasible: nothing fits; the message names what would.
            ModelFilesBroken: the files of weights are not those of the config.
            UnsupportedModel: the matrices cannot be rounded as `weights` says.
        """
        import torch

        from kvcap.runtime.cache.layout import default_positions
        from kvcap.runtime.cache.slot_format import SlotFormat
        from kvcap.runtime.models.config import ModelShape
        from kvcap.runtime.models.packed import check_packing
        from kvcap.runtime.models.weights import weigh
        from kvcap.runtime.models.wrappers import text_config

        settings = CacheSettings.of(given, named)
        sizes = Sizes(settings, memory_cap)
        config = copy.deepcopy(config)  # models that are made of it to be weighed change it
        text = text_config(config)
        dtype = dtype or getattr(text, "dtype", None) or torch.float32
        eviction = settings.eviction
        if weights is not None:
            check_packing(config, dtype, "cpu", weights)
            if "output_projection" in eviction.observes:
                raise UnsupportedModel(
                    f"{eviction.name} weighs values by the output projection, which weights of "
                    f"{weights} do not have as numbers; choose a policy without criticalkv, or "
                    "leave --weights out"
                )
        shape, held = ModelShape.of(text), weigh(config, dtype, headers, weights)
        usual = sizes.usual(text)
        tokens, longest = sizes.slots(usual), sizes.longest(text)
        fixed = SlotFormat.of(settings.kv_dtype).unrotated
        positions = settings.positions or default_positions(shape, longest, unchanging=fixed)
        own = process_bytes() + (RUNNING - held.nbytes if loaded else LOADING)
        baseline = 0 if memory_cap is None else own
        model = ModelPlanner(
            text,
            replace(settings, positions=positions, evict_every=1),
            dtype,
            batch,
            held,
            weights,
            baseline,
            recall_store,
        )
        heads = len(shape.capped), shape.kv_heads
        if tokens is not None:
            eviction.check(tokens, *heads)
        # Compact positions count what is held, and stay where the model was trained.
        most = shape.longest_compact if positions != "true" else None
        search = PlanSearch(
            model.plan,
            sizes,
            eviction.least(*heads),
            shape.trained_length,
            model.rehearsed,
            most,
            usual_block(shape.most_slots - GPU_BLOCK, device, shape.most_slots),
        )
        block = usual_block(tokens or 0, device, shape.most_slots)
        if not eviction.policy.evicts and settings.budget_tokens is None:
            room = free_memory().nbytes + (held.nbytes if loaded else 0)
            usual = search.most_within(room, usual, block)
        plan = search.best(usual, block)
        if settings.block_size is None and plan.block_size > BLOCK_SIZE:
            plan = replace(plan, block_why=LARGE)
        if not rehearse:
            return plan
        least = search.exactly(search.smallest())
        return replace(
            search.exactly(plan),
            least_kv_budget=least.cache_bytes,
            least_memory_cap=with_margin(own + least.run_bytes),
        )


@dataclass(frozen=True)
class ModelPlanner:
    """A planner that plans one transformers model under one eviction policy, at any sizes."""

    config: Any  # of the text model
    settings: CacheSettings  # whose sizes are what is looked for
    dtype: torch.dtype
    batch: int
    weights: Weights
    packed: str | None
    baseline: int  # bytes of the process before, where it has a cap
    recall_store: int  # bytes

    def plan(self, tokens: int, block: int) -> MemoryPlan:
        """Return the plan of `tokens` slots and blocks of `block`, with an estimated workspace."""
        from kvcap.runtime.cache.layout import CacheLayout
        from kvcap.runtime.cache.slot_format import SlotFormat
        from kvcap.runtime.models.config import ModelShape

        config, eviction, dtype, batch = self.config, self.settings.eviction, self.dtype, self.batch
        positions = self.settings.positions
        assert positions is not None, "a plan knows how tokens count"
        shape = ModelShape.of(config, tokens + block)
        number = batch * dtype.itemsize  # bytes of one of every sequence's
        slides = [layer for layer in shape.layers if layer.window is not None]
        slots = SlotFormat.of(self.settings.kv_dtype)
        layout = CacheLayout(shape, eviction, tokens, block, positions, slots)
        kept = (
            shape.kv_heads * layout.longest if layout.pooled else max(map(sum, layout.allotments))
        )
        largest = kept + shape.kv_heads * block  # slots of a layer
        observed = eviction.policy.queries_observed
        rows = block if observed is None else observed  # queries whose attention is recomputed
        hidden = block * (4 * shape.hidden_size + 3 * shape.mlp_size) * dtype.itemsize
        # Norms after the output projection are taken one query head at a time.
        projected = 4 * block * shape.hidden_size * ("output_projection" in eviction.observes)
        rotated = 4 * largest * shape.head_size * 4 * any(layout.rotates)
        # Keys, and values beside them, in float32 and then in the model's type.
        rotated += largest * shape.head_size * (4 + 2 * dtype.itemsize) * slots.quantised
        attention = 3 * shape.groups * rows * largest * 4
        if (latent := shape.latent) is not None:
            numbers = shape.heads * latent.workspace(block, tokens + block)
            attention += numbers * dtype.itemsize
        sizes: dict[str, Any] = layout.nbytes(batch, dtype)
        return MemoryPlan(
            policy=eviction.name,
            positions=positions,
            budget_tokens=tokens,
            block_size=block,
            dtype=str(dtype).removeprefix("torch."),
            **sizes,
            workspace=batch * (hidden + rotated + attention + projected),
            logits=batch * shape.vocabulary * (dtype.itemsize + 4),
            weights=self.weights.nbytes,
            weights_from=self.weights.source,
            trained_length=shape.trained_length,
            token_bytes=number * sum(x.numbers for x in shape.layers if x.window is None),
            sliding_token_bytes=number * sum(layer.numbers for layer in slides),
            layers=shape.held,
            position_modes=shape.position_modes,
            not_exportable=shape.not_exportable,
            sliding_window=max((layer.window or 0 for layer in slides), default=0),
            kv_dtype=slots.name,
            weights_dtype=self.packed,
            evicted_in="" if eviction.corrector is None else eviction.corrector.place,
            recall_store=self.recall_store,
            word_vectors=vectors_bytes(shape.hidden_size),
        )

    def rehearsed(self, plan: MemoryPlan) -> MemoryPlan:
        """Return the plan with the workspace found by a dry run, and the process's own bytes."""
        from kvcap.runtime.planning.dry_run import rehearse_block

        if plan.rehearsed:
            return plan
        settings = plan.sized(self.settings)
        workspace = rehearse_block(self.config, settings, self.dtype, self.batch, self.packed)
        return replace(plan, workspace=workspace, rehearsed=True, baseline=self.baseline)


class Sizes(NamedTuple):
    """A set of sizes that a user requested; None leaves one to the plan."""

    cache: CacheSettings
    memory_cap: str | int | None = None  # bytes of the process, or 'auto'

    def usual(self, config: Any) -> int:
        """Return the slots where no size was given; as many as memory holds, at most.

        A policy that never evicts holds a text as long as the model was trained on.

        Args:
            config: of a text model.
        """
        evicts = self.cache.eviction.policy.evicts
        return BUDGET_TOKENS if evicts else int(config.max_position_embeddings)

    def longest(self, config: Any) -> int:
        """Return the slots of a head and its block; 0 where a number of bytes decides."""
        tokens = self.slots(self.usual(config))
        return 0 if tokens is None else tokens + self.cache.sizes[1]

    def config_for(self, config: Any) -> Any:
        """Return a text model's config as the model is to be loaded for these sizes.

        Compact positions count what is held, and automatic ones until they become compact; true
        ones count all that is read.
        """
        from kvcap.runtime.models.rope import with_one_rope

        reach = None if self.cache.positions == "true" else self.longest(config)
        return with_one_rope(config, reach)

    def slots(self, default: int) -> int | None:
        """Return the requested slots, or `default`; None where a number of bytes decides."""
        if self.cache.budget_tokens is not None:
            return self.cache.budget_tokens
        return default if self.cache.kv_budget is None and self.memory_cap is None else None


@dataclass(frozen=True)
class PlanSearch:
    """A search for the plan that fits the requested sizes, with the most slots where bytes decide.

    Args:
        plan: makes the plan of so many slots and so large a block.
        sizes: as requested.
        pinned: the fewest slots that the policy accepts.
        trained_length: tokens, beyond which a cap of the process takes no more slots.
        exactly: replaces a plan's estimate of the workspace by the workspace it will take.
        most: tokens that a head and its block may hold; None: any number.
        largest: the largest block to take where bytes decide and none was given.
    """

    plan: Callable[[int, int], MemoryPlan]
    sizes: Sizes
    pinned: int
    trained_length: int
    exactly: Callable[[MemoryPlan], MemoryPlan] = lambda plan: plan
    most: int | None = None
    largest: int = BLOCK_SIZE

    def best(self, tokens: int, block: int) -> MemoryPlan:
        """Return the plan; `tokens` and `block` are used where no sizes were given.

        Raises:
            PlanInfeasible: nothing fits, naming what would.
        """
        cap = None if self.sizes.memory_cap is None else parse_cap(self.sizes.memory_cap)
        slots, settings = self.sizes.slots(tokens), self.sizes.cache
        if settings.kv_budget is not None:
            plan = self.within_cache(parse_bytes(settings.kv_budget))
        elif slots is not None:
            plan = self.plan(slots, settings.block_size or block)
        else:
            assert cap is not None
            plan = self.within_process(cap)
        return plan if cap is None else fitting(self.exactly(plan), cap)

    def smallest(self) -> MemoryPlan:
        """Return the plan that takes the least memory."""
        return self.plan(self._fewest(self._blocks[-1]), self._blocks[-1])

    def most_within(self, nbytes: int, tokens: int, block: int) -> int:
        """Return the most slots, up to `tokens`, whose run takes at most `nbytes`; at least one.

        A block of `block` is used where none was given.
        """
        size = self.sizes.cache.block_size or block
        larger = range(2, tokens + 1)
        return 1 + bisect_right(larger, nbytes, key=lambda n: self.plan(n, size).run_bytes)

    def within_cache(self, nbytes: int) -> MemoryPlan:
        """Return the plan with the most slots whose cache fits `nbytes`.

        A block that was not given is halved until it takes at most a third of the slots.

        Raises:
            PlanInfeasible: too few slots fit, naming the bytes that would do.
        """
        for block in self._blocks:
            fixed = self.plan(0, block).cache_bytes  # bytes grow by the same step with every slot
            step = self.plan(1, block).cache_bytes - fixed
            tokens = (nbytes - fixed) // step
            if self.most is not None:
                tokens = min(tokens, self.most - block)
            while tokens > 0 and self.plan(tokens, block).cache_bytes > nbytes:
                tokens -= 1  # layer budgets may round the rotation table up
            if tokens >= self._fewest(block):
                return self.plan(tokens, block)
        least = self.smallest()
        raise PlanInfeasible(
            f"a cache of {nbytes:,} bytes is too small for {least.policy} and blocks of "
            f"{least.block_size:,}; the least that works is {least.cache_bytes:,} bytes"
            + (", less with a smaller block" if (self.sizes.cache.block_size or 1) > 1 else ""),
            least_kv_budget=least.cache_bytes,
        )

    def within_process(self, cap: int) -> MemoryPlan:
        """Return the plan with the most slots whose process stays within `cap` bytes.

        A block that was not given is the largest that leaves room for twice its slots.

        Raises:
            PlanInfeasible: not even the least fits, naming what would.
        """
        least = self.exactly(self.smallest())
        if least.total_bytes > cap:
            raise PlanInfeasible(
                f"even {_needs(least)}, more than the cap of {cap:,}; raise it to "
                f"{with_margin(least.total_bytes) >> 20}MiB, or take a smaller model or dtype",
                least_memory_cap=with_margin(least.total_bytes),
            )
        plans = (self._most_slots(block, cap) for block in self._blocks)
        return next(plan for plan in plans if plan is not None)  # the least fits, so one does

    def _most_slots(self, block: int, cap: int) -> MemoryPlan | None:
        """Return the plan of such blocks with the most slots within `cap` bytes, or None."""
        fewest = tokens = self._fewest(block)
        plan = self.exactly(self.plan(tokens, block))
        if plan.total_bytes > cap:
            return None
        most = max(fewest, min(self.trained_length, self.most or self.trained_length) - block)
        step = self.plan(fewest + 1, block).total_bytes - self.plan(fewest, block).total_bytes
        for _ in range(4):  # the workspace grows with the slots too, nearly evenly
            more = (cap - plan.total_bytes) // step
            if not more or (more > 0 and tokens == most):
                break
            tokens = min(most, max(fewest, tokens + more))
            plan = self.exactly(self.plan(tokens, block))
        while plan.total_bytes > cap:
            tokens = max(fewest, tokens - max(1, -((cap - plan.total_bytes) // step)))
            plan = self.exactly(self.plan(tokens, block))
        return plan

    @property
    def _blocks(self) -> list[int]:
        """Return the sizes of a block that may be taken, the largest first."""
        block_size = self.sizes.cache.block_size
        return (
            [*dict.fromkeys([self.largest, *BLOCK_SIZES])] if block_size is None else [block_size]
        )

    def _fewest(self, block: int) -> int:
        """Return the fewest slots for such blocks: at least twice a block that was not given."""
        return max(1, self.pinned, 2 * block if self.sizes.cache.block_size is None else 0)


def parse_cap(cap: str | int) -> int:
    """Return the bytes of a cap for the whole process.

    'auto' stands for what the process has and all that is free.

    Raises:
        PlanInfeasible: `cap` is neither 'auto' nor a size.
    """
    return process_bytes() + free_memory().nbytes if cap == AUTO else parse_bytes(cap)


def fitting(plan: MemoryPlan, cap: int) -> MemoryPlan:
    """Return the plan if its process stays within `cap` bytes; else refuse it.

    Raises:
        PlanInfeasible: the process would take more; the message names the cap that would do.
    """
    if plan.total_bytes > cap:
        raise PlanInfeasible(
            f"{_needs(plan)}, more than the cap of {cap:,}; raise it to "
            f"{with_margin(plan.total_bytes) >> 20}MiB, or leave the KV budget out to have the "
            "largest taken that fits",
            least_memory_cap=with_margin(plan.total_bytes),
        )
    return plan


def _needs(plan: MemoryPlan) -> str:
    """Say how many bytes a plan takes, in all and by part."""
    rest = plan.workspace + plan.logits
    index = ""
    if plan.recall_store:
        index = f"the index of recall {plan.recall_store:,}, word vectors {plan.word_vectors:,}, "
    return (
        f"{plan.budget_tokens:,} slots and blocks of {plan.block_size:,} need "
        f"{plan.total_bytes:,} bytes (the process {plan.baseline:,}, weights {plan.weights:,}, "
        f"{index}the cache {plan.cache_bytes:,}, a block {rest:,})"
    )


def warn_if_short(plan: MemoryPlan, free: FreeMemory, memory_cap: str | int | None = None) -> None:
    """Warn where a run, or the cap it is given, takes more memory than is free.

    It is no error, as there may be swap, and others may give memory back.

    Args:
        plan: made before anything of the run was in memory.
        free: what the process may still take.
        memory_cap: bytes for the whole process, if there is such a cap.
    """
    held = process_bytes()
    capped = 0 if memory_cap in (None, AUTO) else parse_cap(memory_cap) - held
    if (needed := max(plan.run_bytes, capped)) > free.nbytes:
        reason = "the plan needs" if needed == plan.run_bytes else "the cap allows"
        warnings.warn(
            f"{reason} {needed:,} bytes more than this process has, and {free.nbytes:,} are free "
            f"({free.source}); the largest --memory-cap that there is memory for is about "
            f"{(held + free.nbytes) >> 20}MiB",
            stacklevel=2,
        )
