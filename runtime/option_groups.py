"""How options of the command line are made and taken in groups; which there are it does not know.

A group is a dataclass, whose fields are options.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import typer

ENVIRONMENT = "KVCAP_"
CONTEXT = inspect.Parameter.POSITIONAL_OR_KEYWORD


def option(*names: str, help: str, **settings: Any) -> Any:
    """A typer option that the environment sets too: `--kv-budget` by `KVCAP_KV_BUDGET`."""
    variable = ENVIRONMENT + names[0].lstrip("-").replace("-", "_").upper()
    # A default of None is the model's or the plan's, which the help text says.
    shown = {"show_envvar": False, "show_default": False, **settings}
    return typer.Option(*names, help=help, envvar=variable, **shown)


def pairs(texts: list[str]) -> dict[str, Any]:
    """Options from KEY=VALUE texts; values are Python literals where they can be, else text.

    Raises:
        ValueError: no key, or no '='.

    >>> pairs(["window=16", "anchor=median"])
    {'window': 16, 'anchor': 'median'}
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ValueError(f"{text!r} is not KEY=VALUE, such as window=16")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    return found


def variables(context: Any, names: Iterable[str]) -> list[str]:
    """Those of a command's parameters that the environment set, as VARIABLE='value'."""
    by_name = {parameter.name: parameter.envvar for parameter in context.command.params}
    found = []
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "ENVIRONMENT":
            found.append(f"{by_name[name]}={os.environ.get(by_name[name])!r}")
    return found


def _name_variables(error: Exception, context: Any, given: dict[str, Any]) -> None:
    """Add to an error the variables of the environment whose values or options it speaks of."""
    said = str(error)
    options = {p.name: p.opts for p in context.command.params}
    meant = [
        name
        for name, value in given.items()
        if any(option in said for option in options.get(name, []))
        or any(text in said for text in (f"{value!r}", f"={value}", f" {value} ") if value)
    ]
    if found := variables(context, meant):
        error.args = (f"{said} (the environment says {', '.join(found)})", *error.args[1:])


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with one parameter for every field of the groups it takes, as typer needs it."""
    own: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
        else:
            own.append(parameter.replace(annotation=hints[name]))
    for group in groups.values():
        types = get_type_hints(group, include_extras=True)
        own += [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name]
            )
            for f in fields(group)
        ]

    def call(_context: typer.Context, **values: Any) -> None:
        given = dict(values)
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        try:
            command(**values)
        except (ValueError, OSError) as error:  # what a user can get wrong; no such model
            _name_variables(error, _context, given)
            raise

    call.__doc__, call.__name__ = command.__doc__, command.__name__
    own.insert(0, inspect.Parameter("_context", CONTEXT, annotation=typer.Context))
    call.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
    return call
