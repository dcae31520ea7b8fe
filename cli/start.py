"""The console script: Ctrl-C ends it in one line even while the commands are imported, which takes a second."""

import sys


def run() -> None:
    """Import the commands and run the command line."""
    try:
        from assay.cli.main import run as run_commands
    except KeyboardInterrupt:
        print("assay: interrupted", file=sys.stderr)
        sys.exit(130)
    run_commands()
