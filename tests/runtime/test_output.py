"""Lines of C libraries in standard output."""

import subprocess
import sys

_PRINTED = """
import ctypes, os
from assay.runtime.output import without_lines
c = ctypes.CDLL(None)
c.printf(b"before\\n")
with without_lines("Noise::"):
    c.printf(b"Noise::of a solver\\n")
    c.printf(b"a result\\n")
    os.write(1, b"of another thread\\n")
c.printf(b"Noise::after\\n")
{closed}
with without_lines("Noise::"):
    c.printf(b"last\\n")
"""


def _printed(closed: str = "") -> str:
    return subprocess.run(
        [sys.executable, "-c", _PRINTED.format(closed=closed)], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_only_the_lines_that_are_named_are_kept_out_of_the_output() -> None:
    lines = _printed().splitlines()
    assert lines[0] == "before"
    assert sorted(lines[1:3]) == ["a result", "of another thread"]
    assert lines[3:] == ["Noise::after", "last"]


def test_a_closed_output_is_no_fault() -> None:
    assert "last" not in _printed("c.fflush(None); os.close(1)")
