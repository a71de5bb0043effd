"""What a server keeps of conversations: on disk, through kills, and apart from one another."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest
from server_chats import NEVER, ask, assistant, limits, serve, small, text_of, until, user
from tools import ROOT, first_kept

import kvcap
from kvcap.policies import load_policy
from kvcap.runtime.errors import SessionNotSaved
from kvcap.runtime.session.session import Session
from kvcap.serve.conversations import ConversationPool, beginnings, keys_of
from kvcap.serve.saved import SavedConversations
from kvcap.serve.scheduler import Scheduler

PROGRAM = ROOT / "tests" / "served_until_killed.py"


class Oracle:
    """Plain sessions, which nobody shares: what each way to read a conversation answers."""

    def __init__(self, runtime: Any, tokens: int) -> None:
        self.runtime, self.tokens = runtime, tokens
        # Of an owner's messages with their answer: the ways in which they were read, each a list
        # of what was sent at once, and how many tokens a cache has read then.
        self.ways: dict[str, list[tuple[tuple[str, ...], int]]] = {}

    def check(self, owner: str, messages: list[dict[str, str]], reply: Any, answer: str) -> None:
        """Hold an answer to one of a session that read what the reply says was read before."""
        expected = dict[tuple[str, ...], str]()
        for held in range(len(messages)):
            new = json.dumps(messages[held:])
            known = self.ways.get(owner + json.dumps(messages[:held]), []) if held else [((), 0)]
            for way in [(*way, new) for way, seen in known if seen == reply.usage.reused_tokens]:
                session = self.replay(way)
                expected[way] = session.messages[-1]["content"]
                if expected[way] == answer:  # as others may: what comes next goes on from any
                    key = owner + json.dumps([*messages, assistant(answer)])
                    self.ways.setdefault(key, []).append((way, session.cache.seen))
        assert answer in expected.values(), (reply.usage, expected)

    def replay(self, way: tuple[str, ...]) -> Session:
        session: Session = self.runtime.session()
        session.set_generation(max_new_tokens=self.tokens, temperature=0.0)
        for new in way:
            "".join(session.send(json.loads(new)))
        return session


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_many_clients_do_each_is_answered_from_its_own_context(runtime, tmp_path, seed):
    """They go on, change their mind, ask again, vanish; places are few, and disk is, too."""
    draw, oracle, seen = random.Random(seed), Oracle(runtime, 5), []

    async def client(s: Scheduler, number: int) -> None:
        owner, messages = f"owner {number % 3}", list[dict[str, str]]()
        name = f"chat {number}" if number % 2 else None
        for turn in range(6):
            words = " ".join(draw.choices(["red", "door", "code", "seven"], k=draw.randint(1, 40)))
            what = draw.choice(["go on", "go on", "go on", "again", "change", "vanish"])
            if what == "change":
                messages = messages[: -2 * draw.randint(1, 2)]
            if what != "again" or not messages:
                messages = [*messages, user(f"{number}.{turn} {words}")]
            else:
                messages = messages[:-1]
            reply = s.submit(ask(*messages, tokens=5, owner=owner, session_id=name))
            if what == "vanish":
                for _ in range(draw.randint(0, 3)):
                    await anext(reply, None)
                await reply.aclose()
                messages = []
                continue
            answer = await text_of(reply)
            assert reply.finish_reason == "length"
            seen.append((owner, list(messages), reply, answer))
            messages = [*messages, assistant(answer)]
            await asyncio.sleep(draw.random() / 50)

    async def chat(s: Scheduler) -> None:
        await asyncio.gather(*(client(s, number) for number in range(7)))
        figures = s.figures()
        assert figures.failed == figures.dropped == 0
        assert figures.answering == figures.waiting == 0
        assert figures.in_memory <= figures.places
        assert figures.disk_bytes <= figures.disk_cap
        assert s._pool.made == figures.places

    disk = SavedConversations(tmp_path, 300_000)
    serve(Scheduler(runtime, limits(places=4, together=3, save_after_s=0.01), disk), chat)
    assert disk.restored
    for one in seen:
        oracle.check(*one)
    assert any(reply.usage.reused_tokens > 0 for _, _, reply, _ in seen)  # how many, chance says


def test_memory_stays_flat_however_many_conversations_there_were(runtime, tmp_path):
    async def chat(s: Scheduler) -> tuple[int, int]:
        async def some(numbers: range) -> int:
            for n in numbers:
                await text_of(s.submit(ask(user(f"Number {n}. " * 9), tokens=2)))
            await until(s._wound_up)
            return s.figures().memory_bytes

        return await some(range(6)), await some(range(6, 60))

    disk = SavedConversations(tmp_path, 200_000)
    scheduler = Scheduler(runtime, limits(places=2, save_after_s=0.0), disk)
    caches = 2 * runtime.plan.cache_bytes + scheduler.batch.nbytes
    assert serve(scheduler, chat) == (caches, caches)
    assert not scheduler._answering
    assert not scheduler._waiting
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200_000
    assert len(scheduler._pool.conversations) == 2


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kills", [1, 6])
def test_saved_conversations_survive_kills(chat_model, runtime, tmp_path, kills):
    """Killed at any moment, none of their files is broken, and each goes on where it was saved."""
    known: dict[str, Any] = {}
    draw, path = random.Random(0), os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    for turn in range(kills):
        saved: dict[str, Any] = {}
        with subprocess.Popen(
            [sys.executable, str(PROGRAM), chat_model, str(tmp_path), json.dumps(known)],
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            lines = 1 + 4 * 2 + draw.randint(0, 8)  # at least two rounds
            names = set[str]()
            for _ in range(lines):
                line = json.loads(process.stdout.readline())
                if "found" in line and turn:
                    assert line["found"] >= 3
                if "name" in line and turn and line["name"] not in names:
                    assert line["reused"] > 0  # what the killed one had saved
                    names.add(line["name"])
                if "saved" in line:
                    assert line["dropped"] == 0
                    saved = line["saved"]
            process.kill()
        known = saved
        disk = SavedConversations(tmp_path, 64 << 20)  # the lock went with the process
        assert not list(tmp_path.glob("*.part"))
        files = sorted(tmp_path.glob("*.kvcap"))
        restored = [Session.load(runtime, file).messages for file in files]
        assert all(messages in restored for messages in known.values())
        disk.close()

    async def chat(s: Scheduler) -> None:
        for name, messages in known.items():
            reply = s.submit(ask(*messages, user("And now?"), session_id=name, tokens=5))
            assert await text_of(reply)
            assert reply.usage.reused_tokens > 0

    serve(Scheduler(runtime, limits(), SavedConversations(tmp_path, 64 << 20)), chat)


@pytest.mark.parametrize(("sinks", "together"), [(None, 2), (None, 1), (0, 2)])
def test_conversations_of_one_system_prompt_keep_its_first_tokens(
    chat_model, tmp_path, sinks, together
):
    """Also those that share a beginning, whose place another one had, and that come from disk."""
    runtime = kvcap.Runtime.from_pretrained(
        chat_model,
        budget_tokens=48,
        block_size=16,
        dtype="float32",
        device="cpu",
        sink_tokens=sinks,
    )
    system = {"role": "system", "content": "You keep the doors of a small town."}
    story = (
        "Seven kinds of mosses survive the cold near Porto. Number {}: bees like tall grasses, "
        "the harbour was silver in winter, and a candle stood in every window of the market."
    )

    async def chat(s: Scheduler) -> list[bool]:
        # A system prompt stays longer than other text, whatever the sinks.
        begun = [system] if sinks is None else []
        whole, talks = list[bool](), [[*begun, user(story.format(n))] for n in range(3)]

        async def answered(talks: list[list[dict[str, str]]]) -> list[list[dict[str, str]]]:
            replies = [s.submit(ask(*messages, tokens=4)) for messages in talks]
            answers = await asyncio.gather(*map(text_of, replies))
            await until(s._wound_up)
            for conversation in s._pool.conversations:
                session = conversation.session
                session.fetch_cache()
                whole.append(first_kept(session))
            return [[*m, assistant(answer)] for m, answer in zip(talks, answers, strict=True)]

        first = await answered(talks)
        await answered([[*talk, user(story.format("more"))] for talk in first])
        await answered([[*talk, user(story.format("else"))] for talk in first])  # go on otherwise
        return whole

    disk = SavedConversations(tmp_path, 1 << 24)
    scheduler = Scheduler(runtime, limits(places=2, together=together, save_after_s=0.0), disk)
    whole = serve(scheduler, chat)
    assert len(whole) >= 5
    assert all(whole) if sinks is None else not all(whole)


def test_a_short_conversation_in_the_place_of_a_long_one_is_saved_and_restored(
    chat_model, tmp_path, caplog
):
    """The place's observation window is longer than what the second one says."""
    policy = load_policy("snapkv", window=32)
    runtime = kvcap.Runtime.from_pretrained(
        chat_model, policy, budget_tokens=48, block_size=64, device="cpu"
    )
    long, short = user("Seven kinds of mosses survive the cold. " * 12), user("Hi.")

    async def chat(s: Scheduler) -> None:
        await text_of(s.submit(ask(long, tokens=2)))
        answer = assistant(await text_of(s.submit(ask(short, tokens=2))))
        await text_of(s.submit(ask(long, tokens=2)))  # has the place again
        reply = s.submit(ask(short, answer, user("And?"), tokens=2))
        assert await text_of(reply)
        assert reply.usage.reused_tokens > 0
        assert (s.figures().restored, s.figures().dropped) == (1, 0), caplog.text

    disk = SavedConversations(tmp_path, 1 << 20)
    serve(Scheduler(runtime, limits(places=1, together=1), disk), chat)


