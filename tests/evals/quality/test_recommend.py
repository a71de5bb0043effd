"""Tests which policy is recommended, on figures made by hand."""

from __future__ import annotations

import pytest

from kvcap.evals.quality.recommend import PolicyFigures, Recommendation, choose, command

PASSAGES = (2.0, 2.3, 1.9, 2.2, 2.1)  # losses under the best flow


def row(policy: str, more: float = 0.0, facts: int = 4, ms: float | None = 1.0) -> PolicyFigures:
    """Return a policy's figures: losses `more` nats above the best, so many of 4 facts."""
    slots = None if policy == "full" else 64
    losses = tuple(loss + more for loss in PASSAGES)
    return PolicyFigures(policy, slots, 1000, losses, tuple(float(i < facts) for i in range(4)), ms)


def beside(*candidates: PolicyFigures, floor: float = 0.3, facts: int = 0) -> list[PolicyFigures]:
    """Return candidates with random eviction and the uncapped model."""
    return [*candidates, row("random", floor, facts), row("full", -0.1, facts or 4)]


@pytest.mark.parametrize(
    ("candidates", "chosen", "dropped"),
    [
        pytest.param(
            [row("snapkv", 0.0, 1), row("lagkv", 0.02, 3)],
            "lagkv",
            {"snapkv": "2 facts fewer (1 of 4 against 3 of 4), which perplexity 2.0% lower does "
                       "not outweigh"},
            id="facts outweigh a little flow",
        ),
        pytest.param(
            [row("snapkv", 0.0, 1), row("lagkv", 0.06, 3)],
            "snapkv",
            {"lagkv": "perplexity 6.2% higher, which 2 facts more (3 of 4 against 1 of 4) does "
                      "not outweigh"},
            id="much flow outweighs facts",
        ),
        pytest.param(
            [row("a", 0.05, 2), row("b", 0.0, 3)],
            "b",
            {"a": "perplexity 5.1% higher and 1 fact fewer (2 of 4 against 3 of 4)"},
            id="worse in both",
        ),
        pytest.param(
            [row("slow", ms=9.0), row("fast", 0.009, ms=0.5), row("middle", ms=3.0)],
            "fast",
            {"slow": "as good within 1%, and reads 1700% slower",
             "middle": "as good within 1%, and reads 500% slower"},
            id="of equals the fastest",
        ),
        pytest.param(
            [row("keydiff-window", 0.0, 3, ms=1.9), row("lagkv", 0.008, 4, ms=2.0)],
            "lagkv",
            {"keydiff-window": "as good within 1% (3 of 4 facts against 4 of 4), and no faster"},
            id="time within its noise",
        ),
        pytest.param(
            [row("a", 0.02, ms=0.1), row("b", ms=None)],
            "b",
            {"a": "perplexity 2.0% higher"},
            id="speed does not outweigh flow",
        ),
    ],
)  # fmt: skip
def test_what_is_chosen_and_why_others_are_dropped(candidates, chosen, dropped):
    choice = choose(beside(*candidates))
    assert (choice.policy, choice.reasons) == (chosen, dropped)
    assert choice.remarks[0].startswith(f"{chosen} is chosen, with a perplexity of ")
    for policy, reason in dropped.items():
        assert any(remark.startswith(f"{policy} is dropped: {reason}") for remark in choice.remarks)


def test_few_facts_weigh_less():
    def figures(policy: str, more: float, facts: tuple[float, ...]) -> PolicyFigures:
        return PolicyFigures(policy, 64, 1000, tuple(x + more for x in PASSAGES), facts)

    for count, expected in ((1, "flows"), (16, "finds")):
        rows = [
            figures("flows", 0.0, (0.0,) * count),
            figures("finds", 0.06, (1.0,) * count),
            figures("random", 0.3, (0.0,) * count),
        ]
        assert choose(rows).policy == expected


def test_what_is_worse_than_random_is_never_chosen():
    choice = choose(beside(row("a", 0.2), row("b", 0.3, 2), floor=0.1, facts=4))
    assert choice.policy is None
    assert choice.remarks == (
        "a is worse than random eviction: perplexity 10.5% higher",
        "b is worse than random eviction: perplexity 22.1% higher and 2 facts fewer (2 of 4 "
        "against 4 of 4)",
    )
    kept = choose(beside(row("a", 0.1), row("quick", 0.109, ms=0.1), floor=0.098, facts=4))
    assert kept.policy == "a"  # quick, as good as a, is worse than random


def test_random_and_the_uncapped_model_are_never_chosen():
    choice = choose(beside(row("a", ms=9.0), floor=-0.005, facts=4))
    assert (choice.policy, dict(choice.reasons)) == ("a", {})


def test_a_difference_that_may_be_chance_is_said():
    noisy = PolicyFigures("noisy", 64, 1000, (1.8, 2.6, 1.8, 2.5, 2.2), (1.0,) * 4, 1.0)
    remarks = " ".join(choose(beside(row("a"), noisy, row("bad", 0.1))).remarks)
    assert "noisy is dropped: perplexity 8.3% higher, a difference that may be chance" in remarks
    assert "bad is dropped: perplexity 10.5% higher" in remarks
    assert remarks.count("chance") == 1


def test_a_model_that_finds_nothing_uncapped_is_said():
    rows = [row(name, facts=0) for name in ("a", "random", "full")]
    assert choose(rows).remarks[-1] == (
        "the model finds no fact even uncapped, so that flow alone decides"
    )


def test_the_command_of_a_base_model_reads_the_text():
    chosen = Recommendation("lagkv", {}, ())
    given = {"--budget-tokens": 64, "--dtype": "float32"}
    options = ["--policy", "lagkv", "--budget-tokens", "64", "--dtype", "float32", "--recall"]
    chat = ["kvcap", "chat", "dir"]
    generate = ["kvcap", "generate", "dir", "--file", "a b.txt", "--raw"]
    for plain, expected in (
        (False, [*chat, *options, "auto"]),
        (True, [*generate, *options, "32"]),
    ):
        assert command(chosen, "dir", "a b.txt", given, 32, plain=plain) == expected


def test_rows_and_their_means_in_json():
    figures = row("a", facts=2).as_dict()
    assert figures["perplexity"] == pytest.approx(8.166, abs=1e-3)
    assert figures["facts_found"] == 0.5
    assert figures["cost"] == pytest.approx(2.1 - 0.05)
    assert PolicyFigures("a", 64, 1000, PASSAGES).as_dict()["facts_found"] is None
