"""The block loop: reads tokens into a budgeted cache, at most a block at a time.

Works on token ids and logits; knows no text and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from kvcap.runtime.backends.pytorch.cuda_graphs import BlockGraphs, blocks_of
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.step import Pass
from kvcap.runtime.errors import MemoryCapExceeded, SessionBroken
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.models.output_projection import check_projections
from kvcap.runtime.session.engine import Room
from kvcap.runtime.types import OnFull

LENGTHS = 8  # of a block, besides a single token


class BlockLoop:
    """Runs `model` over `cache`; after every call the cache holds at most its budget.

    Args:
        model: a causal language model loaded with `attn_implementation='kvcap'`.
        cache: made for the model's config.
        on_full: what happens to tokens beyond the budget: 'evict', or nothing is ever evicted and
            reading them is refused. 'stop' is 'error' here, and ends an answer in a session.
        graphs: on CUDA, replay what a full cache's blocks have in common.
        compiled: and parts of the model by `torch.compile`.
        several: and read several small blocks in one pass, whose activations take the memory of
            a larger block.

    Raises:
        UnsupportedModel: the policy reads the output projection, which is quantised or adapted.
    """

    def __init__(
        self,
        model: Any,
        cache: BudgetCache,
        on_full: OnFull = "evict",
        graphs: bool = True,
        compiled: bool = False,
        several: bool = True,
    ) -> None:
        if "output_projection" in cache.eviction.observes:
            check_projections(model, cache.layout.shape)
        self.model, self.cache, self.on_full = model, cache, on_full
        graphs = graphs and model.device.type == "cuda"
        self.graphs = BlockGraphs(model, cache, compiled, several) if graphs else None
        self.peak_bytes = cache.nbytes  # the most storage the cache has held

    def prefill(self, ids: Tensor, on_block: Callable[[int], None] | None = None) -> Tensor:
        """Read `ids` [B, T_total] block by block; returns the last token's logits [B, V].

        A Ctrl-C takes effect between blocks: what was read stays, the cache stays whole.

        Args:
            ids: token ids.
            on_block: called after each block with the number of tokens read so far.

        Raises:
            MemoryCapExceeded: nothing may be evicted, and too many tokens; nothing is read.
        """
        batch, length = ids.shape
        self.check_room(length)
        done, logits = 0, None
        while done < length:
            ahead = None if self.graphs is None else self.graphs.ahead(batch, length - done)
            block = ids[:, done : done + (ahead or self.cache.room)]
            done += block.shape[1]
            logits = self.read(block, wanted=done == length)
            if on_block is not None:
                on_block(done)
        assert logits is not None, "prefill of no tokens"
        return logits

    @torch.inference_mode()
    def read(self, ids: Tensor, wanted: bool = True) -> Tensor:
        """Read one block [B, T], T up to `cache.room`; returns the last token's logits [B, V].

        Or several whole blocks of a full cache, which go through the model in one pass.

        Not `wanted`, they are not computed, and what is returned has nothing in it: they take
        the largest matrix of all, once for every block of a prompt.

        Raises:
            MemoryCapExceeded, BlockTooLarge: before anything is read; or the system refused
                memory half-way, then the cache is empty again.
            SessionBroken: an earlier pass failed half-way; reset the cache.
        """
        cache = self.cache
        self.check_room(ids.shape[1])
        if self.graphs is not None:
            with interrupts_deferred():
                logits = self.graphs.read(ids, wanted)
            if logits is not None:
                return logits
        tokens, start = ids.shape[1], cache.next_position
        # Fillers repeat the last token; whatever comes of them is dropped.
        place = torch.arange(self.padded(tokens), device=ids.device).clamp(max=tokens - 1)
        blocks = blocks_of(cache, tokens)
        last = torch.full((int(wanted),), tokens - 1, device=ids.device)
        if cache.guard is not None:
            cache.guard.check(len(place))
        try:
            with interrupts_deferred(), cache.passing(Pass(start, tokens, blocks)):
                model = self.model if self.graphs is None else self.graphs.warm_up(ids, wanted)
                out = model(
                    input_ids=ids[:, place],
                    position_ids=(start + cache.places(place)).expand(ids.shape[0], -1),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=last,
                )
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            cache.reset()
            raise MemoryCapExceeded(
                f"the system refused the memory that a block of {tokens} tokens takes; what "
                "was held is forgotten, the conversation is read again with the next message"
            ) from error
        self.peak_bytes = max(self.peak_bytes, cache.nbytes)
        return cast(Tensor, out.logits.flatten(0, 1))

    def padded(self, tokens: int) -> int:
        """The length at which a block of so many tokens is read: one of nine.

        Kernels are compiled for every length they meet and kept for good (oneDNN's take some
        megabytes per length in bfloat16), so that odd lengths would let a process grow.
        """
        size = self.cache.block_size
        if tokens == 1 or not self.cache.layout.shape.all_capped:
            return tokens  # native sliding layers would keep the fillers
        step = -(-size // LENGTHS)
        return max(tokens, min(size, -(-tokens // step) * step))

    @property
    def execution(self) -> str:
        """How blocks run that are all alike; empty where there are no CUDA graphs to speak of."""
        if self.graphs is None:
            return ""
        refused = self.graphs.refused
        return "CUDA graphs" if refused is None else f"without CUDA graphs: {refused}"

    def check_room(self, tokens: int, answer: int = 0, *, emptied: bool = False) -> None:
        """Where nothing may be evicted, refuse what does not fit before any of it is read.

        Args:
            tokens: to be read next.
            answer: that follow at most, which a budget that is advised holds too.
            emptied: they are read into the cache once it was reset.

        Raises:
            MemoryCapExceeded: naming the budget that would do.
            SessionBroken: an earlier pass failed half-way; reset the cache.
        """
        cache, eviction = self.cache, self.cache.eviction
        if not emptied and not cache.consistent:
            raise SessionBroken(
                "an earlier forward pass failed half-way, so layers have read different tokens; "
                "reset the cache (in chat: /clear) and read again"
            )
        shape = cache.layout.shape

        def least(budget: int) -> int:
            return min(map(min, eviction.allot(budget, len(shape.capped), shape.kv_heads)))

        room = Room(cache.held, cache.spare, cache.layout.budget_tokens, least)
        never = None if eviction.policy.evicts else eviction.name
        (room.emptied if emptied else room).check(tokens, answer, self.on_full, never)


def out_of_memory(error: Exception) -> bool:
    """Whether an allocator could not get memory."""
    told = str(error)
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in told
    )
