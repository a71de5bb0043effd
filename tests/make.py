"""Makes what tests of many folders begin with: engines, conversations with a fact, browsers."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools import PATIENCE, ROOT
from toy_engine import ToyEngine, tiny

from kvcap.policies import Eviction

FACT = "The secret code of the vault is 7421."
QUESTION = "What is the secret code of the vault?"
WORDS = ["river", "stone", "cloud", "market", "window", "garden", "letter", "winter", "copper"]
DOOR = {  # a schema of JSON
    "type": "object",
    "properties": {"door": {"enum": ["blue", "red"]}, "code": {"type": "integer"}},
    "required": ["door", "code"],
    "additionalProperties": False,
}
SENTENCES = [
    "The harbour master keeps the key under a stone.",
    "It rained all day, and nobody went to the market.",
    "A train leaves for Lisbon at noon.",
    "The orchard was sold to a doctor.",
    "Seven gulls sat upon the roof.",
]
CHROMIUM = os.environ.get("KVCAP_CHROMIUM") or shutil.which("chromium")


def engine(backend: str, model: str, slots: int = 64) -> Any:
    """Return a runtime of a backend: the folder's random model by `torch`, or toys by `numpy`."""
    return ToyEngine(slots) if backend == "numpy" else tiny(model).with_budget(slots)


def saved_model(
    path: Path, family: str = "llama", *, template: bool = True, **changes: Any
) -> Path:
    """Save a random model with pocket's tokenizer into a folder; return the folder."""
    from conftest import tiny_model
    from transformers import AutoTokenizer

    from kvcap import pocket

    tokenizer = AutoTokenizer.from_pretrained(pocket.path())
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    tokenizer.chat_template = tokenizer.chat_template if template else None
    tiny_model(family, **{**sizes, **changes}).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def argv(line: str, *values: Any) -> list[str]:
    """Return the words of a command line, in which each `{}` stands for one of the values."""
    given = map(str, values)
    return [next(given) if word == "{}" else word for word in line.split()]


def ran(command: Sequence[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command that imports this checkout's kvcap; return its exit code and what it wrote."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    given = {"capture_output": True, "text": True, "env": environment, **options}
    return subprocess.run([str(word) for word in command], **{"check": False, **given})


def in_python(code: str, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python of its own."""
    return ran([sys.executable, "-c", code, *arguments], **options)


def filler(count: int = 100, seed: Any = 0) -> str:
    """Return a sentence of words that neither the fact nor the question has."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count)) + "."


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextmanager
def chromium(*flags: str) -> Iterator[Any]:
    """Run Chromium without a window; skip the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: scripts/install-browser")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install it")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage", *flags]
        )
        browser.devices = started.devices
        yield browser
        browser.close()


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Run a head without CPUs and two nodes of one each, on this machine."""
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 100 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
        for _ in range(2):
            made.add_node(num_cpus=1, **store)
        made.wait_for_nodes()
        yield made
        made.shutdown()


def data_independent(eviction: Eviction) -> Eviction:
    """The eviction without the parts whose control flow depends on the data."""
    moving = (x for x in ("head_budget", "layer_budget") if getattr(eviction, x, None))
    changes: Any = {name: None for name in moving if getattr(eviction, name).moves}
    return replace(eviction, **changes) if changes else eviction
