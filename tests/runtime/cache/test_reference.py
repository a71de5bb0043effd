"""The cache against the slow reference: same logits and same kept tokens, after many evictions."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from conftest import tiny_model
from divisions import FUNNEL, TABLE, Best, Funnel, Table, best
from families import model_of
from reference import NAME, STEPS, Setting, rotate, run_reference
from torch import Tensor

import kvcap
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.query_window import QueryWindow
from kvcap.runtime.cache.storage import LayerStorage
from kvcap.runtime.models.rope import Rotation

POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("keydiff", {}),
    ("keydiff", {"anchor": "unit_mean", "recent": 0.2}),
    ("streaming_llm", {"sinks": 2}),
    ("knorm", {}),
    ("tova", {}),
    ("h2o", {}),
    ("h2o", {"recent": 0.0}),
    # Maxima tie between neighbours, so max pooling is compared by score, in test_policies.
    ("snapkv", {"window": 4, "kernel": 3, "pool": "avg"}),
    ("snapkv", {"window": 9, "kernel": 5, "pool": "avg"}),  # longer than the block
]


BUDGET = 12
LAYERS = 2
WINDOW = 21  # of the model, where positions are 'auto': within a block of most texts
FAMILIES = ["llama", "qwen3", "phi3", "granite", "starcoder2", "glm"]  # the last rotates neighbours
DIVISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the cache, of the reference
    "equal": ({}, {}),
    "heads": ({"head_budget": Table()}, {"start": TABLE}),
    "heads that move": (
        {"head_budget": Best()}, {"split": lambda _, s, p: best(s, p, BUDGET)}
    ),
    "layers": ({"layer_budget": Funnel()}, {"start": FUNNEL}),
    "layers, heads that move": (
        {"layer_budget": Funnel(), "head_budget": Best()},
        {"start": FUNNEL, "split": lambda layer, s, p: best(s, p, FUNNEL[layer][0])},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A random combination of all that a cache can be asked for."""

    family: str
    policy: tuple[str, dict[str, Any]]
    positions: str
    division: str
    block: int
    every: int
    batch: int
    ids: Tensor  # [batch, length]

    @classmethod
    def by(cls, seed: int) -> Drawn:
        draw = Random(seed)
        positions, division = draw.choice(["compact", "true", "auto"]), draw.choice([*DIVISIONS])
        name, options = draw.choice(POLICIES)
        options = {"sink_tokens": draw.choice([0, 3]), **options}
        block, batch = draw.randint(1, 9), draw.choice([1, 1, 2])
        if division != "equal":  # pins of half the budget do not fit the smallest head
            options = {key: x for key, x in options.items() if key != "recent"}
            options |= {"recent": 0.0} if name == "h2o" else {}
            options |= {"window": 3} if name == "snapkv" else {}
            options["sink_tokens"] = min(1, options["sink_tokens"])
        length, generator = draw.randint(25, 45), torch.Generator().manual_seed(seed)
        ids = [3 + torch.randperm(50, generator=generator)[:length] for _ in range(batch)]
        # No token comes twice in a text, as equal keys would tie.
        return cls(draw.choice(FAMILIES), (name, options), positions, division, block,
                   draw.randint(1, min(3, block)), batch, torch.stack(ids))  # fmt: skip

    def model(self, attention: str = "kvcap") -> Any:
        changes = {"partial_rotary_factor": 0.5} if self.family == "phi3" else {}
        if self.positions == "auto":
            changes["max_position_embeddings"] = WINDOW
        return model_of(self.family, attention, **changes)

    def cached(self) -> tuple[kvcap.BudgetCache, Tensor]:
        """The cache after the text and some tokens of an answer, and their logits [S, B, V]."""
        name, options = self.policy
        policy = kvcap.load_policy(name, **options).policy
        eviction = kvcap.Eviction(
            policy, **DIVISIONS[self.division][0], sink_tokens=options["sink_tokens"]
        )
        model = self.model()
        cache = kvcap.BudgetCache(
            model.config, BUDGET, self.block, eviction,
            positions=self.positions, evict_every=self.every,
        )  # fmt: skip
        loop = BlockLoop(model, cache)
        steps = [step.expand(self.batch, -1) for step in STEPS]
        logits = [loop.read(part) for part in (*self.ids.split(self.block, 1), *steps)]
        return cache, torch.stack(logits)

    def referred(self, row: int) -> tuple[Any, Tensor]:
        """What the reference keeps of one text of the batch, and its logits [S, V]."""
        name, options = self.policy
        setting = Setting(
            name, BUDGET, self.positions, options, **DIVISIONS[self.division][1],
            keeps=self.block > 1, trained=WINDOW, every=self.every,
        )  # fmt: skip
        return run_reference(self.model(NAME), self.ids[row : row + 1], self.block, setting)


