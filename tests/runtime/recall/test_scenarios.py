"""Recalled text, pins and first tokens as a user meets them: in Python, in a chat, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from make import FACT, QUESTION, filler
from surface import SURFACES, Surface

import kvcap

BUDGET = 256
READ_AGAIN = f"(Earlier in this conversation:\n{FACT})\n\n"
NOUNS = (
    "harbour mosses baker winter lake grasses bees children milk sentence green silver engine wall "
    "paper storm lamp river stone garden window letter candle bridge mountain apple market clock"
)
PAIRS = " ".join(f"{a} {b}s" for a, b in pairwise(NOUNS.split()))


@pytest.fixture(scope="module")
def runtime() -> Any:
    return kvcap.Runtime.from_pretrained("pocket", "streaming_llm", budget_tokens=BUDGET)


@pytest.fixture(params=SURFACES, ids=lambda one: one.__name__)
def surface(request: pytest.FixtureRequest, runtime: Any, tmp_path: Any) -> Iterator[Surface]:
    made: Surface = request.param(runtime, tmp_path)
    yield made
    made.close()


def with_fact(surface: Surface, fact: str = FACT, *, pin: bool = False) -> Surface:
    """Tell a fact, and go on for longer than a budget has slots."""
    surface.say(fact, pin=pin)
    surface.say(filler(400))
    return surface


def test_an_evicted_fact_is_recalled_for_its_question_alone(surface):
    answer = with_fact(surface).say(QUESTION)
    assert "7421" in answer.text
    assert surface.read_again == READ_AGAIN
    assert 0 < answer.recalled <= BUDGET // 2
    assert answer.held <= BUDGET
    assert answer.cap_bytes == surface.runtime.cap_bytes
    assert surface.pinned == ""
    assert surface.say("Thank you.").recalled == 0


@pytest.mark.parametrize(("most", "limit"), [("off", 0), ("60", 60), ("5000", BUDGET)])
def test_no_more_is_recalled_than_was_said(surface, most, limit):
    with_fact(surface).recall(most)
    answer = surface.say(QUESTION)
    assert answer.recalled <= limit
    assert bool(answer.recalled) == ("7421" in answer.text) == bool(limit)
    surface.recall("auto")
    surface.say(filler(400, 1))
    assert "7421" in surface.say(QUESTION).text


def test_an_answer_given_again_recalls_the_same_and_once(surface):
    answer, strip = with_fact(surface).say(QUESTION), surface.strip
    assert (surface.again(), surface.strip) == (answer, strip)
    surface.undo()
    assert (surface.say(QUESTION), surface.strip) == (answer, strip)


def test_what_was_saved_goes_on_as_if_it_had_not_stopped(surface, runtime, tmp_path):
    other: Surface = type(surface)(runtime, tmp_path / "other")
    for one in (surface, other):
        with_fact(one).recall("60")
        one.say(QUESTION)
        one.say(filler(250, 1))
    surface.restart()
    assert surface.say(QUESTION) == other.say(QUESTION)
    assert surface.strip == other.strip
    other.close()


def test_a_forgotten_conversation_is_recalled_in_no_other(surface):
    with_fact(surface).say(QUESTION)
    surface.forget()
    with_fact(surface, "Hello!")
    assert surface.say(QUESTION).recalled == 0
    assert surface.read_again == ""


@pytest.mark.parametrize("made", SURFACES, ids=lambda one: one.__name__)
def test_slots_in_use_above_the_budget_wait_for_the_next_eviction(made, chat_model, tmp_path):
    runtime = kvcap.Runtime.from_pretrained(
        chat_model, budget_tokens=48, block_size=16, device="cpu", evict_every=16
    )
    one: Surface = made(runtime, tmp_path)
    answer, strip = one.say(PAIRS), one.strip
    assert (answer.held, answer.waiting) == (48, 15)  # of 16 tokens the last is not read
    assert (strip.held, strip.waiting, strip.evicted) == answer[2:5]
    assert sum(answer[2:5]) == len(strip.tokens)
    one.close()


def test_what_is_pinned_stays(surface):
    with_fact(surface, pin=True)
    assert FACT in surface.pinned
    ((start, stop),) = surface.strip.pinned
    assert surface.holds(*range(start, stop))
    surface.recall("off")
    assert "7421" in surface.say(QUESTION).text


def test_a_pinned_question_is_pinned_around_what_is_recalled_for_it(surface):
    with_fact(surface).say(QUESTION, pin=True)
    surface.say(filler(250, 1))
    assert surface.read_again == READ_AGAIN
    assert QUESTION in surface.pinned
    assert FACT not in surface.pinned
    strip = surface.strip
    assert surface.holds(*(i for span in strip.pinned for i in range(*span)))
    assert not any(any(group.held[slice(*strip.recalled[0])]) for group in strip.groups)


WAYS = {
    "said": lambda one: None,
    "again": lambda one: one.again(),
    "undone": lambda one: (one.undo(), one.say(PAIRS)),
    "restarted": lambda one: (one.restart(), one.say(PAIRS)),
    "forgotten": lambda one: (one.forget(), one.say(PAIRS)),
    "pinned": lambda one: (one.say("The cat is grey.", pin=True), one.say(PAIRS)),
}


@pytest.mark.parametrize("sinks", [None, 0])
def test_the_first_tokens_stay_whatever_comes(chat_model, sinks, tmp_path):
    """The texts are such that KeyDiff evicts some of them where no sinks are pinned."""
    runtime = kvcap.Runtime.from_pretrained(
        chat_model, "keydiff", budget_tokens=32, block_size=16, device="cpu", sink_tokens=sinks
    )
    kept = []
    for made in SURFACES:
        for name, way in WAYS.items():
            one: Surface = made(runtime, tmp_path / made.__name__ / name)
            one.folder.mkdir(parents=True, exist_ok=True)
            one.say(PAIRS)
            way(one)
            kept.append(one.holds(0, 1, 2, 3))
            one.close()
    assert all(kept) if sinks is None else not all(kept)
