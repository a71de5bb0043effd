"""Several sessions answered at once: each as if it were alone."""

from __future__ import annotations

import copy
import signal
from functools import partial
from typing import Any

import pytest
import tiny_chat
import torch
from batches import NEVER, as_alone, together
from make import in_python
from region_checks import BUDGET, check_regions
from tools import kept
from tools import pocket_runtime as runtime_of

import kvcap
from kvcap.runtime.backends.pytorch import batch as shared_rows
from kvcap.runtime.backends.pytorch.batch import SharedCache
from kvcap.runtime.errors import PlanInfeasible
from kvcap.runtime.session.batch import Answer
from kvcap.runtime.session.session import Session

FACT = "Please remember: the code for the {} door is {}. "
PROMPTS = [
    FACT.format(*x) * n for n, x in enumerate([("blue", 4821), ("red", 77), ("old", 1906)], 4)
]


def calidrop(**options: Any) -> kvcap.Eviction:
    """One whose evicted tokens fill their store at once."""
    return kvcap.load_policy("calidrop", window=4, calibration_size=8, **options)


def begun(runtime: kvcap.Runtime, texts: list[str], tokens: int = 20) -> list[Session]:
    """Sessions that have read texts of unequal length."""
    sessions = []
    for text in texts:
        session = runtime.session()
        session.set_generation(do_sample=False, max_new_tokens=2)
        "".join(session.send(text))
        session.set_generation(max_new_tokens=tokens)
        sessions.append(session)
    return sessions


def pair(
    runtime: kvcap.Runtime, texts: list[str], tokens: int = 20, **settings: Any
) -> tuple[list[Session], list[Session]]:
    """Two like groups of sessions, to be answered alone and together."""
    groups = begun(runtime, texts, tokens), begun(runtime, texts, tokens)
    for session in (*groups[0], *groups[1]):
        session.set_generation(**settings)
    return groups


def going_on(batch: Any, sessions: list[Session]) -> dict[int, str]:
    """Have a batch answer sessions; return what will have their texts."""
    for session in sessions:
        batch.add(session, session.send("Go on."))
    return {id(session): "" for session in sessions}


def take(batch: Any, texts: dict[int, str], steps: int | None = None) -> None:
    """Take so many steps of a batch, or all, and add what sessions say to their texts."""
    while batch._all and steps != 0:
        for progress in batch.step():
            assert progress.error is None
            texts[id(progress.session)] += progress.text
        steps = None if steps is None else steps - 1


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Filled with the slots in use of every session of each shared pass."""
    held, begin = list[list[int]](), SharedCache.begin

    def noting(self: SharedCache, answers: list[Answer], tokens: list[int]) -> Any:
        held.append([answer.session.loop.cache.held for answer in answers])
        return begin(self, answers, tokens)

    monkeypatch.setattr(SharedCache, "begin", noting)
    return held


@pytest.fixture(params=[False, True], ids=["", "ahead"], autouse=True)
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether passes begin before what came of the one before is told, as on a GPU."""
    init = SharedCache.__init__

    def made(self: SharedCache, *args: Any) -> None:
        init(self, *args)
        self.asynchronous = request.param

    monkeypatch.setattr(SharedCache, "__init__", made)
    # As on a GPU, but that rows are read one after the other.
    monkeypatch.setattr(shared_rows, "passes_on", lambda _: False)
    monkeypatch.setattr(shared_rows, "reads_rows", lambda _: True)
    return bool(request.param)


QUESTION = "What is the code for the {} door?"


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "policy", ["keydiff", "snapkv", "h2o", "dropkv", "streaming_llm", "pyramidkv"]
)
def test_answers_and_what_is_kept_are_those_of_sessions_alone(policy: str) -> None:
    runtime = runtime_of(policy)
    batch = runtime.batch(2)  # the third waits until one has ended
    assert batch.why_one_by_one is None
    questions = [QUESTION.format(door) for door in ("blue", "red", "old")]
    as_alone(batch, *pair(runtime, PROMPTS), questions)


