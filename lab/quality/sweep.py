"""Runs a sweep over policies × budgets × positions × tasks × lengths, each cell under its own cap.

It writes `cells.jsonl`, with a line for each cell as soon as it is finished, and `results.md`. A
sweep that is run again with the same folder and version of kvcap runs only the missing cells.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NoReturn, get_args

import numpy as np
import torch
from transformers.utils import logging

from kvcap import dtypes
from kvcap.evals.quality.answering import Prompt
from kvcap.evals.quality.prompts import PLAIN, Question, has_template, prompt_parts
from kvcap.evals.quality.tune import spelled_out
from kvcap.evals.reports import versions
from kvcap.lab.quality import llama_cells
from kvcap.lab.quality.cells import (
    CELLS,
    Cell,
    Options,
    Setting,
    add_cell,
    as_options,
    current_cells,
    mend,
)
from kvcap.lab.quality.measuring import measure, new_cache
from kvcap.lab.quality.table import describe, results
from kvcap.lab.quality.tasks import is_placed, load_task, make_samples
from kvcap.lab.quality.workers import Failed, Here, spread
from kvcap.lab.quality.workers.crew import Crew
from kvcap.policies import PINS, load_policy
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.layout import default_positions
from kvcap.runtime.cache.slot_format import SlotFormat
from kvcap.runtime.errors import CellsFailed, first_line
from kvcap.runtime.files import locked
from kvcap.runtime.memory.free_memory import process_bytes
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.files import load_config, load_tokenizer
from kvcap.runtime.models.gguf import is_gguf, read_gguf
from kvcap.runtime.models.names import resolve
from kvcap.runtime.models.weights import read_headers, weigh
from kvcap.runtime.recall.settings import RecallSettings
from kvcap.runtime.types import DEFAULT_POSITIONS, Positions

HERE = Crew()
Key = tuple[str, int, float | None, Question | None]  # settings that prompts depend on


@dataclass(frozen=True)
class Sweep:
    """The settings of a sweep; policies that never evict run once, whatever the budgets."""

    policies: Sequence[str]
    budgets: Sequence[int]
    tasks: Sequence[str] = ("niah_single",)
    lengths: Sequence[int] = (4096,)
    positions: Sequence[Positions] = ()  # (): the mode that a chat would use
    samples: int = 50
    model: str = "pocket"
    block_size: int = 128
    seed: int = 0
    dtype: str | None = None
    device: str | None = None
    batch_size: int = 8  # prompts read at once
    options: Mapping[str, Any] = field(default_factory=dict)  # for all policies that have them
    kv_dtype: str | None = None  # type of slots; None: the model's own
    questions: Sequence[Question] = ("aware",)  # see `Setting.question`
    depths: Sequence[float | None] = (None,)  # see `Setting.depth`
    max_new_tokens: int | None = None  # most tokens of an answer; None: by the task
    recalls: Sequence[str] = ("off",)  # evicted text read again: 'off', 'auto' or tokens
    by_llamacpp: bool = False  # whether llama.cpp's library runs the model, a GGUF file

    def check(self) -> None:
        """Refuse numbers and names that cannot be run.

        Raises:
            ValueError: naming the option.
        """
        for name in (
            "policies",
            "budgets",
            "tasks",
            "lengths",
            "questions",
            "depths",
            "recalls",
        ):
            if not getattr(self, name):
                raise ValueError(f"{_option(name)}: give at least one")
        numbers = {
            "budgets": min(self.budgets),
            "lengths": min(self.lengths),
            "samples": self.samples,
            "block_size": self.block_size,
            "batch_size": self.batch_size,
            "max_new_tokens": 1 if self.max_new_tokens is None else self.max_new_tokens,
        }
        for name, least in numbers.items():
            if least < 1:
                raise ValueError(f"{_option(name)}: {least} will not work, give 1 or more")
        for mode in self.positions:
            if mode not in get_args(Positions):
                raise ValueError(f"--positions: {mode!r} is not one of {get_args(Positions)}")
        for question in self.questions:
            if question not in get_args(Question):
                raise ValueError(f"--question: {question!r} is not one of {get_args(Question)}")
        for given in self.recalls:
            RecallSettings.parse(given)
        fixed = [depth for depth in self.depths if depth is not None]
        for depth in fixed:
            if not 0 <= depth <= 1:
                raise ValueError(f"--depths: {depth} is not between 0 (start) and 1 (end)")
        load_task.cache_clear()  # files of tasks may have changed since an earlier sweep
        for task in self.tasks:
            if fixed and not is_placed(load_task(task)):
                raise ValueError(
                    f"--depths: task {task!r} hides nothing at one place; leave out the task or "
                    "the depths"
                )
        as_options(self.options)
        known = {option for name in spelled_out(self.policies) for option in options_of(name)}
        for option in self.options:
            if option not in known:
                close = difflib.get_close_matches(option, sorted(known), n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {sorted(known)}"
                raise ValueError(f"no policy of this sweep has an option {option!r}; {hint}")

    def settings(self, dtype: str, usual: Positions = DEFAULT_POSITIONS) -> list[Setting]:
        """Return the setting of every cell once, in the order of running.

        Args:
            dtype: the type of numbers.
            usual: how positions are kept where the sweep does not say it.
        """
        modes = self.positions or (usual,)
        unique: dict[Setting, None] = {}
        for task, length, question, depth, policy, budget, mode, recall in product(
            self.tasks,
            self.lengths,
            self.questions,
            self.depths,
            spelled_out(self.policies),
            self.budgets,
            modes,
            map(RecallSettings.parse, self.recalls),
        ):
            capped, asks = load_policy(policy).policy.evicts, load_task(task).MAX_NEW_TOKENS > 0
            setting = Setting(
                model=self.model,
                dtype=dtype,
                task=task,
                length=length,
                policy=policy,
                positions=mode if capped else "true",  # equal to compact without eviction
                budget=budget if capped else None,
                samples=self.samples,
                seed=self.seed,
                block_size=self.block_size,
                options=self._options_for(policy),
                kv_dtype=self.kv_dtype if capped else None,
                question=question if asks else None,
                depth=depth,
                max_new_tokens=self.max_new_tokens if asks else None,
                data=getattr(load_task(task), "digest", None),
                recall=recall.limit(budget) if capped and asks else 0,
            )
            unique.setdefault(setting)
        return list(unique)

    def _options_for(self, policy: str) -> Options:
        known = options_of(policy)
        return as_options({name: self.options[name] for name in self.options if name in known})


def options_of(policy: str) -> set[str]:
    """Return the names of a policy's options, pins included; none if it never evicts."""
    eviction = load_policy(policy)
    if not eviction.policy.evicts:
        return set()
    return {name for part in eviction.components for name in part.options()}.union(PINS)


