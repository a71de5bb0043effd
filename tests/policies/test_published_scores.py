"""LagKV, Expected Attention and R-KV against loops, and against what their published code keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from observations import in_time_order, newer_than_some_queries, observe, same
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvcap.policies import Eviction, Observation, PolicyError, load_policy

SHAPES = [
    *(pytest.param(observe(17, group=g, seed=g), id=f"groups of {g}") for g in (1, 2, 4, 8)),
    pytest.param(observe(13, gaps=False), id="no gaps"),
    pytest.param(observe(11, window=1, size=3), id="one query"),
    pytest.param(observe(41, batch=1, kv_heads=3, size=5), id="many slots"),
    pytest.param(newer_than_some_queries(), id="more queries than slots"),
]


def heads_of(obs: Observation) -> Iterator[tuple[int, int, list[int]]]:
    """Batch, KV head, and its slots in time order."""
    for b in range(obs.positions.shape[0]):
        for k in range(obs.positions.shape[1]):
            yield b, k, obs.positions[b, k].argsort().tolist()


def softmax(numbers: list[float]) -> list[float]:
    exps = [math.exp(x - max(numbers)) for x in numbers]
    return [x / sum(exps) for x in exps]


def spread(vector: list[float], others: list[list[float]]) -> float:
    """The deviation over channels of a vector scaled by the range of others."""
    scaled = []
    for x, *column in zip(vector, *others, strict=True):
        scaled.append((x - min(column)) / (max(column) - min(column)))
    mean = sum(scaled) / len(scaled)
    return math.sqrt(sum((x - mean) ** 2 for x in scaled) / (len(scaled) - 1))


def lagkv_by_loops(obs: Observation, lag: int, sinks: int) -> Tensor:
    scores = torch.ones(obs.positions.shape, dtype=torch.float64)
    for b, k, in_time in heads_of(obs):
        rest = [j for j in in_time if obs.positions[b, k, j] >= sinks]
        parts = [rest[i : i + lag] for i in range(0, len(rest) // lag * lag, lag)]
        for part, after in pairwise(parts):
            sums = [0.0] * lag
            for states in (obs.keys[b, k].double().tolist(), obs.values[b, k].double().tolist()):
                others = [states[j] for j in after]
                for i, x in enumerate(softmax([spread(states[j], others) for j in part])):
                    sums[i] += x
            for i, j in enumerate(part):
                scores[b, k, j] = sum(x < sums[i] for x in sums) / lag
    return scores


@pytest.mark.parametrize("obs", SHAPES)
@pytest.mark.parametrize(("lag", "sinks"), [(2, 0), (3, 4), (4, 1), (128, 16)])
def test_lagkv(obs, lag, sinks):
    policy = load_policy("lagkv", lag=lag, sinks=sinks).policy
    same(policy.score(obs), lagkv_by_loops(obs, lag, sinks))


def logits(obs: Observation, b: int, head: int, t: int, j: int) -> float:
    key = obs.keys[b, head // obs.groups, j].double()
    return float(obs.queries[b, head, t].double() @ key) * obs.rule.scale


def expected_by_loops(obs: Observation, sinks: int, epsilon: float, covariance: bool) -> Tensor:
    """Score by `μ` and `Σ` of the queries, as the paper does, each query head. [B, K, G, n]."""
    scores = torch.zeros(*obs.positions.shape[:2], obs.groups, obs.positions.shape[2]).double()
    for b, k, in_time in heads_of(obs):
        rest = [j for j in in_time if obs.positions[b, k, j] >= sinks]
        for g in range(obs.groups):
            queries = obs.queries[b, k * obs.groups + g].double()
            mean = sum(queries) / len(queries)
            sigma = sum(torch.outer(q - mean, q - mean) for q in queries) / len(queries)
            rows = []
            for j in rest:
                key = obs.rule.scale * obs.keys[b, k, j].double()
                rows.append(float(mean @ key + (key @ sigma @ key / 2 if covariance else 0)))
            for j, weight in zip(rest, softmax(rows), strict=True):
                scores[b, k, g, j] = weight
    norms = obs.values.double().square().sum(-1).sqrt()
    return (scores + epsilon) * norms[:, :, None]


@pytest.mark.parametrize("obs", SHAPES)
@pytest.mark.parametrize(
    ("group", "options"),
    [("mean", {}), ("max", {"sinks": 0}), ("sum", {"covariance": False}),
     ("mean", {"sinks": 3, "epsilon": 0.0625})],
)  # fmt: skip
def test_expected_attention(obs, group, options):
    settings = {"sinks": 4, "epsilon": 0.0, "covariance": True, **options}
    scores = expected_by_loops(obs, **settings)
    expected = {"mean": scores.mean(2), "max": scores.amax(2), "sum": scores.sum(2)}[group]
    if group == "sum":
        assert settings["epsilon"] == 0  # which is added once, and not for every query head
    policy = load_policy("expected_attention", group=group, **options).policy
    same(policy.score(obs), expected)


def test_expected_attention_of_sinks_alone_is_a_number():
    obs = observe(5, window=2, gaps=False)
    scores = load_policy("expected_attention", sinks=9).policy.score(obs)
    same(scores, obs.values.double().norm(dim=-1) / 5)


def test_expected_attention_looks_at_slots_newer_than_its_queries():
    """The queries stand for those to come, which see every slot."""
    obs = newer_than_some_queries()
    hidden = ~obs.visible[:, :, 0, 0]  # from the first query
    assert hidden.any()
    assert (obs.logits[:, :, 0, 0][hidden] == 0).all()
    assert (obs.unmasked_logits[:, :, 0, 0][hidden] != 0).all()
    capped = replace(obs, rule=obs.rule._replace(softcap=0.5))
    same(capped.unmasked_logits, 0.5 * torch.tanh(obs.unmasked_logits / 0.5))


def rkv_by_loops(
    obs: Observation,
    group: str = "max",
    window: int = 8,
    kernel: int = 7,
    mix: float = 0.1,
    threshold: float = 0.5,
) -> Tensor:
    scores = torch.zeros(obs.positions.shape, dtype=torch.float64)
    fold = {"max": max, "sum": sum, "mean": lambda x: sum(x) / len(x)}[group]
    queries = obs.queries.shape[2]
    for b, k, in_time in heads_of(obs):
        times = obs.positions[b, k].tolist()
        older = [j for j in in_time if times[j] < obs.num_tokens - window]
        weights = dict.fromkeys(in_time, 0.0)
        for t in range(queries):
            seen = [j for j in older if times[j] <= obs.num_tokens - queries + t]
            heads = range(k * obs.groups, (k + 1) * obs.groups)
            z = [fold([logits(obs, b, head, t, j) for head in heads]) for j in seen]
            for j, weight in zip(seen, softmax(z) if z else [], strict=True):
                weights[j] += weight / queries
        pooled = dict(weights)
        for index, j in enumerate(older):
            near = older[max(0, index - kernel // 2) : index + kernel // 2 + 1]
            pooled[j] = max(weights[i] for i in near)
        units = [key.double() / key.double().norm() for key in obs.keys[b, k]]
        repeated = dict.fromkeys(in_time, 0.0)
        for i in in_time:
            cosines = {j: float(units[i] @ units[j]) for j in in_time if j != i}
            alike = [j for j, cosine in cosines.items() if cosine > threshold]
            for j, cosine in cosines.items():  # in time order: the last that is alike is spared
                repeated[j] += cosine / len(in_time) if j not in alike[-1:] else 0
        for j, redundancy in zip(in_time, softmax(list(repeated.values())), strict=True):
            scores[b, k, j] = mix * pooled[j] - (1 - mix) * redundancy
    return scores


@pytest.mark.parametrize("obs", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"group": "mean", "window": 2, "mix": 0.75}, {"window": 3, "kernel": 1, "threshold": 0.1},
     {"group": "sum", "window": 4, "kernel": 3, "mix": 1.0}, {"mix": 0.0, "threshold": 0.9}],
    ids=str,
)  # fmt: skip
def test_rkv(obs, options):
    same(load_policy("rkv", **options).policy.score(obs), rkv_by_loops(obs, **options))


@pytest.mark.parametrize("budget", [8, 4])
def test_rkv_keeps_the_newest_of_keys_that_are_alike(budget):
    """Three tokens of each of four kinds: the oldest of each kind goes first, then the next."""
    obs = observe(12, batch=1, kv_heads=1, group=1, window=1, size=16, gaps=False, budget=budget)
    obs.keys = torch.eye(16)[:4][(obs.positions % 4).long()] + 1e-3 * obs.keys
    policy = load_policy("rkv", window=1, mix=0.0)
    gone = obs.positions.gather(-1, policy.select(obs, 12 - budget))
    assert sorted(gone.flatten().tolist()) == [*range(12 - budget)]


# --- what published code keeps: written plainly for one sequence, whose slots lie in time order


def lagkv_published(keys: Tensor, values: Tensor, sinks: int, lag: int) -> Tensor:
    """Score as LagKVPress of kvpress: keys and values [K, n, D] -> scores [K, n]."""
    heads, tokens, size = keys.shape
    if tokens < sinks + 2 * lag:
        return torch.arange(tokens).expand(heads, -1) / tokens
    whole = (tokens - sinks) // lag

    def part(states: Tensor) -> Tensor:
        parts = states[:, sinks : sinks + whole * lag].reshape(heads, whole, lag, size)
        low = parts[:, 1:].min(2, keepdim=True).values
        high = parts[:, 1:].max(2, keepdim=True).values
        return ((parts[:, :-1] - low) / (high - low)).std(-1).softmax(-1)

    scores = (part(keys) + part(values)) / 2
    ranks = (scores.argsort(-1).argsort(-1) / lag).flatten(1)
    tail = torch.ones(heads, lag + tokens - sinks - whole * lag)
    return torch.cat((torch.ones(heads, sinks), ranks, tail), 1)


def expected_published(
    keys: Tensor, values: Tensor, hidden: Tensor, projection: Tensor, sinks: int, epsilon: float
) -> Tensor:
    """Score as ExpectedAttentionPress of kvpress, where positions rotate nothing.

    Keys and values [K, n, D], hidden states [w, C], projection [H, D, C] -> scores [K, n].
    """
    size = keys.shape[-1]
    mean = hidden.mean(0)
    spread = (hidden - mean).T @ (hidden - mean) / len(hidden)
    mu = projection @ mean  # [H, D]
    sigma = projection @ spread @ projection.mT  # [H, D, D]
    each = keys.repeat_interleave(len(projection) // len(keys), 0)[:, sinks:]  # [H, n, D]
    z = torch.einsum("hd,hnd->hn", mu, each) / math.sqrt(size)
    z = z + torch.einsum("hnd,hde,hne->hn", each, sigma, each) / size / 2
    weights = z.softmax(-1).unflatten(0, (len(keys), -1)).mean(1)
    scores = (weights + epsilon) * values[:, sinks:].norm(dim=-1)
    return torch.cat((scores.max().expand(len(keys), sinks), scores), 1)


def rkv_published(
    keys: Tensor, queries: Tensor, window: int, kernel: int, mix: float, threshold: float
) -> Tensor:
    """Score as R1KV of R-KV's authors: keys [K, n, D], queries [H, w, D] -> scores [K, n - w]."""
    heads, tokens, size = keys.shape
    z = queries.unflatten(0, (heads, -1)) @ keys[:, None].mT / math.sqrt(size)
    weights = z.amax(1)[..., :-window].softmax(-1).mean(-2)
    pooled = max_pool1d(weights, kernel, padding=kernel // 2, stride=1)
    units = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    cosine = (units @ units.mT).masked_fill(torch.eye(tokens, dtype=torch.bool), 0.0)
    last = torch.where(cosine > threshold, torch.arange(tokens), 0).amax(-1, keepdim=True)
    spared = cosine.scatter(-1, last, 0.0)
    redundancy = spared.mean(-2).softmax(-1)[:, :-window]
    return mix * pooled - (1 - mix) * redundancy


def kept_once(eviction: Eviction, obs: Observation) -> list[list[int]]:
    """The times that each KV head keeps of `obs.budget`, evicted once with slots in any order."""
    slots = obs.positions.shape[-1]
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(1))
    shuffled = replace(
        obs,
        keys=obs.keys[:, :, order],
        values=obs.values[:, :, order],
        positions=obs.positions[:, :, order],
    )
    gone = eviction.select(shuffled, slots - obs.budget)
    evicted = shuffled.positions.gather(-1, gone)[0].tolist()
    return [sorted(set(range(slots)) - set(head)) for head in evicted]


