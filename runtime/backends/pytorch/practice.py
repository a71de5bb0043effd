"""A short conversation on a GPU with one layer of a model, before anybody waits for an answer.

CUDA loads a kernel when it is first launched, and waits for all that the GPU is doing: the first
prompt of a process would stand still at every kernel that it is the first to need. So each is
launched once while the weights are read. Knows transformers' models.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from kvcap import dtypes
from kvcap.policies import Eviction
from kvcap.runtime.backends.pytorch.cuda_graphs import PASS, Uncaptured
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.sampler import Sampler
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.types import ATTENTION

MOST = 16  # passes in which it fills the cache; a larger one stays unfilled
DRAWING = {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9}


class Practice:
    """The conversation; making it takes no memory of the GPU, running it that of its layers.

    Args:
        config: the model's transformers config, with as few layers as launch all kernels.
        plan: of the model's memory.
        eviction: what is evicted.
        device: of CUDA.
        evict_every: in generation.
    """

    def __init__(
        self,
        config: Any,
        plan: MemoryPlan,
        eviction: Eviction,
        device: torch.device,
        evict_every: int = 1,
    ) -> None:
        self.plan, self.eviction, self.device = plan, eviction, device
        self.evict_every, self.vocabulary = evict_every, config.vocab_size
        config = copy.deepcopy(config)
        # Few tokens take little memory; kernels depend on whether their number is a multiple of 16.
        config.vocab_size = min(config.vocab_size, 64 + config.vocab_size % 16)
        config.pad_token_id = None
        self.dtype = dtypes.torch_dtype(plan.dtype)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=self.dtype
            ).eval()

    @torch.no_grad()
    def run(self) -> None:
        """Read a prompt, write a few tokens, and read a message, as an answer would.

        Where there is no memory for it, answers go on without.
        """
        with suppress(torch.OutOfMemoryError):
            self._read()
            self._draw()

    def _read(self) -> None:
        model, plan = self.model.to_empty(device=self.device), self.plan
        for x in chain(model.parameters(), model.buffers()):
            x.fill_(1 / 64)
        cache = BudgetCache(
            model.config, plan.budget_tokens, plan.block_size, self.eviction,
            positions=plan.positions, evict_every=self.evict_every, kv_dtype=plan.kv_dtype,
        ).allocate(1, self.dtype, self.device)  # fmt: skip
        # A capture would fail where the thread that loads weights waits for the whole GPU.
        loop = BlockLoop(model, cache, graphs=Uncaptured(model, cache))
        block, step = plan.block_size, max(plan.block_size, PASS)
        full = -(-plan.budget_tokens // block) * block if plan.budget_tokens <= MOST * step else 0
        odd = block // 16 + 2
        for length in (full + step + odd, 1, odd, 1):
            room = length if self.eviction.policy.evicts else min(length, cache.spare)
            if room:
                loop.prefill(torch.zeros(1, room, dtype=torch.long, device=self.device))

    def _draw(self) -> None:
        """Draw a token in every usual way."""
        logits = torch.zeros(1, self.vocabulary, dtype=self.dtype, device=self.device)
        history, rng = torch.zeros(1, 1, dtype=torch.long, device=self.device), torch.Generator()
        ways = {"do_sample": False}, DRAWING, {**DRAWING, "top_k": 0}
        for way in ways:
            sampler = Sampler(GenerationConfig(**way), rng.manual_seed(0))
            sampler.next(logits, history).item()
