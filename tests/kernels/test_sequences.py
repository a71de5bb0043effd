"""Sessions of unequal lengths that are read in one pass, by kernels that read how long each is."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from interpreted import DEVICE, pytestmark  # noqa: F401
from tools import runtime_of

from kvcap import kernels
from kvcap.runtime.backends.pytorch.batch import SharedCache
from kvcap.runtime.session.batch import Answer
from kvcap.runtime.session.decoding import Step

BUDGET, LENGTHS, COUNTS = 16, (5, 14, 26), (14, 7, 5)
# Of prompts and of what follows: no session reads a token twice, whose keys would score alike.
IDS = (3 + torch.randperm(126, generator=torch.Generator().manual_seed(1))).tolist() * 2
PROMPTS = [IDS[40 * i :][:length] for i, length in enumerate(LENGTHS)]
TOKENS = [
    IDS[40 * i + length :][:count]
    for i, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True))
]
POLICIES = [
    "keydiff", "dropkv", "h2o", "obcache-tova", "criticalkv", "knorm", "streaming_llm", "pyramidkv",
    "headkv", "criticalkv-adakv", "duoattention",
]  # fmt: skip


def sessions_of(policy, pinned=0, kind=None, regions=False):
    """Sessions of one runtime that have read prompts of unequal lengths."""
    layers = 2 if policy in ("keydiff", "pyramidkv") else 1
    model = tiny_model("llama", num_hidden_layers=layers, vocab_size=130).to(DEVICE)
    runtime = runtime_of(model, policy, BUDGET, 16, kv_dtype=kind)
    sessions = []
    for prompt in PROMPTS:
        session = runtime.session()
        session.loop.prefill(torch.tensor([prompt], device=DEVICE))
        sessions.append(session)
        if pinned:
            session.loop.cache.pin([(0, pinned)])
        if regions:  # of each session others
            last = session.loop.cache.seen
            system, thoughts = (0, 4 + last // 5), (last - 2, last + 1)
            session.loop.cache.regions.add(
                {"system prompt and tools": [system], "thoughts": [thoughts]}
            )
            session.loop.cache.pin([(last - 1, last + 2)][: last % 2])
    return runtime, sessions


def kept(session):
    segments = [s for layer in session.loop.cache.capped_layers for s in layer.segments]
    return [(s.held, [sorted(head.tolist()) for head in s.positions[0]]) for s in segments]


def alone(*case):
    """What each session's tokens give if it is alone; and the sessions after that."""
    _, sessions = sessions_of(*case)
    for session in sessions:
        session.loop.graphs = None
    with kernels.use("eager"):
        logits = [
            [s.loop.read(torch.tensor([[token]], device=DEVICE)) for token in mine]
            for s, mine in zip(sessions, TOKENS, strict=True)
        ]
    return logits, sessions


def read_together(rows, sessions):
    """Let sessions read their tokens, all that have some; the second comes and goes."""
    answers = [Answer(session, iter(())) for session in sessions]
    left, logits = [list(mine) for mine in TOKENS], [[] for _ in sessions]
    for number in range(len(TOKENS[0])):
        reading = [i for i, mine in enumerate(left) if mine and (i != 1 or number % 5 != 4)]
        for i in reading:
            answers[i].step = Step(token=left[i].pop(0))
            assert rows.fits(answers[i])
            rows.join(answers[i])
        tokens = [answers[i].step.token for i in reading]
        rows_logits = rows.begin([answers[i] for i in reading], tokens)()
        for i, its in zip(reading, rows_logits, strict=True):
            logits[i].append(its)
        if number == 7:
            sessions[0].fetch_cache()
            assert sessions[0].cache_away is None
    for session in sessions:
        session.fetch_cache()
    return logits


def check(policy, pinned=0, kind=None, regions=False, close=1e-3):
    """Sessions in rows, by kernels, give what each gives alone and eagerly; returns the rows."""
    expected, others = alone(policy, pinned, kind, regions)
    runtime, sessions = sessions_of(policy, pinned, kind, regions)
    with kernels.use("triton"):
        rows, why = runtime.shared_rows(3)
        assert why is None
        logits = read_together(rows, sessions)
    for mine, its in zip(logits, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=close, atol=close)
    assert list(map(kept, sessions)) == list(map(kept, others))
    again = torch.tensor([[17]], device=DEVICE)
    for session, other in zip(sessions, others, strict=True):  # which go on alone
        torch.testing.assert_close(
            session.loop.read(again), other.loop.read(again), rtol=close, atol=close
        )
    return rows


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("kind", "policy"), [("int8", "keydiff"), ("int4", "h2o")])
def test_sessions_of_fewer_bits_are_read_together(kind, policy):
    """Each has a mean of its own, which its row takes along."""
    check(policy, kind=kind, close=2e-2)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("policy", POLICIES)
def test_sessions_that_fill_are_read_with_full_ones(policy):
    rows = check(policy)
    assert isinstance(rows, SharedCache)
    if DEVICE == "cuda":  # by one graph
        assert {kind.batch for kind in rows.loop.graphs.captured} == {3}
        assert len(rows.loop.graphs.captured) == 1


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("policy", ["keydiff", "criticalkv", "adakv"])
def test_first_tokens_that_are_pinned_stay_in_rows(policy):
    """Pinned where they are filled as well as where they are full from the beginning."""
    check(policy, pinned=4)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("policy", ["keydiff", "h2o"])
def test_each_row_knows_what_leaves_first_and_what_last(policy):
    """One graph serves all rows, as the device has the regions of each."""
    rows = check(policy, regions=True)
    if DEVICE == "cuda":
        assert [kind.weighs for kind in rows.loop.graphs.captured] == [True]


@pytest.mark.parametrize(
    ("policy", "more", "why"),
    [
        ("adakv", {"block": 1}, "move between heads"),  # with every token
        ("cake", {}, "move between layers"),
        ("keydiff", {"every": 2}, "every few tokens"),
        ("keydiff", {"positions": "true"}, "true positions"),
        ("balanced", {}, "no kernels cover policy 'balanced' over rows"),
    ],
)
def test_what_has_no_rows_says_why(policy, more, why):
    model = tiny_model("llama", num_hidden_layers=1).to(DEVICE)
    with kernels.use("triton"):
        runtime = runtime_of(model, policy, BUDGET, **{"block": 8, **more})
        rows, reason = runtime.shared_rows(2)
        assert rows is None
        assert why in reason
