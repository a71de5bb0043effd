"""Defines the group of commands `kvcap policies`, which list, describe and calibrate policies."""

from __future__ import annotations

from typing import Any

from kvcap.evals.commands import calibrate_command
from kvcap.runtime.cli.commands import policies_command, policy_command
from kvcap.runtime.cli.declare import CommandGroup


class _Named(CommandGroup):
    """A group of commands in which any other word is the name of a policy to describe."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = not args or args[0] in self.commands or args[0].startswith("-")
        return super().resolve_command(ctx, args if known else ["show", *args])


policies = _Named(call=policies_command, subcommand_metavar="[NAME | COMMAND [ARGS]...]")
policies.adds("show")(policy_command)
policies.adds("calibrate")(calibrate_command)