def run(
    sweep: Sweep,
    out: Path,
    on_cell: Callable[[int, int, Cell | None], None] = lambda *_: None,
    *,
    crew: Crew = HERE,
    compared: Sequence[str] = (),
    note: Callable[[str], None] = lambda _: None,
) -> list[Cell]:
    """Run the cells that are missing in `out`, and return all cells of the sweep.

    A cell is written as soon as it is finished, whatever happens to the others.

    Args:
        sweep: the settings of the sweep.
        out: the folder of `cells.jsonl` and `results.md`.
        on_cell: called with (cells finished, cells in all, the one just finished).
        crew: the workers that measure cells.
        compared: policies, the first of which `results.md` compares with each of the others.
        note: called with a sentence on cells that fail, workers that die, a file that was cut
            short, a model without a chat template, and the weights of a GGUF file.

    Raises:
        ValueError, PolicyError, PlanInfeasible, UnsupportedModel, ModelNotFound, ExtraMissing: a
            cell cannot be run, or another sweep runs in `out`; nothing is run.
        CellsFailed: some cells could not be measured; the others are kept.
        WorkersLost: workers died before they were ready, until none was left.
    """
    sweep.check()
    crew.check()
    _check_compared(compared, spelled_out(sweep.policies))
    settings = _checked_settings(sweep, crew)
    path = out / CELLS
    known = {cell.setting for cell in current_cells(path)}  # cells of other versions run again
    missing = [setting for setting in settings if setting not in known]
    prompts: dict[Key, list[Prompt]] = {}
    if missing:
        tokenizer = _tokenizer(sweep, settings[0].dtype, note)
        if not has_template(tokenizer) and any(setting.question for setting in missing):
            note(PLAIN.format(sweep.model))
        prompts = _prompts(tokenizer, missing)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / ".lock", partial(_refuse, out)):
        if mend(path):
            note(f"{path}: the last line was cut short and is dropped; its cell is run again")
        done = {cell.setting: cell for cell in current_cells(path)}
        missing = [setting for setting in missing if setting not in done]
        on_cell(len(settings) - len(missing), len(settings), None)
        failed = list[str]()
        try:
            threads, timed = crew.local_threads(sweep.device), crew.alone(sweep.device)
            job = CellJob(sweep, settings[0], prompts, threads, timed)
            engine = crew.start(job, sweep.device) if missing else Here(job)
            with closing(spread(engine, missing, lambda s: s, note, describe)) as finished:
                for setting, result in finished:
                    if isinstance(result, Failed):
                        failed.append(f"{describe(setting)}: {first_line(result.error)}")
                        note(f"failed: {failed[-1]}")
                        continue
                    add_cell(path, result)
                    done[setting] = result
                    on_cell(sum(s in done for s in settings), len(settings), result)
        finally:
            (out / "results.md").write_text(results(done.values(), compared))
    cells = [done[setting] for setting in settings if setting in done]
    if failed:
        raise CellsFailed(
            f"{len(failed)} of {len(settings)} cells failed ({'; '.join(failed)}); the same "
            "command runs them again, and no other",
            cells,
        )
    return cells


