"""A cap on the whole process: planned, looked at before every block, enforced by the system."""

from __future__ import annotations

import json
import re
import sys
from random import Random
from unittest.mock import patch

import pytest
import torch
from conftest import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from make import argv, in_python, ran
from tiny_chat import save

import kvcap
from kvcap.pocket.prose import filler
from kvcap.runtime.errors import MemoryCapExceeded, PlanInfeasible
from kvcap.runtime.memory import cap_guard
from kvcap.runtime.memory.cap_guard import CapGuard
from kvcap.runtime.memory.free_memory import process_bytes, return_freed
from kvcap.runtime.planning import plan as plan_module
from kvcap.runtime.planning.plan import LOADING, MemoryPlan
from kvcap.runtime.units import parse_bytes

MIB = 1 << 20
CONFIG = tiny_config("llama", max_position_embeddings=100_000)


def plan(**options: object) -> MemoryPlan:
    return MemoryPlan.of(CONFIG, dtype=torch.float32, **options)


HELD = 400 * MIB  # what the plan is told this process holds, lest its tests depend on it


@pytest.fixture
def steady(monkeypatch):
    monkeypatch.setattr(plan_module, "process_bytes", lambda: HELD)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "pyramidkv", "calidrop"])
def test_the_plan_takes_the_largest_budget_that_fits(policy, steady):
    cap = HELD + LOADING + 40 * MIB
    planned = plan(policy=policy, memory_cap=cap)
    assert planned.rehearsed
    assert cap * 0.99 < planned.total_bytes <= cap
    assert planned.baseline >= LOADING
    assert planned.block_size == 128


