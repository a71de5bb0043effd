"""Defines the group of commands `kvcap policies`, which list, describe and calibrate policies."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from kvcap.evals.commands import calibrate_command
from kvcap.runtime.cli.commands import policies_command, policy_command


class _Named(TyperGroup):
    """A group of commands in which any other word is the name of a policy to describe."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = not args or args[0] in self.commands or args[0].startswith("-")
        return super().resolve_command(ctx, args if known else ["show", *args])


policies = typer.Typer(cls=_Named, subcommand_metavar="[NAME | COMMAND [ARGS]...]")
policies.callback(invoke_without_command=True)(policies_command)
policies.command("show")(policy_command)
policies.command("calibrate")(calibrate_command)