def test_a_broken_file_is_set_aside_by_name_and_its_conversation_read_anew(
    runtime, tmp_path, caplog
):
    first = user("Seven kinds of mosses survive the cold. " * 4)

    async def ask_first(s: Scheduler) -> str:
        return await text_of(s.submit(ask(first)))

    answer = serve(Scheduler(runtime, limits(), SavedConversations(tmp_path, 1 << 20)), ask_first)
    (file,) = tmp_path.glob("*.kvcap")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / f".{file.name}.abcdefgh.part").write_text("half")

    async def chat(s: Scheduler) -> None:
        reply = s.submit(ask(first, assistant(answer), user("And now?")))
        assert await text_of(reply)
        assert reply.usage.reused_tokens == 0
        assert s.figures().dropped == 1

    disk = SavedConversations(tmp_path, 1 << 20)
    assert len(disk) == 1
    serve(Scheduler(runtime, limits(), disk), chat)
    aside = file.with_name(f"{file.name}.unreadable")
    assert f"set aside as {aside}" in caplog.text
    assert aside.read_bytes() == data
    assert file not in list(tmp_path.iterdir())
    suffixes = sorted(path.suffix for path in tmp_path.iterdir())
    assert suffixes == ["", ".kvcap", ".txt", ".unreadable"]


