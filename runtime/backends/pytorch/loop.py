"""Reads tokens into a capped cache by PyTorch, at most a block at a time.

Works on token ids and logits; knows no text and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from kvcap.runtime.backends.pytorch import copies
from kvcap.runtime.backends.pytorch.cuda_graphs import BlockGraphs, blocks_of
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.step import ForwardContext
from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.models.arguments import cache_argument
from kvcap.runtime.models.latents import check_expansions
from kvcap.runtime.models.output_projection import check_projections
from kvcap.runtime.models.rope import SHORT, ShortFactors
from kvcap.runtime.session.engine import CacheCopy, Loop, Room
from kvcap.runtime.types import OnFull, Span

LENGTHS = 8  # how many lengths blocks are padded to, besides a single token


class BlockLoop(Loop):
    """Runs `model` over `cache`; after every call the cache holds at most its budget.

    Args:
        model: a causal language model loaded with `attn_implementation='kvcap'`.
        cache: made for the model's config.
        on_full: see `Loop`.
        graphs: on CUDA, replay the blocks of a full cache as CUDA graphs: those given, which are of
            this cache, or new ones.
        several: in these, read several small blocks in one pass, whose activations take the memory
            of one larger block.

    Raises:
        UnsupportedModel: weights that the policy, or attention over latents, reads are quantised
            or adapted.
    """

    cache: BudgetCache

    def __init__(
        self,
        model: Any,
        cache: BudgetCache,
        on_full: OnFull = "evict",
        graphs: bool | BlockGraphs = True,
        several: bool = True,
    ) -> None:
        if "output_projection" in cache.eviction.observes:
            check_projections(model, cache.layout.shape)
        if (latent := cache.layout.shape.latent) is not None:
            check_expansions(model, latent)
        never = None if cache.eviction.policy.evicts else cache.eviction.name
        super().__init__(cache, on_full, never)
        self.model, self.asynchronous = model, model.device.type == "cuda"
        self.step = -(-cache.block_size // LENGTHS)
        """Says by how many tokens the lengths that blocks are padded to differ."""
        self.graphs = graphs if isinstance(graphs, BlockGraphs) else None
        self.short: ShortFactors | None = getattr(model, SHORT, None)
        """Holds the factors by which short texts are read, where the model has others."""
        self.read_short: list[Tensor] = []
        """Lists the tokens [B, T] of all passes, if all were read by the short factors."""
        self._several, self._captures = several, graphs is True and model.device.type == "cuda"
        if cache.allocation.batch is not None:
            self._allocate(cache.allocation.batch)

    def _allocate(self, batch: int) -> None:
        """Allocate the cache for so many sequences, unless it is, and prepare CUDA graphs."""
        if self.cache.allocation.batch is None:
            self.cache.allocate(batch, self.model.dtype, self.model.device)
        if self._captures and self.graphs is None:
            self.graphs = BlockGraphs(self.model, self.cache, self._several)

    def next_length(self, batch: int, left: int) -> int:
        """Return how many of the `left` tokens the next pass reads: one block's, or several."""
        graphs = None if self.read_short else self.graphs
        several = None if graphs is None else graphs.pass_length(batch, left)
        return several or self.cache.room

    @torch.inference_mode()
    def read(self, ids: Tensor, need_logits: bool = True) -> Tensor:
        """Read one block [B, T], T up to `cache.room`; returns the last token's logits [B, V].

        Several whole blocks may be read at once, in one pass through the model. Without
        `need_logits` the LM head, the model's largest matrix, is skipped, and the result is empty
        [0, V].

        Raises:
            MemoryCapExceeded, BlockTooLarge: before anything is read; or the system refused
                memory half-way, then the cache is empty again.
            SessionBroken: an earlier pass failed half-way; reset the cache.
        """
        short = self._begin(ids)
        if self.graphs is not None and short is None:
            with interrupts_deferred():
                logits = self.graphs.read(ids, need_logits)
            if logits is not None:
                return logits
        tokens = ids.shape[1]
        return self._read(ids, range(tokens - int(need_logits), tokens), short).flatten(0, 1)

    @torch.inference_mode()
    def read_every(self, ids: Tensor) -> Tensor:
        """Read one block [B, T], T up to `cache.room`; returns every token's logits [B, T, V].

        Raises:
            MemoryCapExceeded, BlockTooLarge, SessionBroken: as `read`.
        """
        return self._read(ids, range(ids.shape[1]), self._begin(ids))

    def copied(self) -> CacheCopy:
        """Return a copy of what the cache holds, on its device."""
        copy = copies.copied(self.cache)
        return replace(
            copy, facts={**copy.facts, "short": [*self.read_short] if self.cache.seen else []}
        )

    def go_on_from(self, copy: CacheCopy) -> None:
        """Have the cache hold what a cache of the same settings held when it was copied."""
        with interrupts_deferred():
            copies.go_on_from(self.cache, copy)
            self.read_short = [*copy.facts["short"]]

    @torch.inference_mode()
    def drop(self, spans: Sequence[Span]) -> bool:
        """Free the slots of these tokens in capped layers.

        Texts that longrope's short factors may have to be read again for keep them.
        """
        if self.read_short:
            return False
        with interrupts_deferred():
            self.cache.drop(spans)
        return True

    def launched(self) -> Callable[[], object]:
        """Return a function that waits until the GPU has computed all passes so far.

        See `Loop.launched`.
        """
        if self.model.device.type != "cuda":
            return super().launched()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.model.device))
        return event.synchronize

    def make_room(self, tokens: int) -> None:
        """Check that a block can be read; make positions compact if it leaves the trained window.

        Raises:
            MemoryCapExceeded: nothing may be evicted; or the system refused memory, then the cache
                is empty again.
            SessionBroken: an earlier pass failed half-way; reset the cache.
            UnsupportedModel: longrope would rotate its keys by other frequencies than those held.
        """
        self.check_room(tokens)
        if self.cache.layout.positions == "true":
            self.cache.check_factors(tokens)
        if self.cache.leaves_window(tokens):
            with self._emptied_without_memory(tokens):
                self.cache.become_compact()

    def _begin(self, ids: Tensor) -> ShortFactors | None:
        """Prepare to read a block [B, T]; return the short factors of longrope if they are for it.

        If they no longer are, what was read by them is read again, by the long ones.
        """
        cache, tokens, short = self.cache, ids.shape[1], self.short
        if cache.allocation.batch is None:
            self._allocate(len(ids))
        self.make_room(tokens)
        if not cache.seen:
            self.read_short = []
        if short is None or (cache.seen and not self.read_short):
            return None
        # At compact positions, evictions move keys, by the long factors.
        stays = cache.layout.positions != "compact" or (
            cache.held == cache.seen and tokens <= cache.spare
        )
        if stays and cache.seen + tokens <= short.longest:
            return short
        if cache.seen:
            self._read_by_long_factors(torch.cat(self.read_short, 1))
            self.make_room(tokens)
        return None

    def _read_by_long_factors(self, ids: Tensor) -> None:
        """Read again what the cache holds by the short factors; if that fails, it is left empty."""
        pins, done = [*self.cache.pinned_spans], 0
        self.cache.reset()
        self.cache.set_pins(pins)
        self.read_short = []
        try:
            while done < ids.shape[1]:
                block = ids[:, done : done + self.cache.room]
                self.make_room(block.shape[1])
                self._read(block, range(0))
                done += block.shape[1]
        except BaseException:
            self.cache.reset()  # a session reads its conversation again with the next message
            raise

    def _read(self, ids: Tensor, wanted: range, short: ShortFactors | None = None) -> Tensor:
        """Read one block [B, T] without a graph; returns logits [B, n, V] of tokens `wanted` [n].

        `wanted` has indices of tokens in the block; `short` rotates keys, if it is given.
        """
        cache, tokens = self.cache, ids.shape[1]
        graphs = self.graphs if short is None else None
        start, padded, blocks = cache.next_position, self.padded(tokens), blocks_of(cache, tokens)
        if cache.guard is not None:
            cache.guard.check(padded)
        with self._emptied_without_memory(tokens), interrupts_deferred():
            # Fillers repeat the last token; their results are dropped.
            token_index = torch.arange(padded, device=ids.device).clamp(max=tokens - 1)
            model = self.model if graphs is None else graphs.reader(ids, len(wanted) > 0)
            sizes, first = cache.admit(tokens, blocks), cast("int | Tensor", start)
            context = ForwardContext(start, tokens, blocks, sizes=sizes)
            if cache.by_rows:
                count = None
                if graphs is not None and blocks == 1 and tokens > 1:  # as its graph has it
                    count = torch.full((), tokens, dtype=torch.int32, device=ids.device)
                part = -(-tokens // blocks)
                context.rows = cache.row_pass(part, always=graphs is not None, count=count)
                first = context.rows.first(start)
            with cache.passing(context), nullcontext() if short is None else short.used():
                out = model(
                    input_ids=ids[:, token_index],
                    position_ids=(first + cache.offsets(token_index)).expand(ids.shape[0], -1),
                    **cache_argument(model, cache),
                    use_cache=True,
                    logits_to_keep=torch.arange(wanted.start, wanted.stop, device=ids.device),
                )
            if short is not None:
                self.read_short.append(ids)
        if cache.layout.shape.slides:  # all else stays as it was allocated
            self.peak_bytes = max(self.peak_bytes, cache.nbytes)
        return cast(Tensor, out.logits)

    @contextmanager
    def _emptied_without_memory(self, tokens: int) -> Iterator[None]:
        """Empty the cache, and raise a named error, if the system refuses memory for a block."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            self.cache.reset()
            raise MemoryCapExceeded(
                f"the system refused the memory that a block of {tokens} tokens takes; what "
                "was held is forgotten, the conversation is read again with the next message"
            ) from error

    def padded(self, tokens: int) -> int:
        """Return the length to which a block of so many tokens is padded: one of nine.

        Kernels are compiled for every length that occurs and kept for good (oneDNN's take some
        megabytes each in bfloat16), so that many different lengths would let the process grow.
        """
        size = self.cache.block_size
        if tokens == 1 or not self.cache.layout.shape.all_capped:
            return tokens  # native sliding layers and recurrent states would keep the fillers
        return max(tokens, min(size, -(-tokens // self.step) * self.step))

    @property
    def execution(self) -> str:
        """Return words for people on whether passes run as CUDA graphs; '' without a GPU."""
        if self.graphs is None:
            return ""
        if self.graphs.refused is not None:
            return f"without CUDA graphs: {self.graphs.refused}"
        failed = self.graphs.failed
        return "CUDA graphs" if failed is None else f"CUDA graphs, but where {failed}"

    @property
    def graph_bytes(self) -> int:
        """Return the bytes that captured CUDA graphs hold beside the cache."""
        return 0 if self.graphs is None else self.graphs.nbytes

    @property
    def room(self) -> Room:
        """Return how many tokens the cache holds and how many still fit."""
        cache, layout = self.cache, self.cache.layout
        eviction, shape = layout.eviction, layout.shape

        def least(budget: int) -> int:
            return min(map(min, eviction.allot(budget, len(shape.capped), shape.kv_heads)))

        return Room(cache.held, cache.spare, layout.budget_tokens, least, self.never)


def out_of_memory(error: Exception) -> bool:
    """Return whether an error says that memory could not be allocated."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )
