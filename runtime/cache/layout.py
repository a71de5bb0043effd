"""Lists a cache's buffers with their shapes and bytes; nothing is allocated here.

`CacheLayout.buffers` is the one list: `MemoryPlan` adds it up, `Allocation` allocates by it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from kvcap.policies import Eviction
from kvcap.runtime.attention.masks import OTHER_ATTENTION
from kvcap.runtime.cache.pool import SHIFT
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.cache.slot_format import SlotFormat
from kvcap.runtime.cache.slot_numbers import Shapes
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.rope import Rope, has_m_rope, table_dtype
from kvcap.runtime.types import ATTENTION, DEFAULT_POSITIONS, Positions

PARTS = (
    "keys_values",
    "slot_positions",
    "policy_state",
    "evicted_store",
    "query_window",
    "rotation_table",
    "sliding_layers",
    "state_layers",
)
EVICTED = {"score": torch.float32, SHIFT: torch.int32}
"""Lists the auxiliary tensors of kept evicted tokens, by type: their score and their shift."""


IMAGES = (
    "count one position a token, and this model gives tokens of images three (M-RoPE), which an "
    "eviction would move apart; use positions='true', or for text alone kvcap.cap(model) or the "
    "config of its text model, model.config.get_text_config(decoder=True)"
)


class BufferSpec(NamedTuple):
    """A buffer of a cache: its shape, its type and the part of a plan that it belongs to."""

    part: str  # of the plan, under which it counts
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of its storage."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class CacheLayout:
    """A description of a cache's sizes for a model, an eviction and a budget.

    Raises:
        PlanInfeasible: more slots than compact positions can be counted for.
        UnsupportedModel: compact positions where keys cannot be moved exactly; evicted tokens that
            are kept, where layers read the slots of others or slots are quantised; keys of 4 bits
            that cannot be held without rotation.
    """

    shape: ModelShape
    eviction: Eviction  # as given; then as it is run, see `Eviction.with_sinks`
    budget_tokens: int  # N
    block_size: int  # T
    positions: Positions
    slot_format: SlotFormat = field(default_factory=SlotFormat)

    @classmethod
    def of(cls, config: Any, settings: CacheSettings) -> CacheLayout:
        """Return the layout of a cache for the model of a config, which may be a wrapper's.

        Raises:
            UnsupportedModel: the model or its positions cannot be capped, or its attention is not
                kvcap's.
            PolicyError: the policy's pins do not fit the budget.
        """
        (tokens, block), positions = settings.sizes, settings.positions
        text = config.get_text_config(decoder=True)
        if text is not config and has_m_rope(text):
            if positions not in (None, "true"):
                raise UnsupportedModel(f"positions={positions!r} {IMAGES}")
            positions = "true"
        shape = ModelShape.of(text, tokens + block)
        if (attention := getattr(text, "_attn_implementation", None)) not in (None, ATTENTION):
            raise UnsupportedModel(OTHER_ATTENTION.format(attention))
        slot_format = SlotFormat.of(settings.kv_dtype)
        if positions is None:
            moves = shape.can_be_compact(tokens + block)
            positions = usual_positions(slot_format.unrotated) if moves else "true"
        layout = cls(shape, settings.eviction, tokens, block, positions, slot_format)
        layout.eviction.check(tokens, len(shape.capped), shape.kv_heads)
        return layout

    def __post_init__(self) -> None:
        # Whatever runs a model makes a layout, and it knows the budget and the heads.
        run = self.eviction.with_sinks(
            self.budget_tokens, len(self.shape.capped), self.shape.kv_heads
        )
        object.__setattr__(self, "eviction", run)
        moves, named = self.positions != "true", f"positions={self.positions!r}"
        if moves and not self.shape.moves_exactly:
            raise UnsupportedModel(
                f"{named} are not exact here ({self.shape.obstacle}); use positions='true'"
            )
        most = self.shape.longest_compact
        if moves and most and self.longest + self.block_size > most:
            raise PlanInfeasible(
                f"{named} are exact up to {most:,} tokens held, with the frequencies "
                "that RoPE of type longrope has for short texts, and a head and its block would "
                f"hold {self.longest + self.block_size:,}; use a smaller budget or block, "
                "positions='true', or kvcap.Runtime.from_pretrained, which reads longer texts by "
                f"the factors for those where budget and block together are above {most:,}"
            )
        if self.slot_format.quantised:
            self._check_quantised()
        if self.eviction.corrector is not None and self.shape.latent is not None:
            raise UnsupportedModel(
                f"policy {self.eviction.name!r} keeps the keys and values of evicted tokens, and "
                f"slots of {self.shape.family} hold latents; use its base without the corrector"
            )
        if self.eviction.corrector is not None and self.shape.shared:
            raise UnsupportedModel(
                f"policy {self.eviction.name!r} adds to a layer's attention what its evicted "
                "tokens would have given to its own queries, and here other layers attend to them "
                f"too ({self.shape.shared}); use its base without the corrector"
            )

    def _check_quantised(self) -> None:
        """Refuse models, policies and positions that quantised slots do not work with."""
        name, size = self.slot_format.name, self.shape.head_size
        if self.shape.latent is not None:
            raise UnsupportedModel(
                f"kv_dtype={name!r} quantises keys and values, and slots of {self.shape.family} "
                "hold latents, of which every head makes its own; leave kv_dtype out"
            )
        if self.eviction.corrector is not None:
            raise UnsupportedModel(
                f"kv_dtype={name!r} quantises the cache's own slots, and policy "
                f"{self.eviction.name!r} keeps evicted tokens beside them; use its base without "
                "the corrector, or leave kv_dtype out"
            )
        if size % 2 and any(numbers.in_pairs for numbers in self.slot_format.types):
            raise UnsupportedModel(
                f"kv_dtype={name!r} has two numbers in a byte, and a head has {size}; use 'int8'"
            )
        moves = self.positions != "compact" and self.shape.capped_ropes
        if moves and self.slot_format.unrotated:
            raise UnsupportedModel(
                f"kv_dtype={name!r} holds keys without their rotation, for which positions must be "
                "compact; use positions='compact' where the model can, or kv_dtype='int8-int4'"
            )

    @cached_property
    def budgets(self) -> list[int]:
        """Return the slots per KV head kept in each capped layer, on average over its heads."""
        return self.eviction.split(self.budget_tokens, len(self.shape.capped))

    @cached_property
    def allotments(self) -> list[list[int]]:
        """Return the slots kept by each KV head of each capped layer, before anything is read."""
        layers, heads = len(self.shape.capped), self.shape.kv_heads
        return self.eviction.allot(self.budget_tokens, layers, heads)

    @property
    def ragged(self) -> bool:
        """Return whether the heads of a layer may hold unequally many slots."""
        return self.eviction.head_budget is not None

    def divides(self, tokens: int) -> bool:
        """Return whether heads share slots out anew after a pass of so many tokens.

        After a single token they do not, unless blocks have one token.
        """
        return self.eviction.heads_move and (tokens > 1 or self.block_size == 1)

    def shares_out(self, tokens: int) -> bool:
        """Return whether slots move between heads or layers after a pass of so many tokens."""
        return self.divides(tokens) or (self.pooled and tokens > 1)

    @property
    def pooled(self) -> bool:
        """Return whether slots move between layers, so that all layers share one pool."""
        return self.eviction.layers_move

    @cached_property
    def one_shape(self) -> bool:
        """Return whether all layers hold slots of their own keys and values, for one engine."""
        return self.shape.all_capped and self.shape.latent is None

    @cached_property
    def longest(self) -> int:
        """Return the most slots that a head can ever keep, with its sinks or with none.

        Sinks change how budgets are spread, and a saved session brings its own: without them in
        this number, no buffer depends on them, and every session has the bytes of the plan.
        """
        layers, heads = len(self.shape.capped), self.shape.kv_heads
        if self.pooled:
            return layers * self.budget_tokens
        longest = 0
        for run in (self.eviction, replace(self.eviction, sink_tokens=0, sinks_yield=False)):
            if run.heads_move:
                longest = max(longest, heads * max(run.split(self.budget_tokens, layers)))
            else:
                longest = max(longest, *map(max, run.allot(self.budget_tokens, layers, heads)))
        return longest

    @cached_property
    def rotates(self) -> list[bool]:
        """Return for each capped layer whether its keys are ever moved to other positions."""
        moves = self.positions != "true"
        return [moves and self.shape.layers[i].rope is not None for i in self.shape.capped]

    def centred(self, index: int) -> bool:
        """Return whether a capped layer holds its keys without their mean: quantised, unrotated.

        Each channel of unrotated keys stays near a value of its own, which rotation mixes.
        """
        rope = self.shape.layers[self.shape.capped[index]].rope
        return self.slot_format.quantised and (rope is None or self.rotates[index])

    def slots(self, index: int, batch: int) -> int:
        """Return the slots of a capped layer, over all heads of `batch` sequences."""
        kept = self.allotments[index]
        return batch * (sum(kept) + len(kept) * self.block_size)

    def shifts(self, layers: list[int]) -> bool:
        """Return whether slots of these layers, which share a pool, store how far they moved."""
        return any(self.rotates[index] for index in layers)

    @property
    def window_length(self) -> int:
        """Return how many queries a layer keeps between blocks; 0: none."""
        observed = self.eviction.policy.queries_observed
        return observed if observed is not None and observed > 1 else 0

    @property
    def rotation_span(self) -> int:
        """Return how many different shifts can occur, which is the table's length; 0: no table.

        A key's shift is within its head's slots; a kept query's may exceed that by the window.
        """
        if not any(self.rotates):
            return 0
        return self.longest + self.window_length + self.block_size + 1

    @property
    def rope(self) -> Rope | None:
        """Return the rotary embedding that capped layers share; None: they have none."""
        return next((r for i in self.shape.capped if (r := self.shape.layers[i].rope)), None)

    @property
    def pools(self) -> list[list[int]]:
        """Return the indices of the capped layers that share a pool of slots, pool by pool."""
        layers = list(range(len(self.budgets)))
        return [layers] if self.pooled else [[index] for index in layers]

    def aux(self, layers: list[int]) -> dict[str, torch.dtype]:
        """Return the types of the auxiliary tensors of these layers' pool, by name."""
        moved = {SHIFT: torch.int32} if self.shifts(layers) else {}
        return {**self.eviction.state, **moved}

    def buffers(self, batch: int, dtype: torch.dtype) -> dict[str, BufferSpec]:
        """List every buffer of capped and recurrent layers by name, for `batch` sequences.

        `dtype` is the type of keys and values.
        """
        specs: dict[str, BufferSpec] = {}
        size = self.shape.head_size
        for number, layers in enumerate(self.pools):
            slots = sum(self.slots(index, batch) for index in layers)
            shapes = self.slot_format.shapes(size, dtype)
            if self.shape.latent is not None:  # values are part of keys
                del shapes["values"]
            specs |= _slots(f"pool.{number}", slots, shapes, self.aux(layers))
        for index in range(len(self.budgets)):
            if self.centred(index):
                mean = (batch, self.shape.kv_heads, size)
                specs[f"mean.{index}.keys"] = BufferSpec("keys_values", mean, torch.float32)
            if length := self.window_length:
                queries = (batch, self.shape.heads, length, size)
                shifts = (batch, self.shape.kv_heads, length)
                specs[f"window.{index}.queries"] = BufferSpec("query_window", queries, dtype)
                specs[f"window.{index}.shift"] = BufferSpec("query_window", shifts, torch.int32)
            if (corrector := self.eviction.corrector) is not None:
                slots = batch * self.shape.kv_heads * (corrector.size + self.block_size)
                shapes = SlotFormat().shapes(size, dtype)
                kept = _slots(f"evicted.{index}", slots, shapes, EVICTED)
                specs |= {name: spec._replace(part="evicted_store") for name, spec in kept.items()}
                query = (batch, self.shape.heads, 1, size)
                for name, shape, kind in (
                    ("query", query, dtype),
                    ("out", query, torch.float32),
                    ("lse", query[:3], torch.float32),
                    ("counts", (*query[:2], 2), torch.int64),
                ):
                    specs[f"evicted.{index}.{name}"] = BufferSpec("policy_state", shape, kind)
        if self.rope is not None and self.rope.inv_freq is not None and self.rotation_span:
            table = (self.rotation_span, 2, len(self.rope.inv_freq))
            specs["rotation.table"] = BufferSpec("rotation_table", table, table_dtype(dtype))
        for index in self.shape.recurrent:
            for state in self.shape.layers[index].states:
                numbers = (batch, *state.shape)
                spec = BufferSpec("state_layers", numbers, state.dtype(dtype))
                specs[f"state.{index}.{state.name}"] = spec
        return specs

    def nbytes(self, batch: int, dtype: torch.dtype) -> dict[str, int]:
        """Return the exact bytes of every part for `batch` sequences, sliding layers included."""
        sliding = [self.shape.layers[i] for i in self.shape.of_kind("sliding")]
        by_part = dict.fromkeys(PARTS, 0)
        for spec in self.buffers(batch, dtype).values():
            by_part[spec.part] += spec.nbytes
        by_part["sliding_layers"] = sum(
            batch * (layer.window - 1 + self.block_size) * layer.numbers * dtype.itemsize
            for layer in sliding
            if layer.window is not None
        )
        return by_part


