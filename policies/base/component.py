"""What every part of an eviction has in common: options, its source, and memory per slot."""

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
    """A policy, an option, a combination or a budget that cannot work."""


class Preset(NamedTuple):
    """A name for a policy or combination with settings of its own, such as a paper's system."""

    parts: str
    """As `--policy` takes it: `"snapkv+adakv"`."""

    options: Mapping[str, Any] = {}
    """Options that differ from the defaults of the parts."""

    when: str = ""
    """When to use it, where its parts do not say it."""


@dataclass(frozen=True)
class Component:
    """One part of an eviction: a frozen dataclass, whose fields are its options.

    It stands in a file of its own, whose name is what the part is called.
    """

    observes: ClassVar[frozenset[str]] = frozenset()
    """Names of the attributes of `Observation` that it reads. The runtime keeps nothing else."""

    paper: ClassVar[str] = ""
    """Where the formula comes from."""

    formula: ClassVar[str] = ""
    """The formula in one line, shown by `kvcap policies`."""

    when: ClassVar[str] = ""
    """When to use it: "for ...", "to ...", "where ...", shown by `kvcap policies NAME`."""

    state: ClassVar[Mapping[str, torch.dtype]] = {}
    """Per-slot memory [B, K, n] that moves with its slot: name -> dtype. A new slot's is 0."""

    placing: ClassVar[frozenset[str]] = frozenset()
    """Options that say where memory lies and change no result: sessions go on under any of them."""

    presets: ClassVar[Mapping[str, Preset]] = {}
    """Names that this file adds beside its own."""

    small: ClassVar[Mapping[str, Any]] = {}
    """Options that suit budgets of some tens of slots, as tests of every policy use them."""

    def update(self, obs: Observation) -> dict[str, Tensor]:
        """New values of `state`, [B, K, n] each, computed after every block before scoring."""
        return {}

    def options(self) -> dict[str, Any]:
        """The options and their values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def require(self, name: str, ok: bool, expected: str) -> None:
        """Raise `PolicyError` unless option `name` is `ok`, saying what was got and expected."""
        if not ok:
            component = type(self).__module__.rsplit(".", 1)[-1]
            got = getattr(self, name)
            raise PolicyError(f"{component}: {name}={got!r} will not work; expected {expected}")
