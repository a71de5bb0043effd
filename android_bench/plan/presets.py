"""Defines the presets: which cells are measured, and by which rules. Knows policies by name.

Presets are made on demand: `--help` lists their names, and must not import policies and so torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcap.android_bench.errors import PlanBroken
from kvcap.dtypes import short
from kvcap.export.graphs.formulations import FORMULATIONS, TRACED

SIZES = (512, 1024, 2048, 4096, 8192)  # slots, as in Table 19 of KeyDiff's paper


@dataclass(frozen=True)
class PolicyVariant:
    """A policy in one formulation that observes one number of queries."""

    policy: str
    formulation: str | None = None  # None: export's default
    queries: int | None = None  # None: as many as the policy observes, at most a block's
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """The rules by which cells are measured; `rules` of the plan's schema explains the fields."""

    warmup_runs: int = 5
    warmup_seconds: float = 0.5
    min_runs: int = 50
    min_seconds: float = 2.0
    rounds: int = 3
    max_drift: float = 0.10
    max_timer_share: float = 0.02
    seed: int = 1


@dataclass(frozen=True)
class Group:
    """A group of cells of one stage: every variant at every size in every type."""

    stage: str
    variants: tuple[PolicyVariant, ...]
    sizes: tuple[int, ...]  # slots held while scoring; for the stage evict, slots that stay
    dtypes: tuple[str, ...]

    def models(self) -> Iterator[tuple[PolicyVariant, str, int | None]]:
        """Yield variant, type and budget of each graph; None for the stage score."""
        budgets = self.sizes if self.stage == "evict" else (None,)
        for variant in self.variants:
            for dtype in self.dtypes:
                for budget in budgets:
                    yield variant, dtype, budget


@dataclass(frozen=True)
class PlanPreset:
    """A preset of what a plan measures: groups of cells, rules, and numbers of threads."""

    groups: tuple[Group, ...]
    rules: Rules = Rules()
    threads: tuple[int, ...] = (1,)


KEYDIFF = tuple(PolicyVariant("keydiff", form) for form in FORMULATIONS)
TABLE19 = (
    PolicyVariant("snapkv"),
    PolicyVariant("tova"),
    *KEYDIFF,
    PolicyVariant("h2o", queries=1),
)
QUICK = Rules(warmup_seconds=0.05, min_runs=30, min_seconds=0.3)
BOTH = ("fp32", "fp16")


def table19() -> PlanPreset:
    """Return the preset of the paper's Table 19."""
    return PlanPreset((Group("score", TABLE19, SIZES, ("fp16",)),))


def quick() -> PlanPreset:
    """Return the preset of the paper's Table 19 at three sizes, and two graphs that evict."""
    groups = (
        Group("score", TABLE19, (512, 2048, 8192), ("fp16",)),
        Group("score", TABLE19, (512,), ("fp32",)),
        Group("evict", (KEYDIFF[1], PolicyVariant("tova")), (512,), ("fp16",)),
    )
    return PlanPreset(groups, QUICK)


def full() -> PlanPreset:
    """Return the preset of every policy whose graph differs from the others', both stages."""
    from kvcap.export.graphs.spec import with_graphs_of_their_own

    once = {variant.policy for variant in TABLE19 if variant.queries is None}
    others = [PolicyVariant(name) for name in with_graphs_of_their_own() if name not in once]
    every = (*TABLE19, PolicyVariant("snapkv", options={"window": 8}), *others)
    groups = (Group("score", every, SIZES, BOTH), Group("evict", every, (512, 2048), BOTH))
    return PlanPreset(groups, threads=(1, 2))


PRESETS: dict[str, Callable[[], PlanPreset]] = {"table19": table19, "quick": quick, "full": full}


def narrowed(
    preset: str,
    policies: Sequence[str] = (),
    formulations: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    stages: Sequence[str] = (),
    sizes: Sequence[int] = (),
) -> PlanPreset:
    """Return the part of a preset with these policies, formulations, types and stages.

    An empty list keeps all; `sizes` replace the preset's own.

    Raises:
        PlanBroken: there is no such preset, or it has no cell of one of these names.
    """
    if preset not in PRESETS:
        raise PlanBroken(f"no preset {preset!r}; there are {', '.join(PRESETS)}")
    whole = PRESETS[preset]()
    dtypes = [short(name) for name in dtypes]
    variants = [variant for group in whole.groups for variant in group.variants]
    _known(preset, "policy", policies, [v.policy for v in variants])
    _known(preset, "formulation", formulations, [v.formulation or TRACED for v in variants])
    _known(preset, "dtype", dtypes, [dtype for group in whole.groups for dtype in group.dtypes])
    _known(preset, "stage", stages, [group.stage for group in whole.groups])
    groups = []
    for group in whole.groups:
        kept = tuple(
            v
            for v in group.variants
            if (not policies or v.policy in policies)
            and (not formulations or (v.formulation or TRACED) in formulations)
        )
        types = tuple(d for d in group.dtypes if not dtypes or d in dtypes)
        if kept and types and (not stages or group.stage in stages):
            groups.append(
                replace(group, variants=kept, dtypes=types, sizes=tuple(sizes) or group.sizes)
            )
    if not groups:
        raise PlanBroken(f"preset {preset} has no cell with all that was requested")
    return replace(whole, groups=tuple(groups))


def _known(preset: str, kind: str, names: Sequence[str], there: Sequence[str]) -> None:
    for name in names:
        if name not in there:
            choices = ", ".join(dict.fromkeys(there))
            raise PlanBroken(f"preset {preset} has no {kind} {name!r}; it has {choices}")
