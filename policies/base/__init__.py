"""What every policy is made of: `Observation`, `Policy`, `Eviction`. Knows no model, no cache."""

from kvcap.policies.base.eviction import Eviction
from kvcap.policies.base.observation import Observation
from kvcap.policies.base.policy import Policy, PolicyError, pool_in_time

__all__ = ["Eviction", "Observation", "Policy", "PolicyError", "pool_in_time"]
