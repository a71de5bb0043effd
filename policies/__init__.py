"""Defines eviction policies: one file per score, and the file's name is the policy's name.

`saliencies/`, `budgets/`, `rescorers/` and `correctors/` hold what a score can be combined with,
one file each. Pure tensor code; imports nothing else of kvcap. To add a policy, add a file
(CONTRIBUTING.md), or register a `Policy` class under the entry point group `kvcap.policies`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from kvcap.policies.base import (
    Component,
    Corrector,
    Eviction,
    HeadBudget,
    LayerBudget,
    Observation,
    Policy,
    PolicyError,
    Preset,
    Rescorer,
    Saliency,
)

__all__ = [
    "Eviction",
    "Observation",
    "Policy",
    "PolicyError",
    "as_eviction",
    "companions",
    "load_policy",
    "policies",
]

ENTRY_POINTS = "kvcap.policies"
PINS = ("sink_tokens", "recent_tokens")  # options of every policy
FOLDERS = ("saliencies", "budgets", "rescorers", "correctors")
SLOTS: dict[str, type[Component]] = {
    "policy": Policy,
    "saliency": Saliency,
    "layer_budget": LayerBudget,
    "head_budget": HeadBudget,
    "rescorer": Rescorer,
    "corrector": Corrector,
}


class Recipe(NamedTuple):
    """A recipe that a name stands for: a class for each part of an eviction, and its options."""

    parts: Mapping[str, type[Component]]
    options: Mapping[str, Any]
    when: str = ""  # when to use it, if its parts do not say it


@cache
def companions() -> dict[str, type[Component]]:
    """Return everything that a policy can be combined with, by name."""
    return {name: cls for folder in FOLDERS for name, cls in _modules(folder).items()}


@cache
def policies() -> dict[str, Recipe]:
    """Return every policy and preset by name."""
    scores = _scores()
    recipes = {name: Recipe({"policy": cls}, {}) for name, cls in scores.items()}
    # Those of other packages last, so that they take no name of kvcap's own presets.
    for cls in (*_modules(".").values(), *companions().values(), *_registered()[0].values()):
        for name, preset in vars(cls).get("presets", {}).items():  # not those of a base class
            if recipe := _preset(cls, name, preset, scores, recipes.get(name)):
                recipes[name] = recipe
    return dict(sorted(recipes.items()))


def _preset(
    cls: type[Component],
    name: str,
    preset: Preset,
    scores: Mapping[str, type[Component]],
    taken: Recipe | None,
) -> Recipe | None:
    """Return a preset's recipe; None, with a warning, where another package's preset is broken.

    Raises:
        PolicyError: one of kvcap's own is.
    """
    try:
        recipe = _compose(preset.parts, preset.options, preset.when, scores)
        if taken is not None and taken.parts != {"policy": recipe.parts["policy"]}:
            raise PolicyError(f"{cls.__module__} has a preset {name!r}, a name that is taken")
    except PolicyError as error:
        if cls not in _registered()[0].values():
            raise
        warnings.warn(f"preset {name!r} of {cls.__module__} cannot be used: {error}", stacklevel=3)
        return None
    return recipe


def load_policy(name: str, **options: Any) -> Eviction:
    """Return the policy, preset or combination `name`, with `options` over its defaults.

    A combination is a policy and companions with plus signs: `h2o+criticalkv`. An option goes to
    the first part that has it. `sink_tokens` and `recent_tokens` (first and newest tokens that are
    pinned besides what the policy pins) work with every policy. Without `sink_tokens`, a `Runtime`,
    `cap` and `BudgetCache` pin the first 4 tokens, while evaluations and the policy used by itself
    pin what its paper pins; with `sink_tokens=0` all pin only that.

    Raises:
        PolicyError: unknown name or option (the nearest one is named), or a value that is refused.

    >>> load_policy("keydiff", anchor="unit_mean").policy.anchor
    'unit_mean'
    >>> load_policy("h2o+criticalkv", recent=0.1, alpha=0.25).rescorer.alpha
    0.25
    """
    if name not in policies() and "+" not in name:
        raise _unknown(name, policies())
    recipe = policies().get(name) or _compose(name, {})
    remaining = {**recipe.options, **options}
    pins = {key: remaining.pop(key) for key in PINS if key in remaining}
    for key, value in pins.items():
        _check_type(f"{name}: {key}", value, int, 0)
    filled: dict[str, Any] = {}
    option_names: list[str] = []
    for slot, cls in recipe.parts.items():
        own = {
            key: remaining.pop(key) for key in inspect.signature(cls).parameters if key in remaining
        }
        option_names += inspect.signature(cls).parameters
        for key, value in own.items():
            _check_type(f"{name}: {key}", value, get_type_hints(cls)[key], _default(cls, key))
        filled[slot] = cls(**own)
    for option in remaining:
        hint = _nearest(option, [*option_names, *PINS])
        raise PolicyError(f"policy {name} has no option {option!r}{hint}")
    return Eviction(**filled, name=name, **pins)


def as_eviction(policy: str | Eviction | Policy, sink_tokens: int | None = None) -> Eviction:
    """Return the eviction that was named or given, with `sink_tokens` if there are any.

    Raises:
        PolicyError: it is neither, or unknown.
    """
    if isinstance(policy, str):
        eviction = load_policy(policy)
    elif isinstance(policy, Policy):
        eviction = Eviction(policy, name=type(policy).__module__.rsplit(".", 1)[-1])
    elif isinstance(policy, Eviction):
        eviction = policy
    else:
        raise PolicyError(
            f"policy={policy!r}: use a name such as 'keydiff' (kvcap policies lists them), or what "
            "kvcap.load_policy gives"
        )
    if sink_tokens is None:
        return eviction
    _check_type("sink_tokens", sink_tokens, int, 4)
    return replace(eviction, sink_tokens=sink_tokens, sinks_yield=False)


def _check_type(option: str, value: Any, kind: Any, default: Any) -> None:
    """Refuse an option of another type; the policy itself checks which numbers work.

    Raises:
        PolicyError: saying what was got and what would work.
    """
    numbers = {int: ("a whole number", (int,)), float: ("a number", (int, float))}
    if kind not in numbers:
        return
    says, types = numbers[kind]
    if not isinstance(value, types) or isinstance(value, bool):
        raise PolicyError(f"{option}={value!r} will not work; expected {says}, such as {default}")


def _default(cls: type[Component], option: str) -> Any:
    return inspect.signature(cls).parameters[option].default


def _scores() -> dict[str, type[Component]]:
    """Return the policies alone, those of other packages too."""
    return _modules(".") | _registered()[0]


@cache
def _registered() -> tuple[dict[str, type[Component]], dict[str, str]]:
    """Return other packages' policies by name, and why those that are broken cannot be used.

    A broken one is warned of, and takes nothing else with it.
    """
    registered, broken, ours = dict[str, type[Component]](), dict[str, str](), _modules(".")
    presets = (vars(cls).get("presets", {}) for cls in (*ours.values(), *companions().values()))
    own = {*ours, *chain.from_iterable(presets)}
    for point in entry_points(group=ENTRY_POINTS):
        who = f"policy {point.name!r} ({point.value}, of package {_package(point)})"
        try:
            if point.name in own:
                raise PolicyError("the name is kvcap's own")
            if point.name in registered:
                raise PolicyError("another package has a policy of that name")
            cls = point.load()
            if not (isinstance(cls, type) and issubclass(cls, Policy)):
                raise PolicyError("it is no class derived from kvcap.policies.Policy")
            cls()  # its options have defaults
        except (Exception, SystemExit) as error:
            why = str(error).strip().partition("\n")[0]
            fault = f"{who} cannot be used: {why or type(error).__name__}"
            if point.name not in own | registered.keys():
                broken[point.name] = fault
            warnings.warn(f"{fault}; mend or uninstall that package", stacklevel=2)
        else:
            registered[point.name] = cls
    return registered, broken


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module.partition(".")[0]


def _unknown(name: str, names: Iterable[str]) -> PolicyError:
    """Return the error for a name that is no policy's."""
    if why := _registered()[1].get(name):
        return PolicyError(why)
    return PolicyError(f"no policy is called {name!r}{_nearest(name, list(names))}")


