"""Many conversations behind one model: each answered as if it were alone."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_templates import THINKING, TOOLS, with_template
from server_chats import NEVER, ask, assistant, limits, plain, pocket, serve, text_of, until, user
from toy_engine import ToyEngine

from kvcap.runtime.errors import (
    Busy,
    ConversationUnknown,
    EmptyPrompt,
    MessagesInvalid,
    PinsTooLarge,
    ReaderTooSlow,
)
from kvcap.runtime.session.file import SessionFile
from kvcap.runtime.session.tool_calls import schema_of_call
from kvcap.serve.contract import Ask
from kvcap.serve.saved import SavedConversations
from kvcap.serve.scheduler import Scheduler
from kvcap.serve.series import Series

DOOR = "Please remember: the code for the {} door is {}. "
GO_ON = {"eos_token_id": NEVER}


@pytest.fixture(scope="module")
def built_in() -> Any:
    return pocket()


def facts(number: int, times: int = 3) -> str:
    return DOOR.format("blue", 4000 + number) * times


def test_a_conversation_goes_on_and_reads_only_what_is_new(built_in):
    first, then = user(facts(1)), user("What is the code for the blue door?")
    alone, expected = plain(built_in, [first])
    ended = alone.turn.finish_reason
    later = "".join(alone.send([then]))

    async def chat(s: Scheduler) -> None:
        reply = s.submit(ask(first))
        answer = await text_of(reply)
        assert (answer, reply.finish_reason) == (expected, ended)
        assert reply.usage.reused_tokens == 0
        assert reply.usage.prompt_tokens > 50
        again = s.submit(ask(first, assistant(answer), then))
        assert await text_of(again) == later
        assert again.session_id == reply.session_id
        stats = alone.stats
        assert again.usage.reused_tokens + alone.turn.prompt_tokens == again.usage.prompt_tokens
        assert (again.usage.held, again.usage.evicted) == (stats.held_tokens, stats.evicted_tokens)
        assert again.usage.evicted > 0
        assert again.usage.cap_bytes == built_in.cap_bytes
        figures = s.figures()
        assert (figures.asked, figures.answered, figures.in_memory, figures.failed) == (2, 2, 1, 0)

    serve(Scheduler(built_in, limits()), chat)


def test_whatever_differs_is_read_anew(runtime):
    """Another owner, system prompt, answer, tool or pin, or a template, is another conversation."""
    first, then = user(facts(1)), user("What is the code?")

    async def chat(s: Scheduler) -> None:
        answer = assistant(await text_of(s.submit(ask(first, owner="ada"))))
        others = [
            ask(first, answer, then, owner="bob"),
            ask(first, answer, then),
            ask({"role": "system", "content": "Be short."}, first, answer, then, owner="ada"),
            ask(first, assistant("No."), then, owner="ada"),
            ask(user(facts(2)), answer, then, owner="ada"),
            ask(first, answer, then, owner="ada", session_id="mine"),
        ]
        for other in others:
            reply = s.submit(other)
            text = await text_of(reply)
            assert reply.usage.reused_tokens == 0, other
            assert text == plain(runtime, list(other.messages or ()))[1]
        reply = s.submit(ask(first, answer, then, owner="ada"))
        await text_of(reply)
        assert reply.usage.reused_tokens > 0

    serve(Scheduler(runtime, limits(places=8)), chat)


@pytest.mark.parametrize("name", ["switch", "system"])
def test_thinking_is_switched_off_by_a_request(runtime, name):
    """What is held is gone on with, unless the template would have begun otherwise."""
    runtime = runtime.with_budget(600)
    runtime.tokenizer = with_template(runtime.tokenizer, THINKING[name])
    first, then = user("Hello!"), user("And now?")
    off = {"template_options": {"enable_thinking": False}}

    async def chat(s: Scheduler) -> None:
        reply = s.submit(ask(first))
        answer = assistant(await text_of(reply))
        again = s.submit(ask(first, answer, then, options=off))
        text = await text_of(again)
        assert again.session_id == reply.session_id
        assert (again.usage.reused_tokens > 0) == (name == "switch")
        if name == "system":
            session = runtime.session()
            session.set_generation(max_new_tokens=12, temperature=0.0, **off)
            assert text == "".join(session.send([first, answer, then]))

    serve(Scheduler(runtime, limits()), chat)


@pytest.mark.parametrize("name", ["own turn", "ids", "one turn"])
def test_a_result_goes_on_with_the_answer_that_called(runtime, name):
    """What is held is gone on with; a template that needs the call has all of it read again."""
    pytest.importorskip("llguidance")
    runtime = runtime.with_budget(600)
    runtime.tokenizer = with_template(runtime.tokenizer, TOOLS[name])
    tool = {"type": "function", "function": {"name": "add"}}
    first = user("What is 1 and 1?")
    call = r'I add\. <tool_call>\{"name": "add", "arguments": \{"a": [12]\}\}</tool_call>'

    async def chat(s: Scheduler) -> None:
        reply = s.submit(ask(first, tokens=90, tools=(tool,), options={"regex": call}))
        await text_of(reply)
        answer = reply.parsed.as_message()
        (one,) = answer["tool_calls"]
        held = reply.usage.prompt_tokens
        result = {"role": "tool", "content": "two", "tool_call_id": one["id"]}
        again = s.submit(ask(first, answer, result, tools=(tool,)))
        text = await text_of(again)
        assert again.session_id == reply.session_id
        assert (again.usage.reused_tokens > 0) == (name != "one turn")
        assert again.usage.prompt_tokens > held
        messages = [
            first,
            {**answer, "content": "I add. "},
            result,
            assistant(text),
            user("Thanks."),
        ]
        last = s.submit(ask(*messages, tools=(tool,)))
        await text_of(last)
        assert last.session_id == reply.session_id
        assert last.usage.reused_tokens > held

    serve(Scheduler(runtime, limits(shared_prompts=0)), chat)


def test_an_answer_asked_for_again_is_read_anew_and_the_same(runtime):
    first = user(facts(3))

    async def chat(s: Scheduler) -> None:
        answers = []
        for _ in range(3):  # a named one has one place, whatever is asked of it
            reply = s.submit(ask(first, session_id="x"))
            answers.append((await text_of(reply), reply.usage.reused_tokens))
        assert len(set(answers)) == 1
        assert s.figures().in_memory == 1

    serve(Scheduler(runtime, limits()), chat)


def test_requests_for_one_conversation_at_once_do_not_mix(built_in):
    """Those that name it wait for one another; the others have a conversation each."""
    first = user(facts(4))
    expected = plain(built_in, [first], 20)[1]
    texts = [f"And what is {n}?" for n in range(2)]

    async def chat(s: Scheduler) -> None:
        for name in (None, "mine"):
            assert await text_of(s.submit(ask(first, tokens=20, session_id=name))) == expected
            before = first, assistant(expected)
            replies = [s.submit(ask(*before, user(t), session_id=name)) for t in texts]
            answers = await asyncio.gather(*map(text_of, replies))
            reused = [reply.usage.reused_tokens > 0 for reply in replies]
            assert reused == [True, False]
            for text, answer, held in zip(texts, answers, reused, strict=True):
                if held:
                    session = plain(built_in, [first], 20)[0]
                    session.set_generation(max_new_tokens=12)
                    assert answer == "".join(session.send(text))
                else:
                    assert answer == plain(built_in, [*before, user(text)])[1]
            ids = {reply.session_id for reply in replies}
            assert len(ids) == (2 if name is None else 1)

    serve(Scheduler(built_in, limits(together=3)), chat)


def test_a_full_queue_refuses_and_says_when_to_ask_again(runtime):
    async def chat(s: Scheduler) -> None:
        long = {"tokens": 200, "options": GO_ON}
        replies = [s.submit(ask(user(facts(n)), **long)) for n in range(2)]
        await until(lambda: s.figures().answering == 2)
        waiting = [s.submit(ask(user("Hello!"))) for _ in range(3)]
        with pytest.raises(Busy, match="3 requests wait") as refused:
            s.submit(ask(user("Hello!")))
        assert 1 <= refused.value.retry_after_s <= 60
        assert (s.figures().waiting, s.figures().refused) == (3, 1)
        await waiting[1].aclose()  # a place in the queue is free at once
        waiting.append(s.submit(ask(user("Hello!"))))
        for reply in replies:
            await reply.aclose()
            assert reply.finish_reason == "interrupted"
        answers = [await text_of(reply) for reply in waiting]
        assert answers[1] == ""
        assert answers[0] == answers[2] == answers[3] != ""

    serve(Scheduler(runtime, limits(waiting=3)), chat)


def test_a_full_queue_refuses_no_further_answer_of_a_request(runtime):
    async def chat(s: Scheduler) -> None:
        hello = ask(user("Hello!"))
        several = Series(s.submit, [hello] * 3)
        await until(lambda: s.figures().answering == 1)
        other = s.submit(ask(user(facts(1)), tokens=50, options=GO_ON))
        with pytest.raises(Busy):
            s.submit(hello)
        text = await text_of(several)
        assert text == 3 * text[: len(text) // 3] != ""
        await other.aclose()

    serve(Scheduler(runtime, limits(together=1, waiting=1)), chat)


def test_letters_that_wait_are_bounded_too(runtime):
    async def chat(s: Scheduler) -> None:
        one = s.submit(ask(user(facts(1)), tokens=100, options=GO_ON))
        await until(lambda: s.figures().answering == 1)
        two = s.submit(ask(user("a" * 900)))
        with pytest.raises(Busy):
            s.submit(ask(user("b" * 200)))
        for reply in (one, two):
            await reply.aclose()

    serve(Scheduler(runtime, limits(together=1, waiting_letters=1000)), chat)


def test_a_reader_that_leaves_frees_its_place_within_a_block(runtime):
    """Whether it closes its reply or lets it go, and while a prompt is read, too."""

    async def chat(s: Scheduler) -> None:
        long = user(facts(1, 200))
        for leave in ("close", "drop", "cancel"):
            reply: Any = s.submit(ask(long))
            await until(lambda: bool(s.figures().answering))
            if leave == "close":
                await reply.aclose()
                await reply.aclose()
            elif leave == "cancel":
                task = asyncio.ensure_future(text_of(reply))
                await asyncio.sleep(0)
                task.cancel()
                del task
            del reply
            gc.collect()
            await until(lambda: not s.figures().answering)
            figures = s.figures()
            assert figures.in_memory == 0  # what was read of it is nothing to go on with
        assert figures.stopped == 3
        assert figures.prompt_tokens < 3 * len(runtime.tokenizer(long["content"])["input_ids"])
        assert await text_of(s.submit(ask(user(facts(5))))) == plain(runtime, [user(facts(5))])[1]
        assert s._pool.made == 1

    serve(Scheduler(runtime, limits(together=1)), chat)


def test_a_stopped_answer_is_gone_on_with(runtime):
    first = user(facts(6))

    async def chat(s: Scheduler) -> None:
        reply = s.submit(ask(first, tokens=60, options=GO_ON))
        pieces = [(await reply.__anext__()).text for _ in range(4)]
        await until(lambda: bool(s._pool.conversations))
        session = s._pool.conversations[0].session
        await reply.aclose()
        assert reply.finish_reason == "interrupted"
        answer = session.messages[-1]["content"]  # of what was written some may not have been read
        assert answer.startswith("".join(pieces))
        then = s.submit(ask(first, assistant(answer), user("Go on.")))
        await text_of(then)
        assert then.usage.reused_tokens > 0

    serve(Scheduler(runtime, limits()), chat)


def test_a_slow_reader_holds_nobody_up_and_loses_nothing(runtime):
    slow, fast = user(facts(7)), [user(facts(n)) for n in (8, 9)]
    expected = plain(runtime, [slow], 30)[1]

    async def chat(s: Scheduler) -> None:
        reply = s.submit(ask(slow, tokens=30))
        others = [s.submit(ask(one)) for one in fast]
        await until(lambda: s.figures().paused == 1)
        for one, other in zip(fast, others, strict=True):
            assert await text_of(other) == plain(runtime, [one])[1]
        assert len(reply._job.pieces) == 3
        assert await text_of(reply) == expected
        assert reply.usage.completion_tokens > 3

    serve(Scheduler(runtime, limits(together=1, buffered=3)), chat)


def test_an_answer_that_nobody_reads_is_ended_once_its_place_is_wanted(runtime):
    async def chat(s: Scheduler) -> None:
        slow = s.submit(ask(user(facts(7)), tokens=60, options=GO_ON))
        await until(lambda: s.figures().paused == 1)
        assert await text_of(s.submit(ask(user(facts(8))))) == plain(runtime, [user(facts(8))])[1]
        for _ in range(3):  # what was written is not lost
            await anext(slow)
        with pytest.raises(ReaderTooSlow, match="nobody read"):
            await anext(slow)
        assert slow.finish_reason == "interrupted"

    serve(Scheduler(runtime, limits(places=1, together=1, buffered=3, grace_s=0.1)), chat)


def test_what_cannot_be_answered_is_refused(runtime):
    first = user("Hello!")

    async def chat(s: Scheduler) -> None:
        for wrong, error, words in [
            (Ask(), MessagesInvalid, "messages, or a prompt"),
            (Ask((first,), prompt="a"), MessagesInvalid, "not both"),
            (ask(assistant("Hello!")), MessagesInvalid, "must be of the user"),
            (ask(user(" ")), EmptyPrompt, "empty"),
            (Ask((first,), options={"temperature": -1}), ValueError, "temperature"),
            (ask(first, pins=frozenset({1})), MessagesInvalid, "message 1 cannot be pinned"),
        ]:
            with pytest.raises(error, match=words):
                s.submit(wrong)
        # What only its tokens show is raised with the first piece.
        for request, error in [
            (ask(user("many " * 100), pins=frozenset({0})), PinsTooLarge),
            (Ask(prompt=""), EmptyPrompt),
        ]:
            with pytest.raises(error):
                await text_of(s.submit(request))
        assert s.figures().failed == 2
        assert s.figures().in_memory == 0
        assert await text_of(s.submit(ask(first))) == plain(runtime, [first])[1]

    serve(Scheduler(runtime, limits()), chat)


def test_other_pins_are_another_conversation(runtime):
    words = {"role": "system", "content": "You know the word plum."}
    first, then = user("The word is plum."), user(facts(1, 6))

    async def chat(s: Scheduler) -> None:
        reply = s.submit(ask(words, first, pins=frozenset({0, 1})))
        answer = assistant(await text_of(reply))
        again = s.submit(ask(words, first, answer, then, pins=frozenset({0, 1})))
        await text_of(again)
        assert again.usage.reused_tokens > 0
        assert (await s.strip("", again.session_id)).pinned[0][0] == 0
        unpinned = s.submit(ask(words, first, answer, then))
        await text_of(unpinned)
        assert unpinned.usage.reused_tokens == 0
        with pytest.raises(ConversationUnknown):
            await s.strip("bob", again.session_id)

    serve(Scheduler(runtime, limits()), chat)


def test_completions_are_held_for_nobody(runtime):
    text = facts(1, 5)
    session = runtime.session()
    session.set_generation(max_new_tokens=12, temperature=0.0)
    expected = "".join(session.complete(text))

    async def chat(s: Scheduler) -> None:
        for _ in range(2):
            reply = s.submit(Ask(prompt=text, options={"max_new_tokens": 12, "temperature": 0.0}))
            assert await text_of(reply) == expected
            assert reply.usage.reused_tokens == 0
            assert reply.session_id is None
        assert s.figures().in_memory == 0

    serve(Scheduler(runtime, limits()), chat)


def contents(session: Any, folder: Path) -> dict[str, bytes]:
    """Everything that a cache holds, in the order of its memory."""
    session.save(folder / "one")
    with SessionFile(folder / "one") as file:
        tensors = {x: file.tensor(x).numpy().tobytes() for x in file.names if x != "draws"}
    (folder / "one").unlink()
    return tensors


def test_idle_conversations_leave_memory_and_come_back_to_the_bit(runtime, tmp_path):
    """Their answers are those of sessions that never left, slots and all."""
    firsts = [user(facts(n)) for n in range(3)]
    alone = [plain(runtime, [one]) for one in firsts]

    async def chat(s: Scheduler) -> None:
        for turn in range(2):
            for n, (session, _) in enumerate(alone):
                if turn:
                    "".join(session.send(f"And now {turn}?"))
                history = session.messages[:-1]
                reply = s.submit(ask(*history, session_id=f"number {n}"))
                assert await text_of(reply) == session.messages[-1]["content"]
                assert (reply.usage.reused_tokens > 0) == (turn > 0)
                if turn:
                    mine = s._pool.known("", f"number {n}")
                    assert contents(mine.session, tmp_path) == contents(session, tmp_path)
        figures = s.figures()
        assert figures.restored == 3
        assert figures.in_memory == 1
        assert figures.dropped == 0

    disk = SavedConversations(tmp_path, 64 << 20)
    serve(Scheduler(runtime, limits(places=1, together=1), disk), chat)
    # And in another process, or after this one.
    again = SavedConversations(tmp_path, 64 << 20)

    async def later(s: Scheduler) -> None:
        session = alone[2][0]
        answer = "".join(session.send("Are you still there?"))
        reply = s.submit(ask(*session.messages[:-1], session_id="number 2"))
        assert await text_of(reply) == answer
        assert reply.usage.reused_tokens > 0

    serve(Scheduler(runtime, limits(), again), later)


def test_a_second_branch_of_a_saved_conversation_begins_where_it_was_saved(runtime, tmp_path):
    """An answer asked for again goes on from the file, without reading it all anew."""
    first = user(facts(1))

    async def chat(s: Scheduler) -> None:
        answer = assistant(await text_of(s.submit(ask(first, session_id="x"))))
        await until(lambda: s.figures().saved == 1)
        then = ask(first, answer, user("And now?"), session_id="x")
        replies = [s.submit(then) for _ in range(2)]  # the second waits for the first
        texts = [await text_of(reply) for reply in replies]
        assert texts[0] == texts[1]
        assert replies[0].usage == replies[1].usage
        assert replies[1].usage.reused_tokens > 0
        assert s.figures().restored == 1

    disk = SavedConversations(tmp_path, 64 << 20)
    serve(Scheduler(runtime, limits(save_after_s=0.0), disk), chat)


@pytest.mark.parametrize(
    "policy", [pytest.param("full", marks=pytest.mark.slow), "adakv", "of a stand-in"]
)
def test_what_cannot_be_answered_together_is_answered_by_turns(policy):
    """The stand-in has a loop as ONNX Runtime's, and notes what it reads."""
    budget = 400 if policy == "full" else 48
    engine = ToyEngine(64) if policy == "of a stand-in" else pocket(policy, budget)
    chats = [user(facts(n, 2)) for n in range(3)]

    async def chat(s: Scheduler) -> None:
        answers = await asyncio.gather(*(text_of(s.submit(ask(one, tokens=6))) for one in chats))
        assert answers == [plain(engine, [one], 6)[1] for one in chats]

    serve(Scheduler(engine, limits(together=3)), chat)