def test_a_full_disk_costs_conversations_and_nothing_else(runtime, tmp_path, monkeypatch):
    questions = [user(f"Number {n}. " * 9) for n in range(4)]
    tight = SavedConversations(tmp_path / "tight", 1000)  # holds not one
    broken = SavedConversations(tmp_path / "broken", 1 << 20)

    def fail(*_: Any) -> None:
        raise SessionNotSaved("no room")

    async def chat(s: Scheduler) -> list[str]:
        texts = [await text_of(s.submit(ask(one))) for one in questions]
        assert s.figures().dropped
        assert (s.figures().on_disk, s.figures().disk_bytes) == (0, 0)
        return texts

    expected = [runtime.session() for _ in questions]
    for session in expected:
        session.set_generation(max_new_tokens=12, temperature=0.0)
    answers = ["".join(x.send([y])) for x, y in zip(expected, questions, strict=True)]
    assert serve(Scheduler(runtime, limits(places=1), tight), chat) == answers
    monkeypatch.setattr(Session, "save", fail)
    assert serve(Scheduler(runtime, limits(places=1), broken), chat) == answers


@pytest.mark.parametrize("is_saved", [True, False])
def test_what_moves_while_it_is_answered_goes_on_from_what_was_saved(
    runtime, chat_model, tmp_path, is_saved
):
    """The answer that is written is not waited for; what was never saved is read again."""
    disk, other_disk = (SavedConversations(tmp_path, 1 << 20, shared=True) for _ in range(2))
    other = Scheduler(small(chat_model), limits(save_after_s=0.0), other_disk)

    async def chat(s: Scheduler) -> None:
        reply = s.submit(ask(user("Hello!")))
        begun = [user("Hello!"), assistant(await text_of(reply))]
        read = reply.usage.prompt_tokens + reply.usage.completion_tokens
        if is_saved:
            await until(s._wound_up)
        going_on = {"eos_token_id": NEVER}
        unread = s.submit(ask(*begun, user("One."), tokens=3000, options=going_on))
        await anext(unread)
        moved = other.submit(ask(*begun, user("Two.")))
        assert await text_of(moved)
        assert unread.finish_reason is None
        assert abs(moved.usage.reused_tokens - read * is_saved) <= 1  # the last one is not read
        await other.aclose()

    serve(Scheduler(runtime, limits(save_after_s=0.0 if is_saved else 1e9), disk), chat)


