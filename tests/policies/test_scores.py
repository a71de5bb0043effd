"""Output-aware scores against loops in float64, and the facts that their papers promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from observations import (
    attention_by_loops,
    grouped,
    newer_than_some_queries,
    observe,
    pooled,
    same,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcap import policies
from kvcap.policies import Eviction, Observation, PolicyError, load_policy

OUTPUT_AWARE = ("dropkv", "andpro", "cake", "obcache", "obcache-h2o", "obcache-tova")
Term = Callable[[float, float, list[float], list[float]], float]


def shapes() -> list[tuple[str, Observation]]:
    cases = [(f"groups of {g}", observe(17, group=g, seed=g)) for g in (1, 2, 4, 8)]
    cases += [("no gaps", observe(13, gaps=False)), ("one query", observe(11, window=1))]
    return [*cases, ("more queries than slots", newer_than_some_queries())]


SHAPES = [pytest.param(obs, id=name) for name, obs in shapes()]


def by_loops(obs: Observation, term: Term) -> Tensor:
    """`term(A, z, a, v)` of every query and slot, [B, K, G, w, n], with Python's own floats."""
    weights = attention_by_loops(obs).tolist()
    queries, keys, values = (x.double().tolist() for x in (obs.queries, obs.keys, obs.values))
    attention = attention_by_loops(obs)
    for b, batch in enumerate(weights):
        for k, heads in enumerate(batch):
            for g, rows in enumerate(heads):
                for t, row in enumerate(rows):
                    query = queries[b][k * len(heads) + g][t]
                    out = [dot(row, column) for column in zip(*values[b][k], strict=True)]
                    for j, weight in enumerate(row):
                        z = obs.rule.scale * dot(query, keys[b][k][j])
                        attention[b, k, g, t, j] = term(weight, z, out, values[b][k][j])
    return attention


