"""One pass over caches of their own: each session's tokens are those that it would draw alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import NEVER, as_alone, together
from conftest import small_policy, tiny_config
from families import MLA, NEIGHBOURS, READERS, SINKS, STATES, model_of
from tools import kept, pocket_runtime
from transformers import AutoModelForCausalLM

import kvcap
from kvcap.evals.measure import allocator_peak
from kvcap.policies import policies
from kvcap.runtime.backends.pytorch import shared_pass
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.shared_pass import (
    SharedPass,
    read_token_of_each,
    rehearse_pass,
    why_no_pass,
)
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.memory.cap_guard import CapGuard
from kvcap.runtime.session.batch import Answer, Batch
from kvcap.runtime.session.decoding import Step
from kvcap.runtime.session.session import Session

FACT = "Please remember: the code for the {} door is {}. "
DOORS = ["blue", "red", "old", "green", "small", "north"]
TEXTS = [  # no sentence twice, of whose tokens several would score alike but for rounding
    "Hello.",
    "".join(FACT.format(door, 4821 + 77 * i) for i, door in enumerate(DOORS[:4])),
    "".join(FACT.format(door, 1906 + 531 * i) for i, door in enumerate(DOORS)),
]


def runtime_of(policy: Any = "keydiff", budget: int = 48, **more: Any) -> kvcap.Runtime:
    if isinstance(policy, str):
        config = kvcap.Runtime.from_pretrained("pocket", device="cpu").model.config
        policy = small_policy(policy, config)
    return pocket_runtime(policy, budget, **{"evict_every": 5, **more})


def sessions_of(runtime: kvcap.Runtime, tokens: tuple[int, ...]) -> list[Session]:
    """Sessions whose answers have so many tokens."""
    sessions = [runtime.session() for _ in tokens]
    for session, count in zip(sessions, tokens, strict=True):
        session.set_generation(do_sample=False, max_new_tokens=count, eos_token_id=NEVER)
    return sessions


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(
    ("policy", "more"),
    [
        # Of tokens that are alike, rounding decides which one `balanced` keeps: see below.
        *((x, {"budget": 500} if x == "full" else {}) for x in policies() if x != "balanced"),
        ("keydiff", {"positions": "true"}),
        ("keydiff", {"positions": "auto"}),
        ("snapkv", {"evict_every": 1, "positions": "true"}),
        ("keydiff", {"kv_dtype": "int8"}),
        ("keydiff", {"weights": "int8", "dtype": None}),
    ],
)
def test_answers_and_what_is_kept_are_those_of_sessions_alone(
    policy: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of unequal length, one that ends midway and one that comes then."""
    runtime, tokens = runtime_of(policy, **more), (40, 12, 24)
    alone, sessions = sessions_of(runtime, tokens), sessions_of(runtime, tokens)
    batch, sizes = runtime.batch(2), list[int]()
    if batch.why_one_by_one is None and not isinstance(batch._rows, SharedPass):
        pytest.skip("these share a cache")
    assert batch.why_one_by_one is None
    read = shared_pass.read_token_of_each
    monkeypatch.setattr(
        shared_pass, "read_token_of_each", lambda *a: (sizes.append(len(a[1])), read(*a))[1]
    )
    as_alone(batch, alone, sessions, TEXTS, share=0.005, then="And?")
    assert set(sizes) == {2}
    # What is alone is read alone: while another's prompt is read, and at the end.
    assert len(sizes) >= 20
    assert (batch.nbytes > 0) is (runtime.plan.dtype == "bfloat16")


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("policy", [name for name in policies() if name != "full"])
def test_a_pass_of_one_is_the_sessions_own_to_the_bit(policy: str) -> None:
    """So with several only what rounds matrix products of more rows differs."""
    runtime = runtime_of(policy)
    alone, session = sessions_of(runtime, (2, 2))
    for one in (alone, session):
        "".join(one.send(TEXTS[2]))
    for token in range(30, 50):
        with torch.inference_mode():
            logits = read_token_of_each(runtime.model, [token], [session.loop.cache])
        assert torch.equal(logits, alone.loop.read(torch.tensor([[token]])))
    assert kept(session) == kept(alone)


