"""Running pytest with `--assay-audit` on planted test files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any


def run(folder: Path, tests: str, *options: str) -> tuple[list[str], str]:
    """A run of pytest in a process of its own: the outcomes of the tests, sorted, and all that it printed."""
    (folder / "test_planted.py").write_text(dedent(tests))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-P", "-m", "pytest", "-rA", "--tb=short", "-p", "no:cacheprovider", *options]
    printed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout
    outcomes = [line.split(" - ")[0] for line in printed.splitlines() if line.startswith(("PASS", "FAIL", "X", "ERR"))]
    return sorted(outcomes), printed


def audited(folder: Path, tests: str, *options: str) -> dict[str, Any]:
    """The JSON of an audit."""
    run(folder, tests, "--assay-audit-report=report", *options)
    return json.loads((folder / "report" / "audit.json").read_text())


def by_test(data: dict[str, Any]) -> dict[str, Any]:
    """The sites of an audit by the name of their only test."""
    return {"".join(site["tests"]).split("::")[-1]: site for site in data["sites"]}


def never_noticed(site: dict[str, Any]) -> set[str]:
    """The corruptions that all replays of a site let through."""
    return {name for name, tried in site["tried"].items() if tried == site["passed"].get(name)}
