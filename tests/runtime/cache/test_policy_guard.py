"""Policies of other packages are held to their contract by named errors, and run unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import tiny_model
from torch import Tensor

import kvcap
from kvcap.policies import Eviction, Observation, Policy, PolicyError
from kvcap.policies.knorm import Knorm
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.policy_guard import is_own


def policy(score: Any, *observes: str, queries: int | None = 0, state: Any = None) -> Policy:
    """A policy that a package could bring."""

    @dataclass(frozen=True)
    class Theirs(Policy):
        pass

    Theirs.observes, Theirs.state = frozenset(observes), state or {}
    Theirs.queries_observed = property(lambda self: queries)
    Theirs.score = lambda self, obs: score(obs)
    return Theirs()


def read(
    policy: Policy, model: Any = None, tokens: int = 40, positions: str = "compact"
) -> tuple[Any, Tensor]:
    """A cache after some blocks, and the last logits."""
    model = model or tiny_model("llama")
    eviction = Eviction(policy, name="theirs")
    cache = kvcap.BudgetCache(
        model.config, budget_tokens=12, block_size=8, policy=eviction, positions=positions
    )
    ids = torch.randint(0, 90, (1, tokens), generator=torch.Generator().manual_seed(0))
    return cache, BlockLoop(model, cache).prefill(ids)


def ones(obs: Observation) -> Tensor:
    return torch.ones_like(obs.positions, dtype=torch.float32)


def of(field: str, write: str, *given: Any) -> Any:
    """A score that writes into what it is shown."""

    def score(obs: Observation) -> Tensor:
        getattr(getattr(obs, field), write)(*given)
        return ones(obs)

    return score


SEES = ("keys", "values", "queries", "attention", "output")


def of_values(make: Any) -> Policy:
    """A policy that reads values, and declares keys alone."""
    return policy(make, "keys")


BROKEN: dict[str, tuple[Policy, str]] = {
    "nan": (policy(lambda obs: ones(obs) * float("nan")), "score gave NaN; expected a number for"),
    "one-nan": (
        policy(lambda obs: ones(obs).index_fill(-1, torch.tensor([3]), float("nan"))),
        "gave NaN",
    ),
    "shape": (policy(lambda obs: ones(obs)[..., :1]), r"score gave \[1, 2, 1\]; expected one"),
    "nothing": (policy(lambda obs: None), "score gave NoneType; expected a tensor"),
    "fails": (policy(lambda obs: {}["x"]), "score failed with KeyError: 'x'; it observes nothing"),
    "sizes": (
        policy(lambda obs: obs.keys.sum(-1) + torch.ones(3), "keys"),
        "score failed with RuntimeError: .*; it observes keys",
    ),
    "writes-keys": (policy(of("keys", "mul_", 0), *SEES, queries=4), r"score wrote into obs\.keys"),
    "writes-values": (policy(of("values", "zero_"), "values"), r"wrote into obs\.values, which"),
    "writes-positions": (policy(of("positions", "neg_")), r"score wrote into obs\.positions"),
    "writes-queries": (policy(of("queries", "zero_"), *SEES, queries=4), r"into obs\.queries"),
    "writes-a-part": (
        policy(lambda obs: obs.values[..., :1].sigmoid_()[..., 0].float(), "values"),
        r"wrote into obs\.values",
    ),
    "keys": (policy(lambda obs: obs.keys.norm(dim=-1), "values"), r"reads obs\.keys, which it"),
    "values": (of_values(lambda obs: obs.values.norm(dim=-1)), r"reads obs\.values"),
    "values-by-function": (
        of_values(lambda obs: torch.linalg.vector_norm(obs.values, dim=-1)),
        r"reads obs\.values",
    ),
    "values-by-list": (
        of_values(lambda obs: torch.cat([obs.keys, obs.values])[..., 0]),
        r"reads obs\.values",
    ),
    "values-by-operator": (of_values(lambda obs: (2 * obs.values)[..., 0]), r"reads obs\.values"),
    "queries": (policy(lambda obs: obs.queries.sum(1), "keys"), r"reads obs\.queries.*`observes`"),
    "attention": (
        policy(lambda obs: obs.attention.sum((2, 3)), "keys"),
        r"reads obs\.queries, which it does",
    ),
    "no-queries": (
        policy(lambda obs: obs.attention.sum((2, 3)), "attention", "queries", "keys"),
        r"reads obs\.queries.*define `queries_observed`",
    ),
    "output": (
        policy(lambda obs: obs.output.sum((2, 3)), "keys", "queries", "attention", queries=4),
        r"reads obs\.values",
    ),
    "state": (policy(lambda obs: obs.state["sum"]), "KeyError: 'sum'"),
    "projection": (
        policy(lambda obs: obs.output_projection.sum(), "keys"),
        r"reads obs\.output_projection",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_contract_is_named(name: str) -> None:
    broken, says = BROKEN[name]
    with pytest.raises(PolicyError, match=says) as refused:
        read(broken)
    assert "theirs: " in str(refused.value)


@pytest.mark.parametrize("positions", ["compact", "true"])
def test_writes_are_found_wherever_keys_lie(positions: str) -> None:
    """In the cache itself, or in a copy of this pass."""
    with pytest.raises(PolicyError, match=r"wrote into obs\.keys"):
        read(policy(of("keys", "zero_"), "keys"), positions=positions)


def test_state_is_held_to_what_was_declared() -> None:
    def theirs(update: Any) -> Policy:
        made = policy(lambda obs: obs.state["sum"], "state", state={"sum": torch.float32})
        type(made).update = lambda self, obs: update(obs)
        return made

    for update, says in [
        (lambda obs: {"total": ones(obs)}, r"update gave 'total' .*expected tensors \['sum'\]"),
        (lambda obs: {"sum": ones(obs)[..., :1]}, r"update gave 'sum' of \[1, 2, 1\]"),
        (lambda obs: {"sum": 3.0}, r"update gave 'sum' of float; expected tensors"),
        (lambda obs: None, r"update gave NoneType; expected a mapping"),
        (lambda obs: {"sum": obs.state["sum"].add_(1)}, r"update wrote into obs\.state\['sum'\]"),
    ]:
        with pytest.raises(PolicyError, match=says):
            read(theirs(update))
    read(theirs(lambda obs: {"sum": obs.state["sum"] + 1}))


@pytest.mark.parametrize("queries", [4, None])
def test_what_keeps_to_it_is_as_kvcaps_own(queries: int | None) -> None:
    """Also where it looks at all that there is, and gives infinite numbers."""
    model = tiny_model("llama")

    def score(obs: Observation) -> Tensor:
        assert (
            obs.weight.shape[-1] == obs.output_projection.shape[-1] or obs.output.isfinite().all()
        )
        assert obs.groups == 2
        return Knorm().score(obs)

    mine = policy(score, *SEES, "output_projection", queries=queries)
    assert is_own(Knorm())
    assert not is_own(mine)
    (theirs, logits), (own, expected) = read(mine, model), read(Knorm(), model)
    assert torch.equal(logits, expected)
    for one, other in zip(theirs.kept_tokens(), own.kept_tokens(), strict=True):
        assert [list(x) for x in one.heads] == [list(x) for x in other.heads]

    def infinite(obs: Observation) -> Tensor:
        return torch.where(obs.positions % 2 == 0, float("inf"), float("-inf"))

    cache, _ = read(policy(infinite, "positions"), model)
    for layer in cache.kept_tokens():
        assert all(int(x) % 2 == 0 for head in layer.heads for x in head)
