"""An asynchronous device reads the next token of an answer while somebody takes its text."""

from __future__ import annotations

from itertools import islice

import pytest
from toy_engine import session_of

from kvcap.runtime.errors import MemoryCapExceeded

MESSAGE, TOKENS = "Hi, I am Ada.", 12


def answering(runtime, asynchronous=True, fails_at=None, **settings):
    """A session, and a list that grows by every token that it reads by itself."""
    session, single = session_of(runtime), []
    session.set_generation(max_new_tokens=TOKENS, **settings)
    session.loop.asynchronous, read = asynchronous, session.loop.read

    def noted(ids, need_logits=True):
        if ids.shape[1] == 1:
            single.append(ids)
            if len(single) == fails_at:
                raise MemoryCapExceeded("no more")
        return read(ids, need_logits)

    session.loop.read = noted
    return session, single


def reads_by_text(session, single, pieces):
    """Of each piece of text: tokens of the answer so far, and tokens that were read by then."""
    return [(session.turn.completion_tokens, len(single)) for _ in pieces]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_k": 20}])
def test_the_answer_is_the_same_and_the_next_token_is_read_before_its_text(runtime, settings):
    outcomes = []
    for asynchronous in (False, True):
        session, single = answering(runtime, asynchronous, **settings)
        for tokens, reads in reads_by_text(session, single, session.send(MESSAGE)):
            # The first text waits for nothing, and what follows the last is not read.
            ahead = asynchronous and 1 < tokens < TOKENS
            assert reads == tokens - (not ahead)
        assert session.turn.completion_tokens == TOKENS
        assert len(single) == TOKENS - 1
        outcomes.append((session.messages, session.read[:], session.cache.seen))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("settings", [
    {"stop_strings": ["never said"]}, {"repetition_penalty": 1.1}, {"logprobs": 1},
])  # fmt: skip
def test_nothing_is_read_ahead_where_more_is_asked_of_a_token(runtime, settings):
    session, single = answering(runtime, **settings)
    counts = reads_by_text(session, single, session.send(MESSAGE))
    assert counts
    assert all(reads == tokens - 1 for tokens, reads in counts)


def test_an_answer_that_is_stopped_goes_on_as_if_nothing_had_been_read_ahead(runtime):
    outcomes = []
    for asynchronous in (False, True):
        session, single = answering(runtime, asynchronous)
        pieces = session.send(MESSAGE)
        list(islice(pieces, 3))
        pieces.close()
        assert session.turn.finish_reason == "interrupted"
        assert len(single) == session.turn.completion_tokens - (not asynchronous)
        session.set_generation(max_new_tokens=1)  # which is not read
        list(session.send("And I am Bob."))
        outcomes.append((session.messages[:-1], session.read[:]))
    assert outcomes[0] == outcomes[1]


def test_text_is_given_before_the_error_of_the_token_behind_it(runtime):
    session, _ = answering(runtime)
    expected = [piece for piece in session.send(MESSAGE) if session.turn.completion_tokens <= 4]
    session, single = answering(runtime, fails_at=4)
    given = []
    with pytest.raises(MemoryCapExceeded, match="no more"):
        given.extend(session.send(MESSAGE))
    assert session.turn.completion_tokens == len(single) == 4
    assert given == expected
    assert session.turn.finish_reason == "cap"


def test_a_session_joins_others_with_a_token_that_is_read_already(runtime):
    outcomes = []
    for together in (False, True):
        session, single = answering(runtime)
        pieces = session.send(MESSAGE)
        text = list(islice(pieces, 3))
        assert len(single) == session.turn.completion_tokens
        if together:
            batch, other = runtime.batch(2), session_of(runtime)
            batch.add(session, pieces)
            batch.add(other, other.send("And I am Bob."))
            text += [piece for one, piece in batch if one is session]
        else:
            text += pieces
        outcomes.append(("".join(text), session.cache.seen, session.turn.completion_tokens))
    assert outcomes[0] == outcomes[1]
