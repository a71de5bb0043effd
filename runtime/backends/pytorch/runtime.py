"""The PyTorch backend: loads a model and its tokenizer under a memory plan, to chat with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from kvcap import dtypes
from kvcap.policies import PINS, Eviction, load_policy, policies
from kvcap.runtime.backends.pytorch import snapshot
from kvcap.runtime.backends.pytorch.batch import SharedCache, shared_rows
from kvcap.runtime.backends.pytorch.cuda_graphs import BlockGraphs
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.sampler import Sampler
from kvcap.runtime.backends.pytorch.shared_pass import SharedPass
from kvcap.runtime.backends.pytorch.warm import converse
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.settings import CacheSettings, SettingNames, check_size
from kvcap.runtime.memory.cap_guard import CapGuard, Enforce, check_enforce, limit_data
from kvcap.runtime.memory.free_memory import free_memory
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.devices import best_device, usable
from kvcap.runtime.models.files import (
    check_generation,
    load_config,
    load_model,
    load_packed,
    load_tokenizer,
)
from kvcap.runtime.models.names import is_export, locate, resolve
from kvcap.runtime.models.packed import check_packing
from kvcap.runtime.models.quantised import quantisation
from kvcap.runtime.models.rope import SHORT, ShortFactors
from kvcap.runtime.models.weights import Weights, held_weights, read_headers
from kvcap.runtime.planning.plan import (
    MemoryPlan,
    Sizes,
    fitting,
    parse_cap,
    warn_if_short,
)
from kvcap.runtime.recall.meaning import Meaning, Vectors
from kvcap.runtime.recall.settings import index_bytes
from kvcap.runtime.session import chat_template, settings
from kvcap.runtime.session import file as session_file
from kvcap.runtime.session.batch import Batch
from kvcap.runtime.session.encoding import encode_with
from kvcap.runtime.session.ends import with_ends
from kvcap.runtime.session.file import SessionFile
from kvcap.runtime.session.session import Session
from kvcap.runtime.types import BUILT_IN, EVICT_EVERY, POCKET, ModelKind
from kvcap.runtime.units import parse_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Runtime:
    """A loaded model that chats under a cap.

    >>> runtime = Runtime.from_pretrained("pocket", policy="keydiff", budget_tokens=256)
    >>> session = runtime.session()
    >>> answer = "".join(session.send("Please remember: the code for the blue door is 4821."))
    >>> session.stats.held_tokens <= 256
    True
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        plan: MemoryPlan,
        settings: CacheSettings,
        *,
        name: str = "",
        memory_cap: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.plan = model, tokenizer, plan
        self.settings = plan.sized(settings)  # of a session's cache
        self.name = name
        self.kv_budget = settings.kv_budget  # where the cap was given in bytes
        self.memory_cap = memory_cap  # bytes of the whole process
        self._idle: list[tuple[BudgetCache, BlockGraphs]] = []  # of sessions that ended

    def __repr__(self) -> str:
        return f"<Runtime of {self.name or 'a model'} on {self.device_label}: {self.plan.summary}>"

    @property
    def device_label(self) -> str:
        """Return the device and the types of numbers, for people."""
        packed = self.plan.weights_dtype
        also = f", {packed} weights" if packed else ""
        return f"{self.model.device.type} {self.plan.dtype}{also}"

    @cached_property
    def trained_length(self) -> int:
        """Return the longest sequence, in tokens, that the model was trained on."""
        return ModelShape.of(self.model.config.get_text_config(decoder=True)).trained_length

    @cached_property
    def vocabulary(self) -> int:
        """Return how many different tokens the model knows."""
        return ModelShape.of(self.model.config.get_text_config(decoder=True)).vocabulary

    @property
    def kind(self) -> ModelKind:
        """Return the model's family and size."""
        config = self.model.config
        return ModelKind(config.model_type, config.get_text_config(decoder=True).hidden_size)

    @cached_property
    def meaning(self) -> Meaning:
        """Return what compares texts by the model's embedding table."""
        table, device = self.model.get_input_embeddings(), self.model.device

        def rows(ids: Sequence[int]) -> Vectors:
            with torch.inference_mode():
                vectors = table(torch.tensor(list(ids), dtype=torch.long, device=device))
                return cast(Vectors, vectors.float().cpu().numpy())

        encode = partial(encode_with, self.tokenizer, follows=True)
        return Meaning(rows, encode, self.vocabulary)

    @cached_property
    def generation(self) -> GenerationConfig:
        """Return the model's own settings of generation, with all tokens that end an answer."""
        config = settings.copied(self.model.generation_config)
        return with_ends(self.tokenizer, config, self.model.config.get_text_config(decoder=True))

    @property
    def cap_bytes(self) -> int:
        """Return the cap of the cache in bytes: as it was asked for, else what the slots need."""
        return self.plan.cache_bytes if self.kv_budget is None else parse_bytes(self.kv_budget)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = POCKET,
        *given: Any,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        memory_cap: str | int | None = None,
        enforce: Enforce = "check",
        weights: str | None = None,
        recall_store: str | int | None = None,
        **named: Unpack[SettingNames],
    ) -> Runtime:
        """Load a model to chat in fixed memory.

        Args:
            model: 'pocket', a local directory, or a repository of the hub. A directory that `kvcap
                export decoder` wrote gives an `OrtRuntime`, which has the same conversations: its
                policy, sizes and weights are those of the export.
            given: whole `CacheSettings`, or a policy.
            dtype: 'float32', 'bfloat16' or 'float16'; the checkpoint's by default.
            device: 'cpu', 'cuda' or 'mps'; the best there is by default.
            memory_cap: bytes for the whole process, such as '2GiB', or 'auto' for all that is free
                now; without a KV budget, the largest that fits is taken.
            enforce: 'check' checks before every block; 'rlimit' also has the system refuse more
                (on a GPU: the allocator, for the GPU's memory).
            weights: 'int8' or 'int4' to round matrices as they are loaded; the device is then the
                CPU.
            recall_store: the most bytes of the index by which a conversation finds its evicted
                text; 8 MiB by default, less under a small `memory_cap`. With 0 nothing is recalled.
            named: settings of a session's cache by their names, as in `CacheSettings`.

        Raises:
            ModelNotFound, ModelFilesBroken, UnsupportedModel, PlanInfeasible, PolicyError: raised
                before weights are read.
            ValueError: a cap that is not given is to be enforced.
        """
        if str(model) not in BUILT_IN and (folder := locate(model)) and is_export(folder):
            from kvcap.runtime.backends.onnxruntime.runtime import open_export  # an optional one

            return cast(
                "Runtime",
                open_export(
                    folder,
                    given,
                    named,
                    device=device,
                    dtype=dtype,
                    weights=weights,
                    memory_cap=memory_cap,
                    enforce=enforce,
                    recall_store=recall_store,
                ),
            )
        check_enforce(enforce, memory_cap)
        where, settings = resolve(model), CacheSettings.of(given, named, "policy")
        own = load_config(where)
        config = Sizes(settings, memory_cap).config_for(own)
        chosen = usable(device) or (best_device() if weights is None else "cpu")
        cap = None if memory_cap is None else parse_cap(memory_cap)
        precision = dtypes.of_model(dtype, config)
        plan_for = partial(
            MemoryPlan.of,
            config,
            settings,
            dtype=precision,
            device=chosen,
            memory_cap=cap,
            headers=read_headers(where),
            weights=weights,
            recall_store=index_bytes(recall_store, cap),
        )
        if weights is not None:
            check_packing(config, precision, chosen, weights)
        plan = plan_for()
        ModelShape.of(config, plan.budget_tokens + plan.block_size)
        if settings.evict_every is None:
            settings = replace(settings, evict_every=usual_every(chosen, plan.block_size))
        plan.sized(settings)  # refuses evictions further apart than blocks
        if torch.device(chosen).type != "cuda":
            warn_if_short(plan, free_memory(), memory_cap)
        check_generation(where)
        chat_template.start_renderer()
        tokenizer = load_tokenizer(where)
        room = None if cap is None else cap - plan.baseline
        if weights is None:
            loaded = load_model(where, config, precision, room)
        else:
            loaded = load_packed(where, config, precision, weights, room)
        if cap is not None:
            plan = plan_for(loaded=True)  # with the memory that loading really took
            if enforce == "rlimit":
                enforce_limit(cap, chosen)
        if quantisation(config) is not None:
            plan = plan.with_weights(held_weights(loaded))
        if (longest := ModelShape.of(own).longest_compact) and config is not own:
            setattr(loaded, SHORT, ShortFactors(loaded, own, longest))
        runtime = cls(
            loaded.eval().to(chosen),
            tokenizer,
            plan,
            settings,
            name=str(model),
            memory_cap=cap,
        )
        if torch.device(chosen).type == "cuda":
            runtime.warm()
        return runtime

    def new_cache(self, batch: int = 1, **named: Unpack[SettingNames]) -> BudgetCache:
        """Make an empty cache of the planned size for each of `batch` sequences; allocate it.

        Its settings are the runtime's, but for those that are given by name.
        """
        cache = BudgetCache(self.model.config, self.settings, **named)
        if self.memory_cap is not None and self.model.device.type == "cpu":
            block = self.plan.workspace + self.plan.logits
            cache.guard = CapGuard(self.memory_cap, block, self.plan.block_size)
        return cache.allocate(batch, self.model.dtype, self.model.device)

    def session(
        self,
        system: str | None = None,
        *,
        seed: int | None = None,
        generation: GenerationConfig | None = None,
    ) -> Session:
        """Begin a new conversation with a cache of its own."""
        return Session(self, system, seed, generation)

    def batch(self, size: int) -> Batch:
        """Return a batch that answers up to `size` sessions at once; see `Batch`.

        Raises:
            PlanInfeasible: `size` is below 1, or a memory cap is set, whose plan has one session.
        """
        return Batch(self, size)

    def shared_rows(self, size: int) -> tuple[SharedCache | SharedPass | None, str | None]:
        """Return what reads a token of so many sessions at once, or None and the reason."""
        return shared_rows(self, size)

    def reserve(self, conversations: int) -> int:
        """Return 0, as each conversation allocates its own cache."""
        return 0

    def loop(self) -> BlockLoop:
        """Return a block loop over an empty cache, which is its own as long as the loop lives.

        On CUDA it may be the cache of a session that ended, with the graphs captured there, so that
        nothing is allocated or captured anew. A program that still holds that session's cache
        cannot read into it then. See `free_idle`.
        """
        if self._idle:
            cache, graphs = self._idle.pop()
            cache.reset()
            cache.reused = True
            loop = BlockLoop(self.model, cache, graphs=graphs)
        else:
            cache = self.new_cache()
            loop = BlockLoop(self.model, cache, several=self.memory_cap is None)
        if loop.graphs is not None:
            finalize(loop, self._idle.append, (cache, loop.graphs)).atexit = False
        return loop

    def free_idle(self) -> int:
        """Free the memory of caches and graphs that no session uses; returns the caches' bytes."""
        freed = sum(cache.nbytes for cache, _ in self._idle)
        self._idle.clear()
        return freed

    def warm(self) -> None:
        """Have a short conversation, so that a GPU's first answer waits for no kernel.

        Compiles kernels where no process has done so on this machine, and loads them. The first
        session gets the conversation's cache, with the CUDA graphs that it captured.
        """
        converse(self.loop(), self.vocabulary)

    def loop_for(self, eviction: Eviction) -> BlockLoop:
        """Make a block loop over an empty cache with another eviction than the runtime's."""
        cache = self.new_cache(policy=eviction, sink_tokens=None)
        return BlockLoop(self.model, cache, several=self.memory_cap is None)

    def rng(self, seed: int | None) -> torch.Generator:
        """Make a generator of random numbers on the CPU; one seed gives the same on any device."""
        rng = torch.Generator()
        if seed is None:
            rng.seed()
        else:
            rng.manual_seed(seed)
        return rng

    def sampler(self, generation: GenerationConfig, rng: torch.Generator) -> Sampler:
        """Make a sampler with these settings and random numbers.

        Raises:
            UnsupportedModel: for beams and other modes that reorder the cache.
        """
        return Sampler(generation, rng)

    def token_ids(self, tokens: list[int]) -> Tensor:
        """Return token ids [1, T] on the model's device."""
        # By numpy, as torch reads a list number by number: 5 ms for 40,000 tokens.
        return torch.from_numpy(np.array([tokens], np.int64)).to(self.model.device)

    def append_token(self, history: Tensor, token: Tensor) -> Tensor:
        """Return the history [1, T] with the next token [1] behind it: [1, T + 1]."""
        return torch.cat((history, token[:, None]), dim=1)

    def save(self, session: Session, path: str | os.PathLike[str]) -> None:
        """Write everything that `session` needs to go on.

        Raises:
            SessionNotSaved, SessionBroken: nothing was written; an earlier file is as it was.
        """
        session_file.write(path, *snapshot.gather(session, self._identity()))

    def _identity(self) -> dict[str, Any]:
        plan = self.plan
        return snapshot.identity_of(
            self.model, self.name, plan.positions, plan.kv_dtype, plan.weights_dtype
        )

    def restore(self, session: Session, path: str | os.PathLike[str]) -> None:
        """Make `session` the saved one, or refuse and leave it as it is.

        Raises:
            SessionFileCorrupt, SessionFileForeign, SessionFileNewer, PinsTooLarge: refused.
        """
        with SessionFile(path) as file:
            snapshot.restore(session, self._identity(), self.vocabulary, file)

    def with_policy_name(self, policy: str, options: dict[str, Any]) -> Runtime:
        """Return a runtime of this model and budget under another policy; pins by option stay.

        Raises:
            PolicyError: unknown names, refused values.
        """
        mine = self.settings.eviction
        pins = {name: n for name in PINS if (n := getattr(mine, name)) is not None}
        return self.with_policy(load_policy(policy, **{**pins, **options}))

    def policies(self) -> dict[str, list[str]]:
        """Return the policies that `with_policy_name` takes, with the names of their options."""
        return {
            name: [
                *PINS,
                *(o for part in recipe.parts.values() for o in signature(part).parameters),
            ]
            for name, recipe in policies().items()
        }

    def with_policy(self, policy: Eviction) -> Runtime:
        """Return a runtime of this model and budget under another policy; weights are shared.

        A budget in bytes keeps its bytes, in which the new policy may keep fewer slots.
        """
        settings = replace(self.settings, policy=policy, sink_tokens=None)
        if self.kv_budget is not None:
            settings = replace(settings, budget_tokens=None, kv_budget=self.kv_budget)
        return self._replanned(settings)

    def with_budget(self, tokens: int) -> Runtime:
        """Return a runtime of this model and policy with so many slots per KV head and layer.

        Raises:
            PlanInfeasible: below 1, or the process would pass its memory cap.
            PolicyError: the policy pins more.
        """
        check_size("budget_tokens", tokens)
        runtime = self._replanned(replace(self.settings, budget_tokens=tokens))
        if self.memory_cap is not None:  # what the process took without a cache is known
            fitting(replace(runtime.plan, baseline=self.plan.baseline), self.memory_cap)
        return runtime

    def _replanned(self, settings: CacheSettings) -> Runtime:
        """Return a runtime of this model and its weights under a new plan for `settings`."""
        if self.plan.block_why:  # nobody asked for this block, so it follows the new budget
            settings = replace(settings, block_size=None)
        plan = MemoryPlan.of(
            self.model.config,
            settings,
            dtype=self.model.dtype,
            device=self.model.device,
            rehearse=self.memory_cap is not None,
            weights=self.plan.weights_dtype,
            recall_store=self.plan.recall_store,
        ).with_weights(Weights(self.plan.weights, self.plan.weights_from))
        return Runtime(
            self.model,
            self.tokenizer,
            replace(plan, baseline=self.plan.baseline),
            settings,
            name=self.name,
            memory_cap=self.memory_cap,
        )


def usual_every(device: str | torch.device, block_size: int) -> int:
    """Return after how many tokens of an answer to evict by default.

    On a CPU an eviction takes longer than attention does; a GPU replays it beside other work.
    """
    return min(EVICT_EVERY, block_size) if torch.device(device).type == "cpu" else 1


def enforce_limit(cap: int, device: str | torch.device) -> None:
    """Have the system, or on CUDA the allocator, refuse memory beyond `cap` bytes."""
    device = torch.device(device)
    if device.type != "cuda":
        limit_data(cap)
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    _, total = torch.cuda.mem_get_info(index)
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), index)
