"""The cache against the slow reference: same logits and same kept tokens, after many evictions."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from conftest import small_policy, tiny_model
from divisions import FUNNEL, TABLE, Best, Funnel, Table, best
from families import ALL, ELSEWHERE, MLA, config_of, model_of
from reference import NAME, STEPS, ReferenceCache, Setting, rotate, run_reference
from torch import Tensor

import kvcap
from kvcap.policies import policies
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.positions import CompactPositions
from kvcap.runtime.errors import PinsTooLarge
from kvcap.runtime.models.config import ModelShape

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


FOLLOWED = sorted(  # which the reference cannot score: it keeps what the cache did
    name
    for name, recipe in policies().items()
    if not {"corrector", "full"} & {*recipe.parts, name} and name not in dict(POLICIES)
)
BUDGET, ROOMY = 12, 24  # the latter for what pins more
WINDOW = 21  # of the model, where positions are 'auto': within a block of most texts
NAMES = sorted((ALL | ELSEWHERE).keys() - MLA.keys())  # latents: test_latent_attention.py
PLAIN = ["llama", "qwen3", "phi3", "granite", "starcoder2", "glm"]  # two layers, both capped
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip
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
    changes: dict[str, Any]  # of its config
    policy: str
    options: dict[str, Any]
    positions: str
    division: str
    recalls: bool  # evicted tokens are attended to all the same
    pins: list[tuple[int, int]]
    budget: int
    block: int
    every: int
    blocks: list[int]  # tokens of each
    reused: bool  # the cache has read another text, and was reset
    ids: Tensor  # [batch, length]
    copied_after: int  # passes after which another cache goes on from a copy; 0: none does
    dropped: dict[int, tuple[int, int]]  # tokens whose slots are freed after so many passes

    @classmethod
    def by(cls, seed: int) -> Drawn:
        draw = Random(seed)
        family = draw.choice(PLAIN) if seed % 2 else NAMES[seed // 2 % len(NAMES)]
        shape = ModelShape.of(config_of(family))
        positions = draw.choice(["compact", "true", "auto"]) if shape.moves_exactly else "true"
        changes: dict[str, Any] = {"phi3": {"partial_rotary_factor": 0.5}}.get(family, {})
        if positions == "auto":
            changes = {**changes, "max_position_embeddings": WINDOW}
        elif family == "llama" and (rope := ROPES[draw.choice([*ROPES])]):
            five = hasattr(config_of(family), "rope_parameters")
            changes = {"rope_parameters" if five else "rope_scaling": {"rope_theta": 1e4, **rope}}
        division = draw.choice([*DIVISIONS]) if family in PLAIN else "equal"
        recalls = draw.random() < 0.15 and not shape.of_kind("shared")
        name, options = draw.choice(POLICIES)
        options = {"sink_tokens": draw.choice([0, 3]), **options}
        pins, budget = draw.choice([[], [(5, 6), (8, 9)]]), BUDGET
        if division != "equal":  # pins of half the budget do not fit the smallest head
            options = {key: x for key, x in options.items() if key != "recent"}
            options |= {"recent": 0.0} if name == "h2o" else {}
            options |= {"window": 3} if name == "snapkv" else {}
            options["sink_tokens"], pins = min(1, options["sink_tokens"]), []
        elif draw.random() < 0.3 and not recalls:
            name, options, budget = draw.choice(FOLLOWED), {}, ROOMY
            if "critical" in name and family not in PLAIN:
                name = "dropkv"  # not all have a projection that can be read
        block, batch = draw.randint(1, 9), draw.choice([1, 1, 2])
        every, length = draw.randint(1, min(3, block)), draw.randint(25, 45)
        blocks, evenly = list[int](), draw.random() < 0.5
        while left := length - sum(blocks):  # what waits for its eviction takes room of a block
            blocks.append(min(left, block if evenly else draw.randint(1, block - every + 1)))
        generator = torch.Generator().manual_seed(seed)
        ids = [3 + torch.randperm(50, generator=generator)[:length] for _ in range(batch)]
        # No token comes twice in a text, as equal keys would tie.
        reused, copied, drops = (draw.random() < share for share in (0.2, 0.3, 0.3))
        passes = range(1, len(blocks) + len(STEPS))
        dropped = {}
        if drops and not recalls:
            for after in sorted(draw.sample(passes, 2)):
                start = draw.randint(10, length - 6)  # behind what is pinned
                dropped[after] = start, start + draw.randint(1, 5)
        return cls(
            family,
            changes,
            name,
            options,
            positions,
            division,
            recalls,
            pins,
            budget,
            block,
            every,
            blocks,
            reused,
            torch.stack(ids),
            draw.choice(passes) if copied and batch == 1 else 0,  # copies are of one sequence
            dropped,
        )

    def model(self, attention: str = "kvcap") -> Any:
        return model_of(self.family, attention, **self.changes)

    def eviction(self, config: Any) -> kvcap.Eviction:
        if self.policy in FOLLOWED:
            return small_policy(self.policy, config)
        name, options = self.policy, self.options
        if self.recalls:  # always, and nothing is forgotten
            name, options = f"{name}+calidrop", {**options, "theta1": 1.0, "calibration_size": 1000}
        return replace(kvcap.load_policy(name, **options).plain(), **DIVISIONS[self.division][0])

    def cached(self) -> tuple[kvcap.BudgetCache, Tensor, Chosen]:
        """The cache after the text and some tokens of an answer, their logits, what it held.

        Logits are [S, B, V]. What each layer held after every pass is that of each sequence.
        """
        model, held = self.model(), Chosen()
        eviction = self.eviction(model.config)

        def loop_of_new_cache() -> BlockLoop:
            cache = kvcap.BudgetCache(
                model.config,
                self.budget,
                self.block,
                eviction,
                positions=self.positions,
                evict_every=self.every,
            )
            return BlockLoop(model, cache)

        loop, logits = loop_of_new_cache(), []
        cache = loop.cache
        if self.reused:
            loop.prefill(self.ids.flip(1))
            cache.reset()
        with suppress(PinsTooLarge):  # beside those of some policies
            cache.pin(self.pins)
        steps = [step.expand(len(self.ids), -1) for step in STEPS]
        for passes, part in enumerate((*self.ids.split(self.blocks, 1), *steps), 1):
            logits.append(loop.read(part))
            assert cache.held <= self.budget + (self.every - 1 if part.shape[1] == 1 else 0)
            if span := self.dropped.get(passes):
                loop.drop([span])
            if passes == self.copied_after:
                copy, loop = loop.copied(), loop_of_new_cache()
                cache = loop.cache
                cache.allocate(len(self.ids), model.dtype, model.device)
                loop.go_on_from(copy)
                cache.set_pins(copy.facts["pinned_spans"])
            for layer in cache.layout.shape.capped:
                rows = [kept(cache, layer, row) for row in range(len(self.ids))]
                held.setdefault(layer, []).append(rows)
        if self.division == "equal":  # those of tests are of one budget alone
            plan = kvcap.MemoryPlan.of(
                model.config,
                policy=eviction,
                budget_tokens=self.budget,
                batch=len(self.ids),
                block_size=self.block,
                dtype=torch.float32,
                positions=self.positions,
            )
            # Native sliding layers grow up to their window.
            assert 0 <= plan.cache_bytes - cache.nbytes <= plan.sliding_layers
        return cache, torch.stack(logits), held

    def referred(
        self, row: int, pins: list[tuple[int, int]], held: Chosen
    ) -> tuple[ReferenceCache, Tensor]:
        """What the reference keeps of one text of the batch, and its logits [S, V]."""
        follows = self.policy in FOLLOWED or self.dropped
        setting = Setting(
            self.policy,
            self.budget,
            self.positions,
            self.options,
            **DIVISIONS[self.division][1],
            pins=pins,
            keeps=self.block > 1,
            trained=WINDOW,
            every=self.every,
            recalls=self.recalls,
            chosen={i: [x[row] for x in passes] for i, passes in held.items()} if follows else {},
        )
        return run_reference(self.model(NAME), self.ids[row : row + 1], self.blocks, setting)


Chosen = dict[int, list[list[list[list[int]]]]]


def kept(cache: kvcap.BudgetCache, layer: int, row: int = 0) -> list[list[int]]:
    """The places in the text of what each head of a layer holds, in order."""
    segments = [s for s in cache.layers[layer].segments if s.row <= row < s.row + s.batch]
    return [sorted(x.tolist()) for s in segments for x in s.positions[row - s.row]]


def check(drawn: Drawn) -> None:
    """Hold a cache to the logits of the reference, and to the tokens that it keeps."""
    cache, logits, held = drawn.cached()
    pinned = {time for start, stop in cache.pinned_spans for time in range(start, stop)}
    for row in range(len(drawn.ids)):
        reference, expected = drawn.referred(row, cache.pinned_spans, held)
        for layer in cache.layout.shape.capped:
            assert kept(cache, layer, row) == reference.kept(layer), drawn
            assert all(pinned <= {*head} for head in kept(cache, layer, row)), drawn
        difference = (logits[:, row] - expected).abs().max()
        assert difference <= 2e-4 * expected.abs().max().clamp(min=1), drawn


@pytest.mark.slow(keep=24, ci=56)
@pytest.mark.parametrize("seed", range(300))
def test_random_combinations(seed):
    check(Drawn.by(seed))


@pytest.mark.parametrize(("family", "policy"), [
    ("gemma3n", ("h2o", {})), ("gemma4", POLICIES[-1]), ("gpt_oss", ("h2o", {})),
    ("gpt_oss", POLICIES[-2]), ("granite_swa", POLICIES[-1]),
], ids=str)  # fmt: skip
def test_scores_by_attention_where_layers_share_slots_or_have_sinks(family, policy):
    """Slots are scored by the queries of their own layer, less the share of a sink."""
    check(
        replace(
            Drawn.by(0),
            family=family,
            changes={},
            policy=policy[0],
            options=policy[1],
            budget=BUDGET,
            positions="compact",
            division="equal",
            recalls=False,
            pins=[],
            every=1,
        )
    )


@pytest.mark.slow(keep=12, ci=24)
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_of_all_tokens_is_the_uncapped_model(name):
    ids = 3 + torch.randperm(50, generator=torch.Generator().manual_seed(1))[None, :31]
    with torch.no_grad():
        expected = model_of(name, "eager")(torch.cat((ids, *STEPS[:, 0].split(1)), 1)).logits[0]
    _, logits = run_reference(model_of(name, NAME), ids, 8, Setting("knorm", 99, "true"))
    expected = expected[[7, 15, 23, 30, 31, 32, 33, 34]]
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max().clamp(min=1)


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
    rotation = cache.layers[0].engine.positions.rotation
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
    caches, logits, rotations, rotate = [], [], [], CompactPositions.rotate_in_place
    monkeypatch.setattr(
        CompactPositions,
        "rotate_in_place",
        lambda self, segment: rotations.append(rotate(self, segment)),
    )
    for in_place in (True, False):
        if not in_place:
            monkeypatch.setattr(CompactPositions, "can_rotate_in_place", lambda *_: False)
        cache = kvcap.BudgetCache(model.config, 24, 8, eviction, evict_every=every)
        loop, steps = BlockLoop(model, cache), []
        loop.prefill(ids[:, :40])
        steps += [loop.read(ids[:, i : i + 1]) for i in range(40, 200)]
        loop.prefill(ids[:, 200:220])  # another turn, whose blocks evict too
        steps += [loop.read(ids[:, i : i + 1]) for i in range(220, 300)]
        caches.append(cache)
        logits.append(torch.cat(steps))
    assert bool(rotations) == (dtype == torch.float32)
    assert kept(caches[0], 1) == kept(caches[1], 1)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=2e-5)
    keys = [
        cache.capped_layers[0].engine.read_keys(cache.layers[0].segments[0]) for cache in caches
    ]
    torch.testing.assert_close(*keys, rtol=1e-5, atol=1e-6)


def rotate_all(keys: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
    return rotate(keys.double(), positions, cache.layout.rope.inv_freq)
