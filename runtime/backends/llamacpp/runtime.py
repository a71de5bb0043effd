"""Loads a GGUF file into llama.cpp's library under a memory plan, to chat with it.

The counterpart of `backends/pytorch/runtime.py`: the same caps, sessions, recall and server, over
the library's own weights, cells and tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kvcap.runtime.backends.arrays import ArrayEngine
from kvcap.runtime.backends.llamacpp.context import Context
from kvcap.runtime.backends.llamacpp.library import load_library
from kvcap.runtime.backends.llamacpp.loop import LlamaCache, LlamaLoop, LlamaTokenReader
from kvcap.runtime.backends.llamacpp.model import LlamaModel
from kvcap.runtime.backends.llamacpp.plan import LOADING, LlamaPlanner, cell_type
from kvcap.runtime.backends.llamacpp.rank import Ranking, ranking_of, usable_policies
from kvcap.runtime.backends.llamacpp.rows import embedding_rows
from kvcap.runtime.backends.numpy_sampler import Generation
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.memory.cap_guard import Enforce, check_enforce, limit_data
from kvcap.runtime.memory.free_memory import free_memory, process_bytes
from kvcap.runtime.planning.plan import RUNNING, MemoryPlan, fitting, parse_cap, warn_if_short
from kvcap.runtime.recall.meaning import Meaning
from kvcap.runtime.recall.settings import index_bytes
from kvcap.runtime.session import chat_template
from kvcap.runtime.session.encoding import encode_with
from kvcap.runtime.session.ends import with_ends
from kvcap.runtime.types import PINS, ModelKind

MOST_SEQUENCES = 256  # that the library has in one context


@dataclass(repr=False)
class LlamaRuntime(ArrayEngine):
    """A GGUF file in llama.cpp's library under a plan, which makes conversations.

    >>> from kvcap.runtime.backends.llamacpp.runtime import LlamaRuntime
    >>> runtime = LlamaRuntime.from_file("model.gguf", budget_tokens=512)  # doctest: +SKIP
    >>> "".join(runtime.session().send("Hello!"))  # doctest: +SKIP
    """

    backend = "llamacpp"
    library_name = "llama.cpp"

    gguf: LlamaModel
    plan: MemoryPlan
    ranking: Ranking
    settings: CacheSettings
    name: str
    memory_cap: int | None = None
    threads: int | None = None
    all_logits: bool = False
    tokenizer: Any = None
    group: int = 1  # conversations of a context that is made when none has room
    contexts: list[Context] = field(default_factory=list)
    """Holds the contexts whose sequences conversations have."""

    def __repr__(self) -> str:
        return f"<LlamaRuntime of {self.name}: {self.plan.summary}>"

    @classmethod
    def from_file(
        cls,
        file: str | os.PathLike[str],
        policy: str | None = None,
        settings: CacheSettings | None = None,
        *,
        policy_options: Mapping[str, Any] | None = None,
        memory_cap: str | int | None = None,
        enforce: Enforce = "check",
        threads: int | None = None,
        gpu_layers: int = 0,
        recall_store: str | int | None = None,
        all_logits: bool = False,
        library: Path | None = None,
        name: str | None = None,
        **named: Any,
    ) -> LlamaRuntime:
        """Load a GGUF file under a cap.

        Args:
            file: the file.
            policy: which tokens stay; None: `rank.DEFAULT`.
            settings: sizes of the cache, positions, type of cells.
            policy_options: options of the policy, and how many tokens it pins.
            memory_cap: bytes of the whole process, or 'auto' for all that is free.
            enforce: 'rlimit' has the system hold the cap as well.
            threads: that compute; None: as many as there are free cores, counted anew each block.
            gpu_layers: layers on a GPU, if the library has been built for one; -1: all.
            recall_store: bytes of the index by which a conversation finds its evicted text.
            all_logits: whether a block gives the logits of all its tokens, as measurements need.
            library: the library; by default the best that is there.
            name: of the model for people; by default the file's.
            named: settings by their names, in place of those in `settings`.

        Raises:
            ModelFilesBroken, UnsupportedModel, PlanInfeasible, PolicyError: it cannot be run so.
            ExtraMissing, LibraryUnusable: there is no library of llama.cpp that can be used.
            ValueError: a cap that is not given is to be enforced.
        """
        check_enforce(enforce, memory_cap)
        chat_template.start_renderer()
        loaded = load_library(library)
        settings = CacheSettings.of((settings or CacheSettings(evict_every=None),), named)
        cap = None if memory_cap is None else parse_cap(memory_cap)
        ranking = ranking_of(policy, policy_options or {})
        planned = cap is not None or settings.kv_budget is not None
        header = LlamaModel(loaded, Path(file), planned=planned, gpu_layers=gpu_layers)
        planner = LlamaPlanner(
            header,
            ranking,
            settings_for(settings, ranking, header),
            index_bytes(recall_store, cap),
            0 if cap is None else process_bytes() + LOADING,
            all_logits,
        )
        unplanned: Any = None
        made = cls(header, unplanned, ranking, settings, name or str(file), cap, threads)
        made.all_logits = all_logits
        if planned:
            made.plan = planner.best(cap)
            made.gguf = LlamaModel(loaded, Path(file), gpu_layers=gpu_layers)
        else:  # the context is measured that the first conversation gets
            planner.check()
            assert planner.sizes is not None
            context = made.make_context(1, planner.sizes)
            made.plan = planner.plan(*planner.sizes, context.allocated)
        made.tokenizer = made.gguf.tokenizer
        made.plan.sized(settings)  # refuses evictions further apart than blocks
        warn_if_short(made.plan, free_memory(), memory_cap)
        if cap is not None:
            made.plan = replace(made.plan, baseline=process_bytes() + RUNNING)
            if enforce == "rlimit":
                made._take_memory()
                limit_data(cap)
        return made

    def _take_memory(self) -> None:
        """Make the first conversation's context and read a block, for which memory is taken once.

        The library ends the process, and raises nothing, where the system refuses it memory.
        """
        context = self.make_context(1)
        context.read([(0, 0, position) for position in range(context.block)], [])
        context.remove(0)

    @cached_property
    def generation(self) -> Generation:
        """Return the file's own settings of generation, with the tokens that end an answer."""
        return generation_of(self.gguf)

    @cached_property
    def meaning(self) -> Meaning | None:
        """Return an object that compares texts in meaning, by the file's embedding table."""
        rows = embedding_rows(self.gguf.library, self.gguf.file, self.vocabulary)
        encode = partial(encode_with, self.tokenizer, follows=True)
        return rows and Meaning(rows, encode, self.vocabulary)

    @property
    def device_label(self) -> str:
        """Return the library and the model with its type of weights, as text for people."""
        return f"{self.gguf.library.label}, {self.gguf.title}"

    @property
    def kind(self) -> ModelKind:
        """Return the model's family and size."""
        return self.gguf.kind

    @property
    def vocabulary(self) -> int:
        """Return how many different tokens the model knows."""
        return self.gguf.vocabulary

    @property
    def trained_length(self) -> int:
        """Return the longest sequence, in tokens, that the model was trained on."""
        return self.gguf.trained_length

    def reserve(self, conversations: int) -> int:
        """Allocate the cells of so many conversations in one context, in which they are batched.

        Returns:
            The bytes of each.

        Raises:
            MemoryCapExceeded: the library cannot allocate them.
        """
        conversations = min(conversations, MOST_SEQUENCES)
        if sum(len(context.free) for context in self.contexts) < conversations:
            self.contexts = [context for context in self.contexts if not context.unused]
            self.make_context(conversations)
        return self.plan.cache_bytes

    def make_context(self, sequences: int, sizes: tuple[int, int] | None = None) -> Context:
        """Allocate a context.

        Args:
            sequences: conversations.
            sizes: slots of each, and tokens of a block; None: those of the plan.

        Raises:
            MemoryCapExceeded: the library cannot allocate them.
        """
        budget, block = sizes or (self.plan.budget_tokens, self.plan.block_size)
        made = Context(
            self.gguf,
            budget + block,
            block,
            sequences=sequences,
            kv_dtype=cell_type(self.settings.kv_dtype),
            outputs=block if self.all_logits else 0,
            threads=self.threads,
        )
        self.contexts.append(made)
        return made

    def shared_rows(self, size: int) -> tuple[LlamaTokenReader, None]:
        """Return a reader of one token of each of `size` sessions, in one context for all."""
        self.group = size
        return LlamaTokenReader(), None

    def loop(self) -> LlamaLoop:
        """Return a loop over the cells of a sequence that no other conversation has."""
        context = next((context for context in self.contexts if context.free), None)
        context = context or self.make_context(self.group)
        plan = self.plan
        cache = LlamaCache(context, self.ranking, plan.budget_tokens, plan.positions)
        return LlamaLoop(cache, plan.block_size, self.every, self.guard())

    def with_policy_name(self, policy: str, options: dict[str, Any]) -> LlamaRuntime:
        """Return a runtime of this model and budget with another policy and the same pins.

        Raises:
            PolicyError, UnsupportedModel: there is no such policy, or llama.cpp cannot run it.
        """
        pins = {name: n for name in PINS if (n := self.ranking.options.get(name)) is not None}
        ranking = ranking_of(policy, {**pins, **options})
        return replace(self, ranking=ranking).with_budget(self.plan.budget_tokens)

    def _replanned(self, settings: CacheSettings) -> LlamaRuntime:
        """Return a runtime of this model and policy under another plan."""
        planner = LlamaPlanner(
            self.gguf,
            self.ranking,
            settings,
            self.plan.recall_store,
            self.plan.baseline,
            self.all_logits,
        )
        plan = planner.best()
        if self.memory_cap is not None:
            fitting(plan, self.memory_cap)
        return replace(self, plan=plan, settings=settings, contexts=[])

    def policies(self) -> dict[str, list[str]]:
        """Return the policies that `with_policy_name` takes, with the names of their options."""
        return usable_policies()

    @property
    def identity(self) -> dict[str, Any]:
        """Return all that must agree for saved cells to be usable."""
        model = self.gguf
        return {
            "fingerprint": f"{model.description}, {model.nbytes} bytes, {model.vocabulary} tokens",
            "library": ".".join(model.library.version.split(".")[:2]),
            "kv_dtype": self.settings.kv_dtype,
        }


def generation_of(model: LlamaModel) -> Generation:
    """Return a file's settings of generation, with all tokens that end an answer."""
    generation = Generation.of(model.sampling)
    if generation.temperature is not None:
        generation.do_sample = generation.temperature > 0
    generation.eos_token_id = model.ends or None
    ended: Generation = with_ends(model.tokenizer, generation)
    return ended


def settings_for(settings: CacheSettings, ranking: Ranking, model: LlamaModel) -> CacheSettings:
    """Return the settings with the model's context as the budget where nothing is ever evicted."""
    sized = settings.budget_tokens is not None or settings.kv_budget is not None
    if ranking.evicts or sized:
        return settings
    return replace(settings, budget_tokens=model.trained_length)