def test_thoughts_and_results_leave_first_and_the_system_prompt_last(tmp_path: Any) -> None:
    runtime = kvcap.Runtime.from_pretrained(
        tiny_chat.save(tmp_path), "lagkv", budget_tokens=BUDGET, block_size=16, device="cpu"
    )
    check_regions(runtime, 2)


def test_a_shared_pass_reads_the_tokens_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of()
    sessions, shapes = begun(runtime, PROMPTS), []
    batch = runtime.batch(3)
    assert batch._rows is not None
    read = batch._rows.loop.read
    monkeypatch.setattr(
        batch._rows.loop, "read", lambda ids: (shapes.append(tuple(ids.shape)), read(ids))[1]
    )
    for session in sessions:
        session.set_generation(max_new_tokens=9, eos_token_id=NEVER)
    together(batch, sessions, ["Go on."] * 3)
    # The ninth token is not read. One prompt is read at a time, so that the first answer begins a
    # token early, alone, and the last one ends alone.
    assert shapes == [(3, 1)] * 8
    assert batch.nbytes == 3 * sessions[0].cache.nbytes - 2 * _table(sessions[0])


def _table(session: Session) -> int:
    buffers = session.cache.allocation.buffers
    return sum(x.nbytes for name, x in buffers.items() if name.startswith("rotation."))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "policy", ["keydiff", "snapkv", "h2o", "dropkv", "streaming_llm", "pyramidkv", "criticalkv"]
)
def test_sessions_that_fill_join_at_their_own_length(policy: str, passes: list[list[int]]) -> None:
    """And become full among others, one of which is full from the beginning."""
    runtime = runtime_of(policy, budget=48)
    texts = ["Hello.", "Good morning to you all, wherever you are.", PROMPTS[2]]
    alone, sessions = pair(runtime, texts, 44, eos_token_id=NEVER)
    assert len(sessions[0].encode("Hello. Go on.")) < 48
    # Of pyramidkv's slots two score alike to five digits: on some processors rounding decides.
    as_alone(runtime.batch(3), alone, sessions, share=0.002 if policy == "pyramidkv" else 0)
    assert alone[0].cache.seen > 48
    assert len(passes) >= 39  # all but what is alone while prompts are read, and at the end
    assert sum(len({*held}) > 1 for held in passes) > 10  # of unequal lengths


def test_a_session_that_fills_leaves_and_comes_back(tmp_path: Any) -> None:
    runtime = runtime_of("snapkv", budget=64)
    texts = ["Hello.", PROMPTS[0], "Good morning."]
    alone, sessions = pair(runtime, texts, 50, eos_token_id=NEVER)
    expected = ["".join(s.send("Go on.")) for s in alone]
    batch = runtime.batch(2)
    assert isinstance(batch._rows, SharedCache)
    answers = going_on(batch, sessions)
    take(batch, answers, 6)
    assert sessions[0].cache_away is not None
    sessions[0].save(tmp_path / "one.kvcap")  # it is where it would be alone
    assert sessions[0].cache_away is None
    take(batch, answers, 2)
    assert sessions[0].cache_away is not None
    assert sessions[0].loop.cache.held == sessions[0].loop.cache.seen < 64
    batch.pause(sessions[0])  # the third has its place, and its row
    take(batch, answers, 9)
    assert answers[id(sessions[2])]
    assert sessions[2].cache_away is not None
    batch.resume(sessions[0])
    take(batch, answers)
    assert [answers[id(s)] for s in sessions] == expected
    assert list(map(kept, sessions)) == list(map(kept, alone))
    loaded = Session.load(runtime, tmp_path / "one.kvcap")
    assert loaded.cache.held == loaded.cache.seen < 64


