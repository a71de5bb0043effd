"""Measures one cell of a sweep: reads its prompts under the cap, answers them, scores replies."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvcap.evals.measure import eviction_ms, percentiles
from kvcap.evals.quality.cells import Cell, Setting
from kvcap.evals.quality.scores import UNITS, cell_score, interval
from kvcap.evals.quality.tasks import (
    Sample,
    answer_start,
    has_template,
    load_task,
    tasks,
    tokens_to_say,
    unit_of,
)
from kvcap.evals.reports import device_name, versions
from kvcap.policies import load_policy
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.recall.recall import Recall
from kvcap.runtime.recall.settings import RecallSettings
from kvcap.runtime.session.encoding import encode_behind
from kvcap.runtime.session.settings import end_tokens

# Parts of the plan that every cache has, whatever its policy.
COMMON = ("keys_values", "slot_positions", "rotation_table", "sliding_layers", "state_layers")
# A sample and its token ids, in the parts of `prompt_parts`.
Prompt = tuple[Sample, tuple[Sequence[int] | np.ndarray[Any, Any], ...]]


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
    recall = recall_of(runtime.tokenizer, setting.recall, setting.budget or 0)
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


def answer(
    model: Any,
    cache: BudgetCache,
    parts: Sequence[Tensor],
    limit: int,
    stops: Collection[int],
    recall: Recall | None = None,
) -> list[list[int]]:
    """Answer prompts greedily; each answer is cut before the token that ends it.

    Args:
        model: loaded with `attn_implementation='kvcap'`.
        cache: an empty cache.
        parts: parts of the prompts, [B, T] each. After each part, the cache is evicted down to its
            budget.
        limit: most tokens of an answer.
        stops: tokens that end an answer.
        recall: finds evicted text to read again before the question; needs a single prompt.
    """
    ends = torch.tensor(list(stops), device=parts[0].device)
    loop = BlockLoop(model, cache)
    if recall is not None:
        parts = with_recalled(loop, recall, parts)
    logits = [loop.prefill(ids) for ids in parts][-1]
    tokens = [logits.argmax(-1)]  # [B] each
    while len(tokens) < limit and not _ended(tokens, ends).all():
        tokens.append(loop.read(tokens[-1][:, None]).argmax(-1))
    rows: list[list[int]] = torch.stack(tokens, dim=1).tolist()
    return [_cut(row, stops) for row in rows]


def recall_of(tokenizer: Any, tokens: int, budget: int) -> Recall | None:
    """Return a finder of evicted text, as in conversations; None if no tokens are recalled."""
    if not tokens:
        return None
    recall = Recall(tokenizer, partial(encode_behind, tokenizer.backend_tokenizer), budget)
    recall.set(RecallSettings(tokens))
    return recall


def split_at_question(tokenizer: Any, recall: Recall, prompt: Prompt) -> Prompt:
    """Return a prompt in two parts, of which the second begins where text is recalled."""
    sample, parts = prompt
    if len(parts) > 1:
        return prompt
    ids = [int(token) for token in parts[0]]
    split = recall.place(ids, 0, answer_start(tokenizer, sample, ids))
    return sample, (ids[:split], ids[split:])


def with_recalled(loop: BlockLoop, recall: Recall, parts: Sequence[Tensor]) -> list[Tensor]:
    """Read a prompt up to its question; return the parts to read then, recalled text first."""
    whole, cache, split = torch.cat(list(parts), dim=1), loop.cache, parts[0].shape[1]
    ids = whole[0].tolist()
    if not split:
        return [whole]
    cache.regions.set_repeated(recall.dialogue.repeated_replies(ids))
    loop.prefill(whole[:, :split])
    recall.begin(0)
    recalled = recall.insert(cache, ids[split:], ids[:split], split)
    return [torch.tensor([[*recalled, *ids[split:]]], device=whole.device)]


@torch.inference_mode()
def losses(model: Any, cache: BudgetCache, ids: Tensor, start: int = 0) -> Tensor:
    """Return the losses in nats of all tokens but the first, float32 [B, T - 1 - start].

    Tokens are read block by block: each sees the slots held before its block, and the block up to
    itself.

    Args:
        model: loaded with `attn_implementation='kvcap'`.
        cache: an empty cache.
        ids: tokens of the texts [B, T].
        start: number of first tokens that are read like a prompt, and not scored.
    """
    loop, parts, done = BlockLoop(model, cache), list[Tensor](), start
    if start:
        loop.prefill(ids[:, :start])
    while done < ids.shape[1] - 1:
        block = ids[:, done : done + cache.room]
        after = ids[:, done + 1 : done + 1 + block.shape[1]]
        logits = loop.read_every(block)[:, : after.shape[1]]  # [B, T, V] in the model's numbers
        # Row by row, as float32 logits of a large vocabulary take much memory; and over the last
        # dimension, as a softmax over another one is many times slower.
        rows = zip(logits, after, strict=True)
        parts.append(torch.stack([cross_entropy(x.float(), y, reduction="none") for x, y in rows]))
        done += block.shape[1]
    return torch.cat(parts, dim=1)


def _ended(tokens: list[Tensor], ends: Tensor) -> Tensor:
    """Return which rows have an ending token, bool [B]."""
    return torch.isin(torch.stack(tokens, dim=1), ends).any(-1)


def _cut(row: list[int], stops: Collection[int]) -> list[int]:
    return row[: next((i for i, token in enumerate(row) if token in stops), len(row))]
