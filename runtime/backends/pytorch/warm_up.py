"""Finds the kernels that a plan's conversations launch, and has them compiled ahead.

A conversation is rehearsed: the block loop runs over tensors that have sizes and no contents, and
what would be launched is only noted. So there is no list of kernels that could differ from what
runs. Knows transformers' models; no kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from kvcap.kernels.device import Target, pretending
from kvcap.kernels.launch import Listener, heard
from kvcap.policies import Eviction
from kvcap.runtime.backends.pytorch.cuda_graphs import PASS, BlockGraphs
from kvcap.runtime.backends.pytorch.loop import LENGTHS, BlockLoop
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.models.fused.decoder import Decoder, covers
from kvcap.runtime.planning.dry_run import data_independent
from kvcap.runtime.types import ATTENTION, Positions


class Rehearsal:
    """A conversation without data, of which kernels are told and none is run.

    Args:
        config: the model's transformers config.
        eviction: what is evicted. Parts that decide on data are left out, see `data_independent`.
        budget_tokens: slots per KV head and layer.
        block_size: tokens of a block.
        dtype: of weights, keys and values.
        positions: 'compact' or 'true'.
        evict_every: in generation.
        several: see `BlockLoop`.
        target: the GPU; None: as kernels are interpreted.
    """

    def __init__(
        self,
        config: Any,
        eviction: Eviction,
        budget_tokens: int,
        block_size: int,
        dtype: torch.dtype,
        positions: Positions,
        evict_every: int = 1,
        several: bool = True,
        target: Target | None = None,
    ) -> None:
        self.target, self.mode = target, FakeTensorMode(allow_non_fake_inputs=True)
        with self._dry():
            config = copy.deepcopy(config)
            config._attn_implementation = ATTENTION
            self.model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=dtype
            ).eval()
            cache = BudgetCache(
                config, budget_tokens, block_size, data_independent(eviction),
                positions=positions, evict_every=evict_every,
            )  # fmt: skip
            self.loop = BlockLoop(self.model, cache.allocate(1, dtype, "cpu"), graphs=False)
            self.loop.graphs = DryGraphs(self.model, cache, several=several)

    @contextmanager
    def _dry(self) -> Iterator[None]:
        with self.mode, torch.no_grad(), pretending(self.target):
            yield

    def run(self, listener: Listener) -> None:
        """Go through a conversation: first what comes first in any, then what is rarer."""
        cache = self.loop.cache
        budget, block = cache.layout.budget_tokens, cache.block_size
        longest = budget + block if cache.eviction.policy.evicts else budget
        step = -(-block // LENGTHS)
        with self._dry(), heard(listener):
            # A long prompt and its answer, then a short one; both are what most begin with.
            for length in (longest + 3 * max(block, PASS) + step // 2, step // 2):
                cache.reset()
                self._read(length)
                for _ in range(cache.evict_every + 1):
                    self._read(1)
            # Messages: of few tokens, and of all lengths to which blocks are padded.
            lengths = sorted({2, 4, 8, 16, 24, *range(step, block, step)} & {*range(2, block)})
            cache.reset()
            self._read(longest)
            for length in lengths:
                self._read(length)
            for length in lengths:
                cache.reset()
                self._read(length)
            cache.reset()
            for length in lengths:
                self._read(length)

    def _read(self, length: int) -> None:
        """A prompt, or as much of it as there is room for where nothing is evicted."""
        cache = self.loop.cache
        if not cache.eviction.policy.evicts:
            length = min(length, cache.spare)
        if length:
            self.loop.prefill(torch.zeros(1, length, dtype=torch.long))


class DryGraphs(BlockGraphs):
    """Reads all passes as one that prepares a capture does, and captures none."""

    def _decoder(self, compiled: bool) -> Decoder | None:
        if not covers(self.model):
            return None
        decoder = Decoder(self.model)
        for product in decoder.products:
            product.join()
        return decoder

    def read(self, ids: Tensor, need_logits: bool = True) -> Tensor | None:
        """Nothing is replayed."""
        return None
