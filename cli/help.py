"""Help texts: the version, and a list of commands with untruncated descriptions."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from assay.runtime.results import installed_version


class Commands(TyperGroup):
    """Commands in a group; their descriptions are not truncated to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # click's types, or typer's own of later versions
        """Write the first paragraph of each command's help."""
        for command in self.commands.values():
            command.short_help = (command.help or "").partition("\n\n")[0]
        super().format_commands(ctx, formatter)


def help_alone(context: typer.Context) -> None:
    """Callback of a group: prints its help if no command is given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def show_version(requested: bool) -> None:
    """Callback of ``--version``."""
    if requested:
        typer.echo(f"assay {installed_version('kernel-assay')}")
        raise typer.Exit


def pointer(error: Exception) -> str:
    """Return where to read on after a usage error: the help of the command that raised it."""
    context = getattr(error, "ctx", None)
    return f"(see: {context.command_path if context is not None else 'assay'} --help)"