def _checked_settings(sweep: Sweep, crew: Crew) -> list[Setting]:
    """Return the settings of all cells, once each of them can be run.

    Raises:
        PlanInfeasible, UnsupportedModel, PolicyError: one cannot.
    """
    if sweep.by_llamacpp:
        settings = sweep.settings(llama_cells.TYPE)
        llama_cells.LlamaCells(sweep.model).check(settings)
        return settings
    where = resolve(sweep.model)
    config = load_config(where)
    dtype = dtypes.of_model(sweep.dtype, config)
    usual = usual_positions(sweep, config)
    settings = sweep.settings(str(dtype).removeprefix("torch."), usual)
    layouts = [new_cache(config, setting).layout for setting in settings]
    if crew.local_workers(sweep.device) > 1:
        caches = max(sum(layout.nbytes(sweep.batch_size, dtype).values()) for layout in layouts)
        weights = weigh(config, dtype, read_headers(where)).nbytes
        crew.check_memory(sweep.device, process_bytes() + weights + caches)
    return settings


def usual_positions(sweep: Sweep, config: Any) -> Positions:
    """Return the mode of positions of a sweep's first cells: its own, or a chat's."""
    if sweep.positions:
        return sweep.positions[0]
    shape = ModelShape.of(config.get_text_config(decoder=True))
    slots, fixed = max(sweep.budgets) + sweep.block_size, SlotFormat.of(sweep.kv_dtype).unrotated
    return default_positions(shape, slots, unchanging=fixed)


def _tokenizer(sweep: Sweep, dtype: str, note: Callable[[str], None]) -> Any:
    """Return the model's tokenizer; say what the weights of a GGUF file become in PyTorch."""
    if sweep.by_llamacpp:
        return llama_cells.LlamaCells(sweep.model).tokenizer
    where = resolve(sweep.model)
    if is_gguf(where):
        size = weigh(load_config(where), dtypes.parse(dtype) or torch.float32).nbytes
        note(f"{sweep.model}: {read_gguf(where).becomes(size, dtype)}")
    return load_tokenizer(where)


