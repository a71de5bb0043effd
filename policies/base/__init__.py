"""Defines what every eviction is made of: `Observation`, `Policy`, companions, `Eviction`."""

from kvcap.policies.base.companions import (
    Corrector,
    HeadBudget,
    LayerBudget,
    Rescorer,
    Saliency,
    apportion,
    apportion_rows,
    evenly,
)
from kvcap.policies.base.component import Component, PolicyError, Preset
from kvcap.policies.base.eviction import Eviction
from kvcap.policies.base.hashing import hashed, sign_sketch
from kvcap.policies.base.leverage import leverage
from kvcap.policies.base.logits import Logits
from kvcap.policies.base.observation import Expansion, Observation, RowRanges
from kvcap.policies.base.policy import Group, Policy, WindowPolicy, over_group, pool_in_time

__all__ = [
    "Component",
    "Corrector",
    "Eviction",
    "Expansion",
    "Group",
    "HeadBudget",
    "LayerBudget",
    "Logits",
    "Observation",
    "Policy",
    "PolicyError",
    "Preset",
    "Rescorer",
    "RowRanges",
    "Saliency",
    "WindowPolicy",
    "apportion",
    "apportion_rows",
    "evenly",
    "hashed",
    "leverage",
    "over_group",
    "pool_in_time",
    "sign_sketch",
]