def test_a_server_that_closes_ends_answers_and_keeps_conversations(runtime, tmp_path):
    first = user(facts(1))

    async def chat() -> None:
        s = Scheduler(runtime, limits(), SavedConversations(tmp_path, 64 << 20))
        answer = assistant(await text_of(s.submit(ask(first))))
        long = [s.submit(ask(user(facts(n)), tokens=500, options=GO_ON)) for n in range(3)]
        await until(lambda: s.figures().answering == 2)
        await s.aclose()
        await s.aclose()
        for reply in long:
            with pytest.raises(Busy, match="closing"):
                await text_of(reply)
        with pytest.raises(Busy, match="closing"):
            s.submit(ask(first))
        assert s.figures().on_disk >= 1
        again = Scheduler(runtime, limits(), SavedConversations(tmp_path, 64 << 20))
        reply = again.submit(ask(first, answer, user("And now?")))
        await text_of(reply)
        assert reply.usage.reused_tokens > 0
        await again.aclose()

    asyncio.run(chat())


def test_a_fault_of_the_worker_leaves_nobody_waiting(runtime, monkeypatch):
    async def chat() -> None:
        s = Scheduler(runtime, limits())
        monkeypatch.setattr(s.batch, "step", lambda: 1 / 0)
        monkeypatch.setattr("threading.excepthook", lambda *_: None)
        with pytest.raises(ZeroDivisionError):
            await text_of(s.submit(ask(user("Hello!"))))
        with pytest.raises(Busy):
            s.submit(ask(user("Hello!")))
        await s.aclose()

    asyncio.run(chat())


