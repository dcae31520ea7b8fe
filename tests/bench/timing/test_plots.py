"""The page of a bench's charts."""

import html
import re
from dataclasses import replace
from pathlib import Path

import pytest

from assay.bench.timing.contest import Line, Record
from assay.bench.timing.plots import plots
from tests.browser import WIDTHS, complaints, framed, needs_browser, printed

LINE = Line(
    "mine:gemm",
    "gemm",
    "float32",
    "gemm: M=16, N=64",
    "PASS",
    seconds=2e-4,
    spread=1e-6,
    least=1e-4,
    bytes=1e6,
    products=4e6,
    calls=9,
    judged=3,
    worst=0.5,
    bits=21.5,
)
LINES = (
    LINE,
    replace(LINE, kernel="other:gemm", seconds=5e-4, bits=None),
    replace(LINE, kernel="other:copy", case="copy: N=64", products=None, least=None),
    replace(LINE, kernel="wrong:gemm", outcome="FAIL", seconds=None, why="a value is </td> wrong"),
)
RECORDS = [
    Record(f"2026-11-2{day}T10:00:00+00:00", "abc", "a machine", "cpu", "a clock", "a peak", "assay bench", {}, LINES)
    for day in (1, 3, 8)
]


def test_each_timing_is_told_with_units() -> None:
    """Kernel, case, time, share of the roofline and bits stand at each point; a case's history has every record."""
    shown = html.unescape(plots(RECORDS))
    assert shown.count("<title>mine:gemm\ngemm: M=16, N=64\n200 us, 50 % of the roofline\n21.5 bits") == 2 + 3
    assert "2026-11-23T10:00:00+00:00, abc" in shown
    assert "GFLOP/s, or GB/s where bytes are more" in shown
    assert ">2026-11-21<" in shown
    assert shown.count('<figure class="chart" id="history') == 2
    assert "<title>wrong:gemm" not in shown


def test_what_has_no_time_is_in_the_table_alone() -> None:
    """A kernel that was wrong stands there with why, as text; without timings there are no charts."""
    page = plots([replace(RECORDS[0], lines=LINES[3:])])
    assert "a value is &lt;/td&gt; wrong" in page
    assert "<figure" not in page
    assert not re.search(r"https?://|\ssrc=", page)
    with pytest.raises(ValueError, match="records: expected one at least"):
        plots([])


MEASURE = """
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => [frame.clientWidth,
    frame.contentDocument.documentElement.scrollWidth, frame.contentDocument.querySelectorAll(".plot .mark").length]);
  document.querySelector("pre").textContent = JSON.stringify(found);
});
"""


@needs_browser
def test_the_page_fits_and_runs(tmp_path: Path) -> None:
    """At both widths it is as wide as its window and has its marks; no script fails."""
    page = plots(RECORDS)
    for (width, wide, marks), expected in zip(printed(tmp_path, framed(page, MEASURE)), WIDTHS, strict=True):
        assert width == wide == expected
        assert marks > 10
    assert complaints(tmp_path, page) == []
