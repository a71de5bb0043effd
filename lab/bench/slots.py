"""Times slots of fewer bits, and counts what they hold, beside slots of the model's own floats.

Each row is a cache with one `--kv-dtype`: with as many slots as the floats have (`equal` is
'slots'), or as many as fit into the floats' bytes ('bytes'). All caches are filled first. In
each round every cache reads `lengths` more tokens and then `steps` tokens one by one. So slots are
always full, and all rows do equal work. `token_ms` and `prefill_tok_s` are of the rounds; each
ratio is that of the column before it to the floats, the median over rounds.

PyTorch runs on a GPU if there is one. On a CPU, times are processor time on one thread, so that
other processes matter little. With `--backend onnxruntime` rows are of exports with the first of
`weights`, with int8 slots at compact and at true positions; they evict 64 tokens at a time, and
`steps` is rounded up to a multiple of that. Reads `budgets`, `block_size`, `repeats` (rounds),
`steps`, `model`, `backend`, `weights`, `files` (for exports) and the first of `lengths` and of
`policies`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import percentiles
from kvcap.evals.reports import device_name, versions
from kvcap.lab.bench.cpu import BACKENDS, check_backend, exported
from kvcap.lab.bench.gpu import milliseconds
from kvcap.lab.random_models import SHAPES, directory, random_model
from kvcap.runtime.backends.onnxruntime.plan import plan_of
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.formats import CHOICES
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.files import load_config, load_model
from kvcap.runtime.models.names import resolve
from kvcap.runtime.planning.plan import MemoryPlan, Sizes
from kvcap.runtime.types import ATTENTION, Positions

GPU = torch.cuda.is_available()
DEFAULTS = {
    "lengths": (8192,) if GPU else (256,), "budgets": (2048,) if GPU else (1024,),
    "block_size": 512 if GPU else 128, "steps": 64 if GPU else 16, "repeats": 5 if GPU else 3,
    "model": "random-3b" if GPU else "random-360m", "files": Path("out/slots"),
}  # fmt: skip
COLUMNS = (
    "kv_dtype", "positions", "equal", "slots", "cache_bytes", "token_ms", "token_ratio",
    "prefill_tok_s", "prefill_ratio",
)  # fmt: skip
COMPACT: Positions = "compact"  # the only positions that slots of every type support
WARM_UPS, WARM_TOKENS = 2, 4  # prompts over full slots, and tokens after each, to capture graphs


@dataclass(frozen=True)
class TimedCache:
    """A cache with slots of one `kv_dtype`, and the loop that reads into it."""

    kv_dtype: str
    positions: str
    equal: str  # 'slots' or 'bytes', of which it has as many as float slots
    slots: int
    block: int
    loop: Any
    prompt: Any  # [1, length]
    clock: Callable[[Callable[[], Any]], float]
    every: int = 1  # tokens that are evicted at once

    def fill(self) -> None:
        """Read until every slot is in use, and warm up."""
        print(f"kvcap: filling {self.slots:,} {self.kv_dtype} slots ...", file=sys.stderr)
        while self.loop.cache.seen < self.slots + 2 * self.block:
            self.loop.prefill(self.prompt)
        for _ in range(WARM_UPS):
            self.measure(WARM_TOKENS)

    def measure(self, steps: int) -> dict[str, float]:
        """Time a prompt and `steps` tokens.

        Returns:
            Milliseconds per token, and tokens per second of the prompt, by column.
        """
        length, token = self.prompt.shape[1], self.prompt[:, :1]
        took = self.clock(partial(self.loop.prefill, self.prompt))

        def tokens() -> None:
            for _ in range(steps):
                self.loop.read(token)

        return {"token_ms": self.clock(tokens) / steps, "prefill_tok_s": length / took * 1e3}


def run(options: BenchmarkOptions) -> Result:
    """Return a row for the floats of every budget, and two for every other type of slots.

    Raises:
        ValueError: a name is unknown, or a size is below 1.
        PeerFailed: the model cannot be exported.
    """
    check_backend(options.backend, BACKENDS[1:])  # llama.cpp's slots are of its own types
    sizes = options.lengths[0], options.block_size, options.repeats, options.steps
    if min(*sizes, *options.budgets) < 1:
        raise ValueError("tokens, slots, blocks, rounds and steps are at least 1")
    exports = options.backend == "onnxruntime"
    device = "cuda" if GPU and not exports else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    machine = {"device": device_name(device), "versions": versions()}
    setting = {
        "model": options.model,
        "weights": options.weights[0] if exports else None,
        "policy": options.policies[0],
        "block_size": options.block_size,
        "n": options.lengths[0],
        "turns": options.repeats,
        **machine,
    }
    rows: list[dict[str, Any]] = []
    for all_ in _of_exports(options) if exports else _in_pytorch(options, device):
        for slots in all_:
            slots.fill()
        every = all_[0].every
        steps = -(-options.steps // every) * every
        rounds = [[slots.measure(steps) for slots in all_] for _ in range(options.repeats)]
        rows += [{**row, "steps": steps, **setting} for row in _rows(all_, rounds)]
    return Result("slots", COLUMNS, rows, machine)


def _rows(
    all_: Sequence[TimedCache], rounds: Sequence[Sequence[Mapping[str, float]]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each cache of `all_`, floats first; `rounds` have one figure per cache."""
    for i, slots in enumerate(all_):
        figures: dict[str, Any] = {}
        for name in ("token_ms", "prefill_tok_s"):
            figures[name] = percentiles([measured[i][name] for measured in rounds])
            ratio = median(measured[i][name] / measured[0][name] for measured in rounds)
            figures[f"{name.partition('_')[0]}_ratio"] = ratio
        yield {
            "kv_dtype": slots.kv_dtype,
            "positions": slots.positions,
            "equal": slots.equal,
            "slots": slots.slots,
            "cache_bytes": slots.loop.cache.nbytes,
            **figures,
            "execution": slots.loop.execution,
        }


