"""Runs a sweep over policies × budgets × positions × tasks × lengths, each cell under its own cap.

Writes `cells.jsonl`, a line as soon as a cell is finished, and `results.md`. A sweep that is run
again with the same folder and version of kvcap runs only the cells that are missing.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from kvcap.evals.measure import eviction_ms, percentiles
from kvcap.evals.quality.cells import (
    Cell,
    Options,
    Setting,
    add_cell,
    as_options,
    current_cells,
    wilson,
)
from kvcap.evals.quality.table import results
from kvcap.evals.quality.tasks import Sample, load_task, make_samples, prompt_ids
from kvcap.evals.reports import device_name, versions
from kvcap.policies import PINS, load_policy, policies
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime, parse_dtype
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.slot_format import KvDtype
from kvcap.runtime.models.files import load_config, load_tokenizer
from kvcap.runtime.models.names import resolve
from kvcap.runtime.types import Positions

ALL = "all"  # among the names of a sweep's policies
# What every cache holds, whatever its policy is.
COMMON = ("keys_values", "slot_positions", "rotation_table", "sliding_layers", "state_layers")
Prompts = tuple[list[Sample], Tensor]  # samples, and their token ids [samples, length]


@dataclass(frozen=True)
class Sweep:
    """What to measure. Policies that never evict run once, uncapped, whatever the budgets are."""

    policies: Sequence[str]
    budgets: Sequence[int]
    tasks: Sequence[str] = ("niah_single",)
    lengths: Sequence[int] = (4096,)
    positions: Sequence[Positions] = ("compact", "true")
    samples: int = 50
    model: str = "pocket"
    block_size: int = 128
    seed: int = 0
    dtype: str | None = None
    device: str | None = None
    batch_size: int = 8  # prompts read at once
    options: Mapping[str, Any] = field(default_factory=dict)  # for every policy that has them
    kv_dtype: KvDtype | None = None  # of what slots hold; None: the model's own numbers

    def check(self) -> None:
        """Refuse numbers and names that cannot be run.

        Raises:
            ValueError: naming the option.
        """
        for name in ("policies", "budgets", "tasks", "lengths", "positions"):
            if not getattr(self, name):
                raise ValueError(f"{name}: give at least one")
        numbers = {
            "budgets": min(self.budgets),
            "lengths": min(self.lengths),
            "samples": self.samples,
            "block_size": self.block_size,
            "batch_size": self.batch_size,
        }
        for name, least in numbers.items():
            if least < 1:
                raise ValueError(f"{name}: {least} will not work, give 1 or more")
        for mode in self.positions:
            if mode not in get_args(Positions):
                raise ValueError(f"positions: {mode!r} is not one of {get_args(Positions)}")
        for task in self.tasks:
            load_task(task)
        as_options(self.options)
        known = {option for name in spelled_out(self.policies) for option in options_of(name)}
        for option in self.options:
            if option not in known:
                close = difflib.get_close_matches(option, sorted(known), n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {sorted(known)}"
                raise ValueError(f"no policy of this sweep has an option {option!r}; {hint}")

    def settings(self, dtype: str) -> list[Setting]:
        """Every cell of the sweep once, in the order they are run."""
        found: dict[Setting, None] = {}
        for task, length, policy, budget, mode in product(
            self.tasks,
            self.lengths,
            spelled_out(self.policies),
            self.budgets,
            self.positions,
        ):
            capped = load_policy(policy).policy.evicts
            setting = Setting(
                model=self.model,
                dtype=dtype,
                task=task,
                length=length,
                policy=policy,
                positions=mode if capped else "true",  # the same as compact until an eviction
                budget=budget if capped else None,
                samples=self.samples,
                seed=self.seed,
                block_size=self.block_size,
                options=self._options_for(policy),
                kv_dtype=self.kv_dtype if capped else None,
            )
            found.setdefault(setting)
        return list(found)

    def _options_for(self, policy: str) -> Options:
        known = options_of(policy)
        return as_options({name: self.options[name] for name in self.options if name in known})


def spelled_out(names: Iterable[str]) -> list[str]:
    """Every policy once, 'all' as the names it stands for."""
    parts = ([*policies()] if name == ALL else [name] for name in names)
    return list(dict.fromkeys(name for part in parts for name in part))


def options_of(policy: str) -> set[str]:
    """Names of the options a policy or combination has, pins included; none if it never evicts."""
    eviction = load_policy(policy)
    if not eviction.policy.evicts:
        return set()
    return {name for part in eviction.components for name in part.options()}.union(PINS)


def run(
    sweep: Sweep, out: Path, on_cell: Callable[[int, int, Cell | None], None] | None = None
) -> list[Cell]:
    """Run what is missing in `out` and return all cells of the sweep.

    Args:
        sweep: what to measure.
        out: folder of `cells.jsonl` and `results.md`.
        on_cell: called with (cells finished, cells in all, the one just finished).

    Raises:
        ValueError, PolicyError, PlanInfeasible, UnsupportedModel, ModelNotFound: before anything
            runs, if any cell cannot.
    """
    sweep.check()
    where = resolve(sweep.model)
    config = load_config(where)
    dtype = parse_dtype(sweep.dtype) or getattr(config, "dtype", None) or torch.float32
    settings = sweep.settings(str(dtype).removeprefix("torch."))
    for setting in settings:
        new_cache(config, setting)
    path = out / "cells.jsonl"
    done = {cell.setting: cell for cell in current_cells(path)}  # others are measured anew
    missing = [setting for setting in settings if setting not in done]
    prompts = _prompts(load_tokenizer(where), missing) if missing else {}
    out.mkdir(parents=True, exist_ok=True)
    report = on_cell or (lambda *_: None)
    report(len(settings) - len(missing), len(settings), None)
    try:
        runtime = _load(sweep, missing[0]) if missing else None
        for setting in missing:
            assert runtime is not None
            done[setting] = measure(runtime, setting, prompts, sweep.batch_size)
            add_cell(path, done[setting])
            report(sum(s in done for s in settings), len(settings), done[setting])
    finally:
        (out / "results.md").write_text(results(done.values()))
    return [done[setting] for setting in settings]


def new_cache(config: Any, setting: Setting) -> BudgetCache:
    """A cache for one cell, not yet allocated; one that never evicts holds prompt and answer."""
    return BudgetCache(
        config,
        setting.budget or setting.length + load_task(setting.task).MAX_NEW_TOKENS,
        setting.block_size,
        load_policy(setting.policy, **dict(setting.options)),
        positions=setting.positions,
        kv_dtype=setting.kv_dtype,
    )


def measure(
    runtime: Runtime, setting: Setting, prompts: dict[tuple[str, int], Prompts], batch: int
) -> Cell:
    """Run all samples of one cell."""
    model, task = runtime.model, load_task(setting.task)
    samples, ids = prompts[setting.task, setting.length]
    start, texts = time.perf_counter(), list[str]()
    for rows in ids.split(batch):
        cache = new_cache(model.config, setting)
        said = answer(model, cache, rows.to(model.device), task.MAX_NEW_TOKENS)
        texts += [runtime.tokenizer.decode(row, skip_special_tokens=True) for row in said]
    seconds = time.perf_counter() - start
    right = sum(task.is_right(s, text) for s, text in zip(samples, texts, strict=True))
    low, high = wilson(right, len(samples))
    sizes = new_cache(model.config, setting).layout.nbytes(1, model.dtype)
    return Cell(
        setting=setting,
        score=right / len(samples),
        ci_low=low,
        ci_high=high,
        kv_bytes=sum(sizes.values()),
        seconds=round(seconds, 2),
        device=device_name(model.device),
        versions=versions(),
        scoring_ms=_scoring_ms(model, setting, ids[:1]),
        extra_bytes=sum(size for name, size in sizes.items() if name not in COMMON),
    )


def _scoring_ms(model: Any, setting: Setting, ids: Tensor) -> dict[str, float] | None:
    """Milliseconds of eviction per block for one sequence; None for a policy that never evicts."""
    cache = new_cache(model.config, setting)
    if not cache.eviction.policy.evicts:
        return None
    return percentiles(eviction_ms(model, cache, ids.to(model.device)))


def answer(model: Any, cache: BudgetCache, ids: Tensor, limit: int) -> list[list[int]]:
    """Greedy answers to the prompts `ids` [B, T], each cut before the token that ends it."""
    config = model.generation_config.eos_token_id
    ends = torch.tensor([] if config is None else config, device=ids.device).flatten()
    loop = BlockLoop(model, cache)
    logits = loop.prefill(ids)
    said = [logits.argmax(-1)]  # [B] each
    while len(said) < limit and not _ended(said, ends).all():
        said.append(loop.read(said[-1][:, None]).argmax(-1))
    rows: list[list[int]] = torch.stack(said, dim=1).tolist()
    stops = set(ends.tolist())
    return [_cut(row, stops) for row in rows]


def _ended(said: list[Tensor], ends: Tensor) -> Tensor:
    """Which rows hold an ending token. Bool [B]."""
    return torch.isin(torch.stack(said, dim=1), ends).any(-1)


def _cut(row: list[int], stops: set[int]) -> list[int]:
    return row[: next((i for i, token in enumerate(row) if token in stops), len(row))]


def _prompts(tokenizer: Any, settings: Iterable[Setting]) -> dict[tuple[str, int], Prompts]:
    """The samples of every task and length, made once and read by every policy."""
    found: dict[tuple[str, int], Prompts] = {}
    for s in settings:
        if (s.task, s.length) not in found:
            samples = make_samples(s.task, tokenizer, s.length, s.samples, s.seed)
            ids = torch.tensor([prompt_ids(tokenizer, sample) for sample in samples])
            assert ids.shape == (s.samples, s.length), "a task must keep to the length"
            found[s.task, s.length] = samples, ids
    return found


def _load(sweep: Sweep, first: Setting) -> Runtime:
    return Runtime.from_pretrained(
        sweep.model,
        kv_budget_tokens=first.budget,
        block_size=sweep.block_size,
        dtype=sweep.dtype,
        device=sweep.device,
        positions=first.positions,
    )
