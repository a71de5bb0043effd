"""Defines the command line: which commands there are, and how errors end it.

Of several commands only the one that is asked for is imported and built. Neither torch nor
transformers is imported before a command runs, so that `kvcap --help` is instant.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import click

from kvcap.runtime.cli.console import INTERRUPTED, USAGE, complain, exit_code
from kvcap.runtime.cli.declare import CommandGroup, command, option, variables
from kvcap.runtime.cli.options import check_variables
from kvcap.runtime.errors import IN_A_CHECKOUT, ExtraMissing

COMMANDS = {  # and groups of commands: the module of each, and its name there
    "chat": "runtime.cli.commands.chat_command",
    "generate": "runtime.cli.commands.generate_command",
    "plan": "runtime.cli.commands.plan_command",
    "pull": "runtime.cli.models.pull_command",
    "models": "runtime.cli.models.models_command",
    "warm": "runtime.cli.commands.warm_command",
    "serve": "serve.commands.serve_command",
    "policies": "evals.policy_commands.policies",
    "cache": "runtime.cli.cache.cache",
    "memory": "evals.commands.memory",
    "export": "export.commands.export",
    "android": "android_bench.commands.android",
    "demo": "evals.commands.demo_command",
    "tune": "evals.commands.tune_command",
    "bench": "evals.commands.bench_command",
    "lm-eval": "evals.commands.lm_eval_command",
}
LAB = {  # those of kvcap's makers, which come with the repository alone
    "eval": "lab.commands.eval_command",
    "analyze": "lab.commands.analyze_command",
    "report": "lab.commands.report_command",
    "bench": "lab.commands.bench_command",  # with more benchmarks
}
SETTINGS: dict[str, dict[str, Any]] = {  # of click's commands
    "lm-eval": {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
}


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Names the variables by which a user says how OpenMP's threads wait."""


def application(name: str | None = None) -> CommandGroup:
    """Return the command line with the command `name` alone; with all, where it has none such.

    Raises:
        ExtraMissing: the command is one of the repository.
    """
    commands = COMMANDS | (LAB if find_spec("kvcap.lab") else {})
    if name in LAB and name not in commands:
        raise ExtraMissing(f"kvcap {name} {IN_A_CHECKOUT}")
    app = CommandGroup(
        call=_kvcap,
        name="kvcap",
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="The environment sets options of chat, generate, plan, warm and tune too: "
        "--kv-budget by KVCAP_KV_BUDGET, MODEL by KVCAP_MODEL. "
        "KVCAP_DEBUG=1 shows tracebacks. Exit codes: 0 done, 1 failed, 2 wrong input, 3 no plan "
        "fits, 4 cap reached, 130 interrupted.",
    )
    for each in [name] if name in commands else commands:
        module, _, attribute = commands[each].rpartition(".")
        target = getattr(importlib.import_module(f"kvcap.{module}"), attribute)
        made = (
            target
            if isinstance(target, CommandGroup)
            else command(target, **SETTINGS.get(each, {}))
        )
        app.add_command(made, each)
    return app


def _kvcap(
    context: click.Context,
    version: bool = option(False, "Print the version."),
    install_completion: bool = option(False, "Install completion for the current shell."),
    show_completion: bool = option(False, "Print what completes words in the current shell."),
) -> None:
    """Run a language model's chat inside a fixed amount of KV memory."""
    if version:
        from kvcap import __version__

        print(f"kvcap {__version__}")
    elif install_completion or show_completion:
        from kvcap.runtime.cli.completion import install, script

        print(install() if install_completion else script())
    elif context.invoked_subcommand is None:
        print(context.get_help())
    if version or install_completion or show_completion:
        context.exit()


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors are one line on stderr."""
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        check_variables()
        app = application(next(iter(given), None))
        code = app(given, prog_name="kvcap", standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own, for wrong options
            complain(f"{_wrong_option(error)} (--help lists what there is)")
            return USAGE
        complain(error)
        return exit_code(error)
    return int(code or 0)


def _wrong_option(error: Any) -> str:
    """Return click's message on an option, and the environment variable that set it, if any."""
    message = str(error.format_message())
    where = getattr(error, "ctx", None)
    parameter = getattr(error, "param", None)
    if where is None or parameter is None:
        return message
    settings = variables(where, [str(parameter.name)])
    return f"{message}; the environment says {settings[0]}" if settings else message


def wait_briefly() -> None:
    """Have PyTorch's threads sleep soon while they wait, so that other work may use their cores.

    GNU's OpenMP, which reads this once, when torch is imported, spins 300,000 times else, some
    milliseconds; 1,000 is its own number where threads outnumber cores. What a user says of it
    stays.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ["GOMP_SPINCOUNT"] = "1000"


def _in_utf_8() -> None:
    """Start again in Python's UTF-8 mode where arguments are in UTF-8 and the locale is not.

    Python has surrogates in place of their letters then, and does not find files of such names.
    """
    unread = any("\udc80" <= letter <= "\udcff" for letter in "".join(sys.argv))
    if unread and sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _with_streams() -> None:
    """Open the streams that whoever started this process has closed, as empty ones.

    Each gets its usual number, which another file would otherwise take.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))


def main() -> None:
    """Run the `kvcap` script."""
    _with_streams()
    _in_utf_8()
    wait_briefly()
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="replace")  # an answer may hold what the terminal cannot show
    if not sys.warnoptions:  # kvcap's own warnings are for users, those of libraries are not
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", module="kvcap")
        warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}")
    sys.exit(run())