def test_a_small_cap_takes_a_small_block(steady):
    least = plan(budget_tokens=8, block_size=4, memory_cap=1 << 40)
    planned = plan(memory_cap=least.total_bytes + MIB // 4)
    assert planned.block_size < 128
    assert planned.budget_tokens >= 2 * planned.block_size


def test_compact_positions_stay_in_the_trained_window():
    config = tiny_config("llama", max_position_embeddings=512)
    planned = MemoryPlan.of(config, dtype=torch.float32, memory_cap=1 << 40)
    assert planned.budget_tokens + planned.block_size <= 512


def test_what_does_not_fit_is_refused_with_what_would(steady):
    with pytest.raises(PlanInfeasible, match="raise it to") as refused:
        plan(memory_cap=HELD // 2)
    assert "weights" in str(refused.value)
    with pytest.raises(PlanInfeasible, match="leave the KV budget out"):
        plan(budget_tokens=100_000, memory_cap=HELD + LOADING + 10 * MIB)
    both = plan(budget_tokens=100, memory_cap=HELD + LOADING + 40 * MIB)
    assert both.budget_tokens == 100


@pytest.mark.slow
def test_the_command_line(kvcap):
    given = ("plan", "pocket", "--memory-cap", str(process_bytes() + LOADING + 100 * MIB))
    printed = kvcap.document(*given)
    assert printed["rehearsed"]
    assert printed["total_bytes"] <= int(given[-1])
    shown = kvcap(*given)[1]
    assert "measured here" in shown
    assert "dry run" in shown


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    policy=st.sampled_from(["keydiff", "snapkv", "pyramidkv", "calidrop"]),
    budget=st.sampled_from([None, 50, 500]),
    more=st.integers(0, 8 * MIB),
)
def test_a_cap_that_is_advised_is_taken_by_a_process_a_little_larger(policy, budget, more):
    with (
        patch.object(plan_module, "process_bytes", lambda: HELD),
        pytest.raises(PlanInfeasible, match=r"raise it to \d+MiB") as refused,
    ):
        plan(policy=policy, budget_tokens=budget, memory_cap=HELD)
    advised = re.search(r"raise it to (\w+)", str(refused.value))[1]
    assert parse_bytes(advised) == refused.value.least["least_memory_cap"]
    with patch.object(plan_module, "process_bytes", lambda: HELD + more):
        planned = plan(policy=policy, budget_tokens=budget, memory_cap=advised)
    assert planned.total_bytes <= parse_bytes(advised)


@pytest.fixture(scope="module")
def least():
    """The least cap on a process that a plan of pocket names, which is taken when fed back."""
    command = [sys.executable, *argv("-m kvcap plan pocket --memory-cap")]
    refused = ran([*command, "1MiB"])
    assert refused.returncode == 3
    size = refused.stderr.split("raise it to ")[1].split(", or")[0]
    fed_back = ran([*command, size])
    assert fed_back.returncode == 0, fed_back.stderr
    return parse_bytes(size)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("enforce", ["check", "rlimit"])
def test_a_process_stays_under_its_cap(enforce, least, tmp_path):
    """The whole way: a long document, the largest cache that fits, the peak of a fresh process."""
    lines = filler(Random(1))
    (tmp_path / "long.txt").write_text(" ".join(next(lines) for _ in range(200)))
    cap = least + 8 * MIB
    # The peak of a child by rusage begins at its parent's, so the child reads its own.
    code = (
        "import runpy, sys\n"
        "try:\n    runpy.run_module('kvcap', run_name='__main__', alter_sys=True)\n"
        "finally:\n    print(open('/proc/self/status').read(), file=sys.stderr)\n"
    )
    line = "generate -f {} --memory-cap {} --enforce {} --max-new-tokens 4 --json"
    done = in_python(code, *argv(line, tmp_path / "long.txt", cap, enforce))
    assert done.returncode == 0, done.stderr
    out = done.stdout
    peak = int(done.stderr.split("VmHWM:")[1].split()[0]) * 1024
    assert process_bytes() / 4 < peak <= cap
    assert json.loads(out)["kv"]["budget_tokens"] > 1000


def test_a_breach_is_seen_before_the_block_and_the_session_goes_on(tmp_path):
    runtime = kvcap.Runtime.from_pretrained(save(tmp_path), budget_tokens=64)
    session = runtime.session()
    session.set_generation(max_new_tokens=4)
    "".join(session.send("Hello!"))
    seen = session.cache.seen
    return_freed()  # as the guard does before it refuses
    session.cache.guard = CapGuard(cap=process_bytes() + MIB, workspace=8 * MIB, block=128)
    with pytest.raises(MemoryCapExceeded, match="above the cap"):
        "".join(session.send("word " * 200))
    assert session.cache.consistent
    assert session.cache.seen == seen
    session.cache.guard = None
    assert "".join(session.send("Hello again!")) is not None
    assert session.cache.seen > seen


def test_the_guard_counts_a_workspace_once(monkeypatch):
    held = [100]
    monkeypatch.setattr(cap_guard, "process_bytes", lambda: held[0])
    guard = CapGuard(cap=150, workspace=40, block=10)
    guard.check(10)
    held[0] = 140  # the allocator keeps what the block gave back
    guard.check(10)
    held[0] = 151  # something else grew
    with pytest.raises(MemoryCapExceeded, match="holds 151"):
        guard.check(1)
    tight = CapGuard(cap=150, workspace=80, block=10)
    held[0] = 100
    with pytest.raises(MemoryCapExceeded, match="a block of 6 would fit"):
        tight.check(10)
    tight.check(6)


def test_freed_memory_goes_back_to_the_system_before_a_block_is_refused(monkeypatch):
    held = [100]
    monkeypatch.setattr(cap_guard, "process_bytes", lambda: held[0])
    monkeypatch.setattr(cap_guard, "return_freed", lambda: held.__setitem__(0, 110))
    guard = CapGuard(cap=150, workspace=40, block=10)
    guard.check(10)
    held[0] = 400  # a long text became tokens
    guard.check(10)
    assert held == [110]
    second_guard = CapGuard(cap=150, workspace=40, block=10)
    held[0] = 400  # before its first block
    second_guard.check(10)
    second_guard.check(10)
    assert held == [110]


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts what is needed on Linux")
def test_the_system_refuses_and_the_conversation_can_go_on():
    """A block larger than what is left fails in the allocator; the next message reads anew."""
    code = """
import resource, torch, kvcap
from kvcap.runtime.memory.cap_guard import limit_data
from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.memory.free_memory import process_bytes
runtime = kvcap.Runtime.from_pretrained("pocket", policy="h2o", budget_tokens=4096,
                                        block_size=2048)
session = runtime.session()
"".join(session.send("Please remember: the code for the blue door is 4821."))
_, hard = resource.getrlimit(resource.RLIMIT_DATA)
limit_data(process_bytes() + (24 << 20))
try:
    "".join(session.send("word " * 1800))
    print("nothing was refused")
except MemoryCapExceeded as error:
    print("refused:", error)
resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
del session.messages[2:]  # the long one
print("".join(session.send("What is the code for the blue door?")))
"""
    done = in_python(code)
    assert "refused: the system refused the memory" in done.stdout, done.stdout + done.stderr
    assert "4821" in done.stdout