def test_a_deleted_conversation_is_nowhere(runtime, tmp_path):
    """Neither in memory nor on disk, also while it is answered; others, and other owners', stay."""
    first, endless = user(facts(1)), {**GO_ON, "max_new_tokens": 10_000}

    async def chat(s: Scheduler) -> None:
        for owner, name in (("ada", "one"), ("ada", "two"), ("bob", "one")):
            await text_of(s.submit(ask(first, owner=owner, session_id=name)))
        await until(lambda: s.figures().on_disk == 3)
        await s.delete("ada", "one")
        assert (s.figures().on_disk, s.figures().in_memory) == (2, 2)
        for owner, name in (("ada", "one"), ("eve", "two")):
            with pytest.raises(ConversationUnknown, match="deleted, or forgotten"):
                await s.delete(owner, name)
        again = s.submit(ask(first, owner="ada", session_id="one"))
        await text_of(again)
        assert again.usage.reused_tokens == 0
        reply = s.submit(ask(first, owner="ada", session_id="three", options=endless))
        await anext(reply)
        await s.delete("ada", "three")
        await text_of(reply)
        assert reply.finish_reason == "interrupted"
        with pytest.raises(ConversationUnknown):
            await s.strip("ada", "three")
        assert s.figures().answering == 0

    disk = SavedConversations(tmp_path, 64 << 20)
    serve(Scheduler(runtime, limits(save_after_s=0.0), disk), chat)
    left = SavedConversations(tmp_path, 64 << 20)
    assert len(left) == 3
    assert not left.remove("ada", "three")
    assert left.remove("bob", "one")
    left.close()


@pytest.mark.parametrize(
    ("name", "installed"), [("own turn", True), ("ids", True), ("own turn", False)]
)
def test_calls_are_held_to_a_schema_where_they_can_be(runtime, monkeypatch, name, installed):
    """Else a request is answered as if its tools were not strict; see docs/serve-apis.md."""
    pytest.importorskip("llguidance")
    if not installed:
        monkeypatch.setitem(sys.modules, "llguidance", None)
    runtime = runtime.with_budget(600)
    runtime.tokenizer = with_template(runtime.tokenizer, TOOLS[name])
    tool = {"type": "function", "function": {"name": "add"}}
    schema = schema_of_call([tool])

    async def chat(s: Scheduler) -> None:
        reply = s.submit(ask(user("Add."), tools=(tool,), options={"call_schema": schema}))
        await text_of(reply)
        (one,) = s._pool.conversations
        held = schema if (name, installed) == ("own turn", True) else None
        assert one.session.generation.call_schema == held

    serve(Scheduler(runtime, limits()), chat)