def test_owners_and_ids_never_become_paths(runtime, tmp_path):
    home = tmp_path / "home"
    names = ["../../x", "/etc/passwd", "a" * 5000, "\0", "\ud800", "é"]

    async def chat(s: Scheduler) -> None:
        for name in names:
            reply = s.submit(ask(user("Hello!"), owner=name, session_id=name, tokens=2))
            await text_of(reply)
            assert reply.session_id == name

    serve(Scheduler(runtime, limits(places=8), SavedConversations(home, 1 << 20)), chat)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert len(list(home.glob("*.kvcap"))) == len(names)


def test_spaces_around_an_answer_do_not_make_another_conversation():
    """Clients trim what they keep of it; what a user says counts as it is."""
    chat = (user("Hello!"), assistant(" Hi. \n"), user("And now?"))
    trimmed = (user("Hello!"), assistant("Hi."), user("And now?"))
    assert keys_of(ask(*chat), "") == keys_of(ask(*trimmed), "")
    assert keys_of(ask(user(" Hello!")), "") != keys_of(ask(user("Hello!")), "")


def test_conversations_that_pins_allow_are_found_as_the_rule_says():
    """New messages are all pinned, or none: found at once for all beginnings of a request."""
    for pins in itertools.product((False, True), repeat=5):
        pinned = frozenset(index for index, pin in enumerate(pins) if pin)
        chat = ask(*[user(str(n)) for n in range(5)], pins=pinned)
        keys = keys_of(chat, "")
        allowed = {keys[count - 1]: count for count in range(1, 5) if len(set(pins[count:])) == 1}
        assert beginnings(chat, keys) == allowed


def test_waiting_for_a_named_conversation_takes_no_look_at_the_request():
    """Every round of the worker asks for each that waits, so that tokens would wait for it."""

    class Unread(dict[str, int]):
        def get(self, *_: Any) -> Any:
            raise AssertionError("the messages were looked at")

    held = ConversationPool(None, 1, None)
    request = ask(user("Hello!"), session_id="same")
    held.open(request, None, None)
    assert held.find(request, Unread()).wait
