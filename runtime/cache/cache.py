"""Holds the cache that transformers models write to: fixed bytes, evicting after every block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from kvcap.runtime.attention.masks import (
    READY_MADE,
    MaskNote,
    MaskRequest,
    watch_stock,
)
from kvcap.runtime.attention.uncompiled import run_uncompiled
from kvcap.runtime.cache.allocation import Allocation
from kvcap.runtime.cache.checkpointing import watch_layers
from kvcap.runtime.cache.evicted_store import EvictedStore
from kvcap.runtime.cache.layer import BudgetLayer, LatentLayer, refuse_reordering
from kvcap.runtime.cache.layer_balance import LayerBalance
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.cache.pinned_slots import check_pins, clipped, slots_needed
from kvcap.runtime.cache.pool import Segment, resize
from kvcap.runtime.cache.regions import Regions
from kvcap.runtime.cache.row_table import NoTable, RowPass, RowTable
from kvcap.runtime.cache.settings import IN_BYTES, CacheSettings, SettingNames
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.errors import (
    BlockTooLarge,
    MemoryCapExceeded,
    PaddingUnsupported,
    PlanInfeasible,
    SessionBroken,
    UnsupportedModel,
)
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.memory.cap_guard import CapGuard
from kvcap.runtime.types import KeptTokens, SlotUse, Span

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvcap.runtime.cache.state_layer import StateLayer

BROKEN = (
    "an earlier forward pass failed or was interrupted half-way, so that layers have read "
    "different tokens, and those cannot be taken back; cache.reset() and read again"
)
HALF_READ = (
    "not all layers that read another layer's slots attended to the block before: a forward pass "
    "failed half-way, or they lie on another device; reset the cache, and keep the model on one "
    "device"
)
REUSED = (
    "the session that had this cache has ended, and it is another's; make a kvcap.BudgetCache to "
    "run a model by yourself"
)


class BudgetCache(Cache):  # type: ignore[misc]
    """A transformers cache of fixed size: `model.generate(..., cache=BudgetCache(...))`.

    Args:
        config: the model's config.
        given: whole `CacheSettings`; or its budget_tokens, block_size and policy in that order.
        named: settings by their names. `block_size` is generate()'s `prefill_chunk_size`.

    It holds one conversation of equally long sequences. A second generate() continues it, as with
    any cache of transformers, which takes a longer prompt for the whole conversation. Call
    `reset()` before another one. No gradient flows through the cache. A mask cannot follow what it
    keeps, so padded prompts and masks of your own are refused by name. `kvcap.cap` gives a model a
    new cache for every call.

    Raises:
        UnsupportedModel: the model or its positions cannot be capped, or its attention is not
            kvcap's, which alone reads slots.
        PolicyError: the policy is unknown, or its pins do not fit the budget.
        PlanInfeasible: as `CacheSettings`, or for a budget in bytes, which needs a plan.
    """

    def __init__(self, config: Any, *given: Any, **named: Unpack[SettingNames]) -> None:
        settings = CacheSettings.of(given, named, "budget_tokens", "block_size", "policy")
        if settings.kv_budget is not None:
            raise PlanInfeasible(IN_BYTES.format(f"kv_budget={settings.kv_budget!r}"))
        layout = self.layout = CacheLayout.of(config, settings)
        self.eviction, shape = layout.eviction, layout.shape
        self.block_size, self.evict_every = layout.block_size, settings.evict_every or 1
        self.context = ForwardContext()
        """Describes the forward pass that is running."""
        self.pinned_spans: list[tuple[int, int]] = []
        """Holds the spans [start, stop) of tokens read that are never evicted; see `pin`."""
        self.regions = Regions(layout.budget_tokens)
        """Holds the parts of a conversation that leave before or after others."""
        self.unread: tuple[int, int] | None = None
        """Holds an answer's last token and the number of tokens before it, until it is read.

        It is read in front of what comes next; None: everything was read."""
        self.reused = False
        """Says that another session had it, so that only the block loop may read into it."""
        self.guard: CapGuard | None = None
        """Holds the process to a memory cap; the block loop asks it before every block."""
        self._table: RowTable | NoTable = NoTable()
        self._mask = MaskNote()  # of the pass that begins
        self._reading = 0  # tokens of the pass in hand
        watch_stock()
        watch_layers(BudgetCache)
        run_uncompiled(
            BudgetCache,
            "update",
            "get_seq_length",
            "get_mask_sizes",
            "get_conv_state",
            "update_conv_state",
            "get_recurrent_state",
            "update_recurrent_state",
        )
        self.allocation = Allocation(layout, self.evict_every)
        self._first = next(i for i, layer in enumerate(shape.layers) if layer.kind != "none")
        self.state_layers = {i: self._state_layer(i) for i in shape.recurrent}
        """Holds the recurrent layers, or halves of layers, by their index in the model."""
        own = [i for i, layer in enumerate(shape.layers) if layer.kind != "shared"]
        layers = [self._layer(i) for i in own]  # no cache is asked for the others
        self.capped_layers = [layer for layer in layers if isinstance(layer, BudgetLayer)]
        """Holds the layers that kvcap caps, without native sliding and recurrent ones."""
        super().__init__(layers=layers)

    def __repr__(self) -> str:
        """Return a line for people: the model, the settings, and how full the cache is."""
        shape, layout = self.layout.shape, self.layout
        allocated = f"{self.nbytes:,} bytes" if self.allocation.segments else "not allocated yet"
        return (
            f"BudgetCache({shape.family}, {len(self.capped_layers)} of {len(shape.layers)} layers "
            f"capped, {shape.kv_heads} KV heads of {shape.head_size}; policy "
            f"{self.eviction.name!r}, "
            f"{self.counted} positions{layout.slot_format.summary}; {self.seen:,} tokens read, "
            f"{SlotUse.of(self.held, layout.budget_tokens)}, blocks of {self.block_size:,}; "
            f"{allocated})"
        )

    def _layer(self, index: int) -> Any:
        """Make a new cache layer for the model's layer of that index."""
        shape = self.layout.shape
        layer = shape.layers[index]
        if layer.kind == "sliding":
            return DynamicSlidingWindowLayer(layer.window)
        if layer.kind == "state":
            return self.state_layers[index]
        if layer.kind == "none":
            from transformers.cache_utils import DummyLayer

            return DummyLayer()
        spans, place = self.pinned_spans, shape.capped.index(index)
        given = place, self.allocation, spans, self.regions, self._mask
        return BudgetLayer(*given) if shape.latent is None else LatentLayer(shape.latent, *given)

    def _state_layer(self, index: int) -> StateLayer:
        """Make a new state for the model's recurrent layer of that index."""
        from kvcap.runtime.cache.state_layer import StateLayer  # transformers 4.57 has none

        return StateLayer(index, self.allocation)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a block [B, K, T, D] to a layer; see `BudgetLayer.update`.

        Raises:
            PaddingUnsupported: the pass has a mask that was not made by transformers, or `update`
                is called without a model; nothing is changed.
            BlockTooLarge: the block does not fit, and layers that share slots cannot divide it.
            UnsupportedModel: transformers counts beyond the positions that longrope moves keys at.
            SessionBroken: an earlier pass failed half-way; reset the cache.
        """
        layer = self.layers[layer_idx]
        if layer_idx == self._first and layer_idx not in self.state_layers:
            if not layer.is_initialized and self.layout.one_shape:
                layer.lazy_initialization(key_states)  # which chooses the engine of all layers
                self.allocate(key_states.shape[0], key_states.dtype, key_states.device)
            self._begin()
        if isinstance(layer, BudgetLayer):
            return layer.update(key_states, value_states, self.context)
        block: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return block

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a recurrent layer's convolution; None before the first token.

        A recurrent layer begins each pass by this call.

        Raises:
            PaddingUnsupported: as `update`.
            BlockTooLarge, MemoryCapExceeded, UnsupportedModel: the capped layers could not read
                the pass. The first layer raises them, as states cannot go back. Nothing is changed.
            SessionBroken: an earlier pass failed half-way; reset the cache.
        """
        if layer_idx == self._first:
            self._begin()
        layer = self.state_layers[layer_idx]
        layer.begin(self._reading)
        return layer.conv_states[state_idx] if layer.has_previous_state[state_idx] else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Take the inputs [B, channels, T] of a convolution into a recurrent layer's state."""
        return self.state_layers[layer_idx].update_conv_state(conv_states, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a layer's recurrent state; None before the first token."""
        layer = self.state_layers[layer_idx]
        state: Tensor | None = layer.recurrent_states[state_idx]
        return state if layer.has_previous_state[state_idx] else None

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Write a layer's new recurrent state."""
        layer = self.state_layers[layer_idx]
        state: Tensor = layer.update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return state

    def _begin(self) -> None:
        """Begin a pass whose mask was checked before; its layers check nothing more."""
        tokens = self._mask.length
        if tokens is None:
            raise PaddingUnsupported(READY_MADE)
        self._reading, self._mask.length = tokens, None
        if self.context.start is None:  # the block loop has checked what transformers has not
            self._check_counted(tokens)
        context = self.context
        context.sizes = context.sizes or self.admit(context.tokens or tokens, context.blocks)

    def _check_counted(self, tokens: int) -> None:
        """Prepare for a pass whose positions transformers counts."""
        if self.reused:
            raise SessionBroken(REUSED)
        if not self.consistent:
            waits = any(x.readers > 1 and x.half_read for x in self.capped_layers)
            raise SessionBroken(HALF_READ if waits else BROKEN)
        self.check_factors(tokens)
        sizes = self.admit(tokens)
        if self.leaves_window(tokens):
            self.become_compact()
        rows = self.row_pass(tokens, counts_on=True) if self.by_rows else None
        self.context = ForwardContext(sizes=sizes, rows=rows)

    def admit(self, tokens: int, blocks: int = 1) -> list[int]:
        """Return the lengths of the blocks in which all layers read so many tokens.

        A block is read in two if tokens that wait for their eviction take its room.

        Raises:
            BlockTooLarge, MemoryCapExceeded: they cannot be read; nothing is changed.
        """
        size, evicts = self.block_size, self.eviction.policy.evicts
        if blocks > 1:
            return [min(size, tokens - at) for at in range(0, tokens, size)]
        free = self._unused + size
        if not evicts and tokens > free - size:
            raise MemoryCapExceeded(
                f"policy {self.eviction.name!r} never evicts: {self.longest} tokens are held and "
                f"{tokens} more were given, the budget is {self.layout.budget_tokens}; use a "
                "larger budget or a policy that evicts"
            )
        if tokens > free and (not evicts or tokens > size):
            raise BlockTooLarge(
                f"a block of {tokens} tokens was given and {free} slots are free for it; "
                f"pass prefill_chunk_size={size} to generate(), or build the cache "
                f"with block_size={tokens}"
            )
        if tokens > free and any(layer.readers > 1 for layer in self.capped_layers):
            raise BlockTooLarge(
                f"a block of {tokens} tokens was given and {free} fit before the next eviction; "
                "it is not read in two, as layers of this model read the slots of others ("
                f"{self.layout.shape.shared}): give {free} tokens first, or use evict_every=1"
            )
        return [tokens] if tokens <= free else [free, tokens - free]

    def read_token(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        angles: tuple[Tensor, Tensor],
        layer_idx: int,
        module: nn.Module,
        scaling: float,
    ) -> Tensor | None:
        """Rotate, append and attend to one token in a layer; see `BudgetLayer.read_token`."""
        layer = self.layers[layer_idx]
        assert isinstance(layer, BudgetLayer), "all layers are capped where tokens are read so"
        return layer.read_token(query, key, value, angles, module, scaling, self.context)

    def check_mask(self, request: MaskRequest) -> None:
        """Check and note the mask that a pass asks transformers for.

        Raises:
            PaddingUnsupported, PositionMismatch: the mask hides tokens, or does not reach all.
            CacheMismatch: it has another number of sequences. Nothing is changed.
            UnsupportedModel: the model's attention is not kvcap's.
        """
        self._mask.check(self.seen, self.allocation.batch, request)

    @property
    def terms(self) -> dict[str, Any]:
        """Return the settings that say what it holds, which differ between differing caps."""
        layout = self.layout
        return {
            "budget_tokens": layout.budget_tokens,
            "block_size": layout.block_size,
            "policy": self.eviction,
            "positions": layout.positions,
            "kv_dtype": layout.slot_format,
            "evict_every": self.evict_every,
        }

    @property
    def begun(self) -> bool:
        """Return whether a layer has taken up the pass whose mask was checked last."""
        return self._mask.length is None

    @property
    def balance(self) -> LayerBalance | None:
        """Return the object that moves slots between layers; None where they do not move."""
        return self.allocation.balance

    @property
    def seen(self) -> int:
        """Return the number of tokens read so far."""
        return self.capped_layers[0].seen

    @property
    def held(self) -> int:
        """Return the slots in use per KV head and layer, on average (rounded up).

        Until the next eviction they may be more than the budget; see `SlotUse`.
        """
        segments = self.allocation.segments
        heads = [s.batch * s.heads for s in segments]
        held = sum(n * s.held for n, s in zip(heads, segments, strict=True))
        return -(-held // sum(heads)) if heads else 0

    @property
    def longest(self) -> int:
        """Return the most slots in use by any head of any layer."""
        return max([segment.held for segment in self.allocation.segments], default=0)

    @property
    def next_position(self) -> int:
        """Return the position at which the block loop reads the next token."""
        return self.longest if self.compact_positions else self.seen

    @property
    def compact_positions(self) -> bool:
        """Return whether blocks are read at compact positions."""
        return self.allocation.compact and not self.layout.shape.slides

    @property
    def counted(self) -> str:
        """Return how positions count for people, such as 'compact' or 'auto (true now)'."""
        if self.layout.positions != "auto":
            return self.layout.positions
        return f"auto ({'compact' if self.allocation.compact else 'true'} now)"

    def leaves_window(self, tokens: int) -> bool:
        """Return whether so many more tokens would leave the trained window at 'auto' positions.

        False once positions are compact, where nothing leaves it.
        """
        true_yet = self.layout.positions == "auto" and not self.allocation.compact
        return true_yet and self.seen + tokens > self.layout.shape.trained_window

    def become_compact(self) -> None:
        """Switch 'auto' positions from true to compact ones; do nothing in other modes.

        Every held key is rotated from its true position to its rank. If that fails half-way, the
        cache is not `consistent`, and must be reset.
        """
        if self.layout.positions == "auto" and not self.allocation.compact:
            with interrupts_deferred(), torch.no_grad():
                for layer in self.capped_layers:
                    layer.become_compact()
                self.allocation.compact = True

    @property
    def counters(self) -> list[tuple[int, list[int]]]:
        """Return the tokens read and the slots in use of each segment, for every layer."""
        return [(layer.seen, [s.held for s in layer.segments]) for layer in self.capped_layers]

    @counters.setter
    def counters(self, value: list[tuple[int, list[int]]]) -> None:
        self.changed_by_host()
        for layer, (seen, held) in zip(self.capped_layers, value, strict=True):
            layer.restore_counters(seen, held)

    def advance(self, tokens: int) -> None:
        """Count tokens that a CUDA graph has read, after which it evicted down to the budget."""
        for layer in self.capped_layers:
            layer.advance(tokens)
        self._table.agreed(self.seen, tokens, self.layout.shares_out(tokens))

    def enable_rotation(self) -> None:
        """Have keys rotated whenever they are read, by 0 as long as no token has moved."""
        for layer in self.capped_layers:
            layer.enable_rotation()

    @property
    def by_rows(self) -> bool:
        """Return whether kernels work on all rows of a layer at once; chosen as it is allocated."""
        return self.allocation.by_rows

    def by_sequence(self) -> None:
        """Divide segments by sequence, so that sequences may hold unequally many tokens."""
        for layer in self.capped_layers:
            layer.segments[:] = [part for s in layer.segments for part in s.by_sequence()]
        self.allocation.segments = [s for layer in self.capped_layers for s in layer.segments]
        self.changed_by_host()

    def changed_by_host(self) -> None:
        """Note that the host has changed what segments hold, may hold or pin."""
        self._table.seen = None

    def row_table(self) -> RowTable:
        """Return the table of rows on the device, brought up to date; see `by_rows`."""
        if isinstance(self._table, NoTable):
            engines = [layer.engine for layer in self.capped_layers]
            self._table = RowTable(engines, self._recents(), self.balance)
        self._table.upload(self.seen)
        each, regions = self.regions.of_rows, self.regions.weighed
        self._table.weigh([each.get(row, regions) for row in range(self._table.batch)])
        return self._table

    def row_pass(
        self,
        length: int,
        *,
        counts_on: bool = False,
        always: bool = False,
        count: Tensor | None = None,
    ) -> RowPass:
        """Begin a pass over rows; see `RowPass`.

        Args:
            length: tokens of its longest block.
            counts_on: at compact positions, its tokens have positions behind all tokens read, as
                transformers counts; else behind the longest row of each sequence.
            always: as in `RowPass`.
            count: likewise.
        """
        table, read_at, past = self.row_table(), None, 0
        if self.compact_positions:
            read_at = table.behind_longest()
            if counts_on:
                past = self.seen - self.longest
                read_at = torch.full_like(read_at, self.longest)
        return RowPass(table, table.longest(length), read_at, always, count, past)

    @contextmanager
    def only_captured(self) -> Iterator[None]:
        """Restore all counters after a block that captures passes and runs none."""
        before = self.counters
        agreed = self._table.seen
        try:
            yield
        finally:
            self.counters = before
            self._table.seen = agreed

    def _recents(self) -> list[int]:
        """Return how many newest tokens stay in a head of 0, 1, 2, ... slots; [] if none move."""
        if not self.eviction.heads_move and not self.layout.pooled:
            return []
        return [self.eviction.recents(slots) for slots in range(self.layout.longest + 1)]

    def offsets(self, token_index: Tensor) -> Tensor:
        """Return how far behind `next_position` a pass reads tokens, by their indices in it [T]."""
        several = self.context.blocks > 1 and self.compact_positions
        return token_index % self.block_size if several else token_index

    @property
    def room(self) -> int:
        """Return how many tokens the next block may have."""
        if not self.eviction.policy.evicts:
            return min(self.block_size, self._unused)
        return self.block_size + min(0, self._unused)

    @property
    def spare(self) -> int:
        """Return how many tokens fit before any head must evict."""
        return max(0, self._unused)

    @property
    def _unused(self) -> int:
        """Return the slots of its budget that the fullest head has free; below 0 if it is over."""
        if not self.allocation.segments:
            return min(min(kept) for kept in self.layout.allotments)
        return min([segment.budget - segment.held for segment in self.allocation.segments])

    @property
    def consistent(self) -> bool:
        """Return whether all layers have read the same tokens; not so if a pass failed half-way."""
        seen = self.seen
        layers: tuple[BudgetLayer | StateLayer, ...] = (
            *self.capped_layers,
            *self.state_layers.values(),
        )
        for layer in layers:
            if layer.seen != seen or layer.half_read:
                return False
        sliding = self.layout.shape.slides and self.sliding_layers.values()
        return not sliding or all(layer.get_seq_length() == seen for layer in sliding)

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of all storage, native sliding layers and states included."""
        total = self.allocation.nbytes
        for layer in self.sliding_layers.values():
            if layer.is_initialized:
                total += sum(x.untyped_storage().nbytes() for x in (layer.keys, layer.values))
        return total

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all storage but free slots."""
        free = sum(
            s.pool.slot_bytes * s.batch * s.heads * (s.capacity - s.held)
            for s in (*self.allocation.segments, *self._evicted)
        )
        return self.nbytes - free

    @property
    def sinks(self) -> int:
        """Return how many first tokens of the conversation are never evicted."""
        return self.eviction.sinks()

    def kept_tokens(self) -> list[KeptTokens]:
        """Return the tokens of the first sequence that each layer holds, in no order.

        Layers that hold no keys are left out.
        """
        kept = []
        for number, layer in zip(self.layout.shape.capped, self.capped_layers, strict=True):
            own = sorted((s for s in layer.segments if s.row == 0), key=lambda s: s.head)
            heads = [row for s in own for row in s.positions[0].cpu()]
            kept.append(KeptTokens(number, True, heads))
        for number, native in self.sliding_layers.items():
            count, held = native.keys.shape[1:3] if native.is_initialized else (0, 0)
            row = torch.arange(self.seen - held, self.seen)
            kept.append(KeptTokens(number, False, [row] * count))
        return sorted(kept)

    @property
    def _evicted(self) -> list[Segment]:
        return [segment for store in self._stores for segment in store.evicted]

    @property
    def _stores(self) -> list[EvictedStore]:
        stores = [layer.engine.evicted_store for layer in self.capped_layers]
        return [store for store in stores if store is not None]

    @property
    def recomputed(self) -> list[float]:
        """Return how often queries of generated tokens attended to evicted tokens anew, by layer.

        A share from 0 to 1 over all query heads; empty where evicted tokens are not kept.
        """
        counts = [store.counts for store in self._stores]
        return [recomputed / max(1, steps) for steps, recomputed in counts]

    @property
    def stores_full(self) -> bool:
        """Return whether the stores of evicted tokens are full in all layers, or there are none."""
        return all(store.full for store in self._stores)

    def count_stores_full(self) -> None:
        """Count the stores of evicted tokens as full, without writing into them."""
        for store in self._stores:
            store.count_full()

    def allocate(self, batch: int, dtype: torch.dtype, device: torch.device | str) -> BudgetCache:
        """Allocate now rather than at the first token. Returns itself."""
        shape = self.layout.shape
        like = torch.empty(batch, shape.kv_heads, 0, shape.head_size, dtype=dtype, device=device)
        for layer in self.capped_layers:
            if not layer.is_initialized:
                layer.lazy_initialization(like)
        for state in self.state_layers.values():
            state.allocate(batch, dtype, device)
        return self

    @contextmanager
    def passing(self, context: ForwardContext) -> Iterator[ForwardContext]:
        """Make `context` the running forward pass within a `with` block."""
        self.context = context
        try:
            yield context
        finally:
            self.context = ForwardContext()

    def pin(self, spans: Sequence[Span]) -> None:
        """Pin these tokens, [start, stop) in tokens read, so that they are never evicted.

        Spans may lie among tokens that are yet to be read.

        Raises:
            PinsTooLarge: a head cannot hold them beside those pinned already; nothing is changed.
        """
        self.set_pins(self.pinned_with(spans))

    def pinned_with(self, spans: Sequence[Span], *, emptied: bool = False) -> list[Span]:
        """Return all spans that would be pinned with these, without pinning them.

        With `emptied`, as after a reset.

        Raises:
            PinsTooLarge: a head cannot hold them.
        """
        # Pins of tokens that were announced and then not read, as after a Ctrl-C, are dropped.
        seen = 0 if emptied else self.seen
        pinned = [*clipped(self.pinned_spans, seen), *spans]
        budgets = fresh = self.layout.allotments
        if self.allocation.segments:
            budgets = [
                [fresh[c.index][s.head] if emptied else s.budget for s in c.segments]
                for c in self.capped_layers
            ]
        check_pins(self.layout, pinned, seen, budgets)
        return pinned

    def set_pins(self, spans: Sequence[Span]) -> None:
        """Replace all pinned spans by these, which must fit; see `pinned_with`."""
        self.pinned_spans[:] = spans
        self.changed_by_host()  # first tokens may yield to them
        if self.balance is not None:
            self.balance.floor = slots_needed(self.layout, self.pinned_spans)

    def drop(self, spans: Sequence[Span]) -> None:
        """Free the slots of these tokens, [start, stop) in tokens read; see `Loop.drop`."""
        for layer in self.capped_layers:
            layer.engine.drop(spans, self.seen)
        self.changed_by_host()

    activate_past_recording = refuse_reordering  # with which assisted decoding begins

    def prefetch(self, *_: Any, **__: Any) -> None:
        """Refuse to move keys ahead of their use: the buffers stay on the model's device."""
        self.capped_layers[0].prefetch()

    @property
    def sliding_layers(self) -> dict[int, DynamicSlidingWindowLayer]:
        """Return the native sliding layers by their index in the model."""
        shape = self.layout.shape
        return {i: self.layers[i] for i in shape.of_kind("sliding")} if shape.slides else {}

    def refill_sliding(self, index: int, keys: Tensor, values: Tensor, seen: int) -> None:
        """Replace what a native sliding layer holds by keys and values, after `seen` tokens."""
        layer = DynamicSlidingWindowLayer(self.sliding_layers[index].sliding_window)
        layer.update(keys, values)
        layer.cumulative_length = seen
        self.layers[index] = layer

    def reset(self) -> None:
        """Forget all tokens and pins; the buffers stay allocated."""
        for index, layer in self.sliding_layers.items():
            # Transformers before 5 would fill them with zeros, which count as tokens.
            self.layers[index] = DynamicSlidingWindowLayer(layer.sliding_window)
        super().reset()
        for state in self.state_layers.values():  # those beside slots are none of the layers
            state.reset()
        self.allocation.reset()
        self.set_pins(())
        self.unread = None
        self._mask.length = None
        self.changed_by_host()
        for pool in {id(s.pool): s.pool for s in self.allocation.segments}.values():
            mine = [(c.index, s) for c in self.capped_layers for s in c.segments if s.pool is pool]
            kept = [self.layout.allotments[index][segment.head] for index, segment in mine]
            resize([segment for _, segment in mine], kept)

    def buffers(self) -> list[Tensor]:
        """Return every tensor of capped and recurrent layers; they live as long as the cache."""
        return list(self.allocation.buffers.values())

    def check_factors(self, tokens: int) -> None:
        """Refuse a pass whose keys RoPE would rotate by other frequencies than the held ones.

        Raises:
            UnsupportedModel: RoPE of type longrope changes its frequencies at the positions that
                the pass reaches. Nothing is changed.
        """
        most, last = self.layout.shape.longest_compact, self.seen + tokens
        if most is None or last <= most:
            return
        if self.layout.positions == "true" and 0 < self.seen <= most:
            raise UnsupportedModel(
                f"the {self.seen:,} tokens held were rotated by RoPE of type longrope for short "
                f"texts, and beyond {most:,} tokens it takes other frequencies; load the model by "
                "kvcap.Runtime.from_pretrained(positions='true'), which reads the text again by "
                "those, use compact positions with a budget and block of at most "
                f"{most:,} tokens, or begin with a block of more"
            )
        if self.context.start is None and any(self.layout.rotates):
            raise UnsupportedModel(
                f"transformers counts positions by itself here, up to {last:,} now, and beyond "
                f"{most:,} RoPE of type longrope takes other frequencies, by which keys do not "
                "move exactly; use kvcap.Runtime, which counts what is held"
            )