@pytest.mark.parametrize(("policy", "pinned"), [("keydiff", 0), ("keydiff", 4), ("h2o", 3)])
def test_who_has_not_read_the_sinks_yet_reads_alone(policy: str, pinned: int) -> None:
    """The tokens to come would not be taken for first ones in a row."""
    eviction = kvcap.load_policy(policy)
    runtime = runtime_of(eviction if pinned else eviction.plain())
    (session,), batch = begun(runtime, PROMPTS[:1]), runtime.batch(2)
    assert isinstance(batch._rows, SharedCache)
    sinks, few = batch._rows.sinks, runtime.session()
    assert sinks == few.cache.sinks == pinned
    few.loop.prefill(torch.tensor([[5] * max(1, sinks)]))
    answer = Answer(few, iter(()))  # type: ignore[arg-type]
    assert batch._rows.fits(answer)
    few.loop.cache.reset()
    assert not batch._rows.fits(answer)
    if sinks:
        few.loop.prefill(torch.tensor([[5] * (sinks - 1)]))
        assert not batch._rows.fits(answer)
    assert batch._rows.fits(Answer(session, iter(())))  # type: ignore[arg-type]


def test_who_pins_other_sinks_reads_alone() -> None:
    """As sessions do that were saved with others; rows of one cache pin alike."""
    runtime = runtime_of("keydiff")
    session, batch = runtime.session(), runtime.batch(2)
    session.read_by(runtime.loop_for(kvcap.load_policy("keydiff", sink_tokens=0)))
    session.loop.prefill(torch.tensor([[5] * 9]))
    assert isinstance(batch._rows, SharedCache)
    assert not batch._rows.fits(Answer(session, iter(())))  # type: ignore[arg-type]
    session.clear()
    session.loop.prefill(torch.tensor([[5] * 9]))
    assert batch._rows.fits(Answer(session, iter(())))  # type: ignore[arg-type]


def test_sessions_share_passes_once_their_positions_are_compact(passes: list[list[int]]) -> None:
    runtime = runtime_of(positions="auto")
    read = [session.cache.seen for session in begun(runtime, PROMPTS[:2])]
    runtime.model.config.max_position_embeddings = max(read) + 24
    alone, sessions = pair(runtime, PROMPTS[:2], 40, eos_token_id=NEVER)
    as_alone(runtime.batch(2), alone, sessions)
    assert all(session.cache.compact_positions for session in sessions)
    assert {*map(len, passes)} == {2}
    assert len(passes) < 39  # the longer one had changed before, and was read alone until then


def test_sampled_answers_have_their_own_random_numbers() -> None:
    runtime = runtime_of()
    groups = [begun(runtime, PROMPTS[:2]) for _ in range(2)]
    for group in groups:
        for seed, session in enumerate(group):
            session.set_generation(do_sample=True, temperature=1.5, seed=seed)
    expected = ["".join(s.send("Go on.")) for s in groups[0]]
    batch = runtime.batch(2)
    assert together(batch, groups[1], ["Go on."] * 2) == expected
    assert expected[0] != expected[1]


