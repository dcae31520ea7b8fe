"""A failing case under NVIDIA's compute-sanitizer, if installed: which access was out of bounds, and where.

The repro line runs the case in a fresh process, so the kernel must have an importable name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

_TOOL = "compute-sanitizer"
_SECONDS = 600.0  # programs run many times slower under it
_MOST_LINES = 4  # of a finding: what, where, which thread, which address
_PREFIX = re.compile(r"^=+ ?")
_COMPLETE = "ERROR SUMMARY:"
_PROGRAM = """import sys
try:
    from assay.verify.examination.repro import run_line
    run_line(sys.argv[1])
except Exception as error:
    print(f"assay: {error}", file=sys.stderr)
    sys.exit(2)
"""
_FINDING = re.compile(r"Invalid|Misaligned|Program hit|Race|Error:")


def is_installed() -> bool:
    """Return whether the tool is on the PATH."""
    return shutil.which(_TOOL) is not None


def sanitize(line: str, target: str, seconds: float = _SECONDS) -> str:
    """Return the report of compute-sanitizer's memcheck on the case of a repro line, in a few lines, or why there is
    none.

    ``target`` is the importable name of the kernel, empty if it has none. Programs run many times slower under it; it
    is stopped after ``seconds``.
    """
    tool = shutil.which(_TOOL)
    if tool is None:
        return f"{_TOOL} is not installed; it comes with the CUDA toolkit"
    if not target:
        return f"{_TOOL} needs a kernel with an importable name"
    command = [tool, "--tool", "memcheck", "--target-processes", "all", sys.executable, "-c", _PROGRAM]
    try:
        done = subprocess.run(
            [*command, line],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # else an allocation hides its neighbours
        )
    except subprocess.TimeoutExpired:
        return f"{_TOOL}: no end within {seconds:g} s"
    return findings(done.stdout, done.stderr, done.returncode)


def findings(output: str, errors: str = "", status: int = 0) -> str:
    """Return the first finding of a compute-sanitizer report, and the number of findings.

    ``output`` and ``errors`` are what the run printed, ``status`` is its exit status. It reports no finding only if the
    report is complete and the case was run; otherwise it shows the last line of ``errors``.
    """
    printed = [*output.splitlines(), *errors.splitlines()]
    lines = [_PREFIX.sub("", line).strip() for line in printed if line.startswith("====")]
    starts = [index for index, line in enumerate(lines) if _FINDING.match(line)]
    if not starts and (status or not any(line.startswith(_COMPLETE) for line in lines)):
        words = [line.strip() for line in errors.splitlines() if line.strip() and not line.startswith("====")]
        return f"{_TOOL}: the case was not run to its end: {words[-1] if words else f'exit status {status}'}"
    if not starts:
        return f"{_TOOL} found nothing"
    first = [line for line in lines[starts[0] : starts[0] + _MOST_LINES] if line]
    more = f" (and {len(starts) - 1} more)" if len(starts) > 1 else ""
    return f"{_TOOL}: {'; '.join(first)}{more}"
