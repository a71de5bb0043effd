"""A dropped cache is freed at once: by counting references, without Python's cyclic collector.

The collector begins when thousands of objects were made and looks at no bytes, so that caches which
it alone could free would pile up beyond every cap.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny_chat
import torch
from conftest import CACHE, small_policy, tiny_model
from families import ELSEWHERE, model_of
from make import in_python

import kvcap
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.session.session import Session

KINDS = [
    "gemma3_text",
    "qwen3_next",
    "falcon_h1",
    "lfm2",
    "gemma3n",
    "gemma4",
    "deepseek_v3",
    "gpt_oss",
]


@pytest.mark.parametrize("family", [x for x in KINDS if x in {"gemma3_text", *ELSEWHERE}])
def test_with_layers_of_every_kind(family, alive, tokens):
    """Sliding, recurrent, shared, of latents, with sink logits."""
    model = tiny_model(family) if family == "gemma3_text" else model_of(family)
    positions = "true" if family == "qwen3_next" else None
    for attempt in range(2):
        cache = BudgetCache(model.config, 24, 8, positions=positions)
        natives = [weakref.ref(layer) for layer in cache.sliding_layers.values()]
        loop = BlockLoop(model, cache)
        loop.prefill(tokens(60, seed=attempt))
        del cache, loop
        alive.none()
        assert not any(native() for native in natives)


# kvcap.cap ----------------------------------------------------------------------------------------


def test_under_a_cap_one_cache_is_alive_at_a_time(alive, tokens):
    """The last call's, whose figures `capped.cache` shows; the next one's slots are made after."""
    model = tiny_model("llama", "sdpa")
    pools = model.config.num_hidden_layers
    with kvcap.cap(model, 24, 8) as capped:
        for seed in range(4):
            ids = tokens(60, seed=seed)
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
            model(ids, use_cache=False)
            assert alive.caches == 1
            assert capped.cache is not None
        assert alive.most == alive.buffers == pools * 4  # keys, values, positions, shifts
    del capped
    alive.none()


def test_a_cache_that_the_caller_holds_lives_as_long_as_that(alive, tokens):
    model = tiny_model("llama", "sdpa")
    with kvcap.cap(model, 24, 8):
        held = model(tokens(60))
        model(tokens(60))
        assert alive.caches == 2
        assert held[CACHE].held == 24
        del held
        assert alive.caches == 1


@pytest.mark.parametrize("blocks", [5, 7])  # the last one is transformers' own call
def test_under_a_cap_nothing_is_kept_of_a_call_that_failed(blocks, alive, tokens):
    """Neither its cache nor what its blocks gave, of which there may be many."""
    model = tiny_model("llama", "sdpa")
    with kvcap.cap(model, 24, 8) as capped, torch.no_grad():
        with failing(model, after=blocks):
            model(tokens(60))
        model(tokens(8))
        assert alive.caches == 1
        capped.cache = None
        assert alive.caches == 0


def test_a_capped_model_is_freed_with_its_cache(alive, tokens):
    """Weights as well, though the cap was never removed."""
    model = tiny_model("llama", "sdpa")
    capped = kvcap.cap(model, 24, 8)
    model(tokens(60))
    weights = weakref.ref(model)
    del model
    assert weights() is None
    capped.remove()
    del capped
    alive.none()


@contextmanager
def failing(model: Any, after: int = 0) -> Iterator[None]:
    """Within it the model's last feed-forward part fails after so many calls, which is raised."""
    part = model.get_decoder().layers[-1].mlp
    forward, left = part.forward, [after]

    def fail(x: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("fails on purpose")
        return forward(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part, "forward", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            yield


# Sessions -----------------------------------------------------------------------------------------

FACT = "Please remember: the code for the blue door is 4821. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_chat.save(tmp_path_factory.mktemp("model"))


def runtime_of(folder: str, policy: str = "keydiff", **options: Any) -> kvcap.Runtime:
    return kvcap.Runtime.from_pretrained(
        folder,
        policy,
        budget_tokens=48,
        block_size=16,
        device="cpu",
        **{"dtype": "float32", **options},
    )


def begun(runtime: kvcap.Runtime, text: str = FACT, tokens: int = 4) -> Session:
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=tokens)
    assert len(list(session.send(text))) > 0
    return session


def answered(runtime: kvcap.Runtime) -> None:
    begun(runtime)


def left_open(runtime: kvcap.Runtime) -> None:
    """Its generator is dropped, and with it, all else."""
    session = begun(runtime)
    next(session.send("More?"))


def held_to_a_schema(runtime: kvcap.Runtime) -> None:
    session = begun(runtime)
    session.set_generation(regex="[0-9]{1,4}", logprobs=2, stop_strings=["9"])
    list(session.send("Which number?"))


# Whatever else a session does: `tests/runtime/session/test_lifecycles.py`.
@pytest.mark.parametrize("use", [answered, left_open, held_to_a_schema])
@pytest.mark.parametrize(
    "options", [{}, {"policy": "cake"}, {"weights": "int8"}, {"memory_cap": "4GiB"}], ids=str
)
def test_a_session_is_freed_when_it_is_dropped(use, options, folder, alive):
    runtime = runtime_of(folder, **options)
    for _ in range(2):
        use(runtime)
        alive.none()


# Several at once ----------------------------------------------------------------------------------


def through(steps: int | None) -> Callable[[kvcap.Runtime], None]:
    """Answer two sessions at once, for so many steps; batch and sessions are dropped then."""

    def use(runtime: kvcap.Runtime) -> None:
        batch, sessions = runtime.batch(2), [begun(runtime), begun(runtime, FACT * 2)]
        for session in sessions:
            session.set_generation(max_new_tokens=30)
            batch.add(session, session.send("More?"))
        if steps is None:
            assert len(list(batch)) > 2
        for _ in range(steps or 0):
            batch.step()
        assert (steps is None) == all(session.turn.finish_reason for session in sessions)

    return use


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # the latter copies its keys
@pytest.mark.parametrize("steps", [None, 1, 6])  # the first reads a block
@pytest.mark.parametrize("policy", ["keydiff", "adakv"])
def test_a_batch_is_freed_when_it_is_dropped(policy, steps, dtype, folder, alive):
    """To its end or half-way: in rows of one cache, or in passes over their own."""
    runtime = runtime_of(folder, small_policy(policy, None), dtype=dtype)
    for _ in range(2):
        through(steps)(runtime)
        alive.none()


def test_a_batch_whose_pass_failed_is_freed(folder, alive):
    runtime = runtime_of(folder)
    batch, sessions = runtime.batch(2), [begun(runtime), begun(runtime, FACT * 2)]
    for session in sessions:
        session.set_generation(max_new_tokens=12)
        batch.add(session, session.send("More?"))
    for _ in range(5):
        batch.step()
    with failing(runtime.model):
        list(batch)
    steps = [progress for _ in range(4) for progress in batch.step()]
    del batch, sessions, session, steps
    alive.none()


def test_sessions_go_on_after_their_batch_was_dropped(folder, alive):
    """Each has its slots back, wherever they were."""
    runtime = runtime_of(folder)
    answers = []
    for batched in (True, False):
        sessions = [begun(runtime), begun(runtime, FACT * 2)]
        for session in sessions:
            session.set_generation(max_new_tokens=20, do_sample=False)
        if batched:
            batch = runtime.batch(2)
            for session in sessions:
                batch.add(session, session.send("More?"))
            for _ in range(8):
                batch.step()
            del batch
            for session in sessions:
                session.loop.in_batch = False
        answers.append(["".join(session.complete(" And")) for session in sessions])
    assert all(answers[0])
    del sessions, session
    alive.none()


# A whole process ----------------------------------------------------------------------------------

PROCESS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM

import kvcap
from kvcap.runtime.models.arguments import GENERATION
from kvcap.runtime.testing.process_peak import peak
from kvcap.testing import cpu_peak

use, folder = sys.argv[1:]
torch.manual_seed(0)
ids, slots = torch.arange(3, 12)[None], 4096
if use in ("cache", "cap"):
    attention = "kvcap" if use == "cache" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "pad_token_id": 0}
    if use == "cap":
        capped = kvcap.cap(model, slots, 8)
