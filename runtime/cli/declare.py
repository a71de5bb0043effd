"""Makes commands of functions whose parameters declare their options themselves.

A parameter, or a field of a settings object that a command takes, has `option(...)` as its default.
Its name on the command line, its bounds, its default and its help come from there and from its
type. Knows click and no option; imports nothing else, so that `kvcap --help` is instant.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

ENVIRONMENT = "KVCAP_"
DECLARED = "declared"  # the name of a field's metadata
MANY = 10  # options; a help with more of them has headings
OPTIONS = "Options"
HEADINGS = (  # of a command's help, in order
    "Arguments", OPTIONS, "Measure", "Texts", "Model", "Decoder", "Memory", "Recall",
    "Conversation", "Sampling", "Output", "Device", "Address", "Limits", "Replicas",
)  # fmt: skip
METAVARS = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
TYPES: dict[Any, Any] = {int: click.IntRange, float: click.FloatRange}


@dataclass(frozen=True)
class Declared:
    """A record of what a parameter is on the command line, beside its type and its default."""

    help: str
    names: tuple[str, ...]  # of an option; by default made of the parameter's
    metavar: str | None = None  # by default that of the type
    min: float | None = None
    max: float | None = None
    above: bool = False  # `min` itself is refused
    panel: str | None = None  # a heading of the help; by default that of the group
    env: bool = False  # a variable sets it, too
    show: bool = True  # the help says its default
    check: Callable[[Any], Any] | None = None  # of what was given; returns what is taken
    complete: Callable[[str], list[str]] | None = None  # for the shell
    choices: tuple[str, ...] = ()  # all that is taken; by default those of the type
    argument: bool = False  # it has a place and no name

    def parameter(self, name: str, hint: Any, default: Any, panel: str | None) -> click.Parameter:
        """Return click's parameter for a value of the type `hint`; MISSING: it must be given."""
        kind, several = _kind(hint)
        required, given = default is MISSING, None if default is MISSING else default
        names = self.names or ("--" + name.rstrip("_").replace("_", "-"),)
        variable = ENVIRONMENT + names[0].lstrip("-").replace("-", "_").upper()
        shared: dict[str, Any] = {
            "type": _type(kind, self),
            "required": required,
            "envvar": variable if self.env else None,
            "callback": lambda context, parameter, value: _taken(value, several, self.check),
        }
        if not required:  # newer click takes None, too, as a value that was given
            shared["default"] = given
        if self.complete is not None:
            complete = self.complete
            shared["shell_complete"] = lambda context, parameter, text: complete(text)
        metavar = self.metavar or METAVARS.get(kind)
        if self.argument:
            metavar = metavar if self.metavar else name.upper()
            if several:
                shared["nargs"] = -1
            metavar = metavar if required or "[" in str(metavar) else f"[{metavar}]"
            return DeclaredArgument([name], metavar=metavar, declared=self, **shared)
        if kind is bool:
            shared |= {"is_flag": True, "type": None}
        return DeclaredOption(
            [name, *names],
            metavar=None if kind is bool else metavar,
            help=self.help,
            multiple=several,
            show_default=self.show and given not in (None, ""),
            panel=self.panel or panel,
            **shared,
        )


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """Return the declaration of an option, as the default of a parameter or a field.

    Args:
        default: its value where it is not given; ...: it must be.
        help: a sentence.
        names: on the command line; of a parameter `block_size`, --block-size by default.
        more: as `Declared` has it.
    """
    declared = {DECLARED: Declared(help, names, **more)}
    if default is ...:
        return field(metadata=declared)
    return field(default=default, metadata=declared)


def argument(default: Any, help: str, **more: Any) -> Any:
    """Return the declaration of an argument; as for `option`, without names."""
    return option(default, help, argument=True, **more)


def setting(default: Any, help: str, *names: str, **more: Any) -> Any:
    """Return an option that the environment can set: `--kv-budget` by `KVCAP_KV_BUDGET`.

    The help says its default only where it is told to, as None stands for one of the model or the
    plan, which the sentence names.
    """
    return option(default, help, *names, **{"env": True, "show": False, **more})


def again(declaration: Any) -> Any:
    """Return a declaration for one more field, as a field belongs to one class."""
    return copy.copy(declaration)


class DeclaredOption(click.Option):
    """An option with the heading of the help that it stands under."""

    def __init__(self, *args: Any, panel: str | None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.panel = panel


class DeclaredArgument(click.Argument):
    """An argument with a line of help."""

    def __init__(self, *args: Any, declared: Declared, **more: Any) -> None:
        super().__init__(*args, **more)
        self.help, self.shown = declared.help, declared.show

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return its name and its help, with its default."""
        more = ""
        if self.required:
            more = "  [required]"
        elif self.shown and self.default:
            more = f"  [default: {self.default}]"
        return str(self.metavar).strip("[]"), f"{self.help}{more}"


class DeclaredCommand(click.Command):
    """A command whose help lists options under the headings of their groups, if it has many."""

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Write nothing: newer click would list arguments before options, and not among them."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, those of one heading together."""
        parameters = self.get_params(ctx)
        many = sum(each.param_type_name == "option" for each in parameters) > MANY
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in HEADINGS}
        for each in parameters:
            heading = getattr(each, "panel", None) if many else None
            if each.param_type_name == "argument":
                heading = HEADINGS[0]
            if line := each.get_help_record(ctx):
                groups[heading or OPTIONS].append(line)
        for heading, lines in groups.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)