def best_of(scores: Tensor, budget: int) -> list[list[int]]:
    return scores.topk(budget).indices.sort().values.tolist()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("tokens", "budget"), [(60, 30), (101, 40), (128, 60), (20, 12)])
def test_lagkv_keeps_what_published_code_keeps(tokens, budget, seed):
    """The last tokens are too few for two partitions: the newest stay."""
    obs = in_time_order(observe(tokens, batch=1, kv_heads=3, gaps=False, budget=budget, seed=seed))
    sinks, lag = 4, 9
    scores = lagkv_published(obs.keys[0], obs.values[0], sinks, lag)
    cut = scores.sort(descending=True).values[:, budget - 1 : budget + 1]
    eviction = load_policy("lagkv", sinks=sinks, lag=lag)
    kept = kept_once(eviction, obs)
    if tokens < sinks + 2 * lag:
        rest = [*range(sinks), *range(tokens - budget + sinks, tokens)]
        assert kept == [rest] * 3
        return
    for head, times in enumerate(kept):
        # Partitions share their ranks, and nothing says which of equal ones published code keeps.
        above = scores[head] > cut[head, 1]
        assert {int(j) for j in above.nonzero()} <= set(times)
        assert (scores[head, times] >= cut[head, 0]).all()
        equal = [j for j in range(tokens) if scores[head, j] == cut[head, 1]]
        newest = equal[len(equal) - (budget - int(above.sum())) :]
        assert times == sorted([*newest, *(int(j) for j in above.nonzero())])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("epsilon", [0.0, 0.02])