def _in_pytorch(options: BenchmarkOptions, device: str) -> Iterator[list[TimedCache]]:
    """Yield for every budget the caches of one model."""
    if options.model in SHAPES:
        model = random_model(options.model, device)
    else:
        where = resolve(options.model)
        config = load_config(where)
        model = load_model(where, config, getattr(config, "dtype", None) or torch.float32)
        model = model.to(device)
    model.set_attn_implementation(ATTENTION)
    shape = ModelShape.of(model.config.get_text_config(decoder=True))
    prompt = torch.tensor([_tokens(options, shape.vocabulary)], device=device)
    floats = str(model.dtype).removeprefix("torch.")
    policy, block = options.policies[0], options.block_size

    def made(kind: str | None, equal: str, slots: int) -> TimedCache:
        cache = BudgetCache(
            model.config, slots, block, policy, positions=COMPACT, kv_dtype=kind
        ).allocate(1, model.dtype, device)
        clock = milliseconds if device == "cuda" else process_milliseconds
        loop = BlockLoop(model, cache)
        return TimedCache(kind or floats, COMPACT, equal, slots, block, loop, prompt, clock)

    for budget in options.budgets:
        caches = [made(None, "slots", budget)]
        held = caches[0].loop.cache.nbytes
        for kind in CHOICES:
            fitting = MemoryPlan.of(
                model.config,
                policy=policy,
                kv_budget=held,
                block_size=block,
                dtype=model.dtype,
                positions=COMPACT,
                kv_dtype=kind,
            )
            caches.append(made(kind, "slots", budget))
            caches.append(made(kind, "bytes", fitting.budget_tokens))
        yield caches


def _of_exports(options: BenchmarkOptions) -> Iterator[list[TimedCache]]:
    """Yield for every budget exports of one model, as a graph has a fixed number of slots."""
    model, block = directory(options.model, options.files), options.block_size

    def made(
        kind: str | None, positions: str, equal: str, slots: int
    ) -> tuple[TimedCache, OrtRuntime]:
        settings = {
            "--dtype": options.weights[0],
            "--policy": options.policies[0],
            "--budget-tokens": str(slots),
            "--block-size": str(block),
            "--positions": positions,
            **({"--kv-dtype": kind} if kind else {}),
        }
        runtime = OrtRuntime.from_directory(exported(model, options.files, settings), threads=1)
        prompt = runtime.token_ids(_tokens(options, runtime.manifest.model["vocabulary"]))
        name, every = kind or runtime.plan.dtype, runtime.every
        cache = TimedCache(
            name,
            positions,
            equal,
            slots,
            block,
            runtime.loop(),
            prompt,
            process_milliseconds,
            every,
        )
        return cache, runtime

    for budget in options.budgets:
        floats, runtime = made(None, COMPACT, "slots", budget)
        caches = [floats]
        for positions in (COMPACT, "true"):
            same, small = made("int8", positions, "slots", budget)
            more = _slots_within(runtime.plan.cache_bytes, small)
            caches += [same, made("int8", positions, "bytes", more)[0]]
        yield caches


def _slots_within(nbytes: int, runtime: OrtRuntime) -> int:
    """Return how many slots of an export of the same kind take `nbytes`."""
    plan = runtime.plan
    # Slots for a block take as many bytes as others, so two plans give the bytes of one.
    fewer = Sizes(CacheSettings(block_size=plan.block_size // 2))
    less = plan_of(runtime.manifest, fewer)
    step = (plan.cache_bytes - less.cache_bytes) // (plan.block_size - less.block_size)
    return plan.budget_tokens + (nbytes - plan.cache_bytes) // step


def process_milliseconds(work: Callable[[], Any]) -> float:
    """Return the milliseconds of processor time that work takes."""
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1e3


def _tokens(options: BenchmarkOptions, vocabulary: int) -> list[int]:
    """Return a prompt of random tokens."""
    return Random(0).choices(range(vocabulary), k=options.lengths[0])
