"""Finds the kernels that a plan's conversations launch, and has them compiled or loaded ahead.

A conversation is rehearsed: the block loop runs over tensors that have sizes and no contents, and
what would be launched is only noted. So there is no list of kernels that could differ from what
runs. Knows transformers' models; no kernel.
"""

from __future__ import annotations

import atexit
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import Thread
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvcap import dtypes
from kvcap.kernels.device import Target, pretending
from kvcap.kernels.launch import Listener, ahead, heard
from kvcap.kernels.variants import Compiler, save, saved
from kvcap.policies import Eviction
from kvcap.runtime.backends.pytorch.cuda_graphs import PASS, Uncaptured
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.practice import Practice
from kvcap.runtime.backends.pytorch.products import Noted, Product, compute
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.slot_format import KvDtype
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.fused.decoder import FAMILIES
from kvcap.runtime.models.quantised import quantisation
from kvcap.runtime.planning.dry_run import data_independent
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.types import ATTENTION, Positions

THREAD = "kvcap-warm-up"
META = torch.device("meta")  # of tensors that have sizes and no contents


class Rehearsal:
    """A conversation without data, of which kernels are told and none is run.

    Args:
        config: the model's transformers config.
        eviction: what is evicted. Without its shares of heads or layers, where the host decides on
            data how they move.
        budget_tokens: slots per KV head and layer.
        block_size: tokens of a block.
        dtype: of weights, keys and values.
        positions: 'compact', 'true' or 'auto', of which both ways are rehearsed.
        evict_every: in generation.
        several: see `BlockLoop`.
        target: the GPU; None: as kernels are interpreted.
        kv_dtype: of what slots hold, as in `BudgetCache`.

    Raises:
        KvcapError: no such conversation is possible.
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
        kv_dtype: KvDtype | None = None,
    ) -> None:
        autocast_nothing_on_meta()
        self.target = target
        self.noted = Noted()
        """Matrix products of the conversation so far."""
        with self._dry():
            config = _with_few_layers(config, eviction)
            self.model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=dtype
            ).eval()

            def cache_of(eviction: Eviction) -> BudgetCache:
                cache = BudgetCache(
                    config, budget_tokens, block_size, eviction,
                    positions=positions, evict_every=evict_every, kv_dtype=kv_dtype,
                )  # fmt: skip
                return cache.allocate(1, dtype, META)

            cache, even = cache_of(eviction), data_independent(eviction)
            if even is not eviction and not cache.by_rows():
                cache = cache_of(even)
            graphs = Uncaptured(self.model, cache, several)
            self.loop = BlockLoop(self.model, cache, graphs=graphs)

    @contextmanager
    def _dry(self) -> Iterator[None]:
        with META, torch.no_grad(), pretending(self.target):
            yield

    def run(self, listener: Listener) -> None:
        """Go through a conversation: first what comes first in any, then what is rarer."""
        with self._dry(), heard(listener), self.noted:
            self._converse()
            if self.loop.cache.layout.positions == "auto":
                self._converse(compact=True)

    def _converse(self, compact: bool = False) -> None:
        cache = self.loop.cache
        budget, block = cache.layout.budget_tokens, cache.block_size
        each = [slots for kept in cache.layout.allotments for slots in kept]  # of all heads
        longest, odd = max(each) + block, block // 16 + 2
        corrector = cache.eviction.corrector
        longest += 0 if corrector is None else corrector.size  # evicted, and kept then
        # A long prompt and its answer, then a short one; both are what most begin with.
        for length in (longest + 2 * max(block, PASS) + odd, odd):
            self._begin(compact)
            self._read(length)
            for _ in range(cache.evict_every + 1):
                self._read(1)
        # Messages of few and of many tokens: in a full cache, in an empty one, in between.
        lengths = [2**i for i in range(1, block.bit_length()) if 2**i < block]
        self._begin(compact)
        self._read(longest)
        for length in lengths:
            self._read(length)
        for length in lengths:
            self._begin(compact)
            self._read(length)
        for length in reversed(lengths):
            self._read(length)
        # Every length to which blocks are padded, at which matrix products differ.
        for length in range(self.loop.step, block + 1, self.loop.step):
            self._begin(compact)
            self._read(length)
        if cache.eviction.layer_budget is not None:
            # Some layers are full while others fill: a token, and messages.
            self._begin(compact)
            for length in (min(min(each) + block, budget), 1, *lengths, block):
                self._read(length)
        if cache.balance is not None:
            # A layer has got many slots of the others.
            self._begin(compact)
            self._read(longest)
            if (table := cache.row_table()) is not None:
                table.suppose(2 * budget)
            for length in (block, *lengths, 1, 1):
                self._read(length)

    def _begin(self, compact: bool) -> None:
        """Begin with an empty cache; `compact`, as if 'auto' positions had become so."""
        self.loop.cache.reset()
        if compact:
            self.loop.cache.become_compact()

    def _read(self, length: int) -> None:
        """A prompt, or as much of it as there is room for where nothing is evicted."""
        cache = self.loop.cache
        if not cache.eviction.policy.evicts:
            length = min(length, cache.spare)
        if length:
            self.loop.prefill(torch.zeros(1, length, dtype=torch.long))


@cache
def autocast_nothing_on_meta() -> None:
    """Have `torch.autocast` do nothing for tensors without contents, for which it would fail.

    In transformers 4.57 rotary embeddings turn it off for the device of what they are given.
    """

    def new(cls: type, *args: Any, **options: Any) -> Any:
        if META.type in (*args[:1], options.get("device_type")):
            return nullcontext()
        return object.__new__(cls)

    torch.autocast.__new__ = new  # type: ignore[method-assign]


def _with_few_layers(config: Any, eviction: Eviction) -> Any:
    """A copy of a text model's config, with as few layers as launch all kernels."""
    config = copy.deepcopy(config.get_text_config(decoder=True))
    config._attn_implementation = ATTENTION
    if _alike(config, eviction):  # what moves between layers takes more than one
        config.num_hidden_layers = min(2 if eviction.layers_move else 1, config.num_hidden_layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def _alike(config: Any, eviction: Eviction) -> bool:
    """Whether one layer launches what all launch."""
    layers, budgets = ModelShape.of(config).layers, (eviction.layer_budget, eviction.head_budget)
    uniform = all(budget is None or budget.moves for budget in budgets)  # all begin with as many
    return uniform and config.model_type in FAMILIES and len(set(layers)) == 1


class WarmUp:
    """Compiles a plan's kernels ahead, in the background, or loads those that were.

    All other kernels of the first answer are loaded by a short conversation with one layer, unless
    memory is planned to the byte: see `practice.py`, and `products.py` of matrix products.

    Args:
        config: the model's transformers config.
        plan: of its memory.
        eviction: what is evicted.
        device: of CUDA, on which it will run.
        evict_every: in generation.
        several: see `BlockLoop`; False: memory is planned to the byte.
        on_done: called after each kernel with how many are ready, and how many are known of.
        practises: whether the conversation takes place: once a process, while weights are loaded.
    """

    def __init__(
        self,
        config: Any,
        plan: MemoryPlan,
        eviction: Eviction,
        device: torch.device,
        evict_every: int = 1,
        several: bool = True,
        on_done: Callable[[int, int], None] | None = None,
        practises: bool = True,
    ) -> None:
        self.compiler, self.target = Compiler(device, on_done), Target.of(device)
        self.device, self.dtype = device, dtypes.torch_dtype(plan.dtype)
        self._multiplies = several
        self.error: Exception | None = None
        self._rehearsal: Rehearsal | None = None
        self._practice: Practice | None = None
        plain = {k: v for k, v in config.to_dict().items() if not k.startswith("_")}
        sizes = plan.budget_tokens, plan.block_size, plan.dtype, plan.positions, plan.kv_dtype
        told = (plain, *sizes)
        self.key = f"{told} {eviction} {evict_every} {several} {self.target}"
        self._saved = saved(self.key)
        if quantisation(config) is None:
            # Here, as transformers sets what all threads share while it makes a model.
            try:
                if self._saved is None:
                    self._rehearsal = Rehearsal(
                        config, eviction, plan.budget_tokens, plan.block_size,
                        self.dtype, plan.positions, evict_every, several,
                        self.target, plan.kv_dtype,
                    )  # fmt: skip
                few = _with_few_layers(config, eviction)
                if practises and several and _alike(few, eviction):
                    self._practice = Practice(few, plan, eviction, device, evict_every)
            except Exception as error:
                self.error = error
        self._thread = Thread(target=self._work, name=THREAD, daemon=True)
        ahead.append(self.compiler.join)
        atexit.register(self._stop)
        self._thread.start()

    @property
    def found(self) -> bool:
        """Whether an earlier process has compiled all that is known of."""
        return self._saved is not None

    def _work(self) -> None:
        compiler, products = self.compiler, set[Product]()
        rehearses = self._rehearsal is not None
        try:
            if self._saved is not None:
                for launch in self._saved.launches:
                    compiler.add(launch)
                products = {Product(*sizes) for sizes in self._saved.further}
            if self._rehearsal is not None:
                self._rehearsal.run(compiler.hear)
                products = self._rehearsal.noted.products
                self._rehearsal = None
            self._practise()
            if self._multiplies:
                compute(sorted(products), self.dtype, self.device)
            compiler.finish()
            if rehearses:
                save(self.key, compiler.launches.values(), sorted(products))
        except Exception as error:
            self.error = error  # an answer compiles what is missing, or says what is wrong
        finally:
            ahead.remove(compiler.join)
            atexit.unregister(self._stop)

    def _practise(self) -> None:
        """Have the conversation; all else goes on where it fails."""
        practice, self._practice = self._practice, None
        if practice is not None:
            try:
                with heard(self._hear):
                    practice.run()
            except Exception as error:
                self.error = error

    def _hear(self, kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Listens to launches that do happen, and have their kernels compiled before."""
        self.compiler.hear(kernel, args, options)
        return True

    def finish(self) -> int:
        """Wait for all; returns how many kernels there are.

        Raises:
            Exception: what kept them from being found or compiled.
        """
        self._thread.join()
        if self.error is not None:
            raise self.error
        return len(self.compiler.launches)

    def _stop(self) -> None:
        self.compiler.stop()
        self._thread.join()