def _slots(
    place: str, slots: int, shapes: Shapes, aux: Mapping[str, torch.dtype]
) -> dict[str, BufferSpec]:
    """List the buffers of a `SlotPool`, whose slots have keys and values of these shapes."""
    specs = {
        name: BufferSpec("keys_values", (slots, *shape), kind)
        for name, (shape, kind) in shapes.items()
    }
    specs["positions"] = BufferSpec("slot_positions", (slots,), torch.int32)
    for name, kind in aux.items():
        part = "slot_positions" if name == SHIFT else "policy_state"
        specs[name] = BufferSpec(part, (slots,), kind)
    return {f"{place}.{name}": spec for name, spec in specs.items()}


def usual_positions(unchanging: bool = False) -> Positions:
    """Return the default positions for models whose keys can be moved exactly.

    Args:
        unchanging: positions may not change while a cache is used, as with keys of 4 bits and in
            exported graphs.
    """
    return "compact" if unchanging and DEFAULT_POSITIONS == "auto" else DEFAULT_POSITIONS


def default_positions(shape: ModelShape, slots: int = 0, unchanging: bool = False) -> Positions:
    """Return the default positions for a model; warn where they must be true.

    Args:
        shape: the model's.
        slots: how many a head and its block will hold; 0: unknown.
        unchanging: as in `usual_positions`.
    """
    if shape.can_be_compact(slots):
        return usual_positions(unchanging)
    why = shape.obstacle or f"keys move exactly up to {shape.longest_compact:,} tokens held"
    warnings.warn(
        f"positions stay true ({why}); answers will suffer beyond {shape.trained_window} tokens",
        stacklevel=2,
    )
    return "true"