def test_pinned_messages_stay_and_are_read_with_others() -> None:
    runtime = runtime_of(budget=96)
    alone, sessions = sessions_of(runtime, (30, 30)), sessions_of(runtime, (30, 30))
    for group in (alone, sessions):
        "".join(group[0].send("The word is plum.", pin=True))
    as_alone(runtime.batch(2), alone, sessions, TEXTS[1:])


UNSHARED = {**MLA, **READERS, **SINKS, **STATES}
SHARED = {"llama": {}, "phimoe": {}, "phi": {}, "smollm3": {}, "starcoder2": {}, **NEIGHBOURS}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("family", SHARED)
def test_logits_of_a_family_are_those_of_each_cache_alone(family: str) -> None:
    model = model_of(family)
    lengths = (3, 20, 41)

    def filled() -> list[kvcap.BudgetCache]:
        torch.manual_seed(1)
        caches = []
        for length in lengths:
            cache = kvcap.BudgetCache(model.config, 16, 8, evict_every=3)
            cache.allocate(1, torch.float32, "cpu")
            BlockLoop(model, cache).prefill(torch.randint(3, 90, (1, length)))
            caches.append(cache)
        return caches

    together, alone = filled(), filled()
    if why := why_no_pass(together[0]):
        assert why == "native sliding layers grow and shrink"
        return
    for step in range(10):
        tokens = [5 + step, 30 + step, 60 - step]
        with torch.inference_mode():
            logits = read_token_of_each(model, tokens, together)
        for row, (cache, token) in enumerate(zip(alone, tokens, strict=True)):
            expected = BlockLoop(model, cache).read(torch.tensor([[token]]))
            torch.testing.assert_close(logits[row : row + 1], expected, atol=2e-4, rtol=2e-4)
    for one, other in zip(together, alone, strict=True):
        assert (one.seen, one.held) == (other.seen, other.held)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("family", UNSHARED)
def test_what_cannot_share_passes_says_why(family: str) -> None:
    model = model_of(family)
    why = why_no_pass(kvcap.BudgetCache(model.config, 16, 8))
    if family in MLA:
        assert why == "slots hold latents"
    elif family in STATES and family != "lfm3":
        assert why == "some layers are recurrent"
    else:
        assert why == "native sliding layers grow and shrink"


def test_rotations_by_the_longest_session_are_not_shared() -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = tiny_config("llama", rope_parameters=scaling, rope_scaling=scaling)
    config._attn_implementation = "kvcap"
    why = why_no_pass(kvcap.BudgetCache(config, 16, 8, positions="true"))
    assert why == "the model's rotation follows the longest session"


def test_who_may_not_read_a_token_is_refused_alone() -> None:
    runtime = runtime_of("full", budget=64)
    alone, sessions = sessions_of(runtime, (30, 30)), sessions_of(runtime, (30, 30))
    expected = "".join(alone[0].send("Hello."))
    sessions[1].on_full = "stop"
    sessions[1].set_generation(max_new_tokens=31)
    questions = "Hello.", TEXTS[1][:120]
    assert together(runtime.batch(2), sessions, questions)[0] == expected
    assert sessions[1].turn is not None
    assert sessions[1].turn.finish_reason == "full"


def begin(batch: Batch, sessions: list[Session]) -> None:
    """Have the batch read what both sessions are asked, up to their first tokens."""
    for session, text in zip(sessions, TEXTS[:2], strict=True):
        batch.add(session, session.send(text))
    while any(answer.step is None for answer in batch._answers) or not batch._answers:
        batch.step()


