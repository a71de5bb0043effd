"""Runs the policies that `kvcap tune` measures in PyTorch, each in a cache as a chat has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvcap.dtypes import of_model
from kvcap.evals.quality.answering import answer, losses
from kvcap.evals.quality.recommend import UNCAPPED
from kvcap.evals.quality.tune import Side, TuningRequest
from kvcap.evals.reports import environment
from kvcap.policies import PolicyError, load_policy
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime, usual_every
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.devices import best_device, usable
from kvcap.runtime.models.files import load_config, load_tokenizer
from kvcap.runtime.models.names import resolve
from kvcap.runtime.models.weights import read_headers
from kvcap.runtime.planning.plan import MemoryPlan, parse_cap
from kvcap.runtime.recall.recall import Recall
from kvcap.runtime.recall.settings import index_bytes
from kvcap.runtime.session.engine import Engine
from kvcap.runtime.session.settings import end_tokens


class TorchTuned:
    """A model that PyTorch runs, as a `TunedModel`.

    Args:
        request: says the model and how its caches are made.
        load: loads the model with the policy of this name, as a chat does.

    Raises:
        ModelNotFound, ModelFilesBroken, UnsupportedModel: it cannot be used so.
    """

    candidates: Sequence[str] = ("lagkv", "snapkv", "dropkv", "keydiff-window", "streaming_llm")
    engine: Runtime

    def __init__(self, request: TuningRequest, load: Callable[[str], Engine]) -> None:
        self.request, self._load, self.where = request, load, resolve(request.model)
        self.config = request.sizes.config_for(load_config(self.where))

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer, before the model is loaded."""
        return load_tokenizer(self.where)

    @property
    def trained_length(self) -> int:
        """Return the longest sequence, in tokens, that the model was trained on."""
        return ModelShape.of(self.config.get_text_config(decoder=True)).trained_length

    def side(self, policy: str) -> Side:
        """Plan a policy as a conversation would run it: its slots, block, positions and sinks.

        Raises:
            PolicyError, PlanInfeasible, UnsupportedModel: it cannot be run so.
        """
        request = self.request
        eviction = load_policy(policy, **request.pins)
        if not eviction.policy.evicts:
            raise PolicyError(f"{policy} never evicts, so that it needs no budget; leave it out")
        device = usable(request.device) or (best_device() if request.weights is None else "cpu")
        settings, cap = replace(request.sizes.cache, policy=eviction), request.sizes.memory_cap
        plan = MemoryPlan.of(
            self.config,
            settings,
            dtype=of_model(request.dtype, self.config),
            device=device,
            memory_cap=cap,
            headers=read_headers(self.where),
            weights=request.weights,
            recall_store=index_bytes(cap=None if cap is None else parse_cap(cap)),
        )
        every = usual_every(device, plan.block_size)
        return Side(policy, plan, plan.sized(replace(settings, evict_every=every)))

    def uncapped(self, plan: MemoryPlan) -> Side:
        """Return the uncapped model, which reads as this plan says."""
        return Side(UNCAPPED, plan, CacheSettings(None, plan.block_size, UNCAPPED, "true"))

    def load(self, policy: str) -> Engine:
        """Load the model with this policy, as a chat does."""
        self.engine = cast(Runtime, self._load(policy))
        return self.engine

    def loop(self, side: Side, length: int) -> BlockLoop:
        """Return a loop over an empty cache of a policy, for a text of so many tokens."""
        model = self.engine.model
        settings = replace(side.kept, budget_tokens=side.slots(length))
        return BlockLoop(model, BudgetCache(model.config, settings))

    def losses(self, loop: Any, ids: Any, start: int) -> NDArray[np.float32]:
        """Return the losses in nats of a text's tokens after the first `start` + 1."""
        values: NDArray[np.float32] = losses(loop.model, loop.cache, ids, start)[0].numpy(
            force=True
        )
        return values

    def answer(self, loop: Any, parts: Sequence[Any], limit: int, recall: Recall | None) -> str:
        """Return the greedy answer to a prompt in parts, of at most `limit` tokens."""
        ends = end_tokens(self.engine.generation)
        (reply,) = answer(loop.model, loop.cache, parts, limit, ends, recall)
        text: str = self.engine.tokenizer.decode(reply, skip_special_tokens=True)
        return text

    def environment(self) -> dict[str, Any]:
        """Return device, versions and threads, for JSON."""
        return environment(self.engine.model.device)
