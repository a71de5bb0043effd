"""Memory does not grow: with the text, over a chat, after a session; each check can fail."""

from __future__ import annotations

import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from conftest import as_cache, small_policy, tiny_config, tiny_model
from make import in_python
from transformers import DynamicCache, StaticCache

import kvcap
from kvcap.cli import run
from kvcap.evals.measure import MIB
from kvcap.policies import load_policy, policies
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.testing import memory_meter
from kvcap.runtime.testing import threads as memory_threads
from kvcap.runtime.testing.process_peak import NotMeasured
from kvcap.testing import (
    ThreadsNotCounted,
    cpu_meter,
    cpu_peak,
    cuda_peak,
    host_meter,
    host_peak,
    kv_bytes,
    process_peak,
)

ROOT = Path(__file__).parents[3]
BLOCK, BUDGET = 128, 64


def read(name: str, length: int, layers: int = 1, fault=None):
    """A cache that has read `length` tokens, and the peak of that."""
    model = tiny_model("llama", num_hidden_layers=layers, max_position_embeddings=131072)
    ids = torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(0))
    cache = kvcap.BudgetCache(model.config, BUDGET, BLOCK, small_policy(name, model.config))
    loop = BlockLoop(model, cache)
    took = cpu_peak(lambda: loop.prefill(ids, fault and (lambda done: fault(cache, done))))
    return cache, took


def flat(name: str, short: int, long: int, fault=None, slack=0.0, layers=1) -> None:
    """Bytes and peak are the same after a short and a long text."""
    (a, before), (b, after) = (read(name, length, layers, fault) for length in (short, long))
    assert kv_bytes(a) == kv_bytes(b) == sum(b.layout.nbytes(1, torch.float32).values())
    assert after.peak_bytes <= before.peak_bytes * (1 + slack)
    # The last logits are held as the result; nothing else may be left beyond the first text's.
    assert after.held_bytes <= before.held_bytes


def kinds() -> list[str]:
    """Every score and every companion once, in the order of their names."""
    evictions = {name: load_policy(name) for name in policies() if name != "full"}
    by_type: dict[type, str] = {}
    for name in sorted(evictions, key=lambda name: len(evictions[name].components)):
        for part in evictions[name].components:
            by_type.setdefault(type(part), name)
    return sorted(set(by_type.values()))


@pytest.mark.slow(ci=3)
@pytest.mark.parametrize("name", kinds())
def test_flat_from_half_a_k_to_2k(name):
    eviction = load_policy(name)
    shares = eviction.heads_move or eviction.layers_move  # slots, as the text has it
    flat(name, 512, 2048, layers=2, slack=0.05 if shares else 0.0)


def zeros(mebibytes: int) -> torch.Tensor:
    return torch.zeros(mebibytes * MIB, dtype=torch.uint8)


