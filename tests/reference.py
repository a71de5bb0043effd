"""Computes in the plainest way what a cache with a budget should compute, as a slow reference.

It uses nothing of kvcap. It is another cache and another attention function for the same models:
each head has a Python list of tokens with unrotated keys, float64, sorted by time, scored by loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from conftest import as_cache
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "slow_reference"
# Families that rotate neighbours.
NEIGHBOURS = {"cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"}
# Families whose full layers have no positions where others slide.
ONLY_SLIDING = {"afmoe", "cohere2", "exaone4"}
STATE = getattr(cache_utils, "LinearAttentionLayer", tuple)  # transformers 4.57 has none


@dataclass(eq=False)
class Slot:
    time: int
    key: Tensor  # [D] unrotated, float64
    value: Tensor  # [D]
    mass: float = 0.0  # H2O's state
    placed: dict[int, Tensor] = field(default_factory=dict)  # the key at positions it has been at


@dataclass
class Setting:
    policy: str
    budget: int
    positions: str  # 'compact', 'true', or 'auto': compact once more than `trained` were read
    options: dict[str, Any] = field(default_factory=dict)
    start: list[list[int]] | None = None  # slots of each layer's heads, if not all `budget`
    recalls: bool = False  # attends to evicted tokens too
    # By layer, the times that its heads hold after every pass, if another cache chooses them.
    chosen: dict[int, list[list[list[int]]]] = field(default_factory=dict)
    # (layer, scores per head, pinned per head) -> slots per head, if slots move between heads.
    split: Callable[[int, list[list[float]], list[list[bool]]], list[int]] | None = None
    keeps: bool = False  # whether a single token leaves the division as it is
    trained: int = 0
    every: int = 1  # single tokens that wait before an eviction
    pins: list[tuple[int, int]] = field(default_factory=list)  # pinned times, as (start, stop)


def rotate(
    x: Tensor, position: float | Tensor, inv_freq: Tensor, interleaved: bool = False
) -> Tensor:
    """Return x [..., D] rotated to a position, or to [...] of them.

    Pairs are the halves (i, i + R/2), or the neighbours (2i, 2i + 1) if interleaved.
    """
    angles, half = torch.as_tensor(position)[..., None] * inv_freq.double(), len(inv_freq)
    cos, sin = angles.cos(), angles.sin()
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.split(half, -1)
    rotated = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat((joined, rest), -1)


class ReferenceLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(
        self,
        setting: Setting,
        inv_freq: Tensor | None,
        index: int,
        interleaved: bool = False,
        window: int | None = None,
        readers: int = 1,
    ) -> None:
        super().__init__()
        self.index, self.target_length = index, list[int]()
        self.interleaved = interleaved
        self.window = window  # tokens that a sliding layer sees, whatever the policy
        # Number of layers that attend to these slots, this one first; the last of them evicts.
        self.readers, self.attended, self.length = readers, 0, 0
        self.sink_logits: list[float] | None = None  # one per query head
        self.softcap: float | None = None
        self.gone: list[list[Slot]] = []  # evicted slots per head, if they are attended to
        self.setting, self.inv_freq, self.seen = setting, inv_freq, 0
        self.heads: list[list[Slot]] = []
        self.queries: list[list[Tensor]] = []  # per query head, unrotated, all of them

    def lazy_initialization(self, *_: Any) -> None: ...

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.heads = self.heads or [[] for _ in range(keys.shape[1])]
        for head, slots in enumerate(self.heads):
            for t in range(keys.shape[2]):
                raw = self.unrotate(keys[0, head, t].double(), self.seen + t)
                slots.append(Slot(self.seen + t, raw, values[0, head, t].double()))
        self.seen += keys.shape[2]
        keys = keys.clone()
        keys.reference = self
        return keys, values

    def unrotate(self, x: Tensor, position: int) -> Tensor:
        return self.place(x, -position)

    def place(self, x: Tensor, position: int) -> Tensor:
        return x if self.inv_freq is None else rotate(x, position, self.inv_freq, self.interleaved)

    def key_at(self, slot: Slot, position: int) -> Tensor:
        if position not in slot.placed:
            slot.placed[position] = self.place(slot.key, position)
        return slot.placed[position]

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        heads, length = query.shape[1], query.shape[2]
        group = heads // len(self.heads)
        start = self.seen - length
        own = self.queries or [[] for _ in range(heads)]
        # The policy observes only the queries of the first layer that reads these slots.
        self.queries = own if not self.attended else [x[:start] for x in own]
        out = torch.zeros(*query.shape[:3], len(self.heads[0][0].value), dtype=torch.float64)
        for h in range(heads):
            for t in range(length):
                self.queries[h].append(self.unrotate(query[0, h, t].double(), start + t))
            for t in range(length):
                slots = self.heads[h // group]
                if self.setting.recalls and self.gone:
                    slots = slots + self.gone[h // group]
                weights = self.row(h, h // group, start + t, scaling, slots)
                weighted = (w * s.value for w, s in zip(weights, slots, strict=True) if w)
                out[0, h, t] = sum(weighted)
        if not self.attended:
            self.length = length  # other layers may have queries of the last tokens only
        self.queries, self.attended = own, (self.attended + 1) % self.readers
        if not self.attended:
            self.evict(group, self.length, scaling)
        return out.to(query.dtype)

    @property
    def compact(self) -> bool:
        auto = self.setting.positions == "auto" and self.seen > self.setting.trained
        return (auto or self.setting.positions == "compact") and self.window is None

    def position(self, slots: list[Slot], time: int) -> int:
        """Return a token's position: its own time, or right-aligned by rank in compact mode."""
        if not self.compact:
            return time
        older = sum(s.time < time for s in slots)
        held = [s.time for s in slots]
        # A query whose own token is evicted counts back from the newest.
        return older if time in held else len(slots) - (self.seen - time)

    def row(
        self, h: int, k: int, time: int, scaling: float, slots: list[Slot] | None = None
    ) -> list[float]:
        """Return attention of query head h at `time` over KV head k's slots, 0 for later ones."""
        held = self.heads[k]
        q = self.place(self.queries[h][time], self.position(held, time))
        logits = []
        for s in slots or held:
            # An evicted token's position follows the held tokens that are older than it.
            position = self.position(held, s.time)
            if self.compact and s not in held:
                position = sum(other.time < s.time for other in held)
            z = float(q @ self.key_at(s, position)) * scaling
            z = z if self.softcap is None else self.softcap * math.tanh(z / self.softcap)
            seen = s.time <= time and (self.window is None or time - s.time < self.window)
            logits.append(z if seen else -math.inf)
        if self.sink_logits is not None:
            logits.append(self.sink_logits[h])
        top = max(logits)
        exps = [math.exp(z - top) for z in logits]
        return [e / sum(exps) for e in exps[: len(slots or held)]]

    def evict(self, group: int, length: int, scaling: float) -> None:
        if self.window is not None:
            return
        if self.setting.chosen:
            times = self.setting.chosen[self.index].pop(0)
            for k, slots in enumerate(self.heads):
                self.heads[k] = [s for s in slots if s.time in times[k]]
            return
        rows = {}
        if self.setting.policy in ("tova", "h2o", "snapkv"):
            count = {
                "tova": 1,
                "h2o": length,
                "snapkv": self.setting.options.get("window", 32),
            }[self.setting.policy]
            times = range(max(0, self.seen - count), self.seen)
            for h in range(len(self.queries)):
                rows[h] = [self.row(h, h // group, t, scaling) for t in times]
        scored = [self.score(k, group, rows) for k in range(len(self.heads))]
        pinned = [
            [
                s.time < self.sinks()
                or s.time >= self.seen - self.recents()
                or any(start <= s.time < stop for start, stop in self.setting.pins)
                for s in slots
            ]
            for slots in self.heads
        ]
        start = self.setting.start
        self.target_length = (
            self.target_length
            or (start[self.index] if start else [self.setting.budget] * 99)[: len(self.heads)]
        )
        full = any(len(x) > n for x, n in zip(self.heads, self.target_length, strict=True))
        over = max(len(x) - n for x, n in zip(self.heads, self.target_length, strict=False))
        if length == 1 and over < self.setting.every:
            return
        kept = self.setting.keeps and length == 1
        if self.setting.split is not None and full and not kept:
            self.target_length = self.setting.split(self.index, scored, pinned)
        for k, slots in enumerate(self.heads):
            order = sorted(
                range(len(slots)),
                key=lambda j: (not pinned[k][j], -scored[k][j], -slots[j].time),
            )
            kept = sorted(order[: self.target_length[k]])
            self.gone = self.gone or [[] for _ in self.heads]
            self.gone[k] += [slots[j] for j in order[self.target_length[k] :]]
            self.heads[k] = [slots[j] for j in kept]

    def sinks(self) -> int:
        own = self.setting.options.get("sinks", 4) if self.setting.policy == "streaming_llm" else 0
        return max(own, self.setting.options.get("sink_tokens", 0))

    def recents(self) -> int:
        options, budget = self.setting.options, self.setting.budget
        return {
            "h2o": int(options.get("recent", 0.5) * budget),
            "snapkv": min(options.get("window", 32), budget),
            "keydiff": int(options.get("recent", 0.0) * budget),
        }.get(self.setting.policy, 0)

    def score(self, k: int, group: int, rows: dict[int, list[list[float]]]) -> list[float]:
        slots, options = self.heads[k], self.setting.options
        policy = self.setting.policy
        if policy == "streaming_llm":
            return [s.time for s in slots]
        keys = [self.key_at(s, self.position(slots, s.time)) for s in slots]
        if policy == "knorm":
            return [-float(key.norm()) for key in keys]
        if policy == "keydiff":
            if options.get("anchor") == "unit_mean":
                mean = sum(key / key.norm() for key in keys) / len(keys)
            else:
                mean = sum(keys) / len(keys)
            return [-float(key @ mean / (key.norm() * mean.norm())) for key in keys]
        mine = [rows[h] for h in range(k * group, (k + 1) * group)]
        n = len(slots)
        if policy == "tova":
            return [sum(head[-1][j] for head in mine) / group for j in range(n)]
        if policy == "h2o":
            for j, slot in enumerate(slots):
                slot.mass += sum(row[j] for head in mine for row in head) / group
            return [slot.mass for slot in slots]
        assert policy == "snapkv"
        half = options.get("kernel", 7) // 2
        scores = [0.0] * n
        before = sum(s.time < self.seen - options.get("window", 32) for s in slots)
        for head in mine:
            sums = [sum(row[j] for row in head) for j in range(n)]
            for j in range(n):  # tokens of the window are not pooled
                older = slice(max(0, j - half), min(before, j + half + 1))
                near = sums[older] if j < before else [sums[j]]
                pooled = max(near) if options.get("pool", "max") == "max" else sum(near) / len(near)
                scores[j] += pooled / group
        return scores

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, _: Any) -> tuple[int, int]:
        return 1, 0  # this attention needs no mask

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape


class BesideState(ReferenceLayer, STATE):
    """A reference layer that also has a recurrent state, which stays transformers' own."""

    def __init__(self, *args: Any) -> None:
        ReferenceLayer.__init__(self, *args)
        STATE.__init__(self)

    def lazy_initialization(self, *keys: Any, **states: Any) -> None:
        if states:
            STATE.lazy_initialization(self, **states)


class ReferenceCache(Cache):
    def __init__(self, model: Any, setting: Setting) -> None:
        config = model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * 99
        kinds = kinds[: config.num_hidden_layers]
        own = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
        plain = DynamicCache(config=config).layers  # empty if all layers are of one kind
        layers = [plain[i] if plain else None for i in range(own)]
        for i in range(own):
            if type(layers[i]) is STATE:  # a recurrent layer stays as it is
                continue
            slides = kinds[i] in ("sliding_attention", "hybrid_sliding")
            last = kinds[i] not in kinds[i + 1 : own]
            layers[i] = (BesideState if isinstance(layers[i], STATE) else ReferenceLayer)(
                setting,
                inv_freq_of(model, i),
                i,
                config.model_type in NEIGHBOURS,
                config.sliding_window if slides else None,
                1 + (kinds[own:].count(kinds[i]) if last else 0),
            )
        super().__init__(layers=layers)

    def kept(self, layer: int) -> list[list[int]]:
        return [[slot.time for slot in slots] for slots in self.layers[layer].heads]


def _forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    layer = key.reference
    sinks = getattr(module, "sinks", None)
    layer.sink_logits = None if sinks is None else sinks.double().tolist()
    layer.softcap = kwargs.get("softcap")
    out = layer.attend(query, kwargs["scaling"])
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, eager_mask)