def test_expected_attention_keeps_what_published_code_keeps(seed, epsilon):
    """Take the hidden states of a window; its own tokens stay besides, and sinks in both."""
    g = torch.Generator().manual_seed(seed)
    tokens, window, sinks, budget = 53, 11, 4, 30
    obs = in_time_order(observe(tokens, batch=1, kv_heads=3, gaps=False, budget=budget, seed=seed))
    hidden = torch.randn(window, 20, generator=g) + torch.randn(20, generator=g)
    projection = torch.randn(6, 8, 20, generator=g) / 4
    obs.queries = (hidden @ projection.mT)[None]  # [1, H, w, D]
    scores = expected_published(obs.keys[0], obs.values[0], hidden, projection, sinks, epsilon)
    eviction = load_policy("expected_attention", window=window, sinks=sinks, epsilon=epsilon)
    same(eviction.score(obs)[0, :, sinks:], scores[:, sinks:])
    scores[:, tokens - window :] = math.inf
    assert kept_once(eviction, obs) == best_of(scores, budget)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mix", [0.07, 0.1, 0.6])
def test_rkv_keeps_what_published_code_keeps(seed, mix):
    """Use keys that each resemble another: else published code spares the first slot."""
    tokens, window, budget = 57, 8, 30
    obs = observe(tokens, batch=1, kv_heads=3, size=16, window=window, gaps=False, seed=seed)
    obs = replace(in_time_order(obs), budget=budget)
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, 9, 16, generator=g)[:, torch.randperm(tokens, generator=g) % 9]
    obs.keys = (centres + 0.4 * obs.keys[0])[None]
    units = torch.nn.functional.normalize(obs.keys[0], dim=-1)
    assert ((units @ units.mT > 0.5).sum(-1) > 1).all()  # another than itself
    scores = rkv_published(obs.keys[0], obs.queries[0], window, 7, mix, 0.5)
    eviction = load_policy("rkv", window=window, mix=mix)
    same(eviction.score(obs)[0, :, : tokens - window], scores)
    newest = [*range(tokens - window, tokens)]
    assert kept_once(eviction, obs) == [
        [*older, *newest] for older in best_of(scores, budget - window)
    ]