def dot(a: Iterable[float], b: Iterable[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def distance(a: list[float], b: list[float]) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def dropkv_term(p: float, z: float, a: list[float], v: list[float]) -> float:
    return (p / (1 - p + 1e-6)) ** 2 * distance(a, v)


def obcache_term(mode: str) -> Term:
    def term(p: float, z: float, o: list[float], v: list[float]) -> float:
        value, key = p**2 * dot(v, v), (p * z) ** 2 * distance(v, o)
        joint = 2 * p**2 * z * (dot(v, v) - dot(v, o)) + value + key
        return {"value": value, "key": key, "joint": joint}[mode]

    return term


@pytest.mark.parametrize("obs", SHAPES)
@pytest.mark.parametrize(("pool", "group"), [("max", "mean"), ("avg", "sum"), ("max", "max")])
def test_dropkv(obs, pool, group):
    policy = load_policy("dropkv", pool=pool, group=group, kernel=5, window=4).policy
    expected = grouped(by_loops(obs, dropkv_term).sum(-2), group)
    same(policy.score(obs), pooled(expected, obs, 4, 5, pool))


@pytest.mark.parametrize("obs", SHAPES)
@pytest.mark.parametrize("group", ["sum", "mean", "max"])
def test_andpro(obs, group):
    expected = grouped(by_loops(obs, lambda p, z, a, v: p * dot(a, v)).sum(-2), group)
    same(load_policy("andpro", group=group).policy.score(obs), expected)
    assert load_policy("andpro").policy.group == "sum"


@pytest.mark.parametrize("obs", SHAPES)
@pytest.mark.parametrize("group", ["mean", "max"])
def test_cake(obs, group):
    a = attention_by_loops(obs)
    mean = a.mean(-2)
    scores = mean + 200 * ((a - mean[..., None, :]) ** 2).mean(-2)
    expected = grouped(pooled(scores, obs, 4, 5, "avg"), group)
    same(load_policy("cake", group=group, window=4).policy.score(obs), expected)


@pytest.mark.parametrize("obs", SHAPES)
@pytest.mark.parametrize("mode", ["value", "key", "joint"])
def test_obcache(obs, mode):
    """As saliency of every base; what a query cannot see weighs exactly nothing."""
    weights = by_loops(obs, obcache_term(mode))
    for name, expected in (
        ("obcache-tova", weights[..., -1, :].mean(2)),
        ("obcache-h2o", weights.sum(-2).mean(2)),
        ("obcache", pooled(weights.sum(-2), obs, 32, 7, "max").mean(2)),
    ):
        eviction = load_policy(name, mode=mode)
        now = replace(obs, saliency=eviction.saliency)
        now.state = {"accumulated": torch.zeros(obs.positions.shape)}
        now.state = {**now.state, **eviction.update(now)}
        same(eviction.score(now), expected)
        masked = ~now.visible.expand_as(now.weight)
        assert (now.weight[masked] == 0).all()


def test_dropkv_of_a_token_that_takes_all_attention():
    """`p = 1` divides by ε: large, and finite; in bfloat16 that begins at 0.998."""
    obs = observe(9, window=1)
    obs.keys[:, :, 2] = 300 * obs.queries[:, ::2, 0]
    for bf16_ratio in (False, True):
        scores = load_policy("dropkv", kernel=1, bf16_ratio=bf16_ratio).policy.score(obs)
        assert torch.isfinite(scores).all()
        assert (scores >= 0).all()
    rounded = observe(9, window=1)
    exact = load_policy("dropkv", kernel=1).policy.score(rounded)
    low = load_policy("dropkv", kernel=1, bf16_ratio=True).policy.score(rounded)
    assert not torch.equal(exact, low)
    torch.testing.assert_close(exact, low, rtol=0.05, atol=1e-6)
    p = attention_by_loops(rounded).float().bfloat16().double()
    d = by_loops(rounded, lambda p, z, a, v: distance(a, v))
    same(low, ((p / (1 - p + 1e-6)) ** 2 * d).sum(-2).mean(2))


@pytest.mark.parametrize("obs", SHAPES)
@pytest.mark.parametrize("group", ["mean", "sum", "max"])
def test_bases_are_the_attention_saliency_on_their_windows(obs, group):
    """tova, snapkv and h2o sum `A` over the last query, the window, every query."""
    a = attention_by_loops(obs)
    newest = a[..., -1, :]
    same(load_policy("tova", group=group).policy.score(obs), grouped(newest, group))
    of_layer = newest.mean((1, 2), keepdim=True).expand_as(newest)
    policy = load_policy("tova", group=group, across="layer").policy
    same(policy.score(obs), grouped(of_layer, group))
    same(
        load_policy("h2o", group=group).policy.update(obs)["accumulated"],
        grouped(a.sum(-2), group),
    )
    for kernel, pool in ((1, "max"), (3, "max"), (3, "avg")):
        policy = load_policy("snapkv", group=group, window=5, kernel=kernel, pool=pool).policy
        same(policy.score(obs), grouped(pooled(a.sum(-2), obs, 5, kernel, pool), group))


def test_random_hashes_heads_by_their_place():
    obs = observe()
    policy = load_policy("random").policy
    alone = replace(obs, positions=obs.positions[:, 1:], first_head=1)
    assert torch.equal(policy.score(alone), policy.score(obs)[:, 1:])


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made meanwhile; views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.numbers = max(self.numbers, x.numel())
        return out


@pytest.mark.parametrize("name", OUTPUT_AWARE)
def test_scores_need_no_more_than_a_window_of_attention(name):
    """No tensor of window x slots x head size, and no values copied for every query head."""
    eviction = load_policy(name)
    obs = observe(40, batch=1, group=4, size=16, window=8)
    obs.saliency = eviction.saliency
    with Largest() as largest:
        eviction.update(obs)
        eviction.policy.score(obs)
    assert largest.numbers <= 2 * 4 * 8 * 40  # [K, G, w, n]


@pytest.mark.parametrize("name", [n for n in policies.policies() if n != "full"])
def test_scores_depend_on_no_data_in_python(name):
    """Fake tensors have no numbers: a score that asks for one fails."""
    eviction = load_policy(name)
    obs = critical(observe(), new=23)
    obs.saliency = eviction.saliency
    with FakeTensorMode() as mode:
        for field, value in vars(obs).items():
            if isinstance(value, Tensor):
                setattr(obs, field, mode.from_tensor(value))
        obs.state = {n: mode.from_tensor(x) for n, x in obs.state.items()}
        eviction.policy.update(obs)
        scores = eviction.policy.score(obs)
        assert scores.shape == (2, 2, 23)
        if eviction.rescorer is not None:
            eviction.rescorer.update(obs)
            eviction.rescorer.rescore(scores, obs.positions > 3, obs)


def critical(obs: Observation, new: int = 0, hidden: int = 12, seed: int = 0) -> Observation:
    g = torch.Generator().manual_seed(seed)
    obs.output_projection = torch.randn(2, obs.groups, obs.keys.shape[-1], hidden, generator=g)
    obs.state = {**obs.state, "output_norm": torch.rand(obs.positions.shape, generator=g)}
    obs.new = new
    return obs


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("new", [0, 1, 5, 23])
def test_criticalkv_norms_of_the_new_tokens(group, new):
    obs = critical(observe(group=group), new)
    norms = load_policy("criticalkv").rescorer.update(obs)["output_norm"]
    expected = obs.state["output_norm"].double()
    for b, k, j in ((b, k, j) for b in range(2) for k in range(2) for j in range(23 - new, 23)):
        total = 0.0
        for g in range(group):
            for column in obs.output_projection[k, g].T.double().tolist():
                total += abs(dot(obs.values[b, k, j].double().tolist(), column))
        expected[b, k, j] = total / group
    same(norms, expected)
    assert norms.dtype == torch.float32


def test_criticalkv_norms_take_one_query_head_at_a_time():
    obs = critical(observe(batch=1, group=4), new=20, hidden=512)
    with Largest() as largest:
        load_policy("criticalkv").rescorer.update(obs)
    assert largest.numbers <= 20 * 512  # [B, T, hidden]


def stages(
    scores: list[float],
    norms: list[float],
    positions: list[int],
    pinned: list[bool],
    keep: int,
    alpha: float,
    rows: int,
) -> set[int]:
    """Algorithm 1 on one head, as lists: which slots stay. Of equal ones the newer does."""
    kept = {j for j, pin in enumerate(pinned) if pin}
    left = [j for j in range(len(scores)) if j not in kept]
    lowest = min([0.0, *(scores[j] for j in left)])
    room = keep - len(kept)
    first = sorted(left, key=lambda j: (-scores[j], -positions[j]))[: int(alpha * room)]
    left = [j for j in left if j not in first]
    worth = {j: ((scores[j] - lowest) / rows + 1e-4) * norms[j] for j in left}
    second = sorted(left, key=lambda j: (-worth[j], -positions[j]))
    return kept | set(first) | set(second[: room - len(first)])


@given(
    seed=st.integers(0, 10_000),
    alpha=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    base=st.sampled_from(["snapkv", "h2o", "tova", "keydiff", "andpro", "streaming_llm"]),
    pins=st.integers(0, 6),
)
def test_criticalkv_selects_in_two_stages(seed, alpha, base, pins):
    obs = critical(observe(window=3, budget=11, seed=seed), new=23, seed=seed)
    options = {"window": 3} if base in ("snapkv", "andpro") else {}
    eviction = load_policy(f"{base}+criticalkv", alpha=alpha, recent_tokens=pins, **options)
    obs.state = {**obs.state, **eviction.update(obs)}
    if base in ("keydiff", "streaming_llm"):
        obs.queries = None  # such a policy keeps none
    scores, pinned = eviction.score(obs), eviction.pinned(obs)
    gone = eviction.select(obs, 12)
    for b, k in ((b, k) for b in range(2) for k in range(2)):
        expected = stages(
            scores[b, k].double().tolist(),
            obs.state["output_norm"][b, k].double().tolist(),
            obs.positions[b, k].tolist(),
            pinned[b, k].tolist(),
            11,
            alpha,
            3 if obs.queries is not None else 1,
        )
        assert set(range(23)) - set(gone[b, k].tolist()) == expected


def test_obcache_needs_a_base_that_attends():
    with pytest.raises(PolicyError, match="nothing to replace"):
        load_policy("keydiff+obcache")
    assert isinstance(load_policy("tova+obcache+criticalkv"), Eviction)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("obs", SHAPES)
def test_a_mask_that_is_added_gives_what_one_that_is_filled_in_gives(obs, softcap):
    obs = replace(obs, rule=obs.rule._replace(softcap=softcap))
    z = obs.queries.unflatten(1, (-1, obs.groups)).flatten(2, 3) @ obs.keys.mT * obs.rule.scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)).view(obs.attention.shape)
    assert torch.equal(obs.attention, z.masked_fill(~obs.visible, -torch.inf).softmax(-1))
    assert torch.equal(obs.logits, z.masked_fill(~obs.visible, 0.0))
    torch.testing.assert_close(obs.variance, obs.attention.var(-2, correction=0))