def started(*functions) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_other_threads_count_to_the_byte():
    def overlapping():
        both = threading.Barrier(2)

        def hold(mebibytes):
            held = zeros(mebibytes)
            both.wait()
            del held

        started(lambda: hold(3), lambda: hold(4))

    def freed_here():
        kept: list[torch.Tensor] = []
        started(lambda: kept.append(zeros(5)))
        kept.clear()
        zeros(3)

    def backward():
        weight = torch.zeros(MIB // 4, requires_grad=True)
        started((weight * 2).sum().backward)

    pool = ThreadPoolExecutor(1)
    pool.submit(zeros, 1).result()  # its thread runs already, and stays
    for work, most in (
        (lambda: started(lambda: zeros(4)), 4),
        (overlapping, 7),
        (freed_here, 5),
        (lambda: pool.submit(zeros, 6).result() is None, 6),
        (lambda: pool.submit(zeros, 7).result() is None, 7),
    ):
        took = cpu_peak(work)
        assert (took.peak_bytes, took.held_bytes) == (most * MIB, 0)
    pool.submit(zeros, 2).result()  # its thread has left: this is nobody's
    assert cpu_peak(backward).peak_bytes >= 2 * MIB
    assert cpu_peak(lambda: None).peak_bytes == 0
    pool.shutdown()


@pytest.mark.slow
def test_a_thread_that_outlives_the_measurement():
    # It allocates while it is measured, not while PyTorch's profiler starts or stops: that has been
    # seen to end the process.
    requested, answered, last = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def work():
        while True:
            requested.acquire()
            if last.is_set():
                return
            zeros(1)
            answered.release()

    def ask():
        for _ in range(100):
            requested.release()
            answered.acquire()

    thread = threading.Thread(target=work)

    def start():
        thread.start()
        ask()

    try:
        for measured in (start, ask, ask):
            assert MIB <= cpu_peak(measured).peak_bytes <= 2 * MIB
    finally:
        last.set()
        requested.release()
        thread.join()


def test_tensors_of_an_earlier_measurement_do_not_hide_later_ones():
    """PyTorch remembers sizes by address, and tells them at a release long after."""
    earlier = cpu_peak(lambda: zeros(40))

    def replace():
        earlier.result = None
        zeros(50)

    took = cpu_peak(replace)
    assert (took.peak_bytes, took.held_bytes) == (50 * MIB, 0)


@pytest.mark.slow
def test_the_stacks_of_what_was_held_at_the_peak():
    def operator(x):
        return x + 1

    def work():
        first = zeros(3)
        return first, operator(first), torch.nn.Linear(1024, 1024, bias=False)

    for _ in range(3):
        with cpu_meter(stacks=True) as took:
            kept = work()
            zeros(1)
        assert took.peak_bytes >= 11 * MIB
        del kept
        most = took.largest()
        seen = [(each.nbytes // MIB, [p.function for p in each.stack[:3]]) for each in most[:3]]
        assert seen[0] == (4, ["__init__", "work", "test_the_stacks_of_what_was_held_at_the_peak"])
        assert sorted(name for _, (name, *_) in seen[1:]) == ["operator", "zeros"]
        for each in most[:3]:
            assert each.stack[0].exact == (each.stack[0].function != "operator")
            assert each.stack[-1].line > 0


def test_the_stacks_where_another_thread_counts_first(monkeypatch):
    class Prompt(memory_threads.SharedCount):
        """Another thread counts before this one goes on."""

        def start(self):
            super().start()
            pool.submit(zeros, 2).result()

    monkeypatch.setattr(memory_meter, "SharedCount", Prompt)
    with ThreadPoolExecutor(1, "other") as pool:
        pool.submit(zeros, 1).result()  # it runs already
        with cpu_meter(stacks=True) as took:
            pool.submit(zeros, 4).result()
    assert took.peak_bytes == 4 * MIB
    (most,) = took.largest()
    assert (most.nbytes, most.thread) == (4 * MIB, "other_0")
    assert most.stack[0].function == "zeros"


def test_one_measurement_at_a_time():
    def other():
        with pytest.raises(RuntimeError, match="on already"):
            cpu_peak(lambda: None)

    with cpu_meter():
        other()
        started(other)
    assert cpu_peak(lambda: zeros(1) is None).peak_bytes == MIB


def test_memory_of_python_and_numpy():
    import numpy

    took = host_peak(lambda: numpy.ones(3 * MIB, dtype="uint8"))
    assert 3 * MIB <= took.peak_bytes < 3.1 * MIB
    assert took.held_bytes >= 3 * MIB
    with host_meter() as took:
        bytearray(2 * MIB)
    assert 2 * MIB <= took.peak_bytes < 2.1 * MIB
    assert took.held_bytes < MIB
    assert host_peak(lambda: zeros(4)).peak_bytes < MIB


@pytest.mark.slow
def test_nothing_is_said_while_measuring():
    code = (
        "import os, torch; from kvcap.testing import cpu_peak; "
        "print(cpu_peak(lambda: os.write(2, b'kept')).peak_bytes)"
    )
    done = in_python(code, check=True)
    assert (done.stdout, done.stderr.strip()) == ("0\n", "kept")


def test_a_printed_peak_is_a_line_whatever_its_result():
    peak = cpu_peak(torch.ones, 1000)
    assert str(peak) == f"Peak(peak_bytes={peak.peak_bytes}, held_bytes={peak.held_bytes})"


def test_a_pytorch_that_cannot_count_threads_is_named(monkeypatch):
    monkeypatch.setitem(memory_threads.LIBRARIES, "linux", "none.so")
    monkeypatch.setitem(memory_threads.LIBRARIES, sys.platform, "none.so")
    with pytest.raises(ThreadsNotCounted, match="measure in a fresh process"):
        cpu_peak(lambda: None)
    monkeypatch.undo()
    assert cpu_peak(lambda: zeros(1) is None).peak_bytes == MIB


def grow(pool) -> None:
    pool.keys = torch.cat((pool.keys, pool.keys[:1]))


def test_other_caches_are_counted_by_storage():
    config = tiny_config("llama")
    big = torch.zeros(1, 2, 100, 16)
    whole, shared = DynamicCache(config=config), DynamicCache(config=config)
    for layer in range(2):
        whole.update(big, big, layer)
    assert kv_bytes(whole) == 4 * big.nbytes  # concatenated with nothing: copies
    for layer in shared.layers:
        layer.lazy_initialization(*([big] * (2 if "value" in _names(layer) else 1)))
        layer.keys = layer.values = big[:, :, :1]
    assert kv_bytes(shared) == big.nbytes  # one storage, pinned by four views
    static = StaticCache(config=config, max_cache_len=50)
    model = tiny_model("llama", "sdpa")
    with torch.inference_mode():
        model(torch.ones(1, 3, dtype=torch.long), **as_cache(static))
    assert kv_bytes(static) >= 2 * 2 * 2 * 50 * 16 * 4


def _names(layer) -> str:
    return str(layer.lazy_initialization.__code__.co_varnames)


@pytest.fixture(scope="module")
def chat(chat_model):
    return kvcap.Runtime.from_pretrained(chat_model, budget_tokens=48, block_size=16, device="cpu")


def turns(session, count: int, fault=None) -> None:
    for turn in range(count):
        for _ in session.send(f"this is message {turn}"):
            pass
        session.messages.clear()  # text, not memory of the model
        if fault is not None:
            fault(session)


def left_by_chat(chat, count: int, fault=None) -> tuple[int, int]:
    """KV bytes and bytes left by so many turns, after the first."""
    session = chat.session(seed=0)
    session.set_generation(max_new_tokens=2)
    turns(session, 3)
    before = kv_bytes(session.cache)
    took = cpu_peak(lambda: turns(session, count, fault))
    return kv_bytes(session.cache) - before, took.held_bytes


@pytest.mark.slow
def test_two_hundred_turns_leave_nothing(chat):
    grown, left = left_by_chat(chat, 200)
    assert grown == 0
    assert left < 4096  # the state of the last turn


def test_a_fresh_process(tmp_path):
    script = tmp_path / "work.py"
    script.write_text(
        "import sys\nblock = bytearray(int(sys.argv[1])); block[::4096] = b'1' * "
        "len(block[::4096])\n"
    )
    small, large = process_peak(script, MIB), process_peak(script, 101 * MIB)
    assert 99 * MIB < large.grown_bytes - small.grown_bytes < 115 * MIB
    assert large.peak_bytes == large.baseline_bytes + large.grown_bytes
    assert process_peak("json:loads", "[1]").peak_bytes > MIB
    with pytest.raises(RuntimeError, match="JSONDecodeError"):
        process_peak("json:loads", "nothing")
    for wrong in ("json", "nowhere.py", ":f"):
        with pytest.raises(ValueError, match="give 'module:function'"):
            process_peak(wrong)
    assert issubclass(NotMeasured, RuntimeError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_meter_says_that_there_is_none():
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        cuda_peak(lambda: None)


SMALL = ["--policies", "keydiff", "--budgets", "32", "--lengths", "256"]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    path = tmp_path_factory.mktemp("baseline") / "memory.json"
    assert run(["memory", "update", "--baseline", str(path), *SMALL]) == 0
    return path


def check(path: Path, *more: str) -> int:
    return run(["memory", "check", "--baseline", str(path), *more])


@pytest.mark.slow
def test_what_did_not_grow_passes(baseline, capsys):
    assert check(baseline, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["regressions"] == []
    assert printed["peaks_not_compared"] is None
    assert printed["cells"] == json.loads(baseline.read_text())["cells"]  # deterministic


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("figure", "factor", "name"),
    [("kv_bytes", 2, "KV bytes"), ("planned_bytes", 2, "planned"), ("peak_bytes", 0.97, "peak")],
)
def test_what_grew_fails_with_the_cell_and_the_figures(
    baseline, tmp_path, capsys, figure, factor, name
):
    document = json.loads(baseline.read_text())
    now = document["cells"][0][figure]
    was = document["cells"][0][figure] = int(now * factor)
    path = tmp_path / "other.json"
    path.write_text(json.dumps(document))
    assert check(path) == 1
    out = capsys.readouterr().out
    assert re.search(rf"keydiff, 32 slots, 256 tokens: {name}.* {now:,}, baseline {was:,}", out)
    if figure == "peak_bytes":
        assert check(path, "--tolerance", "5") == 0
        document["measured_on"]["torch"] = "1.0"
        path.write_text(json.dumps(document))
        assert check(path) == 0
        assert "peaks were not compared: torch 1.0 in the baseline" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"format": 2}', '{"format": 1, "matrix": {}, "cells": [1]}']
)
def test_a_missing_or_malformed_baseline_is_wrong_input(tmp_path, capsys, text):
    path = tmp_path / "memory.json"
    if text is not None:
        path.write_text(text)
    assert check(path) == 2
    assert "kvcap memory update" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ('["keydiff"]', "[]"),
        ('"budgets": [32]', '"budgets": ["32"]'),
        ('"lengths": [256]', '"lengths": [0]'),
        ('"kv_bytes": ', '"kv_bytes": -'),
    ],
)
def test_a_baseline_that_measures_nothing_is_wrong_input(baseline, tmp_path, capsys, part, other):
    path, text = tmp_path / "memory.json", json.dumps(json.loads(baseline.read_text()))
    assert part in text
    path.write_text(text.replace(part, other))
    assert check(path) == 2
    assert "is no baseline" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing/memory.json", ".", "/proc/memory.json"])
