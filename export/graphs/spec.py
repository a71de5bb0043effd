"""Describes one graph by policy, stage, formulation, type and shape, and makes its module."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcap.dtypes import short, torch_dtype
from kvcap.export.graphs.forms import form_of, graph_part
from kvcap.export.graphs.shape import Shape
from kvcap.export.graphs.stages import STAGES, StageGraph
from kvcap.policies import PINS, Eviction, load_policy, policies
from kvcap.policies.base import Component
from kvcap.runtime.errors import NotExportable

DTYPES = ("fp32", "fp16")
IN_GRAPH = ("policy", "saliency", "rescorer")  # parts of an eviction that a graph contains


@dataclass(frozen=True)
class Spec:
    """A description of one graph, with all settings that its export takes.

    Raises:
        NotExportable: there is no such stage or type.
        PolicyError: the budget has no room for the policy's pins.
    """

    eviction: Eviction  # the whole eviction; the graph has its parts that work on one layer
    shape: Shape
    stage: str = "score"
    formulation: str | None = None
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", short(self.dtype))  # a type has several names
        if self.stage not in STAGES:
            raise NotExportable(f"no stage {self.stage!r}; there are {', '.join(STAGES)}")
        if self.dtype not in DTYPES:
            raise NotExportable(f"no dtype {self.dtype!r}; there are {', '.join(DTYPES)}")
        run = graph_part(self.eviction).plain()  # pins are part of no score
        if self.stage == "evict":
            run = graph_part(self.eviction).with_sinks(self.shape.budget)
        run = replace(self.eviction, sink_tokens=run.sink_tokens)
        object.__setattr__(self, "eviction", run)
        if self.stage == "evict":
            graph_part(run).check(self.shape.budget)  # no graph reads a table of heads

    def graph(self) -> StageGraph:
        """Make the module to trace.

        Raises:
            NotExportable: the policy has no such stage or formulation.
        """
        form = form_of(graph_part(self.eviction), self.shape, self.formulation)
        return STAGES[self.stage](form)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the type of the cache."""
        return torch_dtype(self.dtype)

    def stem(self) -> str:
        """Return the name of the graph's files without their suffixes."""
        parts = [self.eviction.name, self.stage, self.graph().form.name, self.dtype]
        if self.stage == "evict":
            parts.append(f"to{self.shape.budget}")
        if self.shape.slots is not None:
            parts.append(f"n{self.shape.slots}")
        return ".".join(parts)

    def notes(self) -> list[str]:
        """Return notes for the graph's users, such as parts of the policy that it leaves out."""
        sentences, eviction = [], self.eviction
        if eviction.layer_budget is not None:
            sentences.append("layers hold unequal budgets: export an evict graph for every budget")
        if eviction.head_budget is not None:
            sentences.append(
                "heads hold unequal budgets, which this graph does not share out: it scores "
                f"every head by {_name(eviction.policy)}, and evicts to one budget"
            )
        if eviction.corrector is not None:
            sentences.append("the score of its base: what corrects attention is not in this graph")
        if self.stage == "score" and eviction.rescorer is not None:
            sentences.append("pinned holds every slot that stays, those the policy pins too")
        if self.stage == "evict":
            sentences.append("slots that stay keep their order; positions say where each belongs")
        return sentences

    def recipe(self) -> dict[str, Any]:
        """Return the part of the policy that is in the graph, in the format of `recipe`."""
        return recipe(graph_part(self.eviction))


def recipe(eviction: Eviction) -> dict[str, Any]:
    """Return a policy as plain values, from which `load_policy` makes it again."""
    options: dict[str, Any] = {}
    for component in reversed(eviction.components):  # the first part that has an option wins
        options |= component.options()
    pins = {name: n for name in PINS if (n := getattr(eviction, name)) is not None}
    parts = "+".join(_name(component) for component in eviction.components)
    return {"name": eviction.name, "parts": parts, "parameters": {**options, **pins}}


def with_graphs_of_their_own() -> list[str]:
    """Return the names of policies and presets with different graphs, sorted.

    Where several have the same parts in their graphs, such as `snapkv`, `adakv` and `calidrop`, the
    one with the fewest parts and options stands for all.
    """
    names: dict[tuple[Any, ...], str] = {}
    recipes = {name: each for name, each in policies().items() if load_policy(name).policy.evicts}
    for name in sorted(
        recipes, key=lambda name: (len(recipes[name].parts), len(recipes[name].options))
    ):
        parts = recipes[name].parts
        names.setdefault(tuple(parts.get(slot) for slot in IN_GRAPH), name)
    return sorted(names.values())


def recalled(recipe: dict[str, Any], shape: dict[str, Any], **rest: str) -> Spec:
    """Return the spec that a manifest describes.

    Args:
        recipe: the policy, in the format of `recipe`.
        shape: the fields of `Shape`.
        rest: the other fields of `Spec`.

    Raises:
        ValueError: there is no such policy, or no layer can have these sizes.
    """
    eviction = load_policy(recipe["parts"], **recipe["parameters"])
    return Spec(eviction, Shape(**shape), **rest)


def _name(component: Component) -> str:
    """Return the name by which a combination such as `snapkv+adakv` lists a part."""
    for name, each in policies().items():
        if set(each.parts) == {"policy"} and each.parts["policy"] is type(component):
            return name
    return type(component).__module__.rsplit(".", 1)[-1]