def test_whoever_looks_at_a_session_finds_its_own_cache(tmp_path: Any, ahead: bool) -> None:
    """Saved, asked for figures or stopped in the middle, it is what it would be alone.

    It has read its last token already where the next pass has begun.
    """
    runtime = runtime_of()
    alone, sessions = pair(runtime, PROMPTS[:2], 30, eos_token_id=NEVER)
    pieces = alone[0].send("Go on.")
    expected = "".join(next(pieces) for _ in range(8))
    batch, written = runtime.batch(2), id(sessions[0])
    texts = going_on(batch, sessions)
    while len(texts[written]) < len(expected):
        take(batch, texts, 1)
    assert texts[written] == expected
    assert sessions[0].cache_away is not None
    seen = sessions[0].loop.cache.seen
    sessions[0].save(tmp_path / "one.kvcap")
    assert sessions[0].cache_away is None
    batch.step()  # it joins again
    assert sessions[0].cache_away is not None
    batch.remove(sessions[0])
    assert sessions[0].turn.finish_reason == "interrupted"  # type: ignore[union-attr]
    loaded = Session.load(runtime, tmp_path / "one.kvcap")
    unread = alone[0].conversation["unread"]
    if ahead:
        alone[0].loop.read(torch.tensor([unread]))
    assert loaded.cache.seen == seen + ahead == alone[0].cache.seen
    assert kept(loaded) == kept(alone[0])
    assert loaded.conversation["unread"] == ([] if ahead else unread)
    "".join(text for _, text in batch)  # the other one ends as usual
    assert sessions[1].turn.finish_reason == "length"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("more", "certain"),
    [({}, True), ({"do_sample": True, "top_p": 0.9}, True), ({"stop_strings": ["door"]}, False),
     ({"presence_penalty": 0.1}, False), ({"logprobs": 1}, False)],
)  # fmt: skip
def test_a_pass_asynchronous_where_it_is_certain_what_it_reads(
    more: dict[str, Any], certain: bool, ahead: bool, passes: list[list[int]]
) -> None:
    """Not where text may end an answer, nor after the last token but one."""
    runtime = runtime_of()
    sessions = begun(runtime, PROMPTS[:2])
    batch = runtime.batch(2)
    for session in sessions:
        session.set_generation(eos_token_id=NEVER, max_new_tokens=9, **more)
        batch.add(session, session.send("Go on."))
    began = []
    while batch._all:
        before = len(passes)
        batch.step()
        began.append((len(passes) - before, bool(batch._begun[0])))
    together = [one for one in began if one[0]]
    # While prompts are read the first answer is a token ahead, alone.
    if certain and ahead:
        assert together == [(2, True)] + [(1, True)] * 5
    else:
        assert together == [(1, False)] * 7


def test_ctrl_c_while_a_pass_is_waited_for_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of()
    alone, sessions = begun(runtime, PROMPTS[:2]), begun(runtime, PROMPTS[:2])
    expected = ["".join(s.send("Go on.")) for s in alone]
    batch, left = runtime.batch(2), [5]
    assert isinstance(batch._rows, SharedCache)

    def interrupted() -> None:
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(batch._rows.loop, "launched", lambda: interrupted)
    texts = going_on(batch, sessions)
    with pytest.raises(KeyboardInterrupt):
        take(batch, texts)
    take(batch, texts)
    assert list(texts.values()) == expected
    assert list(map(kept, sessions)) == list(map(kept, alone))


def test_an_error_ends_its_own_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of()
    sessions = begun(runtime, PROMPTS[:2])
    monkeypatch.setattr(sessions[0].loop, "blocks", _fail)
    batch = runtime.batch(2)
    going_on(batch, sessions)
    with pytest.raises(ZeroDivisionError):
        list(batch)
    assert [text for _, text in batch]
    assert sessions[0].turn.finish_reason == "error"  # type: ignore[union-attr]
    assert sessions[1].turn.finish_reason in ("stop", "length")  # type: ignore[union-attr]