@pytest.mark.parametrize("error", [ZeroDivisionError(), MemoryError()])
def test_a_pass_that_fails_ends_those_answers_and_no_more(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose conversations are read again, and end as those of sessions that never failed."""
    runtime = runtime_of()
    alone, sessions = sessions_of(runtime, (20,)), sessions_of(runtime, (20, 20))
    batch, layer = runtime.batch(2), sessions[1].loop.cache.capped_layers[1]
    begin(batch, sessions)

    def fail(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:  # some layers have read the token by then
        patched.setattr(layer, "attend", fail)
        ends = [x for x in batch.step() if x.ended]
    expected = MemoryCapExceeded if isinstance(error, MemoryError) else type(error)
    assert [type(x.error) for x in ends] == [expected] * 2
    assert [s.cache.seen for s in sessions] == [0, 0]
    assert all(s.cache.consistent for s in sessions)
    (again,) = together(batch, sessions[:1], ["And now?"])
    assert "".join(alone[0].send(sessions[0].messages[:-1])) == again


def test_a_pass_over_the_cap_is_refused_before_it_begins() -> None:
    runtime = runtime_of()
    sessions, batch = sessions_of(runtime, (20, 20)), runtime.batch(2)
    begin(batch, sessions)
    before = [s.cache.seen for s in sessions]
    for session in sessions:
        session.cache.guard = CapGuard(cap=1, workspace=1, block=16)
    ends = [x for x in batch.step() if x.ended]
    assert [type(x.error) for x in ends] == [MemoryCapExceeded] * 2
    assert [s.cache.seen for s in sessions] == before


def kept_rotated(runtime: kvcap.Runtime, *, keeps: bool) -> list[torch.Tensor]:
    """Logits of a session's tokens, read in passes of its own, and its keys at the end."""
    (session,), batch = sessions_of(runtime, (2,)), runtime.batch(2)
    "".join(session.send(TEXTS[2]))
    answer, tensors, passes = Answer(session, iter(())), list[torch.Tensor](), batch._rows  # type: ignore[arg-type]
    assert isinstance(passes, SharedPass)
    assert passes.nbytes > 0
    if not keeps:
        passes._rotated_keys = [[]] * 2
    for token in range(30, 58):
        if token == 45:  # a block comes in between, and evicts
            session.loop.read(torch.tensor([[5, 6, 7]]))
        answer.step = Step(token=token)
        passes.join(answer)
        tensors += passes.begin([answer], [token])()
    copy = session.loop.cache.capped_layers[0].engine.positions.copy
    assert (copy is not None and copy.count > 0) is keeps
    tensors += [segment.keys for layer in session.cache.capped_layers for segment in layer.segments]
    assert session.loop.cache.capped_layers[0].engine.positions.copy is None
    return tensors


@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "pyramidkv"])
def test_keys_that_stay_rotated_between_evictions_are_the_same(policy: str) -> None:
    runtime = runtime_of(policy, dtype="bfloat16")
    tensors = kept_rotated(runtime, keeps=True)
    expected = kept_rotated(runtime, keeps=False)
    assert all(map(torch.equal, tensors, expected))


@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "streaming_llm"])
def test_the_rehearsed_pass_is_the_allocators_peak(policy: str) -> None:
    config = tiny_config("llama", hidden_size=128, intermediate_size=320, head_dim=32)
    # In float32 keys are rotated where they lie, which takes less than what is rehearsed.
    settings = CacheSettings(200, 64, small_policy(policy, config), evict_every=64)
    dtype = torch.bfloat16
    plan = kvcap.MemoryPlan.of(config, settings, dtype=dtype)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="kvcap", dtype=dtype)
    caches = [kvcap.BudgetCache(config, settings).allocate(1, dtype, "cpu") for _ in range(8)]
    for cache in caches:
        BlockLoop(model.eval(), cache).prefill(torch.randint(3, 90, (1, 256)))
        for _ in range(63):
            BlockLoop(model, cache).read(torch.tensor([[5]]))
    with torch.inference_mode():
        measured = allocator_peak(lambda: read_token_of_each(model, [5] * 8, caches))
    assert all(cache.held == 200 for cache in caches)  # it was the token that evicts
    assert rehearse_pass(config, settings, plan, 8) == pytest.approx(measured, rel=0.05)
