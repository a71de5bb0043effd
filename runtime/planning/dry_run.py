"""Finds the memory that reading a block takes, by a dry run without data.

The model runs once on fake tensors, which have sizes and no contents, over a cache as full as it
gets, while every storage that is allocated and freed is counted. No weights or activations exist,
so a model of any size can be run dry anywhere, in about a second. Memory that kernels allocate
internally is not seen, but for a CPU's attention, whose rule is known; what is left is negligible
(tests/runtime/planning/test_dry_run.py).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.pool import Segment, resize
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.arguments import cache_argument
from kvcap.runtime.models.packed import pack
from kvcap.runtime.types import ATTENTION

ENOUGH = 3  # layers that are alike: the first, one between others, and the last


def rehearse_block(
    config: Any,
    settings: CacheSettings,
    dtype: torch.dtype,
    batch: int = 1,
    packed: str | None = None,
) -> int:
    """Return the most bytes that reading one block takes beyond weights and cache, with its logits.

    Decisions that depend on data cannot run dry. Where slots move between heads or layers, all
    `DIVISIONS` are rehearsed, and the one that takes most counts.

    Args:
        config: the model's transformers config.
        settings: of the cache, whose slots are all in use. With positions 'auto' the change to
            compact ones is rehearsed, too.
        dtype: of weights, keys and values.
        batch: sequences.
        packed: of matrices, with which `check_packing` agreed.

    Raises:
        UnsupportedModel: what the model computes depends on its data, so that it has no dry run.
    """
    config = shortened(config, settings)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=dtype)
        model.eval()
        if packed is not None:
            pack(model, packed)
        peaks, eviction = [], settings.eviction
        for divide in DIVISIONS if eviction.heads_move or eviction.layers_move else DIVISIONS[:1]:
            cache = BudgetCache(config, settings)
            divide(cache.allocate(batch, dtype, "cpu"))
            peaks.append(_rehearse(model, cache, batch))
    return max(peaks)


def shortened(config: Any, settings: CacheSettings) -> Any:
    """Return the config with a few layers where all are alike, which take turns in one memory.

    Alike are layers that hold as many slots, and of which no list in the config says anything else.
    """
    own = copy.deepcopy(config)
    own._attn_implementation = ATTENTION  # whatever a live model runs by
    layout, count = BudgetCache(own, settings).layout, config.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count
    }
    facts = (
        (x.kind, x.window, x.rope is None, x.kv_heads, x.head_size, x.reads, x.sinks, x.experts)
        for x in layout.shape.layers
    )
    kinds = {*facts, *((name, str(x)) for name, value in lists.items() for x in value)}
    alike = len(kinds) == 1 + len(lists) and len({*map(tuple, layout.allotments)}) == 1
    moves = layout.eviction.heads_move or layout.eviction.layers_move
    if not alike or moves or count <= ENOUGH or any(x.experts for x in layout.shape.layers):
        return config
    short = copy.deepcopy(config)
    for name, value in lists.items():
        setattr(short, name, value[:ENOUGH])
    short.num_hidden_layers = ENOUGH
    return short


def _rehearse(model: Any, cache: BudgetCache, batch: int) -> int:
    """Return the most bytes that a block takes beyond weights and a cache that counts as full."""
    evicts, longest = cache.eviction.policy.evicts, cache.block_size
    if not evicts:
        longest = min(longest, cache.layout.budget_tokens)
    tally = Tally((*model.parameters(), *model.buffers(), *cache.buffers()))
    with tally:
        pretend_full(cache)  # native sliding layers replace what they hold
        held = tally.peak = tally.now
        ids = torch.zeros(batch, longest, dtype=torch.long)
        index = torch.arange(longest)
        if cache.leaves_window(longest):
            cache.become_compact()
            cache.enable_rotation()
        with cache.passing(ForwardContext(cache.next_position)):
            try:
                model(
                    input_ids=ids,
                    position_ids=(cache.next_position + index).expand(batch, -1),
                    **cache_argument(model, cache),
                    use_cache=True,
                    logits_to_keep=torch.tensor([longest - 1]),
                )
            except (DynamicOutputShapeException, DataDependentOutputException) as error:
                raise UnsupportedModel(
                    f"the memory that {type(model).__name__} takes depends on its data here, "
                    "as its experts run one by one; use transformers 5, or a cap of the cache "
                    "(kv_budget) in place of one of the process"
                ) from error
    return tally.peak - held


def pretend_uneven(cache: BudgetCache) -> None:
    """Give one layer, or one head of each layer, the most slots that others can spare.

    Does so only where slots move; the cache is empty.
    """
    eviction, tokens = cache.eviction, cache.layout.budget_tokens
    if cache.balance is not None:
        # The last of the layers that most layers read: the model itself holds most beside it.
        _, most = max((layer.readers, i) for i, layer in enumerate(cache.capped_layers))
        _divide(cache.balance.segments, tokens, cache.balance.least, most)
    elif eviction.heads_move:
        heads = cache.layout.shape.kv_heads
        for layer, budget in zip(cache.capped_layers, cache.layout.budgets, strict=True):
            least = min(budget, eviction.pins(budget) + 1)
            _divide(layer.segments, budget, least, heads - 1, heads)  # its mask is held longest


def _divide(
    segments: Sequence[Segment], average: int, least: int, most: int, group: int | None = None
) -> None:
    """Give `least` slots to all but one of each `group` of segments, and the rest to that one."""
    group = len(segments) if group is None else group
    shares = [least] * group
    shares[most] += group * (average - least)
    resize(segments, shares * (len(segments) // group))


def pretend_evicted(cache: BudgetCache) -> None:
    """Divide slots as `pretend_uneven` does, and mark all beyond the least as to be given up."""
    pretend_uneven(cache)
    segments = [segment for layer in cache.capped_layers for segment in layer.segments]
    least = min(segment.budget for segment in segments)
    for segment in segments:
        segment.target_length = least


DIVISIONS: tuple[Callable[[BudgetCache], None], ...] = (
    lambda _: None, pretend_uneven, pretend_evicted
)  # fmt: skip
"""Lists how slots that move may be divided: evenly, or as unevenly as can be."""


def pretend_full(cache: BudgetCache) -> None:
    """Mark every slot as used, as after a very long text, without writing to the slots."""
    shape, block = cache.layout.shape, cache.block_size
    windows = [layer.sliding_window for layer in cache.sliding_layers.values()]
    read = max(shape.trained_length, *windows, 0)  # a window may be the longer one
    for layer in cache.capped_layers:
        spare = 0 if cache.eviction.policy.evicts else block
        layer.restore_counters(read, [max(0, s.budget - spare) for s in layer.segments])
        if cache.eviction.policy.evicts:  # else keys stay where they were read
            layer.enable_rotation()
    cache.count_stores_full()
    for state in cache.state_layers.values():
        state.seen, state.has_previous_state[0] = read, True
    segment = cache.capped_layers[0].segments[-1]
    like = segment.pool.keys.new_empty(0, dtype=segment.pool.dtype)
    for index, layer in cache.sliding_layers.items():
        # It keeps the end of what it and a block had together.
        size = layer.sliding_window - 1
        own = shape.layers[index]
        batch = segment.row + segment.batch  # of the last row: heads may have one each
        slots = (batch, own.kv_heads, size + block, own.head_size)
        layer.keys = like.new_zeros(*slots)[:, :, -size:]
        layer.values = like.new_zeros(*slots)[:, :, -size:]
        layer.dtype, layer.device, layer.is_initialized = like.dtype, like.device, True
        layer.cumulative_length = read


class Tally(TorchDispatchMode):
    """A counter that adds up the bytes of tensors' storages as they come and go, and their peak.

    Args:
        existing: tensors that exist already, whose storages are not counted.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = {x.untyped_storage()._cdata for x in existing}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count the storages it returned."""
        if str(func) == "aten._grouped_mm.default" and args[0].dtype != torch.bfloat16:
            # Experts: torch infers sizes for bfloat16 only, though it computes other types too.
            result = args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        if str(func) == "aten._scaled_dot_product_flash_attention_for_cpu.default":
            self.peak = max(self.peak, self.now + attention_buffers(*args[:2]))
        return result

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


def attention_buffers(query: Tensor, keys: Tensor) -> int:
    """Return the bytes that torch's fused attention for CPUs allocates besides its results.

    Each thread has logits of some queries over some keys, their sums and outputs, in float32, and
    for other types of numbers the weights rounded to those.
    """
    length, size = query.shape[2:]
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    logits = rows * min(512, keys.shape[2])
    rounded = 0 if query.dtype == torch.float32 else logits * query.element_size()
    return torch.get_num_threads() * (4 * (logits + 2 * rows + rows * size) + rounded)
