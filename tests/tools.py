"""Provides helpers that several tests share, and folders made once for all processes of a run.

For tests of phones, it finds adbd, an ARM Linux and a compiler, or gives the reason to skip; and it
makes a small plan and builds the C runner.
"""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_chat
import torch
from conftest import as_cache, small_policy, tiny_model
from filelock import FileLock

import kvcap
from kvcap.cli import run
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.session.messages import render, system_message
from kvcap.runtime.session.session import Session

ROOT = Path(__file__).parents[1]
TOOLS = Path(os.environ.get("KVCAP_ANDROID_TOOLS", ROOT / ".android-tools")).resolve()
ARM_ROOT = TOOLS / "arm64"
# h2o has outputs of every kind: values, chosen slots, their rows, and state by slot.
SMALL = ["--preset", "full", "--policies", "h2o", "--dtypes", "fp16", "--sizes", "48",
         "--threads", "1", "--kv-heads", "2", "--heads", "4", "--head-dim", "16",
         "--block-size", "16", "--min-runs", "6", "--min-seconds", "0",
         "--warmup-seconds", "0"]  # fmt: skip
PATIENCE = 1800  # seconds that a test waits, so that it passes on slow and busy machines, too
CPU = "cortex-a76"  # a processor with float16 arithmetic, as in phones since 2018

installed = pytest.mark.skipif(
    not (TOOLS / ".ready").is_file(), reason="scripts/install-android-test-tools was not run here"
)
compilers = pytest.mark.skipif(
    not all(shutil.which(name) for name in ("cmake", "gcc", "aarch64-linux-gnu-gcc")),
    reason="no cmake, no C compiler or none for aarch64",
)


def skip_without(*needs: pytest.MarkDecorator) -> None:
    """Skip the test that asks for a fixture whose needs are not met, such as `compilers`."""
    for need in needs:
        if need.args[0]:
            pytest.skip(need.kwargs["reason"])


def arm_command(program: Path | str, *arguments: Path | str) -> list[str]:
    """Return a command that runs an aarch64 program under qemu."""
    emulator = [TOOLS / "bin" / "qemu-aarch64", "-cpu", CPU, "-L", ARM_ROOT]
    return [str(part) for part in (*emulator, program, *arguments)]


def arm_python(*arguments: Path | str) -> list[str]:
    """Return a command that runs the aarch64 Python, which has numpy and onnxruntime."""
    return arm_command(ARM_ROOT / "usr" / "bin" / "python3.13", *arguments)


def arm_environment() -> dict[str, str]:
    """Return the environment of that Python, with one thread, as the emulator is slow."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONHOME": str(ARM_ROOT / "usr"),
        "PYTHONPATH": str(ARM_ROOT / "site"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "ORT_DISABLE_TELEMETRY": "1",
    }


def script(path: Path, text: str) -> Path:
    """Write an executable script; return its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@functools.cache
def _operations(make, opset_version: int):
    return make(opset_version=opset_version)


@pytest.fixture(scope="module", autouse=True)
def operations() -> Iterator[None]:
    """Make the exporter's table of operations once, as it takes a third of every export.

    It is a fixture for modules that import it.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    make = ONNXRegistry.from_torchlib

    def once(opset_version: int) -> ONNXRegistry:
        table = copy.copy(_operations(make, opset_version))
        table.functions = {key: [*known] for key, known in table.functions.items()}
        return table

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(once))
        yield


def made(factory: pytest.TempPathFactory, name: str, make) -> Path:
    """Return a folder that `make` fills once for all processes of the test run."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with FileLock(base / f"{name}.lock"):
        if not (base / f"{name}.made").exists():
            make(base / name)
            (base / f"{name}.made").touch()
    return base / name


def _export(
    model: Path | str, folder: Path, budget: int, block: int, positions: str = "compact"
) -> None:
    from kvcap.export.decoder.spec import layout_for, load
    from kvcap.export.decoder.write import write
    from kvcap.policies import load_policy

    source = load(model, "fp32")
    settings = CacheSettings(budget, block, load_policy("keydiff"), positions)
    write(source, layout_for(source.config, settings), "fp32", folder, quick=True)


def pocket_decoder(factory: pytest.TempPathFactory, mode: str = "compact") -> Path:
    """Return the built-in model's decoder, exported by kvcap: 128 slots, blocks of 32, float32."""
    return made(factory, f"shared-{mode}", lambda folder: _export("pocket", folder, 128, 32, mode))


def sliding_decoder(factory: pytest.TempPathFactory, positions: str = "compact") -> Path:
    """Return a random Gemma 3 with the built-in model's tokens, windows of 12 and 24 slots."""

    def make(folder: Path) -> None:
        from make import saved_model

        sizes = {"sliding_window": 12, "eos_token_id": [2, 5]}
        model = saved_model(folder / "model", "gemma3_text", **sizes)
        _export(model, folder / "decoder", 24, 8, positions)

    return made(factory, f"sliding-{positions}", make)


def tiny_decoder(factory: pytest.TempPathFactory, budget: int = 24, block: int = 8) -> Path:
    """Return a folder with a random chat model in `model`, and its export in `decoder`."""

    def make(folder: Path) -> None:
        _export(tiny_chat.save(folder / "model"), folder / "decoder", budget, block)

    return made(factory, f"tiny-{budget}-{block}", make)


def small_plan(factory: pytest.TempPathFactory) -> Path:
    """Return a plan with four cells of h2o."""

    def make(folder: Path) -> None:
        assert run(["android", "plan", "-o", str(folder), *SMALL]) == 0

    return made(factory, "plan", make)


