"""Defines the command line: which commands there are, and how errors end it.

Imports neither torch nor transformers before a command runs, so that `kvcap --help` is instant.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvcap.android_bench.commands import android
from kvcap.evals import commands as evals
from kvcap.export.commands import export
from kvcap.runtime.cli import commands
from kvcap.runtime.cli.cache import cache
from kvcap.runtime.cli.console import INTERRUPTED, USAGE, complain, exit_code
from kvcap.runtime.cli.options import GroupedHelp, current_arguments, variables
from kvcap.serve.commands import serve_command

app = typer.Typer(
    name="kvcap",
    rich_markup_mode=None,  # its tables cut option names off
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="The environment sets options of chat, generate, plan, warm and tune too: --kv-budget "
    "by KVCAP_KV_BUDGET, MODEL by KVCAP_MODEL. "
    "KVCAP_DEBUG=1 shows tracebacks. Exit codes: 0 done, 1 failed, 2 wrong input, 3 no plan fits, "
    "4 cap reached, 130 interrupted.",
)
app.command("chat", cls=GroupedHelp)(commands.chat_command)
app.command("generate", cls=GroupedHelp)(commands.generate_command)
app.command("plan", cls=GroupedHelp)(commands.plan_command)
app.command("warm", cls=GroupedHelp)(commands.warm_command)
app.command("serve", cls=GroupedHelp)(serve_command)


class _Named(TyperGroup):
    """A group in which a word that is no command is the name of what to show."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = not args or args[0] in self.commands or args[0].startswith("-")
        return super().resolve_command(ctx, args if known else ["show", *args])


policies = typer.Typer(cls=_Named, subcommand_metavar="[NAME | COMMAND [ARGS]...]")
policies.callback(invoke_without_command=True)(commands.policies_command)
policies.command("show")(commands.policy_command)
policies.command("calibrate")(evals.calibrate_command)
app.add_typer(policies, name="policies")
app.add_typer(cache, name="cache")
app.add_typer(evals.memory, name="memory")
app.add_typer(export, name="export")
app.add_typer(android, name="android")
app.command("demo", cls=GroupedHelp)(evals.demo_command)
app.command("eval", cls=GroupedHelp)(evals.eval_command)
app.command("tune", cls=GroupedHelp)(evals.tune_command)
app.command("analyze", cls=GroupedHelp)(evals.analyze_command)
app.command("report")(evals.report_command)
app.command("bench", cls=GroupedHelp)(evals.bench_command)
app.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    evals.lm_eval_command
)


def _version(asked: bool) -> None:
    if asked:
        from kvcap import __version__

        print(f"kvcap {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _kvcap(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run a language model's chat inside a fixed amount of KV memory."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors are one line on stderr."""
    try:
        given = current_arguments(sys.argv[1:] if arguments is None else arguments)
        code = app(given, prog_name="kvcap", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own, for wrong options
            complain(f"{_wrong_option(error)} (--help lists what there is)")
            return USAGE
        complain(error)
        return exit_code(error)
    return int(code or 0)


def _wrong_option(error: Any) -> str:
    """Return typer's message on an option, and the environment variable that set it, if any."""
    said, where = str(error.format_message()), getattr(error, "ctx", None)
    parameter = getattr(error, "param", None)
    if where is None or parameter is None:
        return said
    found = variables(where, [parameter.name])
    return f"{said}; the environment says {found[0]}" if found else said


def main() -> None:
    """Run the `kvcap` script."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="replace")  # an answer may hold what the terminal cannot show
    if not sys.warnoptions:  # kvcap's own warnings are for users, those of libraries are not
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", module="kvcap")
        warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}")
    sys.exit(run())