def _option(name: str) -> str:
    """Return the command's option that sets a field of `Sweep`."""
    singular = {"questions": "question", "recalls": "recall"}
    return f"--{singular.get(name, name).replace('_', '-')}"


def _check_compared(compared: Sequence[str], policies: Sequence[str]) -> None:
    if len(compared) == 1:
        raise ValueError(f"--compare: {compared[0]!r} alone; give two policies or more")
    for policy in compared:
        if policy not in policies:
            raise ValueError(f"--compare: {policy!r} is not among the policies of this sweep")


def _refuse(out: Path) -> NoReturn:
    raise ValueError(f"another sweep is running in {out}; wait for it, or give another --out")


@dataclass
class CellJob:
    """The job of a sweep's worker, which loads the model once, and then measures cells."""

    sweep: Sweep
    first: Setting  # the setting by which the model's memory is planned
    prompts: Mapping[Key, list[Prompt]] = field(default_factory=dict)  # the prompts of all cells
    threads: int | None = None  # threads of the CPU
    timed: bool = True  # whether evictions are timed, see `measure`
    quiet: bool = field(default_factory=lambda: not logging.is_progress_bar_enabled())
    """Says whether transformers prints nothing, as in the process that began the sweep."""
    version: str = field(default_factory=lambda: versions()["kvcap"])  # version that began it
    _runtime: Runtime | None = field(default=None, init=False, repr=False)
    _llama: llama_cells.LlamaCells | None = field(default=None, init=False, repr=False)

    def load(self, worker: int) -> None:
        """Load the model; with several GPUs, each worker uses the next one."""
        if self.version != versions()["kvcap"]:
            raise ValueError(
                f"a worker has kvcap {versions()['kvcap']}, and the sweep {self.version}; install "
                "the same version everywhere"
            )
        if self.quiet:
            logging.set_verbosity_error()
            logging.disable_progress_bar()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.sweep.by_llamacpp:
            self._llama = llama_cells.LlamaCells(self.sweep.model, torch.get_num_threads())
            return
        if worker and self.sweep.device in (None, "cuda") and torch.cuda.is_available():
            torch.cuda.set_device(worker % torch.cuda.device_count())
        self._runtime = Runtime.from_pretrained(
            self.sweep.model,
            budget_tokens=self.first.budget,
            block_size=self.sweep.block_size,
            dtype=self.sweep.dtype,
            device=self.sweep.device,
            positions=self.first.positions,
        )

    def run(self, setting: Setting) -> Cell:
        """Measure a cell."""
        prompts = self.prompts[_key(setting)]
        if self._llama is not None:
            return self._llama.measure(setting, prompts)
        assert self._runtime is not None, "a worker loads first"
        cell = measure(self._runtime, setting, prompts, self.sweep.batch_size, self.timed)
        if self._runtime.model.device.type == "cuda":
            torch.cuda.empty_cache()  # leaves memory to other workers on the same GPU
        return cell


def _prompts(tokenizer: Any, settings: Iterable[Setting]) -> dict[Key, list[Prompt]]:
    """Return the prompts by task, length, depth and question, which are equal for all policies."""
    threads = torch.get_num_threads()  # tokenizers release Python's lock while they work
    made = cache(partial(make_samples, tokenizer=tokenizer, threads=threads))
    prompts: dict[Key, list[Prompt]] = {}
    with ThreadPoolExecutor(threads) as pool:
        for s in settings:
            if (key := _key(s)) not in prompts:
                samples = made(s.task, length=s.length, count=s.samples, seed=s.seed, depth=s.depth)
                parts = pool.map(partial(prompt_parts, tokenizer, question=s.question), samples)
                prompts[key] = [
                    (sample, tuple(np.array(ids, dtype=np.int32) for ids in part))
                    for sample, part in zip(samples, parts, strict=True)
                ]
    return prompts


def _key(s: Setting) -> Key:
    return s.task, s.length, s.depth, s.question
