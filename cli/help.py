"""What a command says of itself: its version, and a list of commands whose descriptions are whole."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from assay.runtime.results import installed_version


class Commands(TyperGroup):
    """Commands under one name; the list of them isn't cut to one line each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # click's types, or typer's own of later versions
        """Write the first paragraph of each command's help."""
        for command in self.commands.values():
            command.short_help = (command.help or "").partition("\n\n")[0]
        super().format_commands(ctx, formatter)


def help_alone(context: typer.Context) -> None:
    """The callback of a group: without a command it prints its help."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def show_version(requested: bool) -> None:
    """The callback of ``--version``."""
    if requested:
        typer.echo(f"assay {installed_version('kernel-assay')}")
        raise typer.Exit


def pointer(error: Exception) -> str:
    """Where to read on after a mistake of usage: the help of the command that met it."""
    context = getattr(error, "ctx", None)
    return f"(see: {context.command_path if context is not None else 'assay'} --help)"
