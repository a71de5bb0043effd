"""Loads and plans GGUF files for the commands, by llama.cpp's library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcap.runtime.cli.options import Budget, Run, Running, pairs
from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.memory.free_memory import process_bytes
from kvcap.runtime.models.names import locate
from kvcap.runtime.planning.plan import MemoryPlan, parse_cap

if TYPE_CHECKING:
    from kvcap.runtime.backends.llamacpp.plan import LlamaPlanner
    from kvcap.runtime.backends.llamacpp.runtime import LlamaRuntime
    from kvcap.runtime.backends.numpy_sampler import Generation
    from kvcap.runtime.session.ends import End
    from kvcap.runtime.types import ModelKind

PYTORCH = "; leave it out, or give --backend torch"
USUAL_PLACES = 16  # conversations of a server without a cap: their cells are allocated at once


def load_gguf(run: Run, recall_store: int | None) -> LlamaRuntime:
    """Load a GGUF file under its budget.

    Raises:
        UnsupportedModel: an option that llama.cpp does not have.
    """
    from kvcap.runtime.backends.llamacpp.library import load_library
    from kvcap.runtime.backends.llamacpp.runtime import LlamaRuntime

    budget, running = run.budget, run.running
    check_options(budget, running)
    load_library()  # nothing is downloaded that could not be run
    return LlamaRuntime.from_file(
        _file(run.model),
        budget.policy,
        budget.settings(evict_every=running.evict_every),
        policy_options=_policy_options(budget),
        memory_cap=budget.memory_cap,
        enforce=budget.enforce,
        threads=running.threads,
        gpu_layers=running.gpu_layers,
        recall_store=recall_store,
        name=run.model,
    )


def planned_gguf(model: str, budget: Budget, recall_store: int = 0) -> MemoryPlan:
    """Plan a run of the GGUF file `model` from its header.

    Raises:
        PlanInfeasible: nothing fits, naming what would.
    """
    check_options(budget)
    cap = None if budget.memory_cap is None else parse_cap(budget.memory_cap)
    planner = _planner(model, budget, recall_store, capped=cap is not None)
    return planner.with_least(planner.best(cap))


def library_of() -> str:
    """Return which library of llama.cpp runs a GGUF file, as a line for people."""
    from kvcap.runtime.backends.llamacpp.library import load_library

    library = load_library()
    return f"{library.label} ({library.file})"


def answers_of_gguf(model: str) -> tuple[list[End], Generation, ModelKind]:
    """Return a GGUF file's tokens that end an answer, settings of generation and kind."""
    from kvcap.runtime.backends.llamacpp.library import load_library
    from kvcap.runtime.backends.llamacpp.model import LlamaModel
    from kvcap.runtime.backends.llamacpp.runtime import generation_of
    from kvcap.runtime.session.ends import ends_of

    loaded = LlamaModel(load_library(), _file(model), planned=True)
    generation = generation_of(loaded)
    return ends_of(loaded.tokenizer, generation), generation, loaded.kind


def check_options(budget: Budget, running: Running | None = None) -> None:
    """Refuse options that are for PyTorch.

    Raises:
        UnsupportedModel: naming the option.
    """
    if budget.dtype is not None:
        raise UnsupportedModel(
            f"--dtype {budget.dtype} is not for llama.cpp, which computes with a file's own "
            f"numbers{PYTORCH}"
        )
    if running is not None and running.device not in (None, "cpu"):
        raise UnsupportedModel(
            f"--device {running.device} is not for llama.cpp; use --gpu-layers N with a build for "
            "a GPU, or give --backend torch"
        )


def _planner(model: str, budget: Budget, recall_store: int, *, capped: bool) -> LlamaPlanner:
    from kvcap.runtime.backends.llamacpp.library import load_library
    from kvcap.runtime.backends.llamacpp.model import LlamaModel
    from kvcap.runtime.backends.llamacpp.plan import LOADING, LlamaPlanner
    from kvcap.runtime.backends.llamacpp.rank import ranking_of
    from kvcap.runtime.backends.llamacpp.runtime import settings_for

    ranking = ranking_of(budget.policy, _policy_options(budget))
    header = LlamaModel(load_library(), _file(model), planned=True)
    settings = settings_for(budget.settings(), ranking, header)
    baseline = process_bytes() + LOADING if capped else 0
    return LlamaPlanner(header, ranking, settings, recall_store, baseline)


def _policy_options(budget: Budget) -> dict[str, Any]:
    return {**budget.pins, **pairs(budget.policy_option or [])}


def _file(model: str) -> Path:
    path = locate(model)
    assert path is not None, "a GGUF file was recognised by its first bytes"
    return path
