"""Eviction policies: one file per score, and the file's name is the policy's name.

Pure tensor code; imports nothing else of kvcap. To add a policy, add a file (CONTRIBUTING.md), or
register a `Policy` class under the entry point group `kvcap.policies`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from kvcap.policies.base import Eviction, Observation, Policy, PolicyError

__all__ = ["Eviction", "Observation", "Policy", "PolicyError", "load_policy", "policies"]

ENTRY_POINTS = "kvcap.policies"
PINS = ("sink_tokens", "recent_tokens")  # options of every policy


@cache
def policies() -> dict[str, tuple[type[Policy], dict[str, Any]]]:
    """Every policy and preset by name: its class and the options the preset sets."""
    found: dict[str, tuple[type[Policy], dict[str, Any]]] = {}
    classes = {m.name: _class_in(m.name) for m in pkgutil.iter_modules(__path__) if not m.ispkg}
    for point in entry_points(group=ENTRY_POINTS):
        if point.name in classes:
            raise PolicyError(
                f"{point.value} registers a policy named {point.name!r}, which is kvcap's own name"
            )
        classes[point.name] = point.load()
    for name, cls in classes.items():
        found[name] = (cls, {})
        found.update({preset: (cls, dict(opts)) for preset, opts in cls.presets.items()})
    return dict(sorted(found.items()))


def load_policy(name: str, **options: Any) -> Eviction:
    """The policy or preset `name` with `options` over its defaults.

    `sink_tokens` and `recent_tokens` (pinned besides what the policy pins) work with every policy.

    Raises:
        PolicyError: unknown name or option (the nearest one is named), or a value that is refused.

    >>> load_policy("keydiff", anchor="unit_mean").policy.anchor
    'unit_mean'
    """
    if name not in policies():
        raise PolicyError(f"no policy is called {name!r}{_nearest(name, list(policies()))}")
    cls, preset = policies()[name]
    pins = {key: options.pop(key) for key in PINS if key in options}
    known = list(inspect.signature(cls).parameters)
    for option in options:
        if option not in known:
            hint = _nearest(option, [*known, *PINS])
            raise PolicyError(f"policy {name} has no option {option!r}{hint}")
    try:
        return Eviction(cls(**{**preset, **options}), name=name, **pins)
    except TypeError as error:  # such as '3' < 1
        raise PolicyError(f"policy {name}: {error}; got {options}") from error


def _class_in(module: str) -> type[Policy]:
    members = vars(importlib.import_module(f"{__name__}.{module}")).values()
    (cls,) = (
        m
        for m in members
        if isinstance(m, type) and issubclass(m, Policy) and m.__module__.endswith(f".{module}")
    )
    return cls


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
