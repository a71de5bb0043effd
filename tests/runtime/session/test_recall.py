"""Evicted text is read again in front of a question: under the cap, only its own, and seen."""

from __future__ import annotations

import pytest
from make import FACT, QUESTION, WORDS, filler

import kvcap
from kvcap import Session
from kvcap.runtime.errors import SessionFileCorrupt

BUDGET = 256


@pytest.fixture(scope="module")
def runtime():
    return kvcap.Runtime.from_pretrained("pocket", "streaming_llm", budget_tokens=BUDGET)


def say(session, text, **options):
    return "".join(session.send(text, **options))


def with_fact(runtime, turns=5):
    """Return a conversation that has evicted a fact."""
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=24)
    say(session, FACT)
    for turn in range(turns):
        say(session, filler(seed=turn))
    return session


def test_the_cap_holds_while_text_is_recalled_and_pinned_with_the_question_alone(runtime):
    session = with_fact(runtime)
    assert session.recall.limit == BUDGET // 2
    cache, cap = session.cache, runtime.cap_bytes
    nbytes, pinned = cache.nbytes, []
    for _ in session.send(QUESTION):
        assert cache.nbytes == nbytes <= cap
        assert cache.held <= BUDGET + runtime.plan.block_size
        pinned.append(list(cache.pinned_spans))
    ((start, stop),) = session.recall.spans
    turn = session.turn
    assert turn.read_tokens == turn.prompt_tokens > turn.recalled_tokens == stop - start
    question = start, turn.reused_tokens + turn.prompt_tokens
    assert all(spans == [question] for spans in pinned)
    assert not cache.pinned_spans


def test_a_question_without_slots_is_evicted_before_what_was_recalled_for_it(runtime):
    session = with_fact(runtime)
    say(session, filler(160), pin=True)
    session.recall.limit = 64
    answer = session.send(QUESTION + " " + " ".join(WORDS) * 4)
    next(answer)
    assert session.recall.spans[-1] in session.cache.pinned_spans
    answer.close()


def test_a_question_within_a_long_message_is_preceded_by_what_was_evicted_of_it(runtime):
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=24)
    text = f"{FACT} {filler(600)}\n\n{QUESTION}"
    assert "7421" in say(session, text)
    assert FACT in session.recall.passages[0].text
    ((_, stop),) = session.recall.spans
    after = session.runtime.tokenizer.decode(session.read_ids[stop:])
    assert after.startswith(QUESTION)


@pytest.mark.parametrize("reason", ["held", "no such word", "never evicts"])
def test_nothing_is_recalled_without_need(runtime, reason):
    question = QUESTION
    session = with_fact(runtime, turns=0 if reason == "held" else 5)
    expected = with_fact(runtime, turns=0 if reason == "held" else 5)
    expected.recall.limit = 0
    if reason == "no such word":
        question = "Bonjour, zebra!"
    elif reason == "never evicts":
        session = runtime.session(seed=0)
        expected = runtime.session(seed=0)
        session.on_full = expected.on_full = "stop"
    assert say(session, question) == say(expected, question)
    assert session.turn.recalled_tokens == 0
    assert not session.recall.passages
    assert session.read_ids == expected.read_ids  # a message is read as without recall


def test_what_was_recalled_is_no_text_of_the_conversation(runtime):
    session = with_fact(runtime)
    for turn in range(4):
        say(session, QUESTION)
        say(session, filler(150, seed=9 + turn))
    passages = session.search("secret code vault earlier conversation")
    assert len(passages) > 1
    for start, stop in session.recall.spans:
        assert all(one.span[1] <= start or stop <= one.span[0] for one in passages)
    assert not any("Earlier in this" in one.text for one in passages)


def test_words_of_two_messages_stay_two_words(runtime):
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=1)
    for text in ("The door is 77", "Apples grow here", filler(400)):
        say(session, text)
    (passage,) = session.search("77")
    assert passage.text == "The door is 77"


def test_a_session_recalls_in_the_bytes_that_were_planned(runtime):
    for size, planned in ((None, 8 << 20), ("1MiB", 1 << 20), (0, 0)):
        other = kvcap.Runtime.from_pretrained("pocket", "streaming_llm", recall_store=size)
        assert other.plan.recall_store == planned
        for one in (other, other.with_budget(300), other.with_policy_name("knorm", {})):
            session = one.session()
            assert session.recall.store.limit == one.plan.recall_store == planned
            assert bool(session.recall.limit) == bool(planned)
    with pytest.raises(ValueError, match=r"use 256\.0 KiB or more"):
        kvcap.Runtime.from_pretrained("pocket", recall_store=1024)


def test_a_file_whose_recalled_tokens_cannot_be_is_refused(runtime, tmp_path):
    session = with_fact(runtime)
    session.recall.spans = [(9, 4)]
    session.save(tmp_path / "one")
    with pytest.raises(SessionFileCorrupt, match="end before they begin"):
        Session.load(runtime, tmp_path / "one")


def test_stopping_while_recalled_text_is_read_leaves_a_conversation_that_goes_on(runtime):
    session = with_fact(runtime)

    def stop(done, total):
        raise KeyboardInterrupt

    session.on_block = stop
    with pytest.raises(KeyboardInterrupt):
        say(session, QUESTION)
    session.on_block = None
    assert not session.cache.pinned_spans
    assert "7421" in say(session, QUESTION)
    assert all(0 <= a < b <= session.cache.seen for a, b in session.recall.spans)


def test_a_raw_text_is_read_as_it_is_unless_recall_is_asked_for(runtime):
    text = f"{FACT} {filler(600)}\n\n{QUESTION} The secret code of the vault is"
    session = runtime.session(seed=0)
    "".join(session.complete(text))
    assert session.turn.recalled_tokens == 0
    session = runtime.session(seed=0)
    "".join(session.complete(text, recall=True))
    assert session.turn.recalled_tokens > 0


def test_a_pinned_message_that_leaves_no_slots_for_recalled_text_is_pinned_where_it_lies(runtime):
    session = with_fact(runtime)
    text = f"{filler(205)}\n\n{QUESTION}"
    say(session, text, pin=True)
    assert session.turn.recalled_tokens
    first, ((start, stop),) = session.turn.reused_tokens, session.recall.spans
    message = {*range(first, first + session.turn.prompt_tokens)}
    pinned = {i for a, b in session.cache.pinned_spans for i in range(a, b)}
    assert pinned == message - {*range(start, stop)}


def test_a_conversation_saved_within_an_answer_pins_nothing_that_was_recalled(runtime, tmp_path):
    session = with_fact(runtime)
    answer = session.send(QUESTION)
    next(answer)
    assert session.cache.pinned_spans
    session.save(tmp_path / "one")
    assert not Session.load(runtime, tmp_path / "one").cache.pinned_spans
    answer.close()
    assert not session.cache.pinned_spans
