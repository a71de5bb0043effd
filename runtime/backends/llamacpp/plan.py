"""Plans what a run of a GGUF file holds in memory, as llama.cpp's library itself counts it.

The library makes the context of a plan without memory: its figures of cells are exact, those of a
pass's buffers to a hundredth of a MiB.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

from kvcap.runtime.backends.llamacpp.context import Allocated, Context, whole_pages
from kvcap.runtime.backends.llamacpp.library import CELL_TYPES, PAGE
from kvcap.runtime.backends.llamacpp.model import LlamaModel
from kvcap.runtime.backends.llamacpp.rank import Ranking, least_budget
from kvcap.runtime.cache.settings import BUDGET_TOKENS, CacheSettings
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.memory.free_memory import free_memory, process_bytes
from kvcap.runtime.planning.plan import MemoryPlan, fitting
from kvcap.runtime.recall.settings import vectors_bytes
from kvcap.runtime.types import Positions
from kvcap.runtime.units import parse_bytes, with_margin

CELL_TABLE = 64  # bytes of a cell in the library's own list of cells, which took 54
MOST_CELLS = 2**31 - 1  # that its numbers count
LOADING = 24 << 20  # bytes: the library, the vocabulary, buffers of the first block
TOKENISING = 160  # bytes for each byte of a text, while the library's tokenizer has it
LEAST_BLOCK = PAGE // 2  # tokens: smaller blocks are slower (docs/llamacpp.md)
MOST_BLOCK = 2 * PAGE
PARTS = 4  # where bytes decide, a block takes one in so many cells unless its size was given


@dataclass(frozen=True)
class LlamaPlanner:
    """A planner of one model under one policy.

    Args:
        model: loaded, or only its header.
        ranking: the policy.
        settings: of the cache, whose sizes may be left to the plan.
        recall_store: bytes of the index by which a conversation finds its evicted text.
        baseline: bytes of the process before; 0 where it has no cap.
        all_logits: whether a block gives the logits of all its tokens.
    """

    model: LlamaModel
    ranking: Ranking
    settings: CacheSettings
    recall_store: int = 0
    baseline: int = 0
    all_logits: bool = False
    _measured: dict[tuple[int, int], Allocated] = field(default_factory=dict, init=False)

    @cached_property
    def header(self) -> LlamaModel:
        """Return the model without memory for weights, of which contexts take none either."""
        if self.model.planned:
            return self.model
        return LlamaModel(self.model.library, self.model.file, planned=True)

    def measured(self, cells: int, block: int) -> Allocated:
        """Return what the library allocates for so many cells and tokens of a block."""
        if (cells, block) not in self._measured:
            outputs = block if self.all_logits else 0
            kv_dtype = cell_type(self.settings.kv_dtype)
            context = Context(self.header, cells, block, kv_dtype=kv_dtype, outputs=outputs)
            self._measured[cells, block] = context.allocated
        return self._measured[cells, block]

    @property
    def positions(self) -> Positions:
        """Return how kept tokens are numbered: from 0 unless keys or states cannot move."""
        return self.settings.positions or ("true" if self.model.recurrent else "compact")

    def plan(self, budget: int, block: int, allocated: Allocated | None = None) -> MemoryPlan:
        """Return the plan of so many slots and tokens of a block.

        Args:
            budget: slots.
            block: tokens.
            allocated: what a context of these sizes takes; None: it is measured.

        Raises:
            UnsupportedModel: all layers keep windows, which no budget makes smaller.
        """
        model, cells = self.model, whole_pages(budget + block)
        allocated = allocated or self.measured(cells, block)
        if not allocated.cells:
            raise UnsupportedModel(
                f"every layer of {model.architecture} keeps a window of {model.window:,} tokens, "
                "so there is nothing to cap; run it with llama.cpp"
            )
        copied = allocated.cells + allocated.sliding if self.ranking.reads else 0
        return MemoryPlan(
            policy=self.ranking.name,
            positions=self.positions,
            budget_tokens=budget,
            block_size=block,
            dtype="float16",
            kv_dtype=self.settings.kv_dtype,
            keys_values=allocated.cells,
            slot_positions=0,
            policy_state=0,
            evicted_store=0,
            query_window=0,
            rotation_table=0,
            sliding_layers=allocated.sliding,
            state_layers=allocated.states,
            workspace=allocated.compute + 2 * copied,  # a copy, and one layer of it as float32
            logits=2 * allocated.output,  # the library's, and a copy of them
            weights=model.nbytes,
            weights_from="the file",
            weights_dtype=None,
            baseline=self.baseline,
            trained_length=model.trained_length,
            token_bytes=allocated.cells // cells,
            sliding_token_bytes=allocated.sliding // max(1, min(cells, whole_pages(model.window))),
            sliding_window=model.window,
            layers=self._layers,
            position_modes="compact, true or auto" if self.movable else "true",
            recall_store=self.recall_store,
            word_vectors=vectors_bytes(model.embedding_size),
            tokenising=TOKENISING,
        )

    @property
    def movable(self) -> bool:
        """Return whether kept tokens can be renumbered."""
        return not self.model.recurrent

    @property
    def _layers(self) -> str:
        model = self.model
        window = f", some over windows of {model.window:,} tokens" if model.window else ""
        state = ", some with a state" if model.recurrent else ""
        count = model.library.calls.llama_model_n_layer(model.pointer)
        return f"{count} layers of {model.title}{window}{state}, all with the same tokens"

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Return the requested slots and tokens of a block; None: a number of bytes decides."""
        settings = self.settings
        if settings.kv_budget is not None or (settings.budget_tokens is None and self.baseline):
            return None
        budget = settings.budget_tokens or BUDGET_TOKENS
        return budget, settings.block_size or usual_block(budget)

    def best(self, cap: int | None = None) -> MemoryPlan:
        """Return the plan of the requested sizes, with the most slots where bytes decide.

        Args:
            cap: bytes of the whole process.

        Raises:
            PlanInfeasible: nothing fits; the message names what would.
            UnsupportedModel: no layer of the model keeps keys and values, or they cannot move.
        """
        self.check()
        if self.sizes is not None:
            plan = self.plan(*self.sizes)
        elif self.settings.kv_budget is not None:
            nbytes = parse_bytes(self.settings.kv_budget)
            plan = self._most(nbytes, lambda plan: plan.cache_bytes, "a cache")
        else:
            assert cap is not None
            plan = self._most(cap, lambda plan: plan.total_bytes, "the process")
        return plan if cap is None else fitting(plan, cap)

    def with_least(self, plan: MemoryPlan) -> MemoryPlan:
        """Return a plan with the least budget and cap of the process that would work."""
        block = self.settings.block_size or LEAST_BLOCK
        least = least_budget(self.ranking)
        smallest = self.plan(max(least, whole_pages(block + least) - block), block)
        return replace(
            plan,
            least_kv_budget=smallest.cache_bytes,
            least_memory_cap=with_margin(process_bytes() + LOADING + smallest.run_bytes),
        )

    def check(self) -> None:
        """Refuse a model that cannot be capped so, and a budget that the policy's pins fill.

        Raises:
            UnsupportedModel, PlanInfeasible: naming what would work.
        """
        least = least_budget(self.ranking)
        if self.sizes is not None and (budget := self.sizes[0]) < least:
            raise PlanInfeasible(
                f"policy {self.ranking.name} pins tokens for which {budget} slots are too few; use "
                f"a budget of at least {least}"
            )
        wanted, most = sum(self.sizes or ()), min(free_memory().nbytes // CELL_TABLE, MOST_CELLS)
        if wanted > most:
            raise PlanInfeasible(
                f"{wanted:,} slots and tokens of a block are too many: the memory "
                f"that is free holds the library's list of at most {most:,}; use fewer"
            )
        if not self.model.attends:
            raise UnsupportedModel(
                f"{self.model.architecture} keeps a state and no tokens, so there is nothing to "
                "cap; run it with llama.cpp"
            )
        if not self.movable and self.positions != "true":
            raise UnsupportedModel(
                f"the states of {self.model.architecture} cannot move, so its tokens keep their "
                "positions; use --positions true, or leave it out"
            )

        kv_dtype = cell_type(self.settings.kv_dtype)
        if kv_dtype is not None and "values" in self.ranking.reads:
            raise UnsupportedModel(
                f"policy {self.ranking.name} compares numbers channel by channel, and llama.cpp "
                f"mixes the channels of {kv_dtype} cells before it rounds them; leave --kv-dtype "
                "out, or use streaming_llm or keydiff-window"
            )
        why = self.model.fixed_keys
        if why is not None and kv_dtype is not None and self.positions != "true":
            raise UnsupportedModel(
                f"llama.cpp cannot move quantised keys of {self.model.architecture}, whose {why}; "
                "use --positions true, or leave --kv-dtype out"
            )

    def _sized(self, pages: int) -> MemoryPlan:
        """Return the plan of a context of so many pages of cells."""
        return self.plan(*self._slots_and_block(pages))

    def _slots_and_block(self, pages: int) -> tuple[int, int]:
        cells = pages * PAGE
        block = self.settings.block_size or min(PAGE, cells // PARTS)
        return cells - block, block

    def _most(self, nbytes: int, size: Callable[[MemoryPlan], int], what: str) -> MemoryPlan:
        """Return the plan with the most cells whose size is at most so many bytes.

        Raises:
            PlanInfeasible: not even the least fits.
        """
        slots = least_budget(self.ranking)
        fewest = next(n for n in count(1 + slots // PAGE) if self._slots_and_block(n)[0] >= slots)
        pages = range(fewest, max(fewest, whole_pages(self.model.trained_length) // PAGE) + 1)
        fitting = bisect_right(pages, nbytes, key=lambda count: size(self._sized(count)))
        if not fitting:
            least = self._sized(fewest)
            needed = size(least)
            # A process differs from one run to the next, and the bytes of a cache do not.
            whole = needed != least.cache_bytes
            enough = f"{with_margin(needed) >> 20}MiB" if whole else f"{needed}"
            raise PlanInfeasible(
                f"{what} of {nbytes:,} bytes is too small: {least.budget_tokens} slots and blocks "
                f"of {least.block_size} take {needed:,}; raise it to {enough}",
                least_kv_budget=least.cache_bytes,
                least_memory_cap=with_margin(least.total_bytes),
            )
        return self._sized(pages[fitting - 1])


def usual_block(budget: int) -> int:
    """Return the usual tokens of a block: as many as fill the last page of cells.

    A context has whole pages of 256 cells, so that a larger block may cost nothing.

    >>> [usual_block(budget) for budget in (128, 256, 512, 1000, 1024, 1100)]
    [128, 256, 256, 280, 256, 180]
    """
    free = whole_pages(budget + LEAST_BLOCK) - budget
    return min(MOST_BLOCK, free)


def cell_type(kv_dtype: str | None) -> str | None:
    """Return llama.cpp's type of cells for a type of slots.

    Raises:
        UnsupportedModel: it has none.
    """
    if kv_dtype in CELL_TYPES:
        return kv_dtype
    usual = {"int8": "q8_0", "int4": "q4_0"}
    if kv_dtype in usual:
        return usual[kv_dtype]
    raise UnsupportedModel(
        f"--kv-dtype {kv_dtype} is not for llama.cpp, whose cells hold keys and values in the same "
        "type; use q8_0 or q4_0, or leave it out"
    )
