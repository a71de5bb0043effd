"""Tests that the plan of llama.cpp's engine counts the bytes that the library allocates."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
from llama_reference import loaded, needs_library, runtime_of, text_ids
from make import in_python

from kvcap.runtime.backends.llamacpp.context import Context
from kvcap.runtime.backends.llamacpp.library import PAGE, load_library
from kvcap.runtime.backends.llamacpp.model import LlamaModel
from kvcap.runtime.backends.llamacpp.plan import LlamaPlanner
from kvcap.runtime.backends.llamacpp.rank import ranking_of
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import MemoryCapExceeded, PlanInfeasible, UnsupportedModel
from kvcap.runtime.planning.plan import parse_cap
from kvcap.runtime.types import Positions

pytestmark = needs_library

Files = Callable[..., Path]
BLOCK = 32


class InterruptedLog(list[str]):
    """A log that is interrupted by Ctrl-C as the library writes its first line."""

    def append(self, line: str) -> None:
        """Keep a line."""
        if not self:
            signal.raise_signal(signal.SIGINT)
        super().append(line)


def test_an_interrupt_while_the_library_writes_its_log_is_not_lost(
    gguf: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(gguf("llama"))
    monkeypatch.setattr(model.library, "lines", InterruptedLog())
    with pytest.raises(KeyboardInterrupt):
        LlamaModel(model.library, model.file)
    with pytest.raises(KeyboardInterrupt):
        Context(model, cells=PAGE, block=BLOCK)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize(
    ("architecture", "kv_dtype"),
    [
        *((name, None) for name in tiny_gguf.MOVABLE),
        ("llama", "q8_0"),
        ("llama", "q4_0"),
        ("gemma3", "q8_0"),
    ],
)
def test_bytes_of_full_cells_are_those_planned(
    gguf: Files, architecture: str, kv_dtype: str | None, sequences: int
) -> None:
    budget = PAGE - BLOCK
    runtime = runtime_of(
        gguf(architecture), budget_tokens=budget, block_size=BLOCK, kv_dtype=kv_dtype
    )
    runtime.reserve(sequences)
    cache = runtime.loop().cache
    context = cache.context
    assert context.sequences == sequences
    assert runtime.plan.cache_bytes == cache.nbytes
    ids = text_ids(0, PAGE)
    for at in range(0, PAGE, BLOCK):
        tokens = [(cache.sequence, ids[at + i], at + i) for i in range(BLOCK)]
        context.read(tokens, [])
    state = context.state(cache.sequence)
    layers = tiny_gguf.LAYERS
    gap = context.library.layout.gap
    parts = [] if not runtime.gguf.window else [runtime.gguf.window]
    # Each layer has a type and a size of rows, of keys and of values; each cell its position.
    kinds = 1 if architecture == "deepseek2" else 2  # latents are the only numbers
    heads = 8 + (1 + len(parts)) * (4 + 4 * sequences + 8 + gap) + 12 * kinds * layers
    if not parts:
        assert state.nbytes == cache.nbytes + heads + 12 * PAGE
    else:  # a state has the cells of a window alone
        whole, sliding = context.allocated.cells, context.allocated.sliding
        own = whole // sequences + sliding // sequences // PAGE * parts[0]
        assert state.nbytes == own + heads + 12 * (PAGE + parts[0])
    assert cache.nbytes * sequences == context.allocated.cells + context.allocated.sliding


@pytest.mark.parametrize("kv_dtype", [None, "q8_0"])
@pytest.mark.parametrize("architecture", tiny_gguf.ATTENDING)
def test_a_plan_of_the_header_is_that_of_the_model(
    gguf: Files, architecture: str, kv_dtype: Any
) -> None:
    file = gguf(architecture)
    if kv_dtype and architecture == "deepseek2":
        with pytest.raises(MemoryCapExceeded, match="does not divide n_embd_head_k=48"):
            runtime_of(file, kv_dtype=kv_dtype, positions="true")
        return
    fixed: Positions | None = "true" if loaded(file).fixed_keys is not None else None
    settings = CacheSettings(
        budget_tokens=300, block_size=64, kv_dtype=kv_dtype, positions=fixed if kv_dtype else None
    )
    models = loaded(file), LlamaModel(load_library(), file, planned=True)
    plans = [LlamaPlanner(model, ranking_of("keydiff", {}), settings).best() for model in models]
    assert plans[0] == plans[1]
    context = Context(loaded(file), 364, 64, kv_dtype=kv_dtype)
    planner = LlamaPlanner(loaded(file), ranking_of("keydiff", {}), settings)
    assert planner.plan(300, 64, context.allocated) == plans[0]


@pytest.mark.parametrize("kv_dtype", [None, "q8_0", "int4"])
def test_keys_of_four_bits_move_rarely(
    gguf: Files, kv_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library rounds quantised keys anew whenever they move."""
    loop = runtime_of(gguf(trained=4096), kv_dtype=kv_dtype).loop()
    context, block, moved = loop.cache.context, loop.block, list[int]()
    move = context.move

    def noted(*how: int) -> None:
        moved.append(loop.cache.seen)
        move(*how)

    monkeypatch.setattr(context, "move", noted)
    for _ in range(5 * context.cells // block):
        loop.read(np.array([[5] * block]))
        assert loop.cache.cell_positions[-1] < 2 * context.cells
    passes = len(set(moved))
    assert 0 < passes <= 5 if kv_dtype == "int4" else passes > 10


def test_a_model_of_windows_alone_is_refused_by_name(tmp_path: Path) -> None:
    fields = {"cohere2.attention.sliding_window_pattern": 4}  # of three layers
    file = tiny_gguf.written(tmp_path, "cohere2", fields=fields)
    with pytest.raises(UnsupportedModel, match="every layer of cohere2 keeps a window of 32 tok"):
        runtime_of(file)


def test_the_most_slots_within_bytes_are_planned(gguf: Files) -> None:
    file = gguf(trained=4096)
    row = 3 * 2 * 2 * tiny_gguf.HEAD * 2  # layers, keys and values, heads, numbers, bytes
    sized = {"budget_tokens": None, "block_size": None}
    for pages in (1, 2, 5):
        runtime = runtime_of(file, kv_budget=pages * PAGE * row + row, **sized)
        plan = runtime.plan
        assert plan.cache_bytes == pages * PAGE * row == runtime.loop().cache.nbytes
        assert plan.budget_tokens + plan.block_size == pages * PAGE
    with pytest.raises(PlanInfeasible, match="too small") as refused:
        runtime_of(file, kv_budget=PAGE * row - 1, **sized)
    least = int(str(refused.value).partition("raise it to ")[2].split()[0].replace(",", ""))
    assert least == PAGE * row == refused.value.least["least_kv_budget"]
    assert runtime_of(file, kv_budget=least, **sized).plan.cache_bytes == least


@pytest.mark.parametrize("pins", [{"sink_tokens": 499}, {"recent_tokens": 496}])
def test_slots_that_nobody_asked_for_hold_the_pins(gguf: Files, pins: dict[str, int]) -> None:
    sized = {"budget_tokens": None, "block_size": None, "policy_options": pins}
    with pytest.raises(PlanInfeasible, match="a budget of at least 500"):
        runtime_of(gguf(), **sized)
    with pytest.raises(PlanInfeasible, match="too small") as refused:
        runtime_of(gguf(trained=4096), kv_budget="1KiB", **sized)
    least = refused.value.least["least_kv_budget"]
    for nbytes in (least, "2MiB"):
        runtime = runtime_of(gguf(trained=4096), kv_budget=nbytes, **sized)
        assert runtime.plan.budget_tokens >= 500


def test_the_whole_process_is_planned_under_a_cap(gguf: Files) -> None:
    file = gguf(trained=4096)
    sized = {"budget_tokens": None, "block_size": None}
    with pytest.raises(PlanInfeasible) as refused:
        runtime_of(file, memory_cap="1MiB", **sized)
    cap = refused.value.least["least_memory_cap"]
    assert str(refused.value).endswith(f"raise it to {cap >> 20}MiB")
    runtime = runtime_of(file, memory_cap=cap + (4 << 20), **sized)
    assert runtime.plan.total_bytes <= parse_cap(cap + (4 << 20))
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=5)
    assert "".join(session.send("a" * 400))


