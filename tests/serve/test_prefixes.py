"""System prompts that are read once: answers stay what they are, and no key learns of another's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from chat_templates import TOOLS, with_template
from hypothesis import given, settings
from hypothesis import strategies as st
from server_chats import ask, assistant, limits, plain, serve, text_of, user
from toy_engine import ToyEngine

from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.session.engine import CacheCopy
from kvcap.serve.contract import Ask
from kvcap.serve.prefixes import SharedPrompts
from kvcap.serve.scheduler import Scheduler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = [f"You are the {job} of a small town. Answer briefly. " * 4 for job in ("baker", "doctor")]
SYSTEMS = [{"role": "system", "content": text} for text in RULES]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds. " * 12}}


async def answer(s: Scheduler, *messages: Any, **more: Any) -> tuple[str, Any]:
    reply = s.submit(ask(*messages, **more))
    return await text_of(reply), reply.usage


def answers(runtime: Any, asks: list[Ask], **given: Any) -> list[tuple[str, Any]]:
    """Return texts and usages of requests, one after the other."""

    async def chat(s: Scheduler) -> Any:
        pairs = list[Any]()
        for one in asks:
            reply = s.submit(one)
            pairs.append((await text_of(reply), reply.usage))
        return pairs

    pairs: list[tuple[str, Any]] = serve(Scheduler(runtime, limits(**given)), chat)
    return pairs


POLICIES = ["keydiff", "snapkv", "h2o", "adakv", "calidrop", "random"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pinned", [False, True])
def test_an_answer_is_the_same_from_a_copy(chat_model, policy, pinned):
    options = {"repetition_penalty": 1.3, "temperature": 0.9, "seed": 3}
    runtime = Runtime.from_pretrained(
        chat_model, policy, budget_tokens=140, block_size=16, dtype="float32", device=DEVICE
    )
    pins = frozenset({0} if pinned else ())
    asks = [
        ask(SYSTEMS[0], user(text), options=options, pins=pins)
        for text in ("Bread?", "What is the red door? " * 16, "Bread?")
    ]
    without, shared = (answers(runtime, asks, shared_prompts=n) for n in (0, 1))
    assert [text for text, _ in shared] == [text for text, _ in without]
    for (_, alone), (_, usage) in zip(without, shared, strict=True):
        assert (usage.prompt_tokens, usage.held) == (alone.prompt_tokens, alone.held)
        assert (usage.evicted, alone.reused_tokens) == (alone.evicted, 0)
    first, *others = (usage.reused_tokens for _, usage in shared)
    assert first == 0
    assert min(others) > 40


def test_a_short_system_prompt_is_read_with_the_rest(runtime):
    """So answers are those of a session that knows no other."""
    short = {"role": "system", "content": "Be short."}
    for text, usage in answers(runtime, [ask(short, user(x * 30)) for x in ("A door. ", "B. ")]):
        assert usage.reused_tokens == 0
        assert text in [plain(runtime, [short, user(x * 30)])[1] for x in ("A door. ", "B. ")]


def test_tools_alone_are_shared_and_others_are_not(runtime):
    runtime = runtime.with_budget(600)
    runtime.tokenizer = with_template(runtime.tokenizer, TOOLS["own turn"])
    other = {"type": "function", "function": {**TOOL["function"], "name": "sub"}}
    asks = [ask(user(x), tools=(tool,)) for x, tool in (("A", TOOL), ("B", TOOL), ("C", other))]
    reused = [usage.reused_tokens for _, usage in answers(runtime, asks)]
    assert reused[0] == 0
    assert reused[1] > 16
    assert reused[2] == 0


def test_both_backends_begin_from_copies(runtime):
    engine = ToyEngine(64)
    asks = [ask(SYSTEMS[0], user(text)) for text in ("One?", "Two?")]
    without, shared = (answers(engine, asks, shared_prompts=n) for n in (0, 4))
    assert [text for text, _ in shared] == [text for text, _ in without]
    assert shared[1][1].reused_tokens > 16


def test_what_was_copied_is_counted(runtime):
    async def chat(s: Scheduler) -> None:
        _, first = await answer(s, SYSTEMS[0], user("Bread?"))
        kept = s.figures()
        assert (kept.shared_prompts, kept.prompts_shared, kept.shared_tokens) == (1, 0, 0)
        assert 0 < kept.shared_prompt_bytes <= runtime.plan.cache_bytes
        text, second = await answer(s, SYSTEMS[0], user("Salt?"))
        figures = s.figures()
        assert figures.prompts_shared == 1
        assert figures.shared_tokens == second.reused_tokens == figures.reused_tokens
        assert figures.prompt_tokens == first.prompt_tokens + (
            second.prompt_tokens - second.reused_tokens
        )
        _, third = await answer(s, SYSTEMS[0], user("Salt?"), assistant(text), user("And?"))
        assert third.reused_tokens > second.prompt_tokens  # the conversation went on
        assert s.figures().prompts_shared == 1

    serve(Scheduler(runtime, limits()), chat)


def test_the_one_used_longest_ago_makes_room(runtime):
    async def chat(s: Scheduler) -> None:
        for system, reused in ((0, False), (1, False), (1, True), (0, False), (0, True)):
            _, usage = await answer(s, SYSTEMS[system], user("Bread?"), tokens=2)
            assert (usage.reused_tokens > 0) == reused, (system, reused)
            assert s.figures().shared_prompts == 1

    serve(Scheduler(runtime, limits(places=9, shared_prompts=1)), chat)


def test_without_memory_nothing_is_kept():
    room = True
    store = SharedPrompts(3, lambda: room)
    for key in (b"a", b"b"):
        store.of("ada").keep(key, lambda: CacheCopy({}, {}, 5))
    store.of("ada").keep(b"b", lambda: pytest.fail("it is there"))
    assert (len(store), store.nbytes) == (2, 10)
    room = False
    store.of("ada").keep(b"c", lambda: pytest.fail("there is no memory"))
    assert (len(store), store.nbytes) == (0, 0)


def test_a_stopped_answer_leaves_its_place_clean(runtime):
    """Whoever has the place next begins from an empty cache, however far the prompt was read."""

    async def chat(s: Scheduler) -> None:
        expected, _ = await answer(s, SYSTEMS[0], user("Bread?"))
        for _ in range(3):
            reply = s.submit(ask(SYSTEMS[0], user("Salt? " * 40)))
            reading = asyncio.ensure_future(anext(reply))
            await asyncio.sleep(0.01)
            await reply.aclose()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert (await answer(s, SYSTEMS[0], user("Bread?")))[0] == expected

    serve(Scheduler(runtime, limits(places=1, together=1)), chat)


OWNERS = ("ada", "bob", "eve")
FACT = "The code of {}'s door is {}. Remember it. "
TALKS = st.lists(  # of each owner: which system prompt, and how long the messages are
    st.tuples(st.integers(0, 1), st.lists(st.integers(1, 9), min_size=1, max_size=2)),
    min_size=1,
    max_size=2,
)


@settings(max_examples=3, deadline=None)
@given(talks=st.fixed_dictionaries(dict.fromkeys(OWNERS, TALKS)))
def test_no_key_sees_what_another_said(runtime, talks):
    """Three keys begin with the same system prompts at the same time, and recall what they said."""
    read = dict[tuple[str, str], str]()

    async def client(s: Scheduler, owner: str) -> list[tuple[str, int]]:
        answered, known = list[tuple[str, int]](), set[int]()
        for number, (system, lengths) in enumerate(talks[owner]):
            messages: list[Any] = [SYSTEMS[system]]
            for turn, length in enumerate(lengths):
                words = FACT.format(owner, 100 + turn) + f"{owner} walks home. " * length
                messages.append(user(f"{words} What is the code of {owner}'s door?"))
                name = f"{owner}{number}"
                text, usage = await answer(
                    s, *messages, tokens=4, owner=owner, session_id=name, recall=24
                )
                if turn == 0 and system not in known:
                    assert usage.reused_tokens == 0, "another key's copy"
                known.add(system)
                messages.append(assistant(text))
                session = s._pool.known(owner, name).session
                read[owner, name] = runtime.tokenizer.decode(session.read_ids)
                passages = " ".join(one.text for one in session.recall.passages)
                for other in OWNERS:
                    assert (other in read[owner, name]) == (other == owner)
                    assert other == owner or other not in passages
                answered.append((text, usage.evicted))
        return answered

    async def chat(s: Scheduler) -> Any:
        answered = await asyncio.gather(*(client(s, owner) for owner in OWNERS))
        return answered, s.figures()

    (without, _), (answered, counts) = (
        serve(Scheduler(runtime, limits(places=8, together=3, shared_prompts=n)), chat)
        for n in (0, 9)
    )
    assert answered == without
    begun = sum(len({x[0] for x in one}) for one in talks.values())
    assert counts.shared_prompts == begun
    assert counts.prompts_shared == sum(map(len, talks.values())) - begun
