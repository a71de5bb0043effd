"""Evicted text that a server recalls: each conversation's own, whatever others do meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import make
import openai
import pytest
import tiny_chat
from make import QUESTION
from server_chats import ask, assistant, limits, plain, serve, serving, text_of, until, user
from tools import PATIENCE

import kvcap
from kvcap.runtime.backends.pytorch import batch as batches
from kvcap.runtime.backends.pytorch.batch import SharedCache
from kvcap.runtime.recall.settings import RecallSettings
from kvcap.runtime.recall.store import PassageStore
from kvcap.serve.contract import Ask
from kvcap.serve.saved import SavedConversations
from kvcap.serve.scheduler import Scheduler

FACT = make.FACT.replace("7421", "{}")
BUDGET = 128


def filler(seed: Any, count: int = 90) -> str:
    return make.filler(count, str(seed))


def load(folder: Path, **more: Any) -> kvcap.Runtime:
    return kvcap.Runtime.from_pretrained(
        tiny_chat.save(folder),
        "streaming_llm",
        budget_tokens=BUDGET,
        block_size=16,
        dtype="float32",
        device="cpu",
        **more,
    )


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> kvcap.Runtime:
    return load(tmp_path_factory.mktemp("model"))


class Recalled(NamedTuple):
    """Holds an answer's conversation as it was when it ended."""

    owner: str
    session_id: str | None
    passages: list[str]
    read: str  # every token but special ones


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Recalled]:
    """Filled as answers end, before anything else can have their places."""
    conversations, finish = list[Recalled](), Scheduler._finish

    def noting(self: Scheduler, job: Any, error: Any) -> None:
        session = job.conversation.session
        passages = [one.text for one in session.recall.passages]
        read = session.runtime.tokenizer.decode(session.read_ids, skip_special_tokens=True)
        conversations.append(Recalled(job.ask.owner, job.ask.session_id, passages, read))
        finish(self, job, error)

    monkeypatch.setattr(Scheduler, "_finish", noting)
    return conversations


async def turn(s: Scheduler, messages: list[Any], text: str, **more: Any) -> Any:
    """Send a text after `messages`, which it and the answer join."""
    messages.append(user(text))
    reply = s.submit(ask(*messages, tokens=4, **more))
    messages.append(assistant(await text_of(reply)))
    return reply


async def evicted_fact(s: Scheduler, fact: str, turns: int = 2, **more: Any) -> list[Any]:
    """Return a conversation that has evicted a fact."""
    messages = list[Any]()
    for text in (fact, *map(filler, range(turns))):
        await turn(s, messages, text, **more)
    return messages


KEYS = ("one-key", "two-key", "three-key")
TALKS = [(key, name) for key in KEYS for name in ("mine", None)]  # one name, of three owners


