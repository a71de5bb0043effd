"""Reads a prompt under a cap and answers it, or scores a text, with a GGUF file by llama.cpp."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.llamacpp.loop import LlamaLoop
from kvcap.runtime.recall.recall import Recall

Ids = NDArray[np.int64]


def answer(
    loop: LlamaLoop,
    parts: Sequence[Ids],
    limit: int,
    stops: Collection[int],
    recall: Recall | None = None,
) -> list[int]:
    """Answer a prompt greedily, cut before the token that ends the answer.

    Args:
        loop: over an empty cache.
        parts: parts of the prompt [1, T]; after each the cache is evicted to its budget.
        limit: most tokens of an answer.
        stops: tokens that end an answer.
        recall: finds evicted text to read again before the question.
    """
    if recall is not None:
        parts = with_recalled(loop, recall, parts)
    logits = [loop.prefill(ids) for ids in parts][-1]
    tokens = [int(logits[0].argmax())]
    while len(tokens) < limit and tokens[-1] not in stops:
        tokens.append(int(loop.read(np.array([tokens[-1:]]))[0].argmax()))
    return tokens[:-1] if tokens[-1] in stops else tokens


def with_recalled(loop: LlamaLoop, recall: Recall, parts: Sequence[Ids]) -> list[Ids]:
    """Read a prompt up to its question; return the parts to read then, recalled text first."""
    whole, split = np.concatenate(list(parts), axis=1), parts[0].shape[1]
    ids = whole[0].tolist()
    if not split:
        return [whole]
    loop.cache.regions.set_repeated(recall.dialogue.repeated_replies(ids))
    loop.prefill(whole[:, :split])
    recall.begin(0)
    recalled = recall.insert(loop.cache, ids[split:], ids[:split], split)
    return [np.array([[*recalled, *ids[split:]]])]


def losses(loop: LlamaLoop, parts: Sequence[Ids]) -> NDArray[np.float64]:
    """Return the losses in nats of the last part's tokens, of a single part of all but the first.

    Tokens are read block by block: each sees the slots held before its block, and the block up to
    itself.
    """
    whole, block_losses = np.concatenate(list(parts), axis=1), list[NDArray[np.float64]]()
    done = sum(part.shape[1] for part in parts[:-1])
    if done:
        loop.prefill(whole[:, :done])
    while done < whole.shape[1] - 1:
        block = whole[:, done : done + loop.block]
        after = whole[0, done + 1 : done + 1 + block.shape[1]]
        logits = loop.read_every(block)[0, : len(after)].astype(np.float64)
        top = logits.max(-1)
        total = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        block_losses.append(total - logits[np.arange(len(after)), after])
        done += block.shape[1]
    return np.concatenate(block_losses)
