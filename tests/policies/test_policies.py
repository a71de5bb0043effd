"""Scores against plain formulas, golden facts, options, names and selection."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from observations import attention_by_loops, observe, same

import kvcap
from kvcap import policies
from kvcap.policies import Eviction, Observation, Policy, PolicyError, load_policy
from kvcap.policies.base import LayerBudget, Preset, Rescorer, Saliency, pool_in_time
from kvcap.policies.keydiff import KeyDiff


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [7, 23])
def test_attention_is_causal_softmax_on_unordered_slots(group, n):
    obs = observe(n, group=group)
    same(obs.attention, attention_by_loops(obs))
    expected = torch.einsum("bkgwn,bknd->bkgwd", attention_by_loops(obs), obs.values.double())
    same(obs.output, expected)


def test_masked_logits_are_finite_and_softcap_applies():
    obs = observe(gaps=False)  # some slots are newer than some queries
    assert torch.isfinite(obs.logits).all()
    assert (obs.logits[~obs.visible.expand_as(obs.logits)] == 0).all()
    capped = observe(gaps=False)
    capped.rule = capped.rule._replace(softcap=0.5)
    same(capped.logits, 0.5 * torch.tanh(obs.logits / 0.5))


def test_keydiff_by_its_formula():
    obs = observe()
    keys = obs.keys.double()
    mean = keys.mean(2, keepdim=True)
    cos = (keys * mean).sum(-1) / keys.norm(dim=-1) / mean.norm(dim=-1)
    same(load_policy("keydiff").policy.score(obs), -cos)
    same(load_policy("keydiff", metric="dot").policy.score(obs), -(keys * mean).sum(-1))
    distance = (keys - mean).norm(dim=-1)
    same(load_policy("keydiff", metric="euclidean").policy.score(obs), distance)
    median = keys.median(2, keepdim=True).values
    cos = (keys * median).sum(-1) / keys.norm(dim=-1) / median.norm(dim=-1)
    same(load_policy("keydiff", anchor="median").policy.score(obs), -cos)


def test_keydiff_pairwise_and_unit_mean_keep_the_same():
    """Eq. 7 = Eq. 8: the mean cosine is the cosine with the mean unit key times a constant."""
    obs = observe(40, budget=12)
    kept = [
        set(load_policy("keydiff", anchor=anchor).policy.score(obs)[0, 0].topk(12).indices.tolist())
        for anchor in ("pairwise", "unit_mean")
    ]
    assert kept[0] == kept[1]


def test_zero_keys_are_no_nan():
    obs = observe()
    obs.keys = torch.zeros_like(obs.keys)
    for name in ("keydiff", "knorm", "tova", "snapkv"):
        assert torch.isfinite(load_policy(name).policy.score(obs)).all()


def test_random_depends_on_the_token_alone():
    obs = observe()
    policy = load_policy("random", seed=3).policy
    scores = policy.score(obs)
    order = obs.positions.argsort(-1)
    shuffled = observe()
    shuffled.positions = obs.positions.gather(-1, order)
    same(policy.score(shuffled), scores.gather(-1, order))
    other = load_policy("random", seed=4).policy.score(obs)
    assert not torch.equal(scores, other)
    positions = torch.arange(100_000, dtype=torch.int32).expand(1, 2, -1)
    shuffled.positions = positions
    many = policy.score(shuffled)
    assert abs(float(many.mean()) / 2**24 - 0.5) < 0.01
    correlation = torch.corrcoef(torch.cat((many[0], positions[0, :1].float())))
    assert correlation.fill_diagonal_(0).abs().max() < 0.02


def keeps_its_contract(policy: Policy) -> None:
    """Fail by the policy's name unless it reads what it says and gives what it should."""
    name, obs = type(policy).__name__, observe()
    unknown = policy.observes - policies.base.component.VIEWS
    assert not unknown, f"{name} observes {sorted(unknown)}, which no Observation has"
    unread = {"keys", "values", "queries"} - policy.observes
    obs = replace(obs, **dict.fromkeys(unread))
    state = policy.update(obs)
    assert state.keys() == policy.state.keys(), f"{name}: update gave {sorted(state)}"
    obs.state = {**obs.state, **state}
    for what, tensor in {**state, "scores": policy.score(obs)}.items():
        dtype = policy.state.get(what, torch.float32)
        assert tensor.shape == (2, 2, 23), f"{name}: {what} of shape {list(tensor.shape)}"
        assert tensor.dtype == dtype, f"{name}: {what} in {tensor.dtype}"
        assert torch.isfinite(tensor).all(), f"{name}: {what} that are not finite"


