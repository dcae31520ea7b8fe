"""The command `assay`: collects the commands, one file each, and reports an error in one line."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from assay.cli import baseline, golden
from assay.cli.audit import audit
from assay.cli.bench import bench
from assay.cli.compare import compare
from assay.cli.doctor import doctor
from assay.cli.fingerprint import fingerprint
from assay.cli.inspect import inspect
from assay.cli.judge import judge
from assay.cli.op import op
from assay.cli.power import power
from assay.cli.progress import report_error, report_unforeseen
from assay.cli.repro import repro
from assay.cli.survey import survey
from assay.cli.tune import tune
from assay.cli.verify import verify
from assay.runtime.errors import AssayError
from assay.runtime.output import visible_output
from assay.runtime.results import installed_version


class _Commands(TyperGroup):
    """Commands in a group; their descriptions are not truncated to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # click's types, or typer's own of later versions
        """Write the first paragraph of each command's help."""
        for command in self.commands.values():
            command.short_help = (command.help or "").partition("\n\n")[0]
        super().format_commands(ctx, formatter)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"assay {installed_version('kernel-assay')}")
        raise typer.Exit


def _help_alone(context: typer.Context) -> None:
    """Print a group's help if no command is given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app = typer.Typer(
    name="assay",
    cls=_Commands,
    help="Numerical verification of ML kernels, and the precision audit of models.",
    epilog="Exit status: 0 all passed; 1 a contract was broken, or a budget can't be met; 2 wrong usage or bad input.",
    no_args_is_help=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (survey, verify, judge, power, repro, doctor, op, fingerprint, inspect, bench, tune, audit, compare):
    app.command()(command)
goldens = typer.Typer(
    cls=_Commands,
    help="Golden records: build a campaign, check a store, show it, discard a record, tell two apart.",
    callback=_help_alone,
    invoke_without_command=True,
)
for name in ("build", "check", "show", "discard", "diff"):
    goldens.command()(getattr(golden, name))
app.add_typer(goldens, name="golden")
baselines = typer.Typer(
    cls=_Commands,
    help="Known findings with a reason and an expiry, for pytest --assay-baseline: add, list, prune.",
    callback=_help_alone,
    invoke_without_command=True,
)
for name, function in (("add", baseline.add), ("list", baseline.list_), ("prune", baseline.prune)):
    baselines.command(name)(function)
app.add_typer(baselines, name="baseline")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Numerical verification of ML kernels."""
    _help_alone(context)


def main(arguments: Sequence[str]) -> int:
    """Run a command line; the exit status: 0 all passed, 1 a kernel broke its contract, 2 wrong usage or bad input."""
    with visible_output():
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    try:
        os.getcwd()
    except OSError:  # torch can't compute there
        return report_error("the current folder has been removed; change to one that exists")
    try:
        return app(list(arguments), prog_name="assay", standalone_mode=False) or 0
    except AssayError as error:
        return report_error(str(error))
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return report_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (KeyboardInterrupt, typer.Abort):
        return report_error("interrupted", status=130)
    except Exception as error:
        # The class of usage errors is click's in some versions of typer and its own in others.
        if not hasattr(error, "format_message"):
            return report_unforeseen(error)
        context = getattr(error, "ctx", None)
        return report_error(f"{error.format_message()} (see: {context.command_path if context else 'assay'} --help)")


def run() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ± or ∞ shows ?
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
