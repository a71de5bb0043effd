"""Leverage against `torch.linalg`, and the scores made of it against what kvpress computes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from observations import in_time_order, newer_than_some_queries, observe, same
from torch import Tensor

from kvcap.policies import Observation, load_policy
from kvcap.policies.base import leverage, sign_sketch

SHAPES = [
    pytest.param(observe(17, group=g, seed=g, size=size), id=f"group {g}, size {size}")
    for g, size in ((1, 8), (2, 5), (4, 12))
]
SHAPES += [
    pytest.param(observe(13, gaps=False), id="no gaps"),
    pytest.param(observe(11, window=1), id="one query"),
    pytest.param(newer_than_some_queries(), id="more queries than slots"),
]


def exact(rows: Tensor, ridge: float) -> Tensor:
    """`diag(X (XᵀX + ridge I)⁻¹ Xᵀ)` in float64, by Cholesky."""
    x = rows.double()
    gram = x.mT @ x + ridge * torch.eye(x.shape[-1], dtype=torch.float64)
    solved = torch.cholesky_solve(x.mT, torch.linalg.cholesky(gram))
    return (x * solved.mT).sum(-1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads(obs: Observation) -> list[tuple[int, int]]:
    return [(b, k) for b in range(obs.keys.shape[0]) for k in range(obs.keys.shape[1])]


def kept(scores: Tensor, count: int) -> list[set[int]]:
    return [set(head.topk(count).indices.tolist()) for head in scores.flatten(0, -2)]


@pytest.mark.parametrize(("n", "size"), [(1, 8), (7, 8), (8, 8), (33, 5), (301, 48), (1153, 64)])
@pytest.mark.parametrize("ridge", [0.01, 1.0])
def test_leverage_is_that_of_linalg(n, size, ridge):
    rows = normal(2, 3, n, size)
    scores = leverage(rows, ridge)
    # The floor is felt in one direction of a square of random numbers: 0.6 % there.
    torch.testing.assert_close(scores.double(), exact(rows, ridge), rtol=1e-2, atol=1e-4)
    assert (scores >= 0).all()
    assert (scores < 1 + 1e-4).all()


def test_leverage_with_channels_of_very_different_size():
    """Keys have channels a hundred times as large as others; none hides what is in the others."""
    rows = normal(600, 32) * torch.logspace(-1, 3, 32)
    torch.testing.assert_close(leverage(rows, 0.01).double(), exact(rows, 0.01), rtol=2e-3, atol=0)


def test_rounding_of_the_rows_changes_no_leverage_by_a_thousandth():
    """Rows that hold little of some directions, as keys do: 1e-7 of them is 1e-2 of an inverse."""
    rows = normal(600, 48) @ (normal(48, 48, seed=1) * torch.logspace(0, -3, 48)) @ normal(48, 48)
    nudged = rows * (1 + 1e-7 * normal(600, 48, seed=2))
    torch.testing.assert_close(leverage(nudged, 0.01), leverage(rows, 0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize("rows", [torch.zeros(9, 6), torch.ones(9, 6) * 1e4, torch.zeros(0, 6)])
def test_leverage_of_rows_that_span_nothing_is_finite(rows):
    scores = leverage(rows, 0.01)
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(scores.double(), exact(rows, 0.01), rtol=0.05, atol=1e-6)


def test_the_sketch_keeps_lengths_and_is_the_same_everywhere():
    sketch = sign_sketch(64, 48, torch.device("cpu"))
    assert set((sketch * 48**0.5).round().flatten().tolist()) == {-1.0, 1.0}
    assert torch.equal(sketch, sign_sketch(64, 48, torch.device("cpu")))
    assert abs(sketch.sum() * 48**0.5) < 4 * (64 * 48) ** 0.5  # as many of each, to four deviations
    assert torch.linalg.matrix_rank(sketch) == 48
    rows = normal(400, 64)
    ratio = (rows @ sketch).square().sum(-1) / rows.square().sum(-1)
    assert abs(ratio.mean() - 1) < 0.05
    crossed = sketch.mT @ sketch / 64 * 48  # of independent columns, 1 beside 0
    assert (crossed - torch.eye(48)).abs().max() < 5 / 64**0.5


# --- CUR


def cur_by_loops(obs: Observation, mode: str, window: int) -> Tensor:
    out = torch.zeros(obs.positions.shape, dtype=torch.float64)
    for b, k in heads(obs):
        order = obs.positions[b, k].argsort().tolist()
        for first in range(0, len(order), window or len(order)):
            run = order[first : first + (window or len(order))]
            key, value = (
                {j: float(x[b, k, j].double().square().sum()) for j in run}
                for x in (obs.keys, obs.values)
            )
            for j in run:
                a, c = key[j] / sum(key.values()), value[j] / sum(value.values())
                out[b, k, j] = {"product": a * c, "mean": (a + c) / 2, "key": a, "value": c}[mode]
    return out


@pytest.mark.parametrize("obs", SHAPES)
@pytest.mark.parametrize("mode", ["product", "mean", "key", "value"])
@pytest.mark.parametrize("window", [0, 1, 4, 16, 40])
def test_cur(obs, mode, window):
    score = load_policy("cur", mode=mode, window=window).policy.score
    same(score(obs), cur_by_loops(obs, mode, window))


def in_order(n: int, *, kv_heads: int = 2, group: int = 2, size: int = 8) -> Observation:
    """One block of `n` tokens read at once, in order, as kvpress compresses a prompt."""
    return in_time_order(
        observe(n, kv_heads=kv_heads, group=group, size=size, window=n, gaps=False, seed=n)
    )


def stay(name: str, obs: Observation, budget: int, **options: object) -> list[set[int]]:
    """Return the slots that stay of each head, after one eviction."""
    eviction, n = load_policy(name, **options), obs.positions.shape[-1]
    now = replace(obs, budget=budget)
    now.state = {**obs.state, **eviction.update(now)}
    gone = eviction.select(now, n - budget)
    return [set(range(n)) - set(head.tolist()) for head in gone.flatten(0, 1)]


# --- CapKV


def capkv_exactly(obs: Observation, tau: float, sinks: int, group: str = "mean") -> Tensor:
    """`w_j v_jᵀ (I + Σ w v vᵀ)⁻¹ v_j` head by head, in float64; 0 for the sinks."""
    out = torch.zeros(*obs.positions.shape[:2], obs.groups, obs.positions.shape[2]).double()
    for b, k in heads(obs):
        free = [j for j, p in enumerate(obs.positions[b, k].tolist()) if p >= sinks]
        values = obs.values[b, k, free].double()
        for g in range(obs.groups):
            mean = obs.queries[b, k * obs.groups + g].double().mean(0)
            c = torch.cosine_similarity(obs.keys[b, k, free].double(), mean[None], dim=-1)
            w = (tau * (c - c.max())).exp()
            a = torch.eye(values.shape[1], dtype=torch.float64)
            for weight, v in zip(w, values, strict=True):
                a = a + weight * torch.outer(v, v)
            for j, weight, v in zip(free, w, values, strict=True):
                out[b, k, g, j] = weight * (v @ torch.linalg.solve(a, v))
    return {"mean": out.mean(2), "sum": out.sum(2), "max": out.amax(2)}[group]


@pytest.mark.parametrize("obs", SHAPES)
@pytest.mark.parametrize(
    ("tau", "sinks", "group"), [(5.0, 4, "mean"), (0.0, 0, "sum"), (9, 2, "max")]
)
def test_capkv(obs, tau, sinks, group):
    policy = load_policy("capkv", tau=tau, sinks=sinks, group=group).policy
    torch.testing.assert_close(
        policy.score(obs).double(), capkv_exactly(obs, tau, sinks, group), rtol=2e-3, atol=1e-4
    )


# --- Compactor


def z(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std().clamp_min(1e-6)


def mutual(obs: Observation, chunk: int) -> Tensor:
    """Return by loops what the queries of each run of a block pay its tokens; 0 for older ones."""
    w = obs.queries.shape[2]
    out = torch.zeros(obs.positions.shape).double()
    for b, k in heads(obs):
        offsets = [p - (obs.num_tokens - w) for p in obs.positions[b, k].tolist()]
        for h in range(k * obs.groups, (k + 1) * obs.groups):
            for t in range(w):
                run = [j for j, p in enumerate(offsets) if p >= 0 and p // chunk == t // chunk]
                q = obs.queries[b, h, t].double()
                logits = [float(q @ obs.keys[b, k, j].double()) for j in run]
                exps = [math.exp(x - max(logits)) for x in logits]
                for j, e in zip(run, exps, strict=True):
                    out[b, k, j] += e / sum(exps) / obs.groups
    return out


def compactor_exactly(obs: Observation, chunk: int, sketch: Tensor | None, blend: float) -> Tensor:
    """Return kvpress's score of a block in order, each head by itself, no sinks."""
    out = torch.zeros(obs.positions.shape).double()
    attention = mutual(obs, chunk)
    for b, k in heads(obs):
        x = obs.keys[b, k].double()
        x = x - x.mean(0)
        lever = exact(x if sketch is None else x @ sketch.double(), 0.01)
        looked = attention[b, k] * obs.values[b, k].double().norm(dim=-1)
        near = [looked[max(0, j - 1) : j + 2].mean() for j in range(len(looked))]
        out[b, k] = blend * z(lever) + z(torch.stack(near))
    return out


