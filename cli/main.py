"""The command `assay`: every command stands in a file of its own, and what goes wrong is said in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from assay.cli import golden
from assay.cli.audit import audit
from assay.cli.doctor import doctor
from assay.cli.fingerprint import fingerprint
from assay.cli.power import power
from assay.cli.progress import complain
from assay.cli.repro import repro
from assay.cli.survey import survey
from assay.cli.verify import verify
from assay.precision.errors import AssayError

app = typer.Typer(
    name="assay",
    help="Numerical verification of ML kernels, and the precision audit of models.",
    epilog="Exit status: 0 all passed; 1 a contract was broken, or a budget can't be met; 2 wrong usage or bad input.",
    no_args_is_help=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (survey, verify, power, repro, doctor, fingerprint, audit):
    app.command()(command)
app.add_typer(golden.app, name="golden")


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Numerical verification of ML kernels."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str]) -> int:
    """Run a command line; the exit status: 0 all passed, 1 a kernel broke its contract, 2 wrong usage or bad input."""
    try:
        return app(list(arguments), prog_name="assay", standalone_mode=False) or 0
    except AssayError as error:
        return complain(str(error))
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (KeyboardInterrupt, typer.Abort):
        return complain("interrupted", status=130)
    except Exception as error:
        # The class of usage errors is click's in some versions of typer and its own in others.
        if not hasattr(error, "format_message"):
            raise
        return complain(f"{error.format_message()} (see: assay --help)")


def run() -> None:
    """What the console script calls."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ± or ∞ shows ?
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