def kept(cache: kvcap.BudgetCache, layer: int, row: int = 0) -> list[list[int]]:
    """The places in the text of what each head of a layer holds, in order."""
    segments = [s for s in cache.layers[layer].segments if s.row <= row < s.row + s.batch]
    return [sorted(x.tolist()) for s in segments for x in s.positions[row - s.row]]


@pytest.mark.slow(keep=24)
@pytest.mark.parametrize("seed", range(120))
def test_random_combinations(seed):
    """Any settings give the logits of the reference, and keep the tokens that it keeps."""
    drawn = Drawn.by(seed)
    cache, logits = drawn.cached()
    for row in range(drawn.batch):
        reference, expected = drawn.referred(row)
        for layer in range(LAYERS):
            assert kept(cache, layer, row) == reference.kept(layer), drawn
        torch.testing.assert_close(logits[:, row], expected, rtol=2e-4, atol=2e-4)


def run(model: Any, ids: torch.Tensor, block: int, setting: Setting) -> tuple[Any, torch.Tensor]:
    eviction = kvcap.load_policy(setting.policy, **setting.options).plain()
    cache = kvcap.BudgetCache(
        model.config, setting.budget, block, eviction, positions=setting.positions
    )
    loop = BlockLoop(model, cache)
    logits = [loop.read(part) for part in ids.split(block, 1)]
    logits += [loop.read(part) for part in STEPS]
    return cache, torch.cat(logits)


ROPES = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("rope", ROPES)
def test_compact_positions_with_every_rope_type(rope, tokens):
    """Keys rotated by rank equal keys computed anew from their unrotated form at that rank."""
    scaling = {"rope_theta": 10000.0, **ROPES[rope]} if ROPES[rope] else None
    changes = {"rope_parameters" if hasattr_rope() else "rope_scaling": scaling} if scaling else {}
    setting = Setting("keydiff", 12, "compact")
    ids = tokens(40)
    cache, logits = run(tiny_model("llama", **changes), ids, 6, setting)
    reference, expected = run_reference(tiny_model("llama", NAME, **changes), ids, 6, setting)
    assert kept(cache, 1) == reference.kept(1)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["phi3", "qwen3", "smollm3", "starcoder2", "granite"])
def test_compact_positions_in_other_families(family, tokens):
    changes = {"partial_rotary_factor": 0.5} if family == "phi3" else {}
    setting = Setting("keydiff", 12, "compact")
    ids = tokens(30)
    cache, logits = run(tiny_model(family, **changes), ids, 6, setting)
    reference, expected = run_reference(tiny_model(family, NAME, **changes), ids, 6, setting)
    assert kept(cache, 1) == reference.kept(1)
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


def hasattr_rope() -> bool:
    from conftest import tiny_config

    return hasattr(tiny_config("llama"), "rope_parameters")