@pytest.mark.parametrize("obs", SHAPES)
@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_compactor_adds_up_attention_within_runs_of_the_block(obs, chunk):
    obs.state = {"mutual": torch.full(obs.positions.shape, -7.0)}
    sums = load_policy("compactor", chunk=chunk).policy.update(obs)["mutual"]
    old = obs.positions < obs.num_tokens - obs.queries.shape[2]
    assert (sums[old] == -7).all()
    same(sums.masked_fill(old, 0), mutual(obs, chunk))


@pytest.mark.parametrize(("n", "size", "width"), [(40, 8, 48), (97, 12, 5), (130, 64, 48)])
def test_compactor_keeps_what_kvpress_keeps(n, size, width):
    obs = in_order(n, size=size)
    sketch = sign_sketch(size, width, obs.keys.device) if width < size else None
    options = {"chunk": 32, "sketch": width, "sinks": 0, "recent": 0, "blend": 0.5}
    expected = compactor_exactly(obs, 32, sketch, 0.5)
    assert stay("compactor", obs, n // 2, **options) == kept(expected, n // 2)
    policy = load_policy("compactor", **options).policy
    scores = policy.score(replace(obs, state=policy.update(obs)))
    deviation = math.sqrt(n / (n - 1))  # of a sample there, of all here
    torch.testing.assert_close(scores.double(), expected * deviation, rtol=5e-3, atol=2e-3)


def test_compactor_leaves_pinned_tokens_out_of_its_statistics():
    """Keys and values of sinks, however large, change no other token's score."""
    obs = in_order(60)
    policy = load_policy("compactor", sinks=8, recent=4).policy
    state = {"mutual": normal(2, 2, 60).abs()}
    scores = policy.score(replace(obs, state=state))
    for name in ("keys", "values"):
        changed = getattr(obs, name).clone()
        changed[:, :, :7] *= 100  # the last one is a neighbour, with which a free one is pooled
        changed[:, :, 57:] *= 100
        wild = policy.score(replace(obs, state=state, **{name: changed}))
        same(wild[..., 8:56], scores[..., 8:56])