def inv_freq_of(model: Any, layer: int) -> Tensor | None:
    """Return the frequencies [R/2] of a layer; None if it has no positions."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * 99
    if thetas := getattr(config, "layer_rope_theta", None):  # each theta has a rotary embedding
        each = dict(zip(sorted({*thetas} - {0}), model.model.rotary_embs, strict=True))
        rotary = each.get(thetas[layer])
        return None if rotary is None else rotary.inv_freq.double()
    rotated = getattr(config, "no_rope_layers", None) or [1] * 99
    if config.model_type in ONLY_SLIDING and "sliding_attention" in kinds:
        rotated = [kind == "sliding_attention" for kind in kinds]
    named = dict(model.named_modules())
    embeddings = [
        x for name, x in named.items() if name.split(".")[-1] in ("rotary_emb", "pos_emb")
    ]
    if not embeddings or not rotated[layer]:
        return None
    own = (f"{kinds[layer]}_inv_freq", "hybrid_inv_freq", "inv_freq")
    name = next(name for name in own if hasattr(embeddings[0], name))
    return getattr(embeddings[0], name).double()


STEPS = torch.tensor([[[60]], [[61]], [[62]], [[63]]])  # single tokens, as in generation


def run_reference(
    model: Any, ids: torch.Tensor, block: int | list[int], setting: Setting
) -> tuple[Any, torch.Tensor]:
    cache = ReferenceCache(model, setting)
    parts = [*ids.split(block, 1), *STEPS]
    with torch.no_grad():
        logits = [model(part, **as_cache(cache), logits_to_keep=1).logits for part in parts]
    return cache, torch.cat(logits)[:, -1]