# --- after every block


@pytest.mark.parametrize("budget", [16, 17, 40, 300])
def test_the_cap_wins_over_the_newest_tokens(budget):
    for name, newest in (("lagkv", 0), ("expected_attention", min(32, budget - 16))):
        eviction = load_policy(name, sinks=16)
        eviction.check(budget)
        assert eviction.recents(budget) == newest
        with pytest.raises(PolicyError, match="at least 16"):
            eviction.check(15)


@pytest.mark.parametrize(("budget", "seed"), [(8, 0), (9, 1), (14, 2)])
def test_lagkv_keeps_the_newest_tokens_of_few_slots(budget, seed):
    obs = in_time_order(observe(40, batch=1, kv_heads=3, budget=budget, seed=seed))
    newest = [head[-8:] for head in obs.positions[0].sort().values.tolist()]
    kept = kept_once(load_policy("lagkv", lag=8), obs)
    assert all({*new} <= {*times} for new, times in zip(newest, kept, strict=True))


def test_lagkv_of_keys_that_are_all_alike_is_a_number():
    obs = observe(30)
    obs.keys = torch.ones_like(obs.keys)
    scores = load_policy("lagkv", lag=4, sinks=2).policy.score(obs)
    assert torch.isfinite(scores).all()
    values = replace(obs, keys=obs.values)  # which alone decide
    same(scores, lagkv_by_loops(values, 4, 2))