@pytest.mark.parametrize("fault", ["keys not moved", "keys moved too far", "queries not moved"])
def test_planted_faults_of_positions_are_seen(fault, monkeypatch):
    back, window = Rotation.back, QueryWindow.last
    if fault == "keys not moved":
        monkeypatch.setattr(Rotation, "back", lambda self, x, shift: x)
    elif fault == "keys moved too far":
        monkeypatch.setattr(Rotation, "back", lambda self, x, shift: back(self, x, shift + 1))
    else:
        monkeypatch.setattr(QueryWindow, "last", lambda self, seg, n, _: window(self, seg, n, None))
    setting = Setting("snapkv", 12, "compact", {"window": 9, "kernel": 5, "pool": "avg"})
    ids = 3 + torch.randperm(50)[None, :31]
    cache, logits = run(tiny_model("llama"), ids, 6, setting)
    reference, expected = run_reference(tiny_model("llama", NAME), ids, 6, setting)
    differ = [kept(cache, layer) != reference.kept(layer) for layer in range(2)]
    assert any(differ) or (logits - expected).abs().max() > 1e-2


@pytest.mark.slow
def test_no_drift_in_bfloat16_after_ten_thousand_evictions():
    """Keys are rotated once from what the model made, however often their position moved."""
    model = tiny_model("llama", dtype=torch.bfloat16, max_position_embeddings=128)
    cache = kvcap.BudgetCache(model.config, 16, 8, kvcap.load_policy("streaming_llm", sinks=8))
    loop = BlockLoop(model, cache)
    for i in range(10_000 // 8 + 2):  # eight evictions a block
        loop.read(3 + (torch.arange(8)[None] * 7 + i) % 90)
    store = cache.layers[0].segments[0]
    assert cache.seen > 10_000
    fresh = kvcap.BudgetCache(model.config, 16, 8)
    BlockLoop(model, fresh).read(3 + (torch.arange(8)[None] * 7) % 90)
    order = store.positions[0, 0].argsort()[:8]  # the sinks, read first and never rewritten
    rotation = cache.layers[0].storage.rotation
    moved = rotation.back(store.keys, store.aux("shift"))[0, 0, order]
    assert torch.equal(moved, fresh.layers[0].segments[0].keys[0, 0])
    newest = store.positions[0, 0].argsort()[-8:]
    exact = rotate_all(store.keys[0, 0, newest], -store.aux("shift")[0, 0, newest], cache)
    error = (rotation.back(store.keys, store.aux("shift"))[0, 0, newest].double() - exact).abs()
    assert error.max() <= exact.abs().max() * 2**-8  # one rounding to bfloat16


@pytest.mark.parametrize(("every", "policy", "options"), [
    (1, "keydiff-window", {}), (8, "keydiff-window", {}),
    (8, "snapkv", {"window": 9, "kernel": 3, "pool": "avg"}),  # of queries that are kept
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_rotated_in_place_are_those_rotated_at_attention(
    dtype, every, policy, options, monkeypatch, tokens
):
    """As tokens are on a CPU, in float32; a key moves by no more than its rank."""
    model, ids = tiny_model("llama", dtype=dtype), tokens(300)
    eviction = kvcap.load_policy(policy, **options)
    caches, logits, settle, settled = [], [], LayerStorage.settle, []
    monkeypatch.setattr(LayerStorage, "settle", lambda self: settled.append(settle(self)))
    for settles in (True, False):
        if not settles:
            monkeypatch.setattr(LayerStorage, "settles", False)
        cache = kvcap.BudgetCache(model.config, 24, 8, eviction, evict_every=every)
        loop, found = BlockLoop(model, cache), []
        loop.prefill(ids[:, :40])
        found += [loop.read(ids[:, i : i + 1]) for i in range(40, 200)]
        loop.prefill(ids[:, 200:220])  # another turn, whose blocks evict too
        found += [loop.read(ids[:, i : i + 1]) for i in range(220, 300)]
        caches.append(cache)
        logits.append(torch.cat(found))
    assert bool(settled) == (dtype == torch.float32)
    assert kept(caches[0], 1) == kept(caches[1], 1)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=2e-5)
    keys = [
        cache.capped_layers[0].storage.read_keys(cache.layers[0].segments[0]) for cache in caches
    ]
    torch.testing.assert_close(*keys, rtol=1e-5, atol=1e-6)


def rotate_all(keys: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
    return rotate(keys.double(), positions, cache.layout.rope.inv_freq)