@pytest.mark.parametrize("budget", [48, 300])  # full sessions, and such that fill
def test_a_shared_pass_that_fails_ends_those_answers_and_no_more(
    budget: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose conversations are read again, and end as those of sessions that never failed."""
    runtime = runtime_of(budget=budget)
    alone, sessions = begun(runtime, PROMPTS), begun(runtime, PROMPTS)
    expected = "".join(alone[2].send("Go on."))
    batch = runtime.batch(2)
    assert batch._rows is not None
    going_on(batch, sessions[:2])
    while batch._rows._leases.keys() != {0, 1}:  # type: ignore[attr-defined]
        batch.step()
    with monkeypatch.context() as patched:
        patched.setattr(batch._rows.loop, "read", _fail)
        if ahead:  # what came of the pass before is told first
            assert [bool(x.text) for x in batch.step()] == [True, True]
        ends = [x for x in batch.step() if x.ended]
    assert [type(x.error) for x in ends] == [ZeroDivisionError] * 2
    assert [s.cache.seen for s in sessions[:2]] == [0, 0]
    assert together(batch, sessions[2:], ["Go on."]) == [expected]
    again = together(batch, sessions[:2], ["And now?"] * 2)
    for session, answer in zip(sessions, again, strict=False):
        fresh = runtime.session()
        fresh.set_generation(do_sample=False, max_new_tokens=20)
        assert "".join(fresh.send(session.messages[:-1])) == answer


def test_prompts_are_read_by_turns_between_the_tokens_of_answers() -> None:
    runtime = runtime_of()
    answering, *readers = begun(runtime, PROMPTS)
    for session in (answering, *readers):
        session.set_generation(eos_token_id=NEVER, max_new_tokens=40)
    batch, done = runtime.batch(3), dict[int, list[int]]()
    batch.add(answering, answering.send("Go on."))
    while not any(x.text for x in batch.step()):
        pass
    texts = [PROMPTS[0] * 4, PROMPTS[1]]  # of many blocks, and of a few
    for session, text in zip(readers, texts, strict=True):
        batch.add(session, session.send(text))
        done[id(session)] = at = []
        session.on_block = partial(lambda at, read, _: at.append(read), at)
    tokens, ended = 0, []
    while len(ended) < 3:
        before = answering.turn.completion_tokens  # type: ignore[union-attr]
        blocks = sum(map(len, done.values()))
        ended += [x.session for x in batch.step() if x.ended]
        tokens += answering.turn.completion_tokens - before  # type: ignore[union-attr]
        assert sum(map(len, done.values())) - blocks <= 1  # between two tokens, one block
    assert tokens > len(done[id(readers[1])]) > 2
    assert max(done[id(readers[0])]) > 2 * max(done[id(readers[1])])
    assert ended.index(readers[1]) < ended.index(readers[0])  # the short one need not wait


def test_a_gpu_is_one_block_of_prompts_behind_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are launched, not awaited: an answer or a request that is stopped would wait long."""
    runtime = runtime_of()
    sessions = begun(runtime, PROMPTS[:2])
    batch, launched, done = runtime.batch(2), 0, 0

    def note() -> Any:
        nonlocal launched
        launched += 1
        return partial(finish, launched)

    def finish(number: int) -> None:
        nonlocal done
        done = number

    for session in sessions:
        monkeypatch.setattr(session.loop, "launched", note)
        batch.add(session, session.send(PROMPTS[0]))
    blocks = 0
    while blocks == 0 or any(answer.step is None for answer in batch._answers):
        batch.step()
        blocks += 1
        assert (launched, done) == (blocks, blocks - 1)
    assert blocks > 8


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("policy", ["keydiff", "adakv"])
def test_a_paused_answer_leaves_its_place_and_goes_on_as_if_it_had_not(policy: str) -> None:
    runtime = runtime_of(policy)
    settings = {"eos_token_id": NEVER, "do_sample": True, "temperature": 0.7, "seed": 3}
    alone, sessions = pair(runtime, PROMPTS, **settings)
    expected = ["".join(s.send("Go on.")) for s in alone]
    batch = runtime.batch(2)
    texts = going_on(batch, sessions)
    take(batch, texts, 7)
    batch.pause(sessions[0])
    assert sessions[0].cache_away is None
    held = texts[id(sessions[0])]
    take(batch, texts, 9)
    assert texts[id(sessions[0])] == held
    assert texts[id(sessions[2])]  # it has the place
    batch.resume(sessions[0])
    take(batch, texts)
    assert [texts[id(s)] for s in sessions] == expected


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("policy", "more", "why"),
    [
        ("keydiff", {"positions": "true"}, "a position of its own"),
        ("keydiff", {"evict_every": 4}, "every few tokens"),
        ("full", {"budget": 500}, "nothing is evicted"),
        ("cake", {}, "move between layers"),
        ("adakv", {}, "move between heads"),
        pytest.param(calidrop(store="host"), {}, "on the host", id="calidrop"),
    ],
)
def test_what_cannot_share_a_cache_is_answered_by_turns(
    policy: str | kvcap.Eviction, more: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rows, "passes_on", lambda _: False)  # as on a GPU
    runtime = runtime_of(policy, **more)
    texts = PROMPTS[:2] if policy != "full" else ["Hello."] * 2
    batch = runtime.batch(2)
    assert why in str(batch.why_one_by_one)
    as_alone(batch, *pair(runtime, texts, 6))


