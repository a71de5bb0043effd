"""Holds policies of other packages to their contract as they run; kvcap's own are held by tests.

A policy reads what it declared in `observes`, writes into nothing of it, and gives numbers. Knows
no model and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from kvcap import kernels
from kvcap.policies import Eviction, Observation, Policy, PolicyError
from kvcap.policies.base import Component
from kvcap.policies.base.component import ATTENTION_VIEWS

NEEDED_BY: Mapping[str, frozenset[str]] = {
    "keys": ATTENTION_VIEWS | {"keys"},
    "values": frozenset({"values", "output"}),
    "queries": ATTENTION_VIEWS,
    "output_projection": frozenset({"output_projection"}),
}
"""Lists for each part of an observation the views that make it readable if one is declared."""
ALIASED = 64  # observations, within which a policy has shown what it writes into, if anything
WATCHED = ("keys", "values", "positions", "queries", "attended", "output_projection")


class PolicyGuard:
    """Runs the policy and the companions of an eviction in place of `kernels.score` and `update`.

    Args:
        eviction: whose components may be of other packages.
    """

    def __init__(self, eviction: Eviction) -> None:
        self.eviction = eviction
        self.name = eviction.name or type(eviction.policy).__name__
        self._seen = 0

    def score(self, policy: Policy, obs: Observation) -> Tensor:
        """Return the worth of every slot [B, K, n], as `kernels.score` does.

        Raises:
            PolicyError: the policy breaks its contract, or gives NaN, which ranks nowhere.
        """
        if is_own(policy):
            return kernels.score(policy, obs)
        scores = self._run("score", policy.score, obs)
        if not isinstance(scores, Tensor):
            self._refuse("score", f"gave {type(scores).__name__}; expected a tensor [B, K, n]")
        if _is_known(scores) and bool(scores.isnan().any()):
            self._refuse("score", "gave NaN; expected a number for every slot (infinity will do)")
        return scores

    def update(self, component: Component, obs: Observation) -> dict[str, Tensor]:
        """Return the new values of a component's state, as `kernels.update` does.

        Raises:
            PolicyError: the component breaks its contract.
        """
        if is_own(component):
            return kernels.update(component, obs)
        state = self._run("update", component.update, obs)
        shape = obs.positions.shape
        expected = f"tensors {list(component.state)}, each [B, K, n] = {list(shape)}"
        if not isinstance(state, Mapping):
            self._refuse("update", f"gave {type(state).__name__}; expected a mapping of {expected}")
        for name, values in state.items():
            given = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            if name not in component.state or given != list(shape):
                self._refuse("update", f"gave {name!r} of {given}; expected {expected}")
        return dict(state)

    def _run(self, what: str, call: Callable[[Observation], Any], obs: Observation) -> Any:
        """Run a component's own code on an observation, and refuse it if it wrote into that."""
        seen = self._limited(obs)
        watched = {name: getattr(seen, name) for name in WATCHED}
        watched |= {f"state[{name!r}]": values for name, values in seen.state.items()}
        before = {name: _writes(values) for name, values in watched.items()}
        try:
            result = call(seen)
        except (PolicyError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if "DefaultCPUAllocator" in str(error):  # no memory, as torch says it
                raise
            failure = f"failed with {type(error).__name__}: {error}; it observes "
            failure += ", ".join(sorted(self.eviction.observes)) or "nothing"
            raise PolicyError(f"policy {self.name}: {what} {failure}") from error
        for name, values in watched.items():
            if _writes(values) != before[name]:
                self._refuse(what, f"wrote into obs.{name}, which is the cache's; make new tensors")
        return result

    def _limited(self, obs: Observation) -> Observation:
        """Return the observation without the parts that no component declared.

        All components get the same object, which is made once.
        """
        seen: Observation | None = vars(obs).get("limited")
        if seen is None:
            there: dict[str, Any] = {name: getattr(obs, name) for name in WATCHED}
            if self._seen < ALIASED:  # of inference mode are copies for this pass, not the cache
                self._seen += 1
                there = {name: _counted(values) for name, values in there.items()}
            if obs.queries is None and self.eviction.policy.queries_observed == 0:
                there["queries"] = _Undeclared(self.name, "queries", "define `queries_observed`")
            for name, views in NEEDED_BY.items():
                if not self.eviction.observes & views:
                    there[name] = _Undeclared(self.name, name, "name it in `observes`")
            seen = vars(obs)["limited"] = replace(obs, **there)
        seen.budget = obs.budget  # which is shared out after a score
        return seen

    def _refuse(self, what: str, why: str) -> NoReturn:
        raise PolicyError(f"policy {self.name}: {what} {why}")


class _Undeclared:
    """Stands for what a policy did not declare: whatever it does with that is refused by name."""

    def __init__(self, policy: str, name: str, advice: str) -> None:
        vars(self).update(policy=policy, name=name, advice=advice)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise PolicyError(
            f"policy {vars(self)['policy']}: it reads obs.{vars(self)['name']}, which it does not "
            f"declare, so that the runtime may not keep it; {vars(self)['advice']}"
        )

    __getattr__ = __getitem__ = __len__ = __iter__ = __bool__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __lt__ = __gt__ = _refuse
    __le__ = __ge__ = __setitem__ = _refuse

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        given += [x for one in given if isinstance(one, (list, tuple)) for x in one]
        next(one for one in given if isinstance(one, cls))._refuse()
        raise AssertionError


def is_own(component: Component) -> bool:
    """Return whether a component is kvcap's own."""
    return type(component).__module__.partition(".")[0] == "kvcap"


def _is_known(numbers: Tensor) -> bool:
    """Return whether the host can read a tensor: it is neither pretended nor yet to be computed."""
    return type(numbers) is Tensor and not _is_captured(numbers)


def _is_captured(numbers: Tensor) -> bool:
    """Return whether a CUDA graph is captured, within which nothing is computed yet."""
    return numbers.is_cuda and torch.cuda.is_current_stream_capturing()


def _counted(values: Tensor | None) -> Tensor | None:
    """Return the same memory as a tensor that counts writes, unlike one of inference mode."""
    if values is None or not values.is_inference() or _is_captured(values):
        return values
    if values.device.type == "mps":  # which shares no memory with other libraries
        return values
    with torch.inference_mode(False):
        return from_dlpack(values)


def _writes(values: Any) -> int:
    """Return how often a tensor was written to."""
    return values._version if isinstance(values, Tensor) and not values.is_inference() else 0
