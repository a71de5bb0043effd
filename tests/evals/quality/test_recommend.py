"""Tests which policy is recommended, on figures made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcap.evals.quality.recommend import PolicyFigures, Recommendation, choose, command, near_best

PIECES = (2.0, 2.3, 1.9, 2.2, 2.1)  # losses under the best flow


def row(
    policy: str,
    more: float = 0.0,
    facts: int = 4,
    recalled: int | None = None,
    ms: float | None = 1.0,
) -> PolicyFigures:
    """A policy whose losses are `more` nats above the best, with so many of 8 facts."""
    return PolicyFigures(
        policy,
        None if policy == "full" else 64,
        1000,
        tuple(loss + more for loss in PIECES),
        _found(facts),
        () if recalled is None else _found(recalled),
        ms,
        2.0,
    )


def _found(count: int) -> tuple[float, ...]:
    return tuple(float(i < count) for i in range(8))


def beside(
    *candidates: PolicyFigures, floor: float = 0.3, full: int = 8
) -> Sequence[PolicyFigures]:
    """Candidates, with random eviction and the uncapped model."""
    return [*candidates, row("random", floor, facts=8), row("full", -0.1, full, ms=None)]


def test_the_most_facts_decide_among_equal_flows() -> None:
    found = choose(beside(row("a", facts=2), row("b", facts=5), row("c", facts=3)))
    assert (found.policy, found.near) == ("b", ("a", "b", "c"))


def test_time_decides_among_equal_facts() -> None:
    rows = beside(row("slow", ms=9.0), row("fast", ms=0.5), row("middle", ms=3.0))
    assert choose(rows).policy == "fast"
    assert choose(beside(row("a", ms=None), row("b"))).policy == "b"  # one that was not timed


def test_what_is_worse_than_random_is_never_chosen() -> None:
    """Not even where it finds all facts, costs nothing, and nothing else finds one."""
    planted = row("planted", more=0.4, facts=8, recalled=8, ms=0.0)
    found = choose(beside(planted, row("a", facts=0, ms=50.0)))
    assert found.policy == "a"
    assert "planted" not in found.near
    assert any("planted is worse than random eviction: 1.11 times" in x for x in found.remarks)


def test_nothing_is_chosen_where_all_are_worse_than_random() -> None:
    found = choose(beside(row("a", more=0.2), row("b", more=0.3), floor=0.1))
    assert (found.policy, found.recall, found.near) == (None, False, ())
    assert len(found.remarks) == 2


def test_noise_does_not_save_a_policy_that_reads_worse_than_a_dropped_one() -> None:
    """Two pieces hardly tell `noisy` from random eviction, and tell the better `steady` from it."""
    floor = PolicyFigures("random", 64, 1000, (2.0, 2.0), (), (), 1.0, 2.0)
    full = PolicyFigures("full", None, None, (2.0, 2.0), _found(8))
    steady = PolicyFigures("steady", 64, 1000, (2.05, 2.05), _found(8), (), 1.0, 2.0)
    noisy = PolicyFigures("noisy", 64, 1000, (1.95, 2.3), _found(8), (), 1.0, 2.0)
    good = PolicyFigures("good", 64, 1000, (1.9, 2.1), _found(0), (), 1.0, 2.0)
    found = choose([steady, noisy, floor, full])
    assert found.policy is None
    assert [x.partition(" ")[0] for x in found.remarks] == ["steady", "noisy"]
    assert choose([steady, noisy, good, floor, full]).policy == "good"


def test_random_and_the_uncapped_model_are_never_chosen() -> None:
    found = choose(beside(row("a", facts=0, ms=9.0), floor=-0.2 + 0.2))  # as good as `a`
    assert found.policy == "a"


def test_a_policy_with_more_facts_but_less_flow_is_said_and_not_chosen() -> None:
    rows = beside(row("a", facts=0), row("keeps", more=0.1, facts=8))
    found = choose(rows)
    assert (found.policy, found.near) == ("a", ("a",))
    (said,) = (x for x in found.remarks if x.startswith("keeps finds far more facts"))
    assert "8 of 8, at 1.11 times the perplexity" in said
    close = choose(beside(row("a", facts=7), row("keeps", more=0.1, facts=8)))
    assert not any("far more" in x for x in close.remarks)  # one fact more may be chance


def test_flow_that_the_pieces_do_not_tell_apart_is_equal() -> None:
    noisy = PolicyFigures("noisy", 64, 1000, (1.8, 2.6, 1.8, 2.5, 2.2), _found(8), (), 1.0, 2.0)
    assert noisy.perplexity > row("a").perplexity
    assert choose(beside(row("a"), noisy, floor=0.5)).policy == "noisy"


def test_speed_does_not_outweigh_flow_that_few_pieces_cannot_tell_apart() -> None:
    """Prefer flow to speed in figures of a real model, whose fastest was no better than random."""
    best = PolicyFigures("best", 64, 1000, (2.2, 2.2), _found(8), (), 8.6, 2.0)
    fast = PolicyFigures("fast", 64, 1000, (2.19, 2.34), _found(8), (), 2.5, 2.0)
    floor = PolicyFigures("random", 64, 1000, (2.26, 2.26), (), (), 2.5, 2.0)
    found = choose([best, fast, floor, PolicyFigures("full", None, None, (2.1, 2.1), _found(8))])
    assert found.near == ("best", "fast")
    assert found.policy == "best"


def test_flow_within_a_hundredth_of_the_best_is_equal() -> None:
    near = [x.policy for x in near_best(beside(row("a"), row("b", 0.009), row("c", 0.03)))]
    assert near == ["a", "b"]


@pytest.mark.parametrize(("recalled", "on"), [(None, False), (3, False), (4, False), (5, True)])
def test_recall_is_on_only_where_it_raises_facts(recalled: int | None, on: bool) -> None:
    found = choose(beside(row("a", facts=4, recalled=recalled)))
    assert (found.policy, found.recall) == ("a", on)
    said = [x for x in found.remarks if x.startswith("with recall")]
    assert len(said) == (recalled is not None)
    assert all(("no more than" in x) != on for x in said)


def test_facts_count_as_a_policy_would_be_used() -> None:
    rows = beside(row("alone", facts=6, recalled=6), row("recalls", facts=0, recalled=8))
    found = choose(rows)
    assert (found.policy, found.recall) == ("recalls", True)


def test_a_model_that_finds_nothing_uncapped_is_said() -> None:
    rows = beside(row("a", facts=0, recalled=0), row("b", facts=0, recalled=0, ms=0.1), full=0)
    found = choose(rows)
    assert (found.policy, found.recall) == ("b", False)
    assert found.remarks == (
        "the model finds no fact even uncapped, so that flow and time alone decide",
    )


def test_the_command_of_a_base_model_reads_the_text() -> None:
    chosen = Recommendation("lagkv", True, ("lagkv",), ())
    off = Recommendation("lagkv", False, ("lagkv",), ())
    given = {"--budget-tokens": 64, "--dtype": "float32"}
    options = ["--policy", "lagkv", "--budget-tokens", "64", "--dtype", "float32", "--recall"]
    chat = ["kvcap", "chat", "dir"]
    generate = ["kvcap", "generate", "dir", "--file", "a b.txt", "--raw"]
    for choice, plain, expected in (
        (chosen, False, [*chat, *options, "auto"]),
        (off, False, [*chat, *options, "off"]),
        (chosen, True, [*generate, *options, "32"]),
        (off, True, [*generate, *options, "off"]),
    ):
        assert command(choice, "dir", "a b.txt", given, 32, plain=plain) == expected


def test_rows_and_their_means_in_json() -> None:
    found = row("a", facts=2, recalled=8).as_dict()
    assert found["perplexity"] == pytest.approx(8.166, abs=1e-3)
    assert (found["facts_found"], found["recalled_found"]) == (0.25, 1.0)
    assert row("a").as_dict()["recalled_found"] is None
