"""Measures one cell of a sweep: reads its prompts under the cap, answers them, scores replies."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcap.evals.measure import percentiles
from kvcap.evals.quality.answering import (
    Prompt,
    answer,
    losses,
    recall_as_in_chats,
    split_at_question,
)
from kvcap.evals.quality.prompts import Sample, has_template, tokens_to_say
from kvcap.evals.quality.scores import UNITS, cell_score
from kvcap.evals.reports import device_name, versions
from kvcap.lab.eviction_time import eviction_ms
from kvcap.lab.quality.cells import Cell, Setting
from kvcap.lab.quality.intervals import interval
from kvcap.lab.quality.tasks import load_task, tasks, unit_of
from kvcap.policies import load_policy
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.session.settings import end_tokens

# Parts of the plan that every cache has, whatever its policy.
COMMON = ("keys_values", "slot_positions", "rotation_table", "sliding_layers", "state_layers")


def new_cache(config: Any, setting: Setting, evict_every: int = 1) -> BudgetCache:
    """Make a cache for one cell, not yet allocated; one that never evicts holds prompt and answer.

    Only the policy itself pins sinks, or `sink_tokens` among the options, as in the papers.
    """
    return BudgetCache(
        config,
        setting.budget or setting.length + answer_tokens(setting),
        setting.block_size,
        load_policy(setting.policy, **dict(setting.options)).plain(),
        positions=setting.positions,
        evict_every=evict_every,
        kv_dtype=setting.kv_dtype,
    )


def answer_tokens(setting: Setting) -> int:
    """Return the most tokens of an answer, by the setting or the task."""
    return setting.max_new_tokens or load_task(setting.task).MAX_NEW_TOKENS


def answer_limit(tokenizer: Any, setting: Setting, samples: Iterable[Sample]) -> int:
    """Return the number of tokens after which the answers of a cell are cut.

    A base model does not end its answer. For kvcap's own tasks, its limit is therefore what naming
    the answers takes.
    """
    limit = answer_tokens(setting)
    written = setting.task in tasks()  # a file's task may score all of a reply
    if setting.max_new_tokens is not None or has_template(tokenizer) or not written:
        return limit
    return min(limit, max(tokens_to_say(tokenizer, sample) for sample in samples))


def measure(
    runtime: Runtime, setting: Setting, prompts: Sequence[Prompt], batch: int, timed: bool = True
) -> Cell:
    """Run all samples of one cell.

    Args:
        runtime: the model; its own cache is not used.
        setting: the cell's setting.
        prompts: samples in order, with their token ids.
        batch: most prompts that are read at once.
        timed: also time evictions; times mean nothing if others compute on the same GPU.
    """
    model, task = runtime.model, load_task(setting.task)
    ends = end_tokens(runtime.generation)
    lengths = [sum(map(len, prompt)) for _, prompt in prompts]
    assert max(lengths) <= setting.length, "a task must keep to the length"
    limit = answer_limit(runtime.tokenizer, setting, (sample for sample, _ in prompts))
    scores, start = [0.0] * len(prompts), time.perf_counter()
    recall = recall_as_in_chats(runtime, setting.recall, setting.budget or 0)
    for indices in batches([parts for _, parts in prompts], 1 if recall else batch):
        some = [prompts[i] for i in indices]
        if recall:
            some = [split_at_question(runtime.tokenizer, recall, prompt) for prompt in some]
        rows = zip(*(parts for _, parts in some), strict=True)
        read = [torch.from_numpy(np.stack(row)) for row in rows]
        parts = [ids.to(model.device).long() for ids in read]  # [B, T] each
        cache = new_cache(model.config, setting)
        if not task.MAX_NEW_TOKENS:
            before = sum(part.shape[1] for part in parts[:-1])  # tokens that are not scored
            values = losses(model, cache, torch.cat(parts, dim=1), before).mean(-1).tolist()
        else:
            replies = answer(model, cache, parts, limit, ends, recall)
            texts = [runtime.tokenizer.decode(row, skip_special_tokens=True) for row in replies]
            values = [task.score(prompts[i][0], t) for i, t in zip(indices, texts, strict=True)]
        for i, score in zip(indices, values, strict=True):
            scores[i] = score
    seconds = time.perf_counter() - start
    unit = UNITS[unit_of(task)]
    low, high = interval(scores, unit)
    sizes = new_cache(model.config, setting).layout.nbytes(1, model.dtype)
    first = torch.from_numpy(np.concatenate(prompts[0][1])).long()[None]
    return Cell(
        setting=setting,
        score=cell_score(scores, unit),
        ci_low=low,
        ci_high=high,
        kv_bytes=sum(sizes.values()),
        seconds=round(seconds, 2),
        device=device_name(model.device),
        versions=versions(),
        scoring_ms=_scoring_ms(model, setting, first) if timed else None,
        extra_bytes=sum(size for name, size in sizes.items() if name not in COMMON),
        scores=tuple(scores),
        unit=unit_of(task),
        plain=bool(task.MAX_NEW_TOKENS) and not has_template(runtime.tokenizer),
        prompt_tokens=(min(lengths), max(lengths)),
    )


def batches(prompts: Sequence[tuple[Sized, ...]], size: int) -> Iterator[list[int]]:
    """Yield the indices of prompts to read at once: at most `size`, with parts of equal lengths."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, parts in enumerate(prompts):
        alike.setdefault(tuple(map(len, parts)), []).append(i)
    for group in alike.values():
        for first in range(0, len(group), size):
            yield group[first : first + size]


def _scoring_ms(model: Any, setting: Setting, ids: Tensor) -> dict[str, float] | None:
    """Return milliseconds of eviction per block of one sequence; None if nothing is evicted."""
    cache = new_cache(model.config, setting)
    if not cache.eviction.policy.evicts:
        return None
    return percentiles(eviction_ms(model, cache, ids.to(model.device)))