def built(folder: Path, *options: str) -> Path:
    """Build the C runner in a folder; return the program."""
    source = ROOT / "android_bench" / "c_runner"
    given = [f"-DORT_INCLUDE={TOOLS / 'source'}", f"-DCJSON={TOOLS / 'source' / 'cjson'}"]
    for command in (
        ["cmake", "-S", source, "-B", folder, *given, *options],
        ["cmake", "--build", folder],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "kvcap-bench"


def library(site: Path) -> Path:
    (file,) = (site / "onnxruntime" / "capi").glob("libonnxruntime.so.*")
    return file


def runner_here(factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the C runner for this machine, and its ONNX Runtime."""
    skip_without(installed, compilers)

    def make(folder: Path) -> None:
        built(folder)
        shutil.copy(library(Path(sysconfig.get_path("platlib"))), folder / "libonnxruntime.so")

    return made(factory, "here", make)


def runner_for_arm(factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the C runner for ARM, which runs under qemu."""
    skip_without(installed, compilers)

    def make(folder: Path) -> None:
        target = (
            "C_COMPILER=aarch64-linux-gnu-gcc",
            "SYSTEM_NAME=Linux",
            "SYSTEM_PROCESSOR=aarch64",
        )
        program = built(folder / "build", *(f"-DCMAKE_{setting}" for setting in target))
        script(folder / "kvcap-bench", f'exec {" ".join(arm_command(program))} "$@"')
        shutil.copy(library(ARM_ROOT / "site"), folder / "libonnxruntime.so")

    return made(factory, "arm", make)


def uncapped(family: str, ids: torch.Tensor, **changes) -> torch.Tensor:
    model = tiny_model(family, "eager", **changes)
    with torch.no_grad():
        return model(ids).logits


def distinct(length: int, *, of: int = 90, seed: int = 1) -> torch.Tensor:
    """Return tokens [1, length], none of them twice, as equal keys would tie."""
    return 3 + torch.randperm(of, generator=torch.Generator().manual_seed(seed))[None, :length]


def greedy(ids: torch.Tensor, tokens: int, **more: Any) -> dict[str, Any]:
    """Return arguments of transformers' `generate` for so many of the likeliest tokens."""
    plain = {"do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    return {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, **plain, **more}


def goes_on(runtime: Any, folder: Path) -> None:
    """Assert that a conversation longer than the budget goes on from a file as by itself."""
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=4, temperature=0)
    list(session.send("one two three four five six seven eight nine ten " * 8))
    assert session.stats.held_tokens <= runtime.plan.budget_tokens < session.stats.seen_tokens
    session.save(folder / "session.kvcap")
    again = Session.load(runtime, folder / "session.kvcap")
    assert "".join(session.send("and more")) == "".join(again.send("and more"))


def in_blocks(model, cache, ids: torch.Tensor, block: int) -> torch.Tensor:
    """Return the logits [B, T_total, V] of all tokens, read block by block as in the block loop."""
    parts = []
    with torch.no_grad():
        for part in ids.split(block, 1):
            positions = cache.next_position + torch.arange(part.shape[1])[None]
            with cache.passing(ForwardContext(cache.next_position)):
                parts.append(model(part, **as_cache(cache), position_ids=positions).logits)
    return torch.cat(parts, 1)


def kept(session: Any) -> list[list[int]]:
    """Return the positions that each head of a session or a loop holds, in order."""
    segments = [s for layer in session.cache.capped_layers for s in layer.segments]
    return [sorted(head.tolist()) for s in segments for head in s.positions[0]]


def first_kept(session: Session) -> bool:
    """Return whether all heads hold tokens 0 to 3, the conversation's own first ones.

    Fail if the conversation is not past its budget, or was read otherwise than it is written.
    """
    assert session.cache.seen > session.runtime.plan.budget_tokens
    messages = [*system_message(session.system), *session.messages]
    written = session.encode(render(session.runtime.tokenizer, messages))
    assert session.read_ids[:4] == written[:4]
    rows = [head for layer in session.cache.kept_tokens() for head in layer.heads]
    return all({0, 1, 2, 3} <= set(row.tolist()) for row in rows)


def differing(sessions: list[Session], others: list[Session]) -> float:
    """Return the share of kept tokens that differ, as they may for scores equal but for rounding.

    Products of several rows are summed in another order than those of one row, which depends on the
    processor.
    """
    heads = [zip(kept(a), kept(b), strict=True) for a, b in zip(sessions, others, strict=True)]
    pairs = [(set(one), set(other)) for head in heads for one, other in head]
    assert all(len(one) == len(other) for one, other in pairs)
    return sum(len(one - other) for one, other in pairs) / sum(len(one) for one, _ in pairs)


def pocket_runtime(policy: Any = "keydiff", budget: int = 48, **more: Any) -> kvcap.Runtime:
    """Return a runtime of the built-in model in float32, with blocks of 16 tokens."""
    settings = {"block_size": 16, "dtype": "float32", "device": "cpu", **more}
    return kvcap.Runtime.from_pretrained("pocket", policy, budget_tokens=budget, **settings)


def runtime_of(
    model,
    policy="keydiff",
    budget=24,
    block=8,
    positions="compact",
    every=1,
    memory_cap=None,
    kv_dtype=None,
):
    """Return a runtime around a model, without a tokenizer, for conversations in tokens."""
    eviction = small_policy(policy, model.config) if isinstance(policy, str) else policy
    settings = CacheSettings(budget, block, eviction, positions, every, kv_dtype)
    plan = MemoryPlan.of(model.config, settings, dtype=model.dtype)
    return kvcap.Runtime(model, None, plan, settings, name="tiny", memory_cap=memory_cap)
