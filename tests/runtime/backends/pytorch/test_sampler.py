"""Tokens drawn by one random number each, several at once as each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import TopPLogitsWarper

from kvcap.runtime.backends.pytorch.sampler import TIES, Nucleus, Sampler, draw_each, drawn


def sampler(seed: int = 0, **options: Any) -> Sampler:
    return Sampler(GenerationConfig(**options), torch.Generator().manual_seed(seed))


def test_tokens_are_drawn_by_their_shares() -> None:
    scores = torch.tensor([2.0, float("-inf"), 0.0, 1.0, float("-inf")])
    shares, count = scores.softmax(-1), 1000
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    counts = drawn(scores.expand(count, -1), numbers).bincount(minlength=5)
    torch.testing.assert_close(counts / count, shares, atol=1 / count, rtol=0)


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_no_token_without_a_share_is_drawn(number: float) -> None:
    """Nor where sums are rounded: of a token before all others and of one behind them."""
    scores = torch.full((1, 50_000), float("-inf"))
    scores[0, 7:40_000:3] = torch.randn(13_331, generator=torch.Generator().manual_seed(0))
    token = drawn(scores, torch.tensor([number], dtype=torch.float64)).item()
    assert token == (7 if number == 0 else 39_997)


def test_a_rounding_where_there_is_no_share_is_the_likeliest_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = torch.tensor([[1.0, 3.0, float("-inf")]])
    monkeypatch.setattr(torch, "searchsorted", lambda *_, **__: torch.tensor([[2]]))
    assert drawn(scores, torch.zeros(1)).tolist() == [1]


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_the_likeliest_tokens_of_a_share_are_those_of_transformers(
    spread: float, top_p: float
) -> None:
    """Few of them, or nearly all of a vocabulary; where all are as likely, as many."""
    generator = torch.Generator().manual_seed(0)
    scores = spread * torch.randn(2, 5000, generator=generator)
    scores[:, 77:99] = float("-inf")  # by a limit before
    scores[0, 5] += 2 * spread
    likeliest, expected = (x(top_p)(None, scores) for x in (Nucleus, TopPLogitsWarper))
    if spread:
        assert torch.equal(likeliest, expected)
    else:  # to a rounding of their sum
        assert abs((likeliest > -1).sum() - (expected > -1).sum()) <= 3


SETTINGS: list[dict[str, Any]] = [
    {"do_sample": False}, {"do_sample": True}, {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"do_sample": True, "min_p": 0.2},
]  # fmt: skip


def test_rows_that_draw_together_draw_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [settings for settings in SETTINGS for _ in range(18)]
    together, alone = ({i: sampler(i, **rows[i]) for i in range(len(rows))} for _ in range(2))
    del together[3], together[40]  # they draw by themselves
    for _ in range(3):
        logits = 3 * torch.randn(len(rows), 40, generator=generator)
        tokens = draw_each(logits, together).tolist()
        for i in together:
            assert tokens[i] == alone[i].next(logits[i : i + 1], torch.zeros(1, 0)).item()


@pytest.mark.parametrize(
    ("ties", "more"),
    [
        (False, {}), (False, {"top_p": 0.8}), (False, {"top_p": 0.9, "min_p": 0.2}),
        (True, {}), (True, {"min_p": 0.1}),  # under top_p it is open which of them stay
    ],
)  # fmt: skip
def test_of_the_top_k_what_is_drawn_is_what_all_scores_give(
    ties: bool, more: dict[str, float]
) -> None:
    """Tokens that are as likely as the last of them are drawn, too."""
    generator = torch.Generator().manual_seed(2)
    scores = 2 * torch.randn(200, 3000, generator=generator)
    scores[:, 11:19] = float("-inf")  # by a limit before
    if ties:
        scores = scores.mul(8).round() / 8  # some twenty alike
    numbers = torch.rand(200, generator=generator, dtype=torch.float64)
    few = sampler(do_sample=True, top_k=40, temperature=0.7, **more)
    assert few.shortlist == 40 + TIES
    tokens, wanted = few.draw(scores, numbers), drawn(few.warpers(None, scores), numbers)
    assert torch.equal(tokens, wanted)
    last = scores.topk(40).values[:, -1:]
    assert (int((scores >= last).sum(-1).max()) > 45) == ties


def test_ties_beyond_those_that_are_kept_are_still_among_the_likeliest() -> None:
    scores = torch.zeros(50, 3000)
    scores[:, 100:200] = 1.0
    few = sampler(do_sample=True, top_k=3)
    tokens = few.draw(scores, torch.rand(50, dtype=torch.float64))
    assert bool(((tokens >= 100) & (tokens < 200)).all())


def test_a_limit_may_leave_fewer_than_the_top_k() -> None:
    scores = torch.full((4, 3000), float("-inf"))
    scores[:, 7], scores[:, 1234] = 0.0, 0.0
    few = sampler(do_sample=True, top_k=40, top_p=0.9)
    numbers = torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64)
    assert few.draw(scores, numbers).tolist() == [7, 7, 1234, 1234]


def test_recipes_are_of_what_changes_a_draw() -> None:
    assert sampler(do_sample=False, temperature=0.3).recipe == ()
    assert sampler(do_sample=True).recipe == sampler(do_sample=True, temperature=1.0).recipe
    assert sampler(do_sample=True).recipe != sampler(do_sample=True, top_p=0.5).recipe
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        config = GenerationConfig()
        setattr(config, name, 1.2)
        assert Sampler(config, torch.Generator()).recipe is None