def test_memory_is_taken_before_the_system_refuses_it(
    gguf: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would end the process."""
    order = []
    read = Context.read
    monkeypatch.setattr(Context, "read", lambda *given: order.append("read") or read(*given))
    limit = "kvcap.runtime.backends.llamacpp.runtime.limit_data"
    monkeypatch.setattr(limit, lambda cap: order.append("limit"))
    runtime = runtime_of(gguf(), memory_cap="4GiB", enforce="rlimit", budget_tokens=64)
    assert order == ["read", "limit"]
    runtime.session(seed=0)
    assert len(runtime.contexts) == 1


TOKENISING = """
import re, sys
from pathlib import Path
from kvcap.runtime.backends.llamacpp.library import load_library
from kvcap.runtime.backends.llamacpp.model import LlamaModel
from kvcap.runtime.memory.free_memory import return_freed
from kvcap.runtime.session.encoding import encode_with

def status(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

tokenizer = LlamaModel(load_library(), Path(sys.argv[1])).tokenizer
for letters in ("a", "ax", "7 1.", " "):
    return_freed()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    encode_with(tokenizer, letters * (int(sys.argv[2]) // len(letters)))
    print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_long_request_is_tokenised_within_the_bytes_planned(gguf: Files, kvcap: Any) -> None:
    """A server plans the bytes of the tokenizer that it uses, with no more room than it needs."""
    file, nbytes = gguf(), 1 << 20
    serve = kvcap.document("plan", str(file), "--serve", "--budget-tokens", "64")["serve"]
    planned = serve["tokenising_bytes"] // serve["body_bytes"]
    done = in_python(TOKENISING, file, nbytes)  # here other tests have freed memory that it took
    assert done.returncode == 0, done.stderr
    most = max(map(int, done.stdout.split())) / nbytes
    assert planned / 3 < most <= planned


def test_policies_that_compare_channels_need_cells_that_are_not_mixed(gguf: Files) -> None:
    """llama.cpp rotates quantised cells by Hadamard's matrix, which the lags of LagKV would see."""
    with pytest.raises(UnsupportedModel, match="compares numbers channel by channel"):
        runtime_of(gguf(), policy="lagkv", kv_dtype="q8_0")
