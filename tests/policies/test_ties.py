"""Equal scores at the cut: the newer token stays, in eager code, kernels and graphs alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools import operations  # noqa: F401
from torch import Tensor

from kvcap.export.graphs.cases import Case, inputs
from kvcap.export.graphs.check import feed, session
from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.spec import Spec
from kvcap.export.graphs.write import write
from kvcap.policies import Eviction, Observation, load_policy
from kvcap.policies.base.order import best, sequence
from kvcap.policies.keydiff import KeyDiff
from kvcap.runtime.cache.evicted_store import EvictedStore
from kvcap.runtime.cache.pool import Segment, SlotPool

FEW = [0.0, -0.0, 1.0, -1.0, 1e-42, -3e38, float("inf"), float("-inf"), float("nan")]
SHAPE = Shape(kv_heads=2, heads=4, head_dim=8, batch=2, block=10, budget=23)


def observe(n: int, seed: int = 0) -> Observation:
    """Slots in no order, with gaps."""
    g = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(3 * n, generator=g)[:n] for _ in range(4)])
    keys = torch.randn(2, 2, n, 8, generator=g)
    return Observation(
        keys=keys,
        values=keys,
        positions=positions.view(2, 2, n).int(),
        num_tokens=3 * n,
        budget=n // 2,
    )


def evicted(worth: Tensor, positions: Tensor, count: int) -> list[list[list[int]]]:
    """The lowest of every head, the older of equal ones, by sorting pairs."""
    rows = zip(worth.flatten(0, 1).tolist(), positions.flatten(0, 1).tolist(), strict=True)
    slots = [
        sorted(sorted(range(len(row)), key=list(zip(row, age, strict=True)).__getitem__)[:count])
        for row, age in rows
    ]
    return [slots[:2], slots[2:]]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    n=st.integers(2, 40), share=st.floats(0.05, 1.0), kinds=st.integers(1, len(FEW)),
    sinks=st.integers(0, 9), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_eager_code_chooses_by_worth_and_then_by_age(n, share, kinds, sinks, seed):
    obs, g = observe(n, seed), torch.Generator().manual_seed(seed)
    raw = torch.tensor(FEW)[torch.randint(kinds, (2, 2, n), generator=g)]
    eviction, count = Eviction(KeyDiff(), sink_tokens=sinks), max(1, int(share * (n - 1)))
    scores = eviction.score(obs, lambda *_: raw)
    pinned = eviction.pinned(obs)
    worth = torch.where(pinned, torch.inf, scores)
    slots = eviction.choose(scores, pinned, obs, count).sort().values
    assert slots.tolist() == evicted(worth, obs.positions, count)
    # The same order by sorts, as graphs and devices without 64-bit topk have it.
    assert sequence(worth, obs.positions)[..., :count].sort().values.equal(slots)
    for counts in (
        torch.full((2, 2, 1), n - count),
        torch.tensor([[[0.0], [0.9]], [[1.5], [n + 7]]]),
    ):
        upper = sequence(worth, obs.positions).argsort(dim=-1) >= n - counts.floor()
        assert best(worth, obs.positions, counts).equal(upper)
        assert best(worth.double(), obs.positions, counts).equal(upper)


def tied(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs that score alike to the bit, whoever computes them: small whole numbers, no query."""
    g = torch.Generator().manual_seed(2)
    keys = torch.zeros_like(given["keys"])
    keys[..., 0] = torch.randint(1, 4, keys.shape[:-1], generator=g).float()
    changed = {"keys": keys, "values": keys + 1, "pinned": torch.zeros_like(given["pinned"])}
    if "queries" in given:
        changed["queries"] = torch.zeros_like(given["queries"])
    if "output_norm" in given:
        changed["output_norm"] = torch.ones_like(given["output_norm"])
    return {**given, **changed}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("name", "options"),
    [("knorm", {}), ("keydiff", {"recent": 0.2}), ("snapkv", {"window": 4}),
     ("cake", {"window": 4}), ("criticalkv", {"window": 4})],
    ids=str,
)  # fmt: skip
def test_graphs_keep_what_eager_code_keeps(name, options, tmp_path):
    """Slots lie in no order."""
    spec = Spec(load_policy(name, **options), SHAPE, "evict")
    file, _ = write(spec, tmp_path, quick=True)
    graph = spec.graph()
    fixed: Any = session(file)
    for n in (24, 33):
        given = tied(inputs(graph, Case("random", n), torch.float32))
        got, eviction, obs = feed(fixed, given), spec.eviction, graph.form.observe(given)
        worth = eviction.worth(eviction.score(obs), eviction.pinned(obs), obs)
        cut = worth.sort().values[..., n - 24 : n - 22]  # the last that goes, the first that stays
        assert (cut[..., 0] == cut[..., 1]).any(), "no tie at the cut"
        gone = evicted(worth, obs.positions, n - 23)
        stays = [[sorted({*range(n)} - {*row}) for row in rows] for rows in gone]
        assert got["kept_slot"].tolist() == stays
        assert eviction.select(obs, n - 23).sort().values.tolist() == gone


def test_of_evicted_tokens_kept_aside_the_newer_stay():
    new = torch.Generator().manual_seed(0)
    segment = Segment(SlotPool(60, 4, torch.float32), 0, 22, 8, 1, 2)
    segment.held = 30
    positions = [torch.randperm(30, generator=new) for _ in range(2)]
    segment.positions.copy_(torch.stack(positions)[None])
    corrector = load_policy("calidrop", calibration_size=7).corrector
    kept = EvictedStore(corrector, [segment], 4)
    slots = torch.stack([torch.randperm(30, generator=new)[:20] for _ in range(2)])[None]
    obs = Observation(segment.keys, segment.values, segment.positions, num_tokens=30, budget=10)
    kept.take(0, segment, slots, torch.ones(1, 2, 30), obs)
    newest = segment.positions.gather(2, slots).sort().values[..., -7:]
    assert kept.evicted[0].positions.sort().values.equal(newest)
