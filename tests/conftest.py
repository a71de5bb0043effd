"""Makes small random models of every supported family, and defines the three tiers of tests.

`pytest` is the fast tier, `pytest --ci` also runs some slow tests, `pytest --all` runs everything.
A slow test is marked `slow`; its keywords say how many of its parameter sets each tier runs:

    slow                no set in the fast tier, one in `--ci`
    slow(keep=3)        three in both
    slow(ci=0)          none in either: a minute of processes, or a whole loop in an interpreter

The folders of `OWN_TIER` are a tier of their own: their tests run with `--all`, or if a folder or a
file in it is named: `pytest --ci tests/android_bench` runs the `--ci` tier of that folder.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Set before numpy and torch are imported, as tests run in three processes on two cores.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # set before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings
from transformers import AutoConfig, AutoTokenizer

from kvcap import cli, pocket  # which registers attn_implementation='kvcap'
from kvcap.policies import Eviction, load_policy, policies
from kvcap.runtime.cache import row_table
from kvcap.runtime.models.arguments import GENERATION
from kvcap.runtime.models.config import ModelShape

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if os.environ.get("TRITON_INTERPRET"):
    row_table.STEP = 64  # kernels compute padding up to STEP, which is slow in the interpreter
settings.register_profile("kvcap", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("kvcap")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="all tests, not the fast tier alone")
    parser.addoption(
        "--ci", action="store_true", help="the fast tier, and a parameter set of what is slow"
    )
    parser.addoption(
        "--all-of",
        action="append",
        default=[],
        metavar="PATH",
        help="all tests of a folder or file, of the rest the fast tier",
    )


# Files that take more than a minute. Processes that share files begin with these, so that none is
# still running when all others are done.
LONG = ("policies/test_one_file.py", "export/graphs/test_graphs.py", "testing/test_memory.py",
        "testing/test_pytest_plugin.py", "onnxruntime/test_backend.py",
        "export/decoder/test_decoder.py", "export/decoder/test_repeat.py",
        "devices/test_adb.py", "android_bench/test_browser.py",
        "memory/test_cap_guard.py", "planning/test_dry_run.py",
        "bench/test_weights.py")  # fmt: skip


# Tests of phones.
OWN_TIER = (Path(__file__).parent / "android_bench",)


def is_of_own_tier(item: pytest.Item, config: pytest.Config) -> bool:
    """Return whether an item is of a tier of its own, of which nothing was named."""
    arguments = [*config.args, *config.getoption("--all-of")]
    named = [(config.invocation_params.dir / a.partition("::")[0]).resolve() for a in arguments]
    return any(
        folder in item.path.parents and not any(folder in (x, *x.parents) for x in named)
        for folder in OWN_TIER
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that the tier does not run, unless they were named."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))
    if config.getoption("--all"):
        return
    unnamed = {item for item in items if is_of_own_tier(item, config)}
    config.hook.pytest_deselected(items=[*unnamed])
    items[:] = [item for item in items if item not in unnamed]
    arguments = [*config.getoption("--all-of"), *(a for a in config.args if "::" in a)]
    paths = [(config.invocation_params.dir / a.partition("::")[0]).resolve() for a in arguments]
    sets: dict[str, list[pytest.Item]] = {}
    for item in items:
        named = any(
            path in (item.path, *item.path.parents)
            and item.nodeid.partition("::")[2].startswith(a.partition("::")[2])
            for a, path in zip(arguments, paths, strict=True)
        )
        if item.get_closest_marker("slow") and not named:
            sets.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = set[pytest.Item]()
    for several in sets.values():
        mark = several[0].get_closest_marker("slow")
        assert mark is not None
        keep = mark.kwargs.get("keep", 0)
        if config.getoption("--ci"):
            keep = max(keep, mark.kwargs.get("ci", 1))
        kept = spread(len(several), keep)
        left |= {item for i, item in enumerate(several) if i not in kept}
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def spread(count: int, keep: int) -> set[int]:
    """Return the indices of `keep` of `count` things, evenly from the first to the last."""
    keep = min(keep, count)
    return {round(i * (count - 1) / max(1, keep - 1)) for i in range(keep)}


def pytest_collection_finish() -> None:
    """Make garbage collections cheap: they examine only the objects of tests, and more rarely.

    Otherwise a collection examines all of torch and transformers and takes a third of a second, and
    exporters spent a tenth of their time on one collection per 700 objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def _old_objects_frozen() -> Iterator[None]:
    """Freeze what a file's tests leave behind, so that later collections need not examine it.

    Exporters and models that are imported by then took a second of every collection.
    """
    yield
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Seed random numbers before every test, so that they do not depend on earlier tests."""
    torch.manual_seed(0)


def pytest_unconfigure() -> None:
    """Undo `gc.freeze`, as Triton's bindings report frozen objects as leaks at the end."""
    gc.unfreeze()
    gc.collect()