@pytest.mark.parametrize("policy", ["keydiff", "streaming_llm"])
def test_pinned_first_messages_stay_in_a_row(policy: str, passes: list[list[int]]) -> None:
    """Beside a session without pins, and one that fills."""
    runtime = runtime_of(policy, budget=96)

    def sessions_of() -> list[Session]:
        group = [runtime.session() for _ in range(3)]
        for session, text in zip(group, ["The word is plum.", PROMPTS[0], "Hello."], strict=True):
            session.set_generation(do_sample=False, max_new_tokens=2)
            "".join(session.send(text, pin=session is group[0]))
            "".join(session.send(PROMPTS[1] if session is not group[2] else "Hi."))
            session.set_generation(max_new_tokens=40, eos_token_id=NEVER)
        return group

    alone, sessions = sessions_of(), sessions_of()
    (span,) = sessions[0].cache.pinned_spans
    as_alone(runtime.batch(3), alone, sessions)
    assert [*map(len, passes)].count(3) >= 36
    assert all(set(range(*span)) <= set(head) for head in kept(sessions[0]))


@pytest.mark.parametrize(
    ("policy", "budget", "together"),
    [("keydiff", 96, 3), ("criticalkv", 96, 2), ("keydiff", 12, 2)],
)
def test_messages_pinned_later_stay_in_a_row(
    policy: str, budget: int, together: int, passes: list[list[int]]
) -> None:
    """But where a rescorer asks for them, or first tokens yield: there its own cache holds them."""
    runtime = runtime_of(policy, budget=budget)
    alone, sessions = pair(runtime, PROMPTS, 16, eos_token_id=NEVER)
    for group in (alone, sessions):
        group[0].set_generation(max_new_tokens=2)
        "".join(group[0].send("The word is plum.", pin=True))
        group[0].set_generation(max_new_tokens=16)
    spans = sessions[0].cache.pinned_spans
    as_alone(runtime.batch(3), alone, sessions)
    assert [*map(len, passes)].count(together) >= 12
    assert all(set(range(*span)) <= set(head) for head in kept(sessions[0]) for span in spans)


LEAVE = """
import gc, kvcap
runtime = kvcap.Runtime.from_pretrained("pocket", budget_tokens=64)

def leave():
    batch, sessions = runtime.batch(4), [runtime.session() for _ in range(4)]
    for session in sessions:
        pieces = session.complete("Hello there, how are you? " * 9)
        next(pieces)
        batch.add(session, pieces)
    for _ in range(5):
        batch.step()

for _ in range(4):
    leave()
gc.collect()
"""


def test_answers_that_nobody_reads_on_end_without_a_word() -> None:
    """Whatever the order in which Python lets go of a batch, its sessions and their answers."""
    done = in_python(LEAVE, check=True)
    assert "Exception ignored" not in done.stderr


def test_bad_input_is_refused() -> None:
    runtime = runtime_of()
    for size in (0, True, "2"):
        with pytest.raises(PlanInfeasible, match="whole number of sessions"):
            runtime.batch(size)  # type: ignore[arg-type]
    capped = copy.copy(runtime)
    capped.memory_cap = 1 << 30
    with pytest.raises(PlanInfeasible, match="memory cap"):
        capped.batch(2)
    batch, session = runtime.batch(1), runtime.session()
    with pytest.raises(ValueError, match="another runtime"):
        batch.add(capped.session(), iter(()))
    with pytest.raises(ValueError, match=r"send\(\)"):
        batch.add(session, iter("abc"))
    batch.add(session, session.send("Hello."))
    with pytest.raises(ValueError, match="being answered"):
        batch.add(session, session.send("Hello."))
    batch.remove(session)
    assert not list(batch)
    assert torch.equal(session.cache.buffers()[0], torch.zeros_like(session.cache.buffers()[0]))