@pytest.fixture(params=["forgotten", "kept"])
def url(runtime: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Provide a server of three keys, with fewer places than conversations."""
    disk = SavedConversations(tmp_path, 64 << 20) if request.param == "kept" else None
    scheduler = Scheduler(runtime, limits(places=3, together=2, save_after_s=0.01), disk)
    with serving(scheduler, keys=KEYS) as server:
        yield f"{server.url}/v1"


def test_a_conversation_recalls_nothing_of_anothers(url, ended):
    """Let six speak at once about one subject, in three places."""

    def talk(number: int) -> None:
        key, name = TALKS[number]
        with openai.OpenAI(base_url=url, api_key=key, timeout=PATIENCE) as client:
            messages = list[Any]()
            before = [filler(i, 20) for i in range(number % 3)]  # facts stand at unlike places
            for text in (*before, FACT.format(7000 + number), *map(filler, range(2)), QUESTION):
                messages.append(user(text))
                parts = client.chat.completions.create(
                    model="pocket",
                    messages=messages,
                    stream=True,
                    max_tokens=4,
                    temperature=0,
                    stream_options={"include_usage": True},
                    extra_headers={} if name is None else {"X-Session-Id": name},
                )
                last, answer = None, ""
                for last in parts:
                    answer += last.choices[0].delta.content or "" if last.choices else ""
                messages.append(assistant(answer))
            assert last.usage.recalled > 0
            assert last.usage.recalled_passages == 1

    with ThreadPoolExecutor(len(TALKS)) as threads:
        list(threads.map(talk, range(len(TALKS))))
    assert len(ended) == 4 * len(TALKS) + 6
    questioned = [one for one in ended if QUESTION in one.read]
    assert len({one.owner for one in questioned}) == len(KEYS)
    numbers = [str(7000 + number) for number in range(len(TALKS))]
    seen = set[str]()
    for one in ended:
        own = {number for number in numbers if number in one.read}
        assert len(own) <= 1
        for text in one.passages:
            assert "".join(text.split()) in "".join(one.read.split())
        if one in questioned:
            assert any(number in text for number in own for text in one.passages)
            seen |= own
    assert seen == set(numbers)


@pytest.mark.parametrize("name", ["mine", None])
@pytest.mark.parametrize("change", ["first", "later"])
def test_what_a_request_changes_is_forgotten(runtime, ended, tmp_path, name, change):
    """Change messages, also where what stands before them is restored from a file."""

    async def chat(s: Scheduler) -> None:
        messages = list[Any]()
        for text in (filler("a"), FACT.format(1111), filler("b"), filler("c")):
            await turn(s, messages, text, session_id=name)
            await until(lambda: s._moving == 0 and all(x.clean for x in s._pool.conversations))
        kept = 0 if change == "first" else 2
        changed = messages[:kept]
        for text in (FACT.format(2222), filler("d"), filler("e"), QUESTION):
            reply = await turn(s, changed, text, session_id=name)
        assert (s.figures().restored > 0) == (change == "later")
        assert reply.usage.recalled_tokens > 0
        assert "1111" not in ended[-1].read
        assert any(FACT.format(2222) in text for text in ended[-1].passages)
        assert not any("1111" in text for text in ended[-1].passages)

    disk = SavedConversations(tmp_path, 64 << 20)
    serve(Scheduler(runtime, limits(places=2, save_after_s=0.0), disk), chat)


def test_a_restored_conversation_recalls_as_the_server_was_told(runtime, tmp_path):
    async def chat(s: Scheduler) -> None:
        for text in (FACT.format(7421), QUESTION):
            await turn(s, messages, text)
        session = s._pool.conversations[0].session
        assert (session.recall.limit, session.recall.store.limit) == (60, 1 << 20)

    messages = list[Any]()
    for restored in (0, 1):
        disk = SavedConversations(tmp_path, 64 << 20)
        serve(Scheduler(runtime, limits(), disk, recall=RecallSettings(60, 1 << 20)), chat)
        assert disk.restored == restored


@pytest.mark.parametrize(
    ("every", "rows", "ahead"), [(1, True, False), (1, True, True), (16, False, False)]
)
def test_an_answer_with_recalled_text_beside_others_is_as_alone(
    tmp_path, every, rows, ahead, monkeypatch
):
    """Nobody waits for its end: all are read in one pass, on a GPU in rows of one cache."""
    init = SharedCache.__init__
    monkeypatch.setattr(batches, "passes_on", lambda _: not rows)
    monkeypatch.setattr(batches, "reads_rows", lambda _: rows)

    def made(self: SharedCache, *args: Any) -> None:
        init(self, *args)
        self.asynchronous = ahead  # as on a GPU, where a pass begins before the last one is told

    monkeypatch.setattr(SharedCache, "__init__", made)
    runtime = load(tmp_path, evict_every=every)
    facts = [FACT.format(7000 + number) for number in range(4)]
    questions = [QUESTION, filler("long", 120), QUESTION, filler("more", 60)]

    def begun() -> list[Any]:
        begun_sessions = [plain(runtime, [user(fact)], 4)[0] for fact in facts]
        for session in begun_sessions:
            for number in range(2):
                "".join(session.send(filler(number)))
            session.set_generation(max_new_tokens=24)
        return begun_sessions

    alone, sessions = begun(), begun()
    expected = ["".join(x.send(text)) for x, text in zip(alone, questions, strict=True)]
    counts = [session.turn.recalled_tokens for session in alone]
    assert [count > 0 for count in counts] == [True, False, True, False]
    batch = runtime.batch(4)
    assert batch.why_one_by_one is None
    for session, text in zip(sessions, questions, strict=True):
        batch.add(session, session.send(text))
    pieces = [(sessions.index(session), text) for session, text in batch]
    order = [number for number, _ in pieces]
    assert max(map(order.index, range(3))) < len(order) - max(
        order[::-1].index(n) for n in range(3)
    )
    assert ["".join(text for n, text in pieces if n == number) for number in range(4)] == expected

    async def chat(s: Scheduler) -> None:
        talks = [await evicted_fact(s, fact, session_id=str(n)) for n, fact in enumerate(facts)]
        replies = [
            s.submit(ask(*talk, user(text), tokens=24, session_id=str(number)))
            for number, (talk, text) in enumerate(zip(talks, questions, strict=True))
        ]
        assert await asyncio.gather(*map(text_of, replies)) == expected
        assert [reply.usage.recalled_tokens for reply in replies] == counts

    serve(Scheduler(runtime, limits(together=4)), chat)


def test_a_long_prompt_is_indexed_block_by_block(runtime):
    """So that others, whose tokens are read in between, wait for no more of it."""
    session = runtime.session()
    session.set_generation(max_new_tokens=2)
    lengths, index = [0], session.recall.index
    session.recall.index = lambda ids: (lengths.append(len(ids)), index(ids))[1]
    "".join(session.send(f"{FACT.format(7421)} {filler('long', 400)}\n\n{QUESTION}"))
    assert session.turn.recalled_tokens > 0
    steps = [b - a for a, b in pairwise(lengths)]
    assert len(steps) > 20
    assert max(steps) <= runtime.plan.block_size
    assert lengths[-1] == session.recall.spans[0][0]


def test_a_request_says_how_much_is_recalled_for_its_message(runtime, monkeypatch):
    cleared = list[PassageStore]()
    clear = PassageStore.clear
    monkeypatch.setattr(PassageStore, "clear", lambda self: (cleared.append(self), clear(self))[1])

    async def chat(s: Scheduler) -> None:
        messages = await evicted_fact(s, FACT.format(7421))
        counts = []
        for recall in (None, "off", 0, "auto", 60, None):
            reply = await turn(s, messages, QUESTION, recall=recall)
            counts.append(reply.usage.recalled_tokens)
            assert (reply.usage.recalled_passages > 0) == (counts[-1] > 0)
            if recall == "auto":
                assert not cleared  # nothing was indexed anew
            await turn(s, messages, filler(recall, 150), recall="off")
        assert all(0 < counts[i] <= BUDGET // 2 for i in (0, 3, 5)), counts
        assert counts[1:3] == [0, 0]
        assert 0 < counts[4] <= 60
        figures = s.figures()
        assert figures.recalled_tokens == sum(counts)
        (one,) = s._pool.conversations
        assert figures.index_bytes == one.session.recall.store.nbytes > 0
        text = f"{FACT.format(7421)} {filler('long', 300)}\n\n{QUESTION}"
        for recall, some in ((None, False), ("auto", True), ("off", False)):
            reply = s.submit(Ask(prompt=text, options={"max_new_tokens": 2}, recall=recall))
            await text_of(reply)
            assert (reply.usage.recalled_tokens > 0) == some
        for wrong in ("some", -1):
            with pytest.raises(ValueError, match="use auto, off, or the most tokens"):
                s.submit(ask(user("Hello!"), recall=wrong))

    serve(Scheduler(runtime, limits()), chat)


def test_a_server_without_indexes_recalls_nothing_and_says_so(runtime):
    async def chat(s: Scheduler) -> None:
        messages = await evicted_fact(s, FACT.format(7421))
        for recall in (None, "off", 0):
            assert (await turn(s, messages, QUESTION, recall=recall)).usage.recalled_tokens == 0
        for recall in ("auto", 64):
            with pytest.raises(ValueError, match="started with --recall off"):
                s.submit(ask(user("Hello!"), recall=recall))
        assert s.figures().index_bytes == 0

    serve(Scheduler(runtime, limits(), recall=RecallSettings.parse("off")), chat)