@pytest.mark.parametrize("name", policies.policies())
def test_every_policy_keeps_its_contract(name):
    keeps_its_contract(load_policy(name).policy)


def broken(**members: Any) -> Policy:
    good = {"score": lambda self, obs: -obs.positions.float()}
    return type("Broken", (Policy,), good | members)()


def test_scores_of_another_shape_are_refused():
    eviction = Eviction(broken(score=lambda self, obs: obs.positions.float()[:, :1]), name="mine")
    with pytest.raises(PolicyError, match=r"mine: score gave \[2, 1, 23\]; .* \[2, 2, 23\]"):
        eviction.select(observe(), 13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [n for n in policies.policies() if n != "full"])
def test_low_precision_inputs_score_in_float32(name, dtype):
    """Numbers are scored alike in either type, though float16 cannot hold their squares."""
    eviction, scores, kept = replace(load_policy(name), head_budget=None), [], []
    projection = torch.randn(2, 2, 8, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    for wide in (torch.Tensor.clone, torch.Tensor.float):
        obs = observe(dtype=dtype)
        obs.keys, obs.values, obs.queries = map(wide, (obs.keys, 100 * obs.values, obs.queries))
        obs.output_projection, obs.saliency, obs.new = wide(projection), eviction.saliency, 23
        obs.state = {**obs.state, **{n: torch.zeros(2, 2, 23) for n in eviction.state}}
        obs.state = {**obs.state, **eviction.update(obs)}
        scores.append(eviction.score(obs))
        kept.append(eviction.select(obs, 13).sort(-1).values)
    assert scores[0].dtype == torch.float32
    assert scores[0].isfinite().all()
    assert torch.equal(*scores)
    assert torch.equal(*kept)


@pytest.mark.parametrize("pool", ["max", "avg"])
def test_pooling_goes_through_time(pool):
    scores = torch.tensor([[[5.0, 1.0, 3.0]]])
    positions = torch.tensor([[[30, 10, 20]]])  # in time: 1, 3, 5
    pooled = pool_in_time(scores, positions, 3, pool, 31, 0)
    expected = [5.0, 3.0, 5.0] if pool == "max" else [4.0, 2.0, 3.0]
    assert pooled[0, 0].tolist() == expected


@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("num_tokens", [41, torch.tensor(41)])
def test_the_newest_tokens_lift_no_neighbours(pool, num_tokens):
    scores = torch.tensor([[[90.0, 1.0, 4.0, 80.0]]])
    positions = torch.tensor([[[40, 10, 20, 30]]])  # in time: 1, 4, 80, 90
    pooled = pool_in_time(scores, positions, 3, pool, num_tokens, 11)
    expected = [90.0, 4.0, 4.0, 80.0] if pool == "max" else [90.0, 2.5, 2.5, 80.0]
    assert pooled[0, 0].tolist() == pytest.approx(expected, rel=1e-6)
    for all_ in (31, 1000):
        assert torch.equal(pool_in_time(scores, positions, 3, pool, num_tokens, all_), scores)


@pytest.mark.parametrize(("name", "kernel"), [("snapkv", 7), ("dropkv", 11), ("cake", 5)])
def test_a_strong_window_does_not_lift_its_neighbours(name, kernel):
    """What its tokens score is nothing to the others."""
    policy = load_policy(name, window=5).policy
    obs = observe(60)
    newest = obs.positions >= obs.num_tokens - 5
    border = (obs.positions >= obs.num_tokens - 5 - 60) & ~newest
    weak = policy.score(replace(obs))
    strong = replace(obs, values=torch.where(newest[..., None], 50 * obs.values, obs.values))
    if name != "dropkv":  # attention itself: the same to all but the window
        strong = replace(obs)
        strong.__dict__["attention"] = torch.where(
            newest[:, :, None, None], 100 * obs.attention, obs.attention
        )
    else:
        strong.__dict__["attention"], strong.__dict__["output"] = obs.attention, obs.output
    assert (policy.score(strong)[newest] > weak[newest]).any()
    assert torch.equal(policy.score(strong)[border], weak[border])


@given(seed=st.integers(0, 10_000), extreme=st.sampled_from([math.inf, -math.inf, math.nan, 3e38]))
def test_pins_survive_any_score(seed, extreme):
    """Pinning is a mask: infinite, huge or missing scores cannot push a pinned token out."""

    @dataclass(frozen=True)
    class Wild(Policy):
        observes: ClassVar = frozenset({"keys"})

        def score(self, obs: Observation) -> torch.Tensor:
            g = torch.Generator().manual_seed(seed)
            scores = torch.randn(obs.positions.shape, generator=g)
            return scores.masked_fill(scores > 0, extreme)

    obs = observe(seed=seed, gaps=False)
    eviction = Eviction(Wild(), sink_tokens=4, recent_tokens=6)
    gone = obs.positions.gather(-1, eviction.select(obs, 13))
    assert (gone >= 4).all()
    assert (gone < 23 - 6).all()
    assert all(len(set(head.tolist())) == 13 for head in gone.flatten(0, 1))


def test_names_presets_and_nearest():
    names = policies.policies()
    assert {"keydiff", "streaming_llm", "knorm", "tova", "h2o", "snapkv", "random", "full"} <= set(
        names
    )
    assert load_policy("keydiff-window").policy.recent == 0.2
    assert load_policy("keydiff-window", recent=0.1).policy.recent == 0.1
    with pytest.raises(PolicyError, match="did you mean 'keydiff'"):
        load_policy("keydif")
    with pytest.raises(PolicyError, match="did you mean 'anchor'"):
        load_policy("keydiff", anchr="mean")
    for wrong in ({"sinktokens": 3}, {"sink_tokens": -1}):
        with pytest.raises(PolicyError, match="sink_tokens"):
            load_policy("keydiff", **wrong)


REFUSED: dict[str, dict[str, list[Any]]] = {  # values of each option that will not work
    "adakv": {"safeguard": [1.1]},
    "andpro": {"window": [0], "group": ["all"]},
    "cake": {
        "window": [-1], "gamma": [-1], "kernel": [4], "group": ["all"], "tau1": [0], "tau2": [-1],
        "floor": [1.5],
    },
    "capkv": {"tau": [-1, 81], "sinks": [-1], "window": [0]},
    "compactor": {
        "blend": [-1], "sketch": [0], "ridge": [0], "chunk": [0], "sinks": [-1], "recent": [-1],
        "group": ["all"],
    },
    "criticalkv": {"alpha": [1.5], "epsilon": [-1e-4]},
    "cur": {"mode": ["both"], "window": [-1], "sinks": [-1]},
    "dropkv": {
        "window": [0], "kernel": [2], "pool": ["sum"], "group": ["median"], "epsilon": [0],
        "bf16_ratio": ["maybe"],
    },
    "duoattention": {"retrieval": [2], "sinks": [-1], "recents": [0]},
    "expected_attention": {
        "window": [0], "sinks": [-1], "epsilon": [-0.1, 1.0], "covariance": ["half"],
    },
    "h2o": {"recent": [-0.1], "group": ["all"]},
    "headkv": {"beta": [1.0, 11], "table": [3]},
    "keydiff": {"anchor": ["mode"], "metric": ["manhattan"], "recent": [1.0, "much"]},
    "lagkv": {"lag": [1], "sinks": [-1]},
    "obcache": {"mode": ["both"]},
    "pyramidkv": {"beta": [0]},
    "random": {"seed": [-1]},
    "rkv": {
        "window": [0], "kernel": [4, 0], "mix": [1.1, math.nan], "threshold": [-0.1],
        "group": ["all"],
    },
    "snapkv": {"window": [0], "kernel": [4], "pool": ["sum"], "group": ["all"]},
    "streaming_llm": {"sinks": [-1]},
    "tova": {"across": ["model"], "group": ["all"]},
}  # fmt: skip


@pytest.mark.parametrize(("name", "option", "value"), [
    (name, option, value)
    for name, options in REFUSED.items()
    for option, values in options.items()
    for value in values
])  # fmt: skip
def test_bad_options_are_refused_by_name(name, option, value):
    with pytest.raises(PolicyError, match=f"{name}: {option}={value!r} will not work; expected"):
        load_policy(name, **{option: value})


def test_pins_larger_than_the_budget():
    eviction = load_policy("streaming_llm", sinks=8)
    with pytest.raises(PolicyError, match="at least 8"):
        eviction.check(6, 2)
    with pytest.raises(PolicyError, match="0 slots cannot hold a token; use 8 or more"):
        eviction.check(0, 2)


def test_slots_of_an_eviction_compose():
    """A saliency replaces attention, a rescorer the scores, a layer budget the split."""
    obs = observe()

    class Square(Saliency):
        def weigh(self, obs):
            return obs.attention**2

    saliency = Eviction(load_policy("tova").policy, saliency=Square())
    obs.saliency = saliency.saliency
    same(saliency.policy.score(obs), (attention_by_loops(obs)[..., -1, :] ** 2).mean(2))

    class Flip(Rescorer):
        def rescore(self, scores, pinned, obs):
            return -scores

    plain = load_policy("knorm")
    flipped = Eviction(plain.policy, rescorer=Flip())
    a = plain.select(obs, 11)[0, 0].tolist()
    b = flipped.select(obs, 12)[0, 0].tolist()
    assert not set(a) & set(b)

    class Funnel(LayerBudget):
        def split(self, budget, layers, pinned):
            return [budget + (layers - 1 - 2 * i) for i in range(layers)]

    assert Eviction(plain.policy, layer_budget=Funnel()).split(10, 3) == [12, 10, 8]
    with pytest.raises(PolicyError, match="nothing to replace"):
        Eviction(plain.policy, saliency=Square())
    with pytest.raises(PolicyError, match="across=group"):
        load_policy("tova+adakv", across="layer")
    with pytest.raises(PolicyError, match="cannot be combined with a head budget"):
        load_policy("cake+adakv+cake")
    with pytest.raises(PolicyError, match="two parts for one place"):
        load_policy("snapkv+adakv+headkv")
    with pytest.raises(PolicyError, match="did you mean 'adakv'"):
        load_policy("snapkv+adakw")
    with pytest.raises(PolicyError, match="never evicts"):
        Eviction(load_policy("full").policy, rescorer=Flip())


def registered(monkeypatch, **points: Any) -> None:
    """Register policies by entry points, where an error is what loading raises."""

    class Point:
        value, dist = "elsewhere:Thing", SimpleNamespace(name="a-package")

        def __init__(self, name: str, policy: Any) -> None:
            self.name, self.policy = name, policy

        def load(self):
            if isinstance(self.policy, BaseException):
                raise self.policy
            return self.policy

    made = [Point(name, policy) for name, policy in points.items()]
    monkeypatch.setattr(policies, "entry_points", lambda group: made)
    policies.policies.cache_clear()
    policies._registered.cache_clear()


@pytest.fixture
def fresh(monkeypatch):
    yield
    monkeypatch.undo()
    policies.policies.cache_clear()
    policies._registered.cache_clear()


@dataclass(frozen=True)
class Demanding(Policy):
    """Has an option without a default, and a preset of nothing."""

    much: int
    presets: ClassVar = {"nothing": Preset("no_such_policy")}


@dataclass(frozen=True)
class Plain(Policy):
    """Sound."""


@dataclass(frozen=True)
class Greedy(Policy):
    """Takes names of others for its presets."""

    presets: ClassVar = {
        "h2o": Preset("greedy"),
        "balanced": Preset("greedy"),
        "nothing": Preset("no_such"),
        "mine": Preset("greedy"),
    }


@pytest.mark.parametrize(
    ("loaded", "why"),
    [
        (ImportError("No module named 'gone'"), "No module named 'gone'"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (SystemExit("bye"), "bye"),
        (SyntaxError("invalid syntax"), "invalid syntax"),
        (load_policy, "no class derived from kvcap.policies.Policy"),
        (int, "no class derived from kvcap.policies.Policy"),
        (Demanding, "missing 1 required positional argument: 'much'"),
    ],
)
def test_a_broken_policy_of_a_package_takes_nothing_else_with_it(loaded, why, monkeypatch, fresh):
    registered(monkeypatch, broken=loaded, newest=Plain)
    message = rf"policy 'broken' \(elsewhere:Thing, of package a-package\) cannot be used: .*{why}"
    with pytest.warns(UserWarning, match=message):
        assert isinstance(load_policy("newest").policy, Plain)
    assert "keydiff" in policies.policies()
    assert "broken" not in policies.policies()
    for name in ("broken", "broken+adakv"):
        with pytest.raises(PolicyError, match=message):
            load_policy(name)


def test_names_that_are_taken_stay_their_owners(monkeypatch, fresh):
    registered(monkeypatch, keydiff=Demanding, balanced=Plain, greedy=Greedy)
    with pytest.warns(UserWarning, match="cannot be used") as caught:
        assert type(load_policy("keydiff").policy) is KeyDiff
    assert type(load_policy("balanced").policy).__name__ == "DropKV"
    assert type(load_policy("h2o").policy).__name__ == "H2O"
    assert isinstance(load_policy("mine").policy, Greedy)
    messages = [str(one.message) for one in caught]
    assert any("the name is kvcap's own; mend or uninstall" in one for one in messages)
    assert any("preset 'h2o' of" in one and "a name that is taken" in one for one in messages)
    assert any("preset 'nothing' of" in one and "no policy is called" in one for one in messages)
    assert len(messages) == 5


def test_every_policy_documents_itself():
    parts = {cls for recipe in policies.policies().values() for cls in recipe.parts.values()}
    for cls in parts | set(policies.companions().values()):
        assert cls.paper, cls
        assert cls.formula, cls
        assert cls.__doc__, cls
        assert cls.observes <= policies.base.component.VIEWS, cls
    assert kvcap.load_policy("full").policy.evicts is False
