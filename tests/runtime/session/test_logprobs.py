"""How likely tokens were: the model's own distribution, as the text is streamed."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizers import Wrapped, byte_level
from tokenizers import Tokenizer
from toy_engine import ToyEngine, drawn, samplers, session_of

from kvcap import pocket
from kvcap.runtime.session.logprobs import Logprob, Logprobs, TokenTexts


def test_they_are_those_of_the_models_own_distribution(runtime):
    """Whatever settings choose the token; compared with the logits that the loop gave."""
    session = session_of(runtime)
    session.set_generation(temperature=3.0, top_k=40, repetition_penalty=2.0, logprobs=3)
    given, plain = [], session.loop.read

    def read(ids: Any, need_logits: bool = True) -> Any:
        logits_of_pass = plain(ids, need_logits)
        if need_logits:
            given.append(np.array(logits_of_pass[0].tolist()))
        return logits_of_pass

    session.loop.read = read
    text = "".join(session.send("Hello!"))
    assert len(session.logprobs) == session.turn.completion_tokens == 6
    for one, logits in zip(session.logprobs, given, strict=True):
        expected = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        assert one.logprob == pytest.approx(expected[one.token], abs=1e-4)
        assert [x.logprob for x in one.top] == pytest.approx(np.sort(expected)[:-4:-1], abs=1e-4)
        assert [x.token for x in one.top] == np.argsort(-expected)[:3].tolist()
        assert all(x.top == () for x in one.top)
    texts = [x.text for x in session.logprobs if not x.text.startswith("<|")]  # special tokens
    assert "".join(texts) == text
    assert any(x.token != x.top[0].token for x in session.logprobs)  # others than the likeliest


def test_the_text_is_that_of_those_who_do_not_ask(runtime):
    answers = []
    for count in (None, 0, 5):
        session = session_of(runtime)
        session.set_generation(logprobs=count)
        answers.append(list(session.send("Hello!")))
        tops = [] if count is None else [count] * 6
        assert [len(one.top) for one in session.logprobs] == tops
    assert answers[0] == answers[1] == answers[2]
    session.set_generation(logprobs=None)
    list(session.send("And now?"))
    assert session.logprobs == []
    for wrong in (-1, 21, True, "all"):
        with pytest.raises(ValueError, match="logprobs"):
            session.set_generation(logprobs=wrong)


def test_tokens_come_with_their_text_and_not_those_of_a_stop_string(runtime):
    """A token is there once the last letter of its text is given out."""
    session = session_of(runtime)
    session.set_generation(logprobs=0, max_new_tokens=12)
    whole = "".join(session.send("Hello!"))
    tokens = [one.text for one in session.logprobs]
    stop = whole[5:8]
    session.clear()
    session.set_generation(stop_strings=[stop])
    text = ""
    for piece in session.send("Hello!"):
        text += piece
        joined = "".join(one.text for one in session.logprobs)
        assert text.startswith(joined) or joined.startswith(text)
        assert len(joined) - len(text) < max(map(len, tokens))
    assert text == whole[: whole.index(stop)]
    assert session.turn.stop_string == stop
    texts = [one.text for one in session.logprobs]
    assert texts[:-1] == tokens[: len(texts) - 1]
    assert "".join(texts).endswith(text)
    assert len("".join(texts)) <= len(text) + 1  # some tokenizers begin a text with a space


class Changed:
    """A sampler of which every token is changed."""

    recipe = None

    def __init__(self, sampler: Any, change: Callable[[Any], Any]) -> None:
        self.sampler, self.change = sampler, change
        self.logprobs = sampler.logprobs

    def next(self, *given: Any) -> Any:
        return self.change(self.sampler.next(*given))


def with_changed(runtime: Any, change: Callable[[Any], Any]) -> None:
    plain = runtime.sampler
    runtime.sampler = lambda *given: Changed(plain(*given), change)


def test_a_stop_string_that_only_the_end_of_the_answer_completes():
    """Leave U+FFFD of a letter that was begun; what is before the string keeps its tokens."""
    known = byte_level()
    engine = ToyEngine(64, tokenizer=Wrapped(known))
    names = iter([known.token_to_id(name) for name in ("b", "a", "Ã")])
    session = session_of(engine)
    with_changed(engine, lambda token: token * 0 + next(names))
    session.set_generation(stop_strings=["a\ufffd"], logprobs=0, max_new_tokens=3)
    assert "".join(session.complete("b")) == "b"
    assert (session.turn.finish_reason, session.turn.stop_string) == ("stop", "a\ufffd")
    assert [one.text for one in session.logprobs] == ["b"]


def test_a_special_token_can_be_a_stop_string(runtime):
    session = session_of(runtime)
    session.set_generation(logprobs=0)
    list(session.send("Hello!"))
    first = session.logprobs[0].token
    backend = session.runtime.tokenizer.backend_tokenizer
    special = backend.token_to_id("<|pad|>")  # which is the first token drawn

    session.clear()
    with_changed(runtime, lambda token: token * 0 + special if token.item() == first else token)
    session.set_generation(stop_strings=["<|pad|>", "never"])
    assert "".join(session.send("Hello!")) == ""
    assert (session.turn.finish_reason, session.turn.stop_string) == ("stop", "<|pad|>")
    assert session.logprobs == []


def test_texts_and_bytes_of_single_tokens():
    known = Tokenizer.from_file(str(pocket.path() / "tokenizer.json"))
    texts = TokenTexts(type("T", (), {"backend_tokenizer": known}))
    ids = known.encode("né 🙂!").ids
    noted = [texts.noted([(token, -1.0), (token, -math.inf)]) for token in ids]
    assert b"".join(one.bytes for one in noted).decode() == "né 🙂!"
    assert "\ufffd" in "".join(one.text for one in noted)  # a letter of several tokens
    first = noted[0].as_dict()
    assert first == {
        "token": "n",
        "logprob": -1.0,
        "bytes": [110],
        "top_logprobs": [{"token": "n", "logprob": -9999.0, "bytes": [110]}],
    }


@given(
    lengths=st.lists(st.integers(1, 4), max_size=6), cut=st.integers(0, 24), stopped=st.booleans()
)
def test_tokens_wait_for_their_text(lengths, cut, stopped):
    stream = SimpleNamespace(begins=False, decoded=0, given=0, stopped=None)
    sampler = SimpleNamespace(logprobs=lambda logits, number, top: number)
    texts = SimpleNamespace(
        noted=lambda number, begins: Logprob(
            number, "x" * lengths[number], b"x" * lengths[number], 0.0
        )
    )
    given: list[Logprob] = []
    listener, end, ends = Logprobs(given, sampler, 0, texts, stream), 0, []  # type: ignore[arg-type]
    for number, length in enumerate(lengths):
        stream.decoded += length
        listener.token(number, None)
        ends.append((end, end + length))
        end += length
    stream.stopped = "stop" if stopped else None
    listener.note(cut)
    expected = [i for i, (a, b) in enumerate(ends) if (a < cut if stopped else b <= cut)]
    assert [one.token for one in given] == expected
    text = "".join(one.text for one in given)
    assert b"".join(one.bytes for one in given).decode() == text
    assert len(text) == (min(cut, end) if stopped else sum(lengths[: len(expected)]))


def test_a_cut_token_has_whole_letters_alone():
    one = Logprob(7, "né🙂!", "né🙂!".encode(), -1.0)
    assert one.without_last(2)[1:3] == ("né", "né".encode())
    part = Logprob(8, "\ufffd. ", b"\x99. ", -1.0)  # it begins with the end of a letter
    assert part.without_last(1)[1:3] == ("\ufffd.", b"\x99.")
    assert part.without_last(9)[1:3] == ("", b"")


@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8),
    top=st.integers(0, 9),
    data=st.data(),
)
def test_backends_agree(logits, top, data):
    token = data.draw(st.integers(0, len(logits) - 1))
    row = np.array([logits], np.float32)
    torch_one, numpy_one = samplers()
    one = torch_one.logprobs(torch.from_numpy(row), token, top)
    other = numpy_one.logprobs(row.copy(), token, top)
    assert [x[1] for x in one] == pytest.approx([x[1] for x in other], rel=1e-5, abs=1e-3)
    assert one[0][0] == other[0][0] == token
    assert len(one) == len(other) == 1 + min(top, len(logits))


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=8),
    allowed=st.lists(st.booleans(), min_size=1, max_size=10),
    greedy=st.booleans(),
    seed=st.integers(0, 99),
)
def test_only_what_is_allowed_is_drawn(logits, allowed, greedy, seed):
    """Of a tokenizer with fewer tokens than the model, or more; in both backends."""
    some = np.array(allowed)
    if not some[: len(logits)].any():
        return
    row, history = np.array([logits], np.float32), np.array([[0]])
    both = samplers(seed, do_sample=not greedy, temperature=2.0, top_k=2, top_p=0.9)
    tokens = drawn(both, row, history, some)
    assert some[tokens].all()
    if greedy:
        assert (row[0, tokens] == row[0, : len(some)][some[: len(row[0])]].max()).all()


@given(
    logits=st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=8),  # penalties decide
    ids=st.lists(st.integers(0, 3), max_size=9),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
)
def test_penalties_are_those_of_openai(logits, ids, presence, frequency):
    """Logit − presence · (it was said) − frequency · (times that it was said)."""
    row, history = np.array([logits], np.float32), np.array([[0, 1]])
    both = samplers(presence_penalty=presence, frequency_penalty=frequency)
    expected = row[0].copy()
    for token in set(ids):
        expected[token] -= np.float32(presence) + np.float32(frequency) * ids.count(token)
    assert (expected[drawn(both, row, history, None, ids)] >= expected.max() - 1e-4).all()
    assert [one.recipe for one in both] == [() if presence == frequency == 0 else None] * 2
    assert row[0].tolist() == np.array(logits, np.float32).tolist()  # others may read them


def test_a_penalised_answer_repeats_itself_less(runtime):
    session = session_of(runtime)
    session.set_generation(max_new_tokens=30, do_sample=False, eos_token_id=[], logprobs=0)
    "".join(session.send("Hello!"))
    plain = [one.token for one in session.logprobs]
    session.clear()
    session.set_generation(frequency_penalty=2.0, presence_penalty=2.0)
    "".join(session.send("Hello!"))
    penalised = [one.token for one in session.logprobs]
    assert plain[0] == penalised[0]
    assert len(set(penalised)) >= len(set(plain))
    for wrong in (2.5, -2.1, "1", True):
        with pytest.raises(ValueError, match="presence_penalty"):
            session.set_generation(presence_penalty=wrong)


@given(
    logits=st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=8),
    biases=st.dictionaries(st.integers(0, 3), st.floats(-100, 100, width=32), max_size=4),
)
def test_biases_are_added_to_logits(logits, biases):
    row, history = np.array([logits], np.float32), np.array([[0, 1]])
    by_text = {str(token): bias for token, bias in biases.items()}  # as a file has them
    both = samplers(logit_bias=biases)[0], samplers(logit_bias=by_text)[1]
    expected = row[0].copy()
    for token, bias in biases.items():
        expected[token] += np.float32(bias)
    assert (expected[drawn(both, row, history)] >= expected.max() - 1e-4).all()
    assert [one.recipe for one in both] == [None if biases else ()] * 2


def test_a_prompt_is_only_read_and_its_tokens_are_noted_where_all_logits_are_given(runtime):
    session = session_of(runtime)
    session.set_generation(only_read=True)
    assert "".join(session.complete("Hello!")) == ""
    assert (session.turn.finish_reason, session.turn.completion_tokens) == ("length", 0)
    seen = session.cache.seen
    assert seen == session.turn.prompt_tokens > 0
    session.clear()
    session.set_generation(prompt_logprobs=1)
    if not hasattr(session.loop, "read_every"):
        with pytest.raises(ValueError, match="this backend does not give"):
            session.complete("Hello!")
        return
    assert "".join(session.complete("Hello!")) == ""
    noted = session.prompt_logprobs
    assert (len(noted), noted[0].logprob) == (seen, None)
    assert all(one.logprob <= 0 and len(one.top) == 1 for one in noted[1:])
    for wrong in ({"x": 1}, {1: 101}, [1]):
        with pytest.raises(ValueError, match="logit_bias"):
            session.set_generation(logit_bias=wrong)
