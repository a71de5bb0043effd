"""Runs the policies that `kvcap tune` measures by llama.cpp, each in cells as a chat has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvcap.evals.quality.llama_answering import answer, losses
from kvcap.evals.quality.recommend import UNCAPPED
from kvcap.evals.quality.tune import Side, TuningRequest
from kvcap.evals.reports import device_name, versions
from kvcap.runtime.backends.llamacpp.library import load_library
from kvcap.runtime.backends.llamacpp.loop import LlamaLoop
from kvcap.runtime.backends.llamacpp.model import LlamaModel
from kvcap.runtime.backends.llamacpp.plan import LlamaPlanner
from kvcap.runtime.backends.llamacpp.rank import ranking_of
from kvcap.runtime.backends.llamacpp.runtime import LlamaRuntime
from kvcap.runtime.cores import usable_cores
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.names import resolve
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.recall.recall import Recall
from kvcap.runtime.recall.settings import index_bytes
from kvcap.runtime.session.engine import Engine
from kvcap.runtime.session.settings import end_tokens


class LlamaTuned:
    """A GGUF file that llama.cpp runs, as a `TunedModel`.

    Args:
        request: says the file and how its caches are made.
        load: loads the file with the policy of this name, as a chat does.

    Raises:
        UnsupportedModel: the budget is a cap of the process.
    """

    candidates: Sequence[str] = ("streaming_llm", "keydiff-window", "lagkv")
    engine: LlamaRuntime

    def __init__(self, request: TuningRequest, load: Callable[[str], Engine]) -> None:
        if (cap := request.sizes.memory_cap) is not None:
            raise UnsupportedModel(
                f"--memory-cap {cap} gives a chat by llama.cpp more slots than this process, which "
                f"holds PyTorch too; give --budget-tokens, as `kvcap plan {request.model} "
                f"--memory-cap {cap}` says them"
            )
        self.request, self._load = request, load

    @cached_property
    def header(self) -> LlamaModel:
        """Return the file without its weights."""
        return LlamaModel(load_library(), Path(resolve(self.request.model)), planned=True)

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer, before the model is loaded."""
        return self.header.tokenizer

    @property
    def trained_length(self) -> int:
        """Return the longest sequence, in tokens, that the model was trained on."""
        return self.header.trained_length

    def side(self, policy: str) -> Side:
        """Plan a policy as a conversation would run it: its slots, block, positions and sinks.

        Raises:
            PolicyError, PlanInfeasible, UnsupportedModel: it cannot be run so.
        """
        ranking = ranking_of(policy, self.request.pins)
        planner = LlamaPlanner(self.header, ranking, self.request.sizes.cache, index_bytes())
        return Side(policy, planner.best(), ranking)

    def uncapped(self, plan: MemoryPlan) -> Side:
        """Return the uncapped model, which reads as this plan says."""
        return Side(UNCAPPED, plan, ranking_of(UNCAPPED, {}))

    def load(self, policy: str) -> Engine:
        """Load the file with this policy, as a chat does."""
        self.engine = cast(LlamaRuntime, self._load(policy))
        return self.engine

    def loop(self, side: Side, length: int) -> LlamaLoop:
        """Return a loop over an empty context of a policy, for a text of so many tokens."""
        return replace(
            self.engine,
            ranking=side.kept,
            plan=replace(side.plan, budget_tokens=side.slots(length)),
            all_logits=True,
            contexts=[],
        ).loop()

    def losses(self, loop: Any, ids: Any, start: int) -> NDArray[np.float64]:
        """Return the losses in nats of a text's tokens after the first `start` + 1."""
        return losses(loop, [ids[:, :start], ids[:, start:]])

    def answer(self, loop: Any, parts: Sequence[Any], limit: int, recall: Recall | None) -> str:
        """Return the greedy answer to a prompt in parts, of at most `limit` tokens."""
        reply = answer(loop, parts, limit, end_tokens(self.engine.generation), recall)
        text: str = self.engine.tokenizer.backend_tokenizer.decode(reply)
        return text

    def environment(self) -> dict[str, Any]:
        """Return device, versions and threads, for JSON."""
        engine = self.engine
        threads = engine.threads or len(usable_cores())
        return {
            "device": f"{engine.device_label}, {device_name('cpu', threads)}",
            "versions": versions() | {"llama.cpp": engine.gguf.library.version},
            "threads": threads,
        }