else:
    runtime = kvcap.Runtime.from_pretrained(
        folder, budget_tokens=slots, block_size=8, device="cpu", dtype="float32"
    )
    first = runtime.session(seed=0)
    first.set_generation(max_new_tokens=2)
    list(first.send("Hi"))
    first.save(folder + "/chat.kvcap")

def once():
    if use == "cache":
        cache = kvcap.BudgetCache(model.config, slots, 8)
        model.generate(ids, **given, **{GENERATION: cache}, prefill_chunk_size=8)
        return cache.nbytes
    if use == "cap":
        model.generate(ids, **given)
        return capped.cache.nbytes
    if use == "load":
        return kvcap.Session.load(runtime, folder + "/chat.kvcap").cache.nbytes
    sessions = [runtime.session(seed=0) for _ in range(1 + (use == "batch"))]
    batch = runtime.batch(len(sessions))
    for session in sessions:
        session.set_generation(max_new_tokens=2)
        batch.add(session, session.send("Hi"))
    next(iter(batch))  # and no further
    return session.cache.nbytes

def times(count):
    for _ in range(count):
        once()

nbytes = once()
times(2)
resident = peak()
times(CALLS)
print(json.dumps({
    "cache": nbytes,
    "grown": peak() - resident,
    "few": cpu_peak(lambda: times(2)).peak_bytes,
    "many": cpu_peak(lambda: times(20)).peak_bytes,
}))
"""


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("use", "calls"), [
    ("cache", 200), ("batch", 25), ("cap", 200), ("session", 60), ("load", 60),
])  # fmt: skip
def test_a_process_holds_no_more_after_many_calls_than_after_few(use, calls, folder):
    """Of tensors not a byte more; of resident memory less than one cache."""
    program = PROCESS.replace("CALLS", str(calls))
    done = in_python(program, use, folder)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["many"] == figures["few"] < 5 * figures["cache"]
    assert figures["grown"] < figures["cache"]
