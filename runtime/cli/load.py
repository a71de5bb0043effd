"""An exported decoder from the command line's options; what they ask that it cannot do, by name."""

from __future__ import annotations

from pathlib import Path

from kvcap.runtime.backends.onnxruntime import manifest
from kvcap.runtime.backends.onnxruntime.plan import plan_of
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime, Wanted, check_dtype, choose
from kvcap.runtime.cli.options import Budget, Running, pairs
from kvcap.runtime.errors import NotExportable
from kvcap.runtime.models.names import locate
from kvcap.runtime.planning.plan import MemoryPlan, Sizes
from kvcap.runtime.types import POCKET


def load(model: str, budget: Budget, running: Running) -> OrtRuntime:
    """The decoder in the directory `model` under a budget.

    Raises:
        NotExportable: an option that this backend does not have.
    """
    for option, given, why in (
        ("--device", running.device not in (None, "cpu"), "this backend runs on the CPU"),
        ("--compile", running.compiled, "a graph is compiled as it is"),
        ("--evict-every", running.evict_every != 1, "exported graphs evict after every token"),
    ):
        if given:
            raise NotExportable(f"{option} is not for --backend onnxruntime: {why}; leave it out")
    return OrtRuntime.from_directory(
        _directory(model), _wanted(budget), **budget.sizes(), enforce=budget.enforce,
        dtype=budget.dtype, threads=running.threads,
    )  # fmt: skip


def plan(model: str, budget: Budget) -> MemoryPlan:
    """What a run would hold, without loading it.

    Raises:
        PlanInfeasible: nothing fits, naming what would.
    """
    found, wanted = manifest.read(_directory(model)), _wanted(budget)
    chosen = choose(found, wanted, budget.positions)
    check_dtype(found, budget.dtype)
    return plan_of(found, chosen.name, Sizes(**budget.sizes()), pinned=chosen.least)


def _directory(model: str) -> Path:
    """Where the export is.

    Raises:
        ModelNotFound: there is nothing of that name.
        NotExportable: a model that was not exported yet.
    """
    folder = Path(model) if model == POCKET else locate(model)
    if folder is None or (model == POCKET and not folder.is_dir()):
        what = "the built-in model" if model == POCKET else "no directory"
        raise NotExportable(
            f"{model!r} is {what}, and --backend onnxruntime runs exported directories; export it "
            f"once with: kvcap export decoder {model} -o {Path(model).name}-onnx, and give that "
            "directory, or leave --backend onnxruntime out"
        )
    return folder


def _wanted(budget: Budget) -> Wanted:
    options = pairs(budget.policy_option or [])
    return Wanted(budget.policy, options, budget.sink_tokens, budget.recent_tokens)
