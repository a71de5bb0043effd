"""Finds the memory that reading a block takes, by a dry run without data.

The model runs once on fake tensors, which have sizes and no contents, over a cache as full as it
gets, while every storage that is allocated and freed is counted. No weights or activations exist,
so a model of any size can be run dry anywhere, in about a second. Memory that kernels allocate
internally is not seen; on a CPU it is negligible (tests/runtime/planning/test_dry_run.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from kvcap.policies import Eviction
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.slot_format import KvDtype
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.arguments import cache_argument
from kvcap.runtime.models.packed import PackedDtype, pack
from kvcap.runtime.types import ATTENTION, Positions


def rehearse_block(
    config: Any,
    eviction: Eviction,
    budget_tokens: int,
    block_size: int,
    dtype: torch.dtype,
    positions: Positions,
    batch: int = 1,
    kv_dtype: KvDtype | None = None,
    packed: PackedDtype | None = None,
) -> int:
    """The most bytes that reading one block takes beyond weights and cache, with its logits.

    Decisions that depend on data cannot run dry: budgets that move between heads or layers are
    taken as even ones.

    Args:
        config: the model's transformers config.
        eviction: what is evicted.
        budget_tokens: slots per KV head and layer (`N`), all in use.
        block_size: tokens of the block (`T`).
        dtype: of weights, keys and values.
        positions: 'compact', 'true' or 'auto': the change is rehearsed then, too.
        batch: sequences.
        kv_dtype: of what slots hold, as in `BudgetCache`.
        packed: of matrices, with which `check_packing` agreed.

    Raises:
        UnsupportedModel: what the model computes depends on its data, so that it has no dry run.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=dtype)
        model.eval()
        if packed is not None:
            pack(model, packed)
        cache = BudgetCache(
            config, budget_tokens, block_size, data_independent(eviction), positions=positions,
            kv_dtype=kv_dtype,
        )  # fmt: skip
        cache.allocate(batch, dtype, "cpu")
        longest = min(block_size, budget_tokens) if not eviction.policy.evicts else block_size
        ids = torch.zeros(batch, longest, dtype=torch.long)
        tally = Tally((*model.parameters(), *model.buffers(), *cache.buffers(), ids))
        with tally:
            pretend_full(cache)  # native sliding layers replace what they hold
            held = tally.peak = tally.now
            if cache.leaves_window(longest):
                cache.become_compact()
                cache.enable_rotation()
            with cache.passing(ForwardContext(cache.next_position)):
                try:
                    model(
                        input_ids=ids,
                        position_ids=ids,
                        **cache_argument(model, cache),
                        use_cache=True,
                        logits_to_keep=1,
                    )
                except DynamicOutputShapeException as error:
                    raise UnsupportedModel(
                        f"the memory that {type(model).__name__} takes depends on its data here, "
                        "as its experts run one by one; use transformers 5, or a cap of the cache "
                        "(kv_budget) in place of one of the process"
                    ) from error
    return tally.peak - held


def pretend_full(cache: BudgetCache) -> None:
    """Mark every slot as used, as after a very long text; what the slots hold is not touched."""
    shape, block = cache.layout.shape, cache.block_size
    for layer in cache.capped_layers:
        spare = 0 if cache.eviction.policy.evicts else block
        layer.restore_counters(
            shape.trained_length, [max(0, s.budget - spare) for s in layer.segments]
        )
        layer.enable_rotation()
    cache.count_stores_full()
    for state in cache.state_layers.values():
        state.seen, state.has_previous_state[0] = shape.trained_length, True
    segment = cache.capped_layers[0].segments[0]
    like = segment.pool.keys.new_empty(0, dtype=segment.pool.dtype)
    for index, layer in cache.sliding_layers.items():
        # It keeps the end of what it and a block had together.
        size = layer.sliding_window - 1
        own = shape.layers[index]
        slots = (segment.batch, own.kv_heads, size + block, own.head_size)
        layer.keys = like.new_zeros(*slots)[:, :, -size:]
        layer.values = like.new_zeros(*slots)[:, :, -size:]
        layer.dtype, layer.device, layer.is_initialized = like.dtype, like.device, True
        layer.cumulative_length = shape.trained_length


class Tally(TorchDispatchMode):
    """Counts the bytes of tensors' storages as they come and go, and their peak.

    Args:
        known: tensors that exist already, whose storages are not counted.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = {x.untyped_storage()._cdata for x in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count the storages it returned."""
        if str(func) == "aten._grouped_mm.default" and args[0].dtype != torch.bfloat16:
            # Experts: torch knows the sizes in bfloat16 alone, and computes in others too.
            found = args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        else:
            found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        weakref.finalize(storage, self._release, key, nbytes)
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def _release(self, key: int, nbytes: int) -> None:
        self.now -= nbytes
        self._known.discard(key)


def data_independent(eviction: Eviction) -> Eviction:
    """The eviction without the parts whose control flow depends on the data."""
    changes: dict[str, Any] = {}
    for slot in ("head_budget", "layer_budget"):
        if getattr(getattr(eviction, slot), "moves", False):
            changes[slot] = None
    return replace(eviction, **changes) if changes else eviction
