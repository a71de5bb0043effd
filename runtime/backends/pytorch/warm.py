"""Has a short conversation on a GPU, so that an answer finds its kernels compiled and loaded.

Triton compiles a kernel, and CUDA loads one, when it is first launched. A real conversation
launches what answers launch, so there is no list of kernels that could differ from it.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from transformers import GenerationConfig

from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.sampler import Sampler
from kvcap.runtime.errors import MemoryCapExceeded

MOST = 16  # blocks that are read to fill a cache; a larger one stays unfilled
READS = 2  # of each kind of pass: the first may run without a CUDA graph
DRAWING = {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9}


@torch.inference_mode()
def converse(loop: BlockLoop, vocabulary: int) -> None:
    """Read prompts and write tokens, while slots fill and when they are full; leave it empty.

    Where memory does not suffice, the conversation ends early: an answer says so by itself.

    Args:
        loop: over an empty cache.
        vocabulary: how many tokens the model knows, from which the first ones are read.
    """
    cache, device = loop.cache, loop.model.device
    block, budget = cache.block_size, cache.layout.budget_tokens
    short = block // 16 + 2
    with suppress(MemoryCapExceeded, torch.OutOfMemoryError):
        filled = budget if budget <= MOST * block else 0
        for whole, system in ((0, 0), (filled, 0), (0, 1)):  # regions have kernels
            cache.reset()
            cache.regions.add({"system prompt and tools": [(0, system)]})
            for length in (whole + READS * block + short, *READS * (1,), short, *READS * (1,)):
                room = length if cache.eviction.policy.evicts else min(length, cache.spare)
                if room:
                    ids = torch.arange(room, device=device)[None] % vocabulary
                    logits = loop.prefill(ids)
        history = torch.zeros(1, 1, dtype=torch.long, device=device)
        for way in ({"do_sample": False}, DRAWING, {**DRAWING, "top_k": 0}):
            rng = torch.Generator().manual_seed(0)
            Sampler(GenerationConfig(**way), rng).next(logits, history).item()
    cache.reset()
    cache.regions.cut(0)