def test_a_baseline_that_cannot_be_written_is_wrong_input(tmp_path, capsys, name):
    assert run(["memory", "update", "--baseline", str(tmp_path / name), *SMALL]) == 2
    assert f"cannot write '{tmp_path / name}': " in capsys.readouterr().err


def test_numbers_below_one_are_wrong_input(baseline, capsys):
    assert [check(baseline, option, "0") for option in ("--budgets", "--lengths")] == [2, 2]
    assert capsys.readouterr().err.count("whole numbers from 1, not 0") == 2


def test_a_cell_the_baseline_lacks_is_wrong_input(baseline, capsys):
    assert check(baseline, "--budgets", "33") == 2
    assert "lacks keydiff, 33 slots" in capsys.readouterr().err


def test_our_own_bytes_are_those_of_the_committed_baseline():
    assert check(ROOT / "memory-baseline.json", "--lengths", "1024", "--budgets", "64") == 0


def test_the_workflow_on_that_page_runs_commands_that_are(pytestconfig):
    page = (ROOT / "docs" / "memory.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (job,) = yaml.safe_load(text)["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert [c.split()[0] for c in commands] == ["pip", "pytest"]
    for option in re.findall(r"--([\w-]+)", commands[1]):
        known = {"junitxml": "xmlpath"}.get(option, option.replace("-", "_"))
        pytestconfig.getoption(known)  # raises where there is none
