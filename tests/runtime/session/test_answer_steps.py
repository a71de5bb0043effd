"""Steps of an answer, its source of tokens and its listeners; a script stands for the model."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toy_engine import BLOCK, ToyDecoder, ToyEngine

from kvcap.runtime.backends.onnxruntime.loop import OrtCache, OrtLoop
from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.session.decoding import Decoding, Pieces, Step, TokenSource, Written
from kvcap.runtime.session.listener import AnswerLimits, Listener
from kvcap.runtime.session.stats import Turn

ENGINE = ToyEngine(64)
PROMPT = ENGINE.tokenizer("Hello " * 40, add_special_tokens=False)["input_ids"][: 2 * BLOCK + 3]
ANSWER = ENGINE.tokenizer(" the code is 4821", add_special_tokens=False)["input_ids"]
END = 2


class Scripted(ToyDecoder):
    """Gives the tokens of a script as the likeliest ones behind a prompt."""

    script: Any = (*ANSWER, END)

    def run(self, ids: Any, seen: int, spans: Any) -> Any:
        super().run(ids, seen, spans)
        logits = np.zeros((1, self.vocabulary), np.float32)
        if (index := seen + len(ids) - len(PROMPT)) >= 0:
            logits[0, self.script[index]] = 1
        return logits


class Notes(Listener):
    """Notes what it is given."""

    def __init__(self, **reasons: Any) -> None:
        self.taken: list[int] = []
        self.reasons, self.finished = reasons, 0

    def token(self, number: int, logits: Any) -> Any:
        self.taken.append(number)
        return self.reasons.get("behind") if len(self.taken) == self.reasons.get("count") else None

    def finish(self) -> Any:
        self.finished += 1
        return self.reasons.get("last")


def begun(*listeners: Listener, in_batch: bool = False, **settings: Any) -> SimpleNamespace:
    """An answer to the prompt, with further listeners behind its own."""
    config = ENGINE.session().generation
    config.update(**{"do_sample": False, "eos_token_id": END, **settings})
    decoder = Scripted(64, ENGINE.vocabulary)
    loop, turn, written = OrtLoop(OrtCache(decoder, "toy")), Turn(), Written()
    decoding = Decoding(ENGINE, loop)
    chosen = decoding._listeners
    decoding._listeners = lambda *given: [*chosen(*given), *listeners]  # type: ignore[method-assign]
    loop.in_batch, turn.prompt_tokens = in_batch, len(PROMPT)
    steps = decoding.answer(PROMPT, config, ENGINE.rng(0), turn, written, None)
    return SimpleNamespace(
        steps=steps, turn=turn, written=written, loop=loop, decoder=decoder, decoding=decoding
    )


def driven(one: SimpleNamespace, draws: bool) -> list[Step]:
    """Return all steps of an answer in a batch that reads its tokens, and draws where it may."""
    steps: list[Step] = []
    sent: Any = None
    while True:
        try:
            step = one.steps.send(sent)
        except StopIteration:
            return steps
        steps.append(step)
        sent = None
        if step.token is not None:
            sent = one.loop.read(np.array([[step.token]]))
            if draws and step.sampler is not None:
                sent = int(sent.argmax())


def test_every_step_is_a_block_a_piece_of_text_or_a_token_to_be_read():
    alone = begun()
    texts = list(alone.steps)
    for draws in (False, True):
        one = begun(in_batch=True)
        steps = driven(one, draws)
        assert {type(step) for step in steps} == {Step}
        # Of three blocks all but the last are steps; no token is to be read behind the end.
        assert [bool(step.text) + 2 * (step.token is not None) for step in steps] == [
            0,
            0,
            *[1, 2] * len(ANSWER),
        ]
        assert [step.token for step in steps if step.token is not None] == ANSWER
        assert [step for step in steps if step.text] == [step for step in texts if step.text]
        assert all(step.ends == {END} and step.sampler for step in steps[3::2])
        assert one.written == alone.written
        assert one.decoder.read == alone.decoder.read == [*PROMPT, *ANSWER]
        assert one.turn.completion_tokens == alone.turn.completion_tokens == len(ANSWER) + 1
    assert [bool(step.text) for step in texts] == [False, False, *[True] * len(ANSWER)]
    assert alone.written.text == "".join(Pieces(begun().steps)) == " the code is 4821"


@pytest.mark.parametrize(
    ("settings", "reason", "taken", "text"),
    [({}, "stop", len(ANSWER), " the code is 4821"),
     ({"max_new_tokens": 3}, "length", 3, " the code is"),
     ({"stop_strings": ["is"]}, "stop", 3, " the code ")],
)  # fmt: skip
def test_listeners_take_every_token_but_one_that_ends_the_answer(settings, reason, taken, text):
    notes = Notes()
    one = begun(notes, **settings)
    list(one.steps)
    assert (one.turn.finish_reason, one.written.text) == (reason, text)
    assert one.turn.stop_string == settings.get("stop_strings", [None])[0]
    assert notes.taken == one.written.tokens == ANSWER[:taken]
    assert notes.finished == 1
    # The last token drawn is not read, and kept if it is one of the text.
    assert one.decoder.read == [*PROMPT, *[*ANSWER, END][: one.turn.completion_tokens - 1]]
    kept = None if one.turn.completion_tokens > taken else (ANSWER[taken - 1], one.loop.cache.seen)
    assert one.loop.cache.unread == kept


def test_a_later_listeners_reason_counts_and_the_last_word_is_at_the_end():
    notes = Notes(behind="cap", count=2)
    one = begun(notes, max_new_tokens=2)
    list(one.steps)
    assert (one.turn.finish_reason, len(notes.taken)) == ("cap", 2)
    one = begun(Notes(last="full"))
    list(one.steps)
    assert one.turn.finish_reason == "full"


def test_text_is_given_before_the_reason_is_known():
    """Whoever closes an answer at its last piece has interrupted it."""
    one = begun(max_new_tokens=1)
    pieces = Pieces(one.steps)
    assert next(pieces)
    assert one.turn.finish_reason is None
    assert list(pieces) == []
    assert one.turn.finish_reason == "length"


class Only(Listener):
    """Allows one token."""

    reads_logits = True

    def __init__(self, token: int) -> None:
        self.mask = np.arange(ENGINE.vocabulary) == token

    def allowed(self) -> Any:
        return self.mask


def source_of(
    *listeners: Listener, tokens: list[int], most: int = 9, **settings: Any
) -> TokenSource:
    config = ENGINE.session().generation
    config.update(**{"do_sample": False, **settings})
    loop = OrtLoop(OrtCache(Scripted(64, ENGINE.vocabulary, read=[*PROMPT]), "toy"))
    loop.cache.seen = len(PROMPT)
    sampler = ENGINE.sampler(config, ENGINE.rng(0))
    before = ENGINE.token_ids([7])
    return TokenSource(ENGINE, loop, sampler, listeners, frozenset([END]), most, before, tokens)


def test_a_source_draws_what_is_allowed_or_takes_what_was_drawn():
    logits = np.zeros((1, ENGINE.vocabulary), np.float32)
    logits[0, 5] = 1
    assert source_of(tokens=[]).draw(logits.copy()) == 5
    assert source_of(Listener(), Only(9), tokens=[]).draw(logits.copy()) == 9
    assert source_of(tokens=[]).draw(11) == 11
    source = source_of(tokens=[], repetition_penalty=2.0)
    for _ in range(2):
        source.draw(logits.copy())
    assert source.history.tolist() == [[7, 5, 5]]  # a penalty looks at what was drawn
    source = source_of(tokens=[])
    source.draw(logits.copy())
    assert source.history.tolist() == [[7]]


@pytest.mark.parametrize(
    ("listeners", "settings", "drawn", "certain"),
    [((), {}, True, True), ((Only(9),), {}, False, False),
     ((), {"presence_penalty": 1.0}, False, False)],
)  # fmt: skip
def test_a_batch_draws_only_where_nothing_else_has_a_say(listeners, settings, drawn, certain):
    for tokens, more in (([3], True), ([3] * 8, False)):  # the next token is the last one
        source = source_of(*listeners, tokens=tokens, **settings)
        source.loop.in_batch = True
        step = next(source.read())
        assert (step.text, step.token) == ("", 3)
        assert (step.sampler is not None) is drawn
        assert step.ends == ({END} if certain and more else None)


def test_a_listener_that_may_end_an_answer_leaves_the_next_token_uncertain():
    source = source_of(tokens=[3])
    source.loop.on_full = "stop"
    source = TokenSource(
        ENGINE,
        source.loop,
        source.sampler,
        [AnswerLimits(9, source.loop)],
        source.ends,
        9,
        None,
        [3],
    )
    source.loop.in_batch = True
    step = next(source.read())
    assert step.sampler is not None
    assert step.ends is None


def test_an_asynchronous_device_reads_before_text_is_made_and_fails_after_it():
    for count, early in ((1, False), (2, True), (8, True), (9, False)):
        source = source_of(tokens=[3] * count)
        source.draw(np.ones((1, ENGINE.vocabulary), np.float32))
        source.loop.asynchronous = True
        source.begin()
        assert source.loop.cache.seen == len(PROMPT) + early
    source.loop.asynchronous = True
    failing = source_of(tokens=[3, 3])
    failing.draw(np.ones((1, ENGINE.vocabulary), np.float32))
    failing.loop.asynchronous = True

    def fail(*_: Any) -> None:
        raise MemoryCapExceeded("no more")

    failing.loop.read = fail  # type: ignore[assignment]
    failing.begin()
    with pytest.raises(MemoryCapExceeded, match="no more"):
        list(failing.read())


def test_an_error_that_is_sent_ends_the_answer_where_it_stands():
    one = begun(in_batch=True)
    steps = iter(one.steps)
    step = next(step for step in steps if step.token is not None)
    with pytest.raises(MemoryCapExceeded, match="refused"):
        one.steps.send(MemoryCapExceeded("refused"))
    assert one.written.tokens == [step.token]
    assert list(one.steps) == []


def test_pieces_are_texts_and_end_the_answer_when_closed_or_interrupted():
    one = begun()
    pieces = Pieces(one.steps)
    assert next(pieces) == one.written.text != ""
    pieces.close()
    assert list(pieces) == list(one.steps) == []

    closed: list[bool] = []

    def interrupted() -> Any:
        try:
            yield Step("a")
            signal.raise_signal(signal.SIGINT)
            yield Step("b")
        finally:
            closed.append(True)

    pieces = Pieces(interrupted())
    assert next(pieces) == "a"
    with pytest.raises(KeyboardInterrupt):
        next(pieces)
    assert closed == [True]
