"""Reads a prompt under a cap and answers it, or scores a text, with a model in PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvcap.evals.quality.prompts import Sample, answer_start
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.recall.recall import Recall
from kvcap.runtime.recall.settings import RecallSettings
from kvcap.runtime.session.engine import recall_of

# A sample and its token ids, in the parts of `prompt_parts`.
Prompt = tuple[Sample, tuple[Sequence[int] | np.ndarray[Any, Any], ...]]


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


def recall_as_in_chats(runtime: Any, tokens: int, budget: int) -> Recall | None:
    """Return a finder of evicted text, as in conversations; None if no tokens are recalled."""
    if not tokens:
        return None
    recall = recall_of(runtime, budget)
    recall.set(RecallSettings(tokens))
    return recall


def split_at_question(tokenizer: Any, recall: Recall, prompt: Prompt) -> Prompt:
    """Return a prompt in two parts, of which the second begins where text is recalled."""
    sample, parts = prompt
    if len(parts) > 1:
        return prompt
    ids = [int(token) for token in parts[0]]
    split = recall.question_start(ids, 0, answer_start(tokenizer, sample, ids))
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