def in_turn(things: Iterable[Any], others: Iterable[Any], each: int = 1) -> list[tuple[Any, ...]]:
    """Return sets of parameters that pair each of `things` with `each` of `others` in turn."""
    known, pairs = [*others], list[tuple[Any, ...]]()
    for thing in things:
        for _ in range(each):
            # The offset grows every round; otherwise, with even numbers, some pairs never occur.
            index = len(pairs) + len(pairs) // len(known)
            pair = thing, known[index % len(known)]
            pairs.append(sum((x if isinstance(x, tuple) else (x,) for x in pair), ()))
    return pairs


VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 24},
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "granite": {},
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "olmo2": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {"num_hidden_layers": 4},  # its fourth layer has no positions
    "starcoder2": {"sliding_window": None},
}


def tiny_config(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})


CACHE = GENERATION
"""Holds the name of the cache in transformers' arguments and results."""


def as_cache(cache: Any) -> dict[str, Any]:
    """Return the arguments that pass a cache to a model of transformers."""
    return {CACHE: cache}


def tiny_model(
    family: str, attention: str = "kvcap", dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """Make a random model; weights depend on family and changes, but not on the attention."""
    from families import model_of

    return model_of(family, attention, dtype, **changes)


def small_options(name: str) -> dict[str, Any]:
    """Return options of a policy or preset for budgets of some tens of slots."""
    parts = policies()[name].parts.values()
    return {key: value for cls in parts for key, value in cls.small.items()}


def small_policy(name: str, config: Any, **changes: Any) -> Eviction:
    """Load a policy or preset with windows and pins for budgets of some tens of slots.

    A policy that needs a table gets one for the model. `changes` are options; those that the policy
    does not have are ignored.
    """
    known = {f.name for cls in policies()[name].parts.values() for f in fields(cls)}
    options = small_options(name) | {key: value for key, value in changes.items() if key in known}
    if "table" in known:
        shape = ModelShape.of(config.get_text_config(decoder=True))
        layers, heads = len(shape.capped), shape.heads
        scores = [[1 + (7 * i + 3 * j) % 5 for j in range(heads)] for i in range(layers)]
        file = Path(tempfile.gettempdir()) / f"kvcap-heads-{os.getuid()}-{layers}-{heads}.json"
        if not file.exists():
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"model": "tiny", "kind": "heads", "scores": scores}))
            part.replace(file)
        options["table"] = str(file)
    return load_policy(name, **options)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a small random model that can chat."""
    import tiny_chat

    return tiny_chat.save(tmp_path_factory.mktemp("chat"))


class Command:
    """Runs commands, and reads what they write."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        """Run a command; return its exit code, stdout and stderr."""
        given = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        self.monkeypatch.setattr(sys, "stdin", given)
        self.capsys.readouterr()  # what earlier steps of the test wrote
        code = cli.run(arguments)
        out, err = self.capsys.readouterr()
        return code, out, err

    def document(self, *arguments: str, code: int = 0, stdin: bytes = b"") -> Any:
        """Run a command with --json; return what it prints."""
        got, out, err = self(*arguments, "--json", stdin=stdin)
        assert got == code, err
        return json.loads(out)

    def refused(self, *arguments: str, code: int = 2, stdin: bytes = b"") -> str:
        """Run a command that is to be refused in one line of stderr; return that."""
        got, out, err = self(*arguments, stdin=stdin)
        assert (got, out) == (code, "")
        assert (err.startswith("kvcap: "), err.count("\n")) == (True, 1), err
        return err


@pytest.fixture
def kvcap(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return what runs commands."""
    return Command(capsys, monkeypatch)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Return a Ray cluster of two nodes."""
    from make import ray_cluster

    with ray_cluster() as made:
        yield made


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a browser with the `FLAGS` of the test file; its tests are skipped without one."""
    from make import chromium

    with chromium(*getattr(request.module, "FLAGS", ())) as made:
        yield made


@pytest.fixture
def alive() -> Iterator[Any]:
    """Return the caches and slots that are alive, while the cyclic collector rests."""
    from alive import watched

    with watched() as counted:
        yield counted


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random Llama model with the tokenizer of the built-in model."""
    from make import saved_model

    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Return the tokenizer of the built-in model."""
    return AutoTokenizer.from_pretrained(pocket.path())


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    def make(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, VOCABULARY, (batch, length), generator=generator)

    return make
