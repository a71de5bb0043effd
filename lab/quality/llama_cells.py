"""Measures cells of a sweep over a GGUF file by llama.cpp, where all layers share the slots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kvcap.evals.quality.answering import Prompt, recall_as_in_chats, split_at_question
from kvcap.evals.quality.llama_answering import answer, losses
from kvcap.evals.quality.prompts import has_template
from kvcap.evals.quality.scores import UNITS, cell_score
from kvcap.evals.reports import device_name, versions
from kvcap.lab.quality.cells import Cell, Setting
from kvcap.lab.quality.intervals import interval
from kvcap.lab.quality.measuring import answer_limit, answer_tokens
from kvcap.lab.quality.tasks import load_task, unit_of
from kvcap.runtime.backends.llamacpp.library import load_library
from kvcap.runtime.backends.llamacpp.model import LlamaModel
from kvcap.runtime.backends.llamacpp.rank import ranking_of
from kvcap.runtime.backends.llamacpp.runtime import LlamaRuntime
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.models.names import resolve
from kvcap.runtime.session.settings import end_tokens
from kvcap.runtime.types import SINKS

TYPE = "llama.cpp"  # in the place of a type of numbers, in settings of cells


class LlamaCells:
    """A measurer of cells of one GGUF file.

    Args:
        model: the file.
        threads: that compute; None: as many as there are free cores.
    """

    def __init__(self, model: str, threads: int | None = None) -> None:
        self.file, self.threads = Path(resolve(model)), threads

    @cached_property
    def tokenizer(self) -> Any:
        """Return the file's tokenizer."""
        return LlamaModel(load_library(), self.file, planned=True).tokenizer

    def check(self, settings: Sequence[Setting]) -> None:
        """Refuse policies that llama.cpp cannot run.

        Raises:
            UnsupportedModel, PolicyError: naming the policy.
        """
        for setting in settings:
            ranking_of(setting.policy, dict(setting.options))

    def runtime(self, setting: Setting, *, all_logits: bool) -> LlamaRuntime:
        """Return the file under a cap; only the policy itself pins sinks, as in papers."""
        return LlamaRuntime.from_file(
            self.file,
            setting.policy,
            CacheSettings(
                budget_tokens=setting.budget or setting.length + answer_tokens(setting),
                block_size=setting.block_size,
                positions=setting.positions,
                evict_every=1,
                kv_dtype=setting.kv_dtype,
            ),
            policy_options={SINKS: 0, **dict(setting.options)},
            threads=self.threads,
            recall_store=0,
            all_logits=all_logits,
        )

    def measure(self, setting: Setting, prompts: Sequence[Prompt]) -> Cell:
        """Run all samples of one cell."""
        task, start = load_task(setting.task), time.perf_counter()
        lengths = [sum(map(len, parts)) for _, parts in prompts]
        scored = not task.MAX_NEW_TOKENS
        runtime = self.runtime(setting, all_logits=scored)
        limit = answer_limit(runtime.tokenizer, setting, (sample for sample, _ in prompts))
        recall = recall_as_in_chats(runtime, setting.recall, setting.budget or 0)
        loop, scores = runtime.loop(), list[float]()
        for prompt in prompts:
            loop.cache.reset()
            if recall is not None:
                prompt = split_at_question(runtime.tokenizer, recall, prompt)
            sample, parts = prompt
            ids = [np.asarray(part, np.int64)[None] for part in parts]
            if scored:
                scores.append(float(np.mean(losses(loop, ids))))
            else:
                reply = answer(loop, ids, limit, end_tokens(runtime.generation), recall)
                text = runtime.tokenizer.backend_tokenizer.decode(reply)
                scores.append(task.score(sample, text))
        unit = UNITS[unit_of(task)]
        low, high = interval(scores, unit)
        return Cell(
            setting=setting,
            score=cell_score(scores, unit),
            ci_low=low,
            ci_high=high,
            kv_bytes=loop.cache.nbytes,
            seconds=round(time.perf_counter() - start, 2),
            device=device_name("cpu"),
            versions=versions() | {"llama.cpp": runtime.gguf.library.version},
            extra_bytes=0,
            scores=tuple(scores),
            unit=unit_of(task),
            plain=bool(task.MAX_NEW_TOKENS) and not has_template(runtime.tokenizer),
            prompt_tokens=(min(lengths), max(lengths)),
        )