def _compose(
    combination: str,
    options: Mapping[str, Any],
    when: str = "",
    scores: Mapping[str, type[Component]] | None = None,
) -> Recipe:
    """Return the recipe of 'policy+companion+companion'."""
    scores = _scores() if scores is None else scores
    base, *others = combination.split("+")
    if base not in scores:
        raise _unknown(base, scores)
    parts = {"policy": scores[base]}
    for other in others:
        if other not in companions():
            hint = _nearest(other, list(companions()))
            raise PolicyError(f"nothing to combine is called {other!r}{hint}")
        cls = companions()[other]
        slot = next(slot for slot, kind in SLOTS.items() if issubclass(cls, kind))
        if slot in parts:
            raise PolicyError(f"{combination!r} has two parts for one place ({slot})")
        parts[slot] = cls
    return Recipe(parts, options, when)


def _modules(folder: str) -> dict[str, type[Component]]:
    """Return the one component that each module of a folder defines, by the module's name."""
    path = Path(__path__[0]) / folder
    names = [m.name for m in pkgutil.iter_modules([str(path)]) if not m.ispkg]
    package = __name__ if folder == "." else f"{__name__}.{folder}"
    return {name: _class_in(f"{package}.{name}") for name in names}


def _class_in(module: str) -> type[Component]:
    members = vars(importlib.import_module(module)).values()
    classes = [m for m in members if isinstance(m, type) and issubclass(m, Component)]
    defined = [cls for cls in classes if cls.__module__ == module]
    if len(defined) != 1:
        names = ", ".join(cls.__name__ for cls in defined) or "none"
        raise PolicyError(f"{module} must define one policy or companion; it defines {names}")
    return defined[0]


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
