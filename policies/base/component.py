"""Defines what every part of an eviction has: options, a source, and memory per slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvcap.policies.base.observation import Observation

ATTENTION_VIEWS = frozenset({"queries", "attention", "logits", "output"})
VIEWS = ATTENTION_VIEWS | {"keys", "values", "positions", "output_projection", "state"}


class PolicyError(ValueError):
    """An error that says that a policy, an option, a combination or a budget cannot work."""


class Preset(NamedTuple):
    """A name that stands for a policy or combination with settings, such as a paper's system."""

    parts: str
    """Names the parts as `--policy` takes them: `"snapkv+adakv"`."""

    options: Mapping[str, Any] = {}
    """Holds the options that differ from the defaults of the parts."""

    when: str = ""
    """Says when to use it, where its parts do not say it."""


@dataclass(frozen=True)
class Component:
    """A part of an eviction: a frozen dataclass whose fields are its options.

    Each part has a file of its own, whose name is the part's.
    """

    observes: ClassVar[frozenset[str]] = frozenset()
    """Names the attributes of `Observation` that it reads. The runtime keeps nothing else."""

    paper: ClassVar[str] = ""
    """Names the source of the formula."""

    formula: ClassVar[str] = ""
    """Holds the formula in one line, shown by `kvcap policies`."""

    when: ClassVar[str] = ""
    """Says when to use it: "for ...", "to ...", "where ...", shown by `kvcap policies NAME`."""

    state: ClassVar[Mapping[str, torch.dtype]] = {}
    """Maps names of per-slot memory [B, K, n], which moves with its slot, to dtypes; 0 if new."""

    placing: ClassVar[frozenset[str]] = frozenset()
    """Names options that only say where memory lies: sessions continue under any of them."""

    presets: ClassVar[Mapping[str, Preset]] = {}
    """Names that this file adds beside its own."""

    small: ClassVar[Mapping[str, Any]] = {}
    """Holds options that suit budgets of some tens of slots, as tests of every policy use them."""

    def update(self, obs: Observation) -> dict[str, Tensor]:
        """Return new values of `state`, [B, K, n] each; runs after every block, before scoring."""
        return {}

    def options(self) -> dict[str, Any]:
        """Return the options and their values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def require(self, name: str, ok: bool, expected: str) -> None:
        """Raise `PolicyError` unless option `name` is `ok`, saying what was got and expected."""
        if not ok:
            component = type(self).__module__.rsplit(".", 1)[-1]
            value = getattr(self, name)
            raise PolicyError(f"{component}: {name}={value!r} will not work; expected {expected}")