class CommandGroup(click.Group):
    """A group of commands that lists them where none is named.

    Args:
        help: its first sentence.
        call: a command of its own, for when none is named.
        more: settings of click's groups.
    """

    def __init__(
        self, help: str | None = None, call: Callable[..., None] | None = None, **more: Any
    ) -> None:
        own = command(call or _print_help)
        super().__init__(
            help=help or own.help,
            params=own.params,
            callback=own.callback,
            invoke_without_command=True,
            **{"subcommand_metavar": "COMMAND [ARGS]...", **more},
        )

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands in the order in which they were added."""
        return [*self.commands]

    def adds(self, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator that makes a function the command `name` of this group."""

        def add(call: Callable[..., None]) -> Callable[..., None]:
            self.add_command(command(call), name)
            return call

        return add


def command(call: Callable[..., None], **more: Any) -> DeclaredCommand:
    """Return the command that a function is, from what its parameters declare.

    Args:
        call: takes options and arguments, settings objects whose fields are options, and click's
            context, if it likes.
        more: settings of click's commands.
    """
    parameters: list[click.Parameter] = []
    groups: dict[str, Any] = {}
    contexts, hints = [], get_type_hints(call)
    for name, each in inspect.signature(call).parameters.items():
        hint = hints[name]
        if hint is click.Context:
            contexts.append(name)
        elif is_dataclass(hint):
            groups[name] = hint
        else:
            parameters.append(_parameter(name, hint, each.default))
    for group in groups.values():
        types = get_type_hints(group)
        parameters += [_parameter(f.name, types[f.name], f, group.heading) for f in fields(group)]

    @click.pass_context
    def callback(context: click.Context, /, **values: Any) -> None:
        given = dict(values)
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        try:
            call(**dict.fromkeys(contexts, context), **values)
        except (ValueError, OSError) as error:  # a user's mistake, or a model that is missing
            _name_variables(error, context, given)
            raise
        except KeyboardInterrupt as error:  # for which click would write an empty line
            raise click.Abort from error

    return DeclaredCommand(
        None, params=parameters, callback=callback, help=inspect.getdoc(call), **more
    )


def variables(context: click.Context, names: Iterable[str]) -> list[str]:
    """Return the parameters of a command that the environment set, as VARIABLE='value'."""
    by_name = {str(parameter.name): str(parameter.envvar) for parameter in context.command.params}
    listed = []
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "ENVIRONMENT":
            listed.append(f"{by_name[name]}={os.environ.get(by_name[name])!r}")
    return listed


def _name_variables(error: Exception, context: click.Context, given: dict[str, Any]) -> None:
    """Add to an error the environment's variables whose values or options it mentions."""
    message = str(error)
    options = {p.name: p.opts for p in context.command.params}
    meant = [
        name
        for name, value in given.items()
        if any(option in message for option in options.get(name, []))
        or any(text in message for text in (f"{value!r}", f"={value}", f" {value} ") if value)
    ]
    if listed := variables(context, meant):
        source = f"the environment says {', '.join(listed)}"
        message = f"{message}; {source}" if message.endswith(")") else f"{message} ({source})"
        error.args = (message, *error.args[1:])


def _print_help(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _parameter(name: str, hint: Any, option: Any, panel: str | None = None) -> click.Parameter:
    declared: Declared = option.metadata[DECLARED]
    return declared.parameter(name, hint, option.default, panel)


def _kind(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value, without None, and whether several may be given."""
    if NoneType in get_args(hint):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    if get_origin(hint) is list:
        return get_args(hint)[0], True
    return hint, False


def _type(kind: Any, declared: Declared) -> Any:
    if choices := declared.choices or (get_args(kind) if get_origin(kind) is Literal else ()):
        return click.Choice(choices)
    if kind in TYPES and (declared.min, declared.max) != (None, None):
        return TYPES[kind](declared.min, declared.max, min_open=declared.above)
    return click.Path(path_type=Path) if kind is Path else kind


def _taken(value: Any, several: bool, check: Callable[[Any], Any] | None) -> Any:
    """Convert click's value to what a command gets: a tuple to a list, an empty one to None.

    Raises:
        click.BadParameter: it is nan, which is within all bounds, as it compares with nothing.
    """
    if value != value:
        raise click.BadParameter("nan is no number")
    if several:
        value = list(value or ()) or None
    return value if check is None or value is None else check(value)
