"""Settings of generation: what may be given, what is refused by name, the same in both backends."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import drawn as drawn_by
from toy_engine import numpy_scores, samplers, session_of
from transformers import GenerationConfig

from kvcap.runtime.backends import numpy_sampler
from kvcap.runtime.backends.pytorch import sampler as sampling
from kvcap.runtime.session import settings as bounds


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"temprature": 1.0}, "no setting 'temprature'; known: temperature"),
        ({"temperature": -0.1}, "a number, 0 or more"),
        ({"temperature": "warm"}, "temperature='warm' will not work"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 10**400}, "a number, 0 or more"),
        ({"top_p": 1.1}, "a number from 0 to 1"),
        ({"top_k": 2.5}, "a whole number, 0 or more"),
        ({"min_p": True}, "min_p=True"),
        ({"max_new_tokens": 0}, "a whole number, 1 or more"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 will not work; use a number above 0"),
        ({"repetition_penalty": -1.0}, "a number above 0"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"seed": "x", "top_k": 3}, "seed='x'"),
        ({"eos_token_id": "</s>"}, "a token id or a list of them"),
        ({"eos_token_id": [2, None]}, "a token id or a list of them"),
        ({"stop_strings": [3]}, "a text or a list of them"),
        ({"do_sample": 1}, "True or False"),
        ({"seed": 9, "top_p": 3}, "top_p=3"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(runtime, setting, says):
    session = session_of(runtime)

    def state() -> Any:
        return session.seed, bounds.as_dict(session.generation)

    before = state()
    with pytest.raises(ValueError, match=says):
        session.set_generation(**setting)
    assert state() == before
    (name, value), *_ = setting.items()
    if name in bounds.as_dict(session.generation):  # and so is what was set past the door
        setattr(session.generation, name, value)
        with pytest.raises(ValueError, match=name):
            session.send("Hi.")


def test_what_ends_an_answer_may_be_none_one_or_several(runtime):
    session = session_of(runtime)
    session.set_generation(eos_token_id=None, stop_strings=None)
    answer = "".join(session.complete("Hello there, my friend."))
    assert session.turn.finish_reason == "length"
    first = session.read[session.turn.prompt_tokens]
    for ends in (first, [first], (first, 1)):
        session.clear()
        session.set_generation(eos_token_id=ends)
        assert "".join(session.complete("Hello there, my friend.")) == ""
        assert session.turn.finish_reason == "stop"
    session.set_generation(eos_token_id=[])
    part = answer[2:5]
    for stop in (part, [part], [part, "no such text"], ["", part]):
        session.clear()
        session.set_generation(stop_strings=stop)
        assert "".join(session.complete("Hello there, my friend.")) == answer[: answer.index(part)]
        assert session.turn.finish_reason == "stop"


def test_a_repetition_penalty_changes_an_answer(runtime):
    session = session_of(runtime)
    session.set_generation(eos_token_id=None, max_new_tokens=30)
    prompt = "Hello there, my friend."
    plain = "".join(session.complete(prompt))

    def answered_with(penalty: float | None) -> tuple[str, list[int], list[int]]:
        session.clear()
        session.set_generation(repetition_penalty=penalty)
        text = "".join(session.complete(prompt))
        count = session.turn.prompt_tokens
        return text, session.read[:count], session.read[count : session.cache.seen]

    _, prompt_ids, answered = answered_with(1000.0)
    assert len({*prompt_ids, *answered}) == len(set(prompt_ids)) + len(
        answered
    )  # no token comes twice
    text, prompt_ids, answered = answered_with(0.001)
    assert text != plain
    assert set(answered) <= set(prompt_ids)
    assert answered_with(None)[0] == plain


number = st.floats(-9, 9, width=32)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.lists(number, min_size=8, max_size=8),
    st.lists(st.integers(0, 7), min_size=1, max_size=6),
    st.floats(0.125, 9, width=32),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_a_repetition_penalty_is_the_same_in_both_backends(logits, ids, penalty, temperature):
    config = {"repetition_penalty": penalty, "do_sample": True, "temperature": temperature}
    theirs, mine = samplers(**config)
    a = numpy_scores(mine, np.array(logits, np.float32), np.array(ids))
    penalised = theirs.repetition(torch.tensor([ids]), torch.tensor([logits]))
    b = theirs.warpers(None, penalised)[0].numpy()
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [0.5, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_is_the_same_in_both_backends(spread, top_p):
    """Whether few tokens have that share, or nearly all of a vocabulary."""
    scores = spread * np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    theirs, mine = samplers(do_sample=True, top_p=top_p)
    a = numpy_scores(mine, scores, np.array([0]))
    b = theirs.warpers(None, torch.from_numpy(scores)[None])[0].numpy()
    assert np.array_equal(a, b)


@pytest.mark.parametrize("config", [
    {"top_k": 1}, {"top_k": 50}, {"top_k": 4999}, {"top_k": 5000}, {"top_k": 9000},
    {"top_k": 50, "top_p": 0.9}, {"top_k": 400, "min_p": 0.1, "temperature": 0.7},
])  # fmt: skip
def test_of_the_top_k_what_is_drawn_is_what_all_scores_give(config):
    """Tokens that tie with the last of them are among them, as in transformers."""
    draws = np.random.default_rng(0)
    logits = draws.standard_normal((1, 5000)).astype(np.float32).round(1)  # many tie
    history = np.zeros((1, 1), np.int64)
    theirs, mine = samplers(do_sample=True, **config)
    wanted = theirs.warpers(None, torch.from_numpy(logits))[0].numpy()
    if "top_p" not in config:  # which leaves open which of those that tie it takes
        np.testing.assert_allclose(numpy_scores(mine, logits[0], history[0]), wanted, rtol=1e-6)
    kept = set(np.flatnonzero(numpy_scores(mine, logits[0], history[0]) > -np.inf))
    drawn = [int(mine.next(logits, history)[0]) for _ in range(300)]
    assert kept >= set(drawn)
    assert len(set(drawn)) > min(len(kept), 20) // 2
    shares = np.exp(wanted.astype(np.float64) - wanted.max())
    if "top_p" not in config:
        mass = (shares / shares.sum()).cumsum()
        number = np.random.default_rng(3).random()
        again = numpy_sampler.NumpySampler(mine.config, np.random.default_rng(3))
        assert int(again.next(logits, history)[0]) == np.searchsorted(mass, number, side="right")


def test_a_whole_number_is_a_number():
    config = GenerationConfig(repetition_penalty=2, do_sample=True, temperature=1, top_p=1)
    sampler = sampling.Sampler(config, torch.Generator())
    logits, ids = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[1, 1]])
    assert sampler.warpers(None, sampler.repetition(ids, logits))[0].tolist() == [1.0, 1.5, 2.0]


def test_settings_that_are_not_read_are_named():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampling.Sampler(GenerationConfig(), torch.Generator())
        config = GenerationConfig(no_repeat_ngram_size=3, typical_p=0.9, max_length=99)
        sampling.Sampler(config, torch.Generator())
    (warning,) = [str(one.message) for one in caught]
    assert "no_repeat_ngram_size=3, typical_p=0.9; answers are drawn as if" in warning


INF = float("inf")
SPREAD = (1.0, 4.0, -INF, 3.0, 2.0, -INF)  # of which token 1 is the likeliest
EDGES: list[tuple[dict[str, float], tuple[float, ...], set[int]]] = [
    ({"top_p": 0}, SPREAD, {1}), ({"top_p": 1e-45}, SPREAD, {1}), ({"top_p": 1e-300}, SPREAD, {1}),
    ({"top_p": 1e-19}, SPREAD, {1}), ({"top_p": 0, "top_k": 3}, SPREAD, {1}),
    ({"top_p": 0, "min_p": 1.0, "temperature": 2.0}, SPREAD, {1}),
    ({"temperature": 0}, SPREAD, {1}), ({"temperature": 1e-45}, SPREAD, {1}),
    ({"temperature": 1e-320}, SPREAD, {1}), ({"temperature": 1e-38, "top_p": 0.9}, SPREAD, {1}),
    ({"temperature": 1e-19}, SPREAD, {1}), ({"temperature": 1e-19, "min_p": 0.1}, SPREAD, {1}),
    ({"temperature": 1e30}, SPREAD, {0, 1, 3, 4}), ({"min_p": 1.0}, SPREAD, {1}),
    ({"min_p": 0.3}, SPREAD, {1, 3}), ({"min_p": 1e-320}, SPREAD, {0, 1, 3, 4}),
    ({"top_k": 1}, SPREAD, {1}), ({"top_k": 1, "temperature": 9.0}, SPREAD, {1}),
    ({"top_k": 2, "temperature": 9.0}, SPREAD, {1, 3}), ({"top_k": 9}, SPREAD, {0, 1, 3, 4}),
    ({}, (0.0, INF, 9.0), {1}), ({"temperature": 0.5, "min_p": 0.9}, (0.0, INF, INF), {1, 2}),
    ({"temperature": 1e-19}, (-3e38, 3e38, INF, 0.0), {1, 2}), ({"top_k": 1}, (0.0, INF), {1}),
    ({"min_p": 0.5, "top_p": 0.5}, (0.0, 3e38, 9.0), {1}), ({"temperature": 0}, (0.0, INF), {1}),
    ({}, (-INF, -3e38, -INF), {1}), ({"temperature": 1e-19}, (-3e38, -9.0), {1}),
]  # fmt: skip


@pytest.mark.parametrize("tokens", [6, 5000])
@pytest.mark.parametrize(("config", "logits", "kept"), EDGES)
def test_settings_at_the_edge_of_what_numbers_hold(config, logits, kept, tokens):
    """In both backends, and in a vocabulary of which all other tokens are impossible."""
    row = np.full((1, tokens), -INF, np.float32)
    row[0, : len(logits)] = logits
    history = np.zeros((1, 1), np.int64)
    torch_one, numpy_one = samplers(do_sample=True, **config)
    pairs = [drawn_by((torch_one, numpy_one), row, history) for _ in range(60)]
    assert [{*tokens} for tokens in zip(*pairs, strict=True)] == [kept] * 2
    assert (torch_one.recipe == ()) == (numpy_one.recipe == ())
    if torch_one.recipe:
        rows = sampling.draw_each(
            torch.from_numpy(row).expand(4, -1), dict.fromkeys(range(4), torch_one)
        )
        assert set(rows.tolist()) <= kept


def test_nothing_ends_an_answer_before_it_has_tokens_enough(runtime):
    session = session_of(runtime)
    text = "".join(session.send("Hello!"))
    prompt = session.turn.prompt_tokens
    end, count = session.read_ids[prompt], session.turn.completion_tokens
    assert count == 6
    for options, least in (
        ({"eos_token_id": [end]}, 3),
        ({"eos_token_id": [], "stop_strings": [text[:1]]}, 4),
    ):
        session.clear()
        session.set_generation(**options, min_tokens=0)
        list(session.send("Hello!"))
        assert (session.turn.completion_tokens < least, session.turn.finish_reason) == (
            True,
            "stop",
        )
        session.clear()
        session.set_generation(min_tokens=least)
        list(session.send("Hello!"))
        assert session.turn.completion_tokens >= least
        assert end not in session.read_ids[prompt : prompt + least] or "stop_strings" in options
        session.set_generation(eos_token_id=[], stop_strings=None, min_tokens=None)
    with pytest.raises(ValueError, match="min_tokens does not go with regex"):
        session.set_generation(min_tokens=3, regex="a")
