"""The pages in a real browser, at the width of a phone and of a desk: nothing overflows, pictures are drawn."""

from pathlib import Path

import pytest
import torch

from assay.verify import Verdict, examine
from assay.verify.campaign.page import survey_page
from assay.verify.campaign.survey import Entry, Row
from assay.verify.report.html import verdict_page
from assay.verify.settings import Settings
from tests.browser import WIDTHS, colours_on, framed, needs_browser, printed

pytestmark = needs_browser

MEASURE = """
addEventListener("load", () => {
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, root = page.documentElement, boxes = {};
  for (const button of page.querySelectorAll(".unfold[aria-expanded=false]")) button.click();
  for (const name of [".map svg", ".bars", ".numbers .compared", ".bins", ".levels"]) {
    boxes[name] = [...page.querySelectorAll(name)].map((part) => {
      const box = part.getBoundingClientRect();
      return [box.width, box.height];
    });
  }
  const bars = [...page.querySelectorAll(".bar i")].map((bar) => bar.getBoundingClientRect().height);
  const fills = [...page.querySelectorAll(".map path:not(.between)")].map((path) => getComputedStyle(path).fill);
  found.push({width: frame.clientWidth, content: root.scrollWidth, boxes, bars, fills});
}
document.querySelector("pre").textContent = JSON.stringify(found);
});
"""


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    """A kernel that fails in its later columns, and one that passes."""

    def late(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1).clone()
        y[:, 5:] *= 1.25
        return y

    kernels = (late, lambda x: torch.softmax(x, -1))
    return [
        examine(kernel, "softmax", dtype="bfloat16", shapes={"R": [4]}, effort="quick", examples=0)
        for kernel in kernels
    ]


def test_no_page_overflows_and_pictures_have_a_size(tmp_path: Path, verdicts: list[Verdict]) -> None:
    """At both widths a survey with every row unfolded is as wide as its window, pictures inside of it."""
    rows = [
        Row(Entry("k" * 60, "a:b", Settings("softmax")), "bfloat16", verdict.outcome, verdict) for verdict in verdicts
    ]
    for seen, width in zip(printed(tmp_path, framed(survey_page(rows, {"torch": "2"}), MEASURE)), WIDTHS, strict=True):
        assert seen["width"] == seen["content"] == width
        assert [len(seen["boxes"][name]) for name in (".map svg", ".levels", ".bars", ".bins")] == [1, 1, 2, 2]
        for boxes in seen["boxes"].values():
            assert all(0 < wide <= width and tall > 10 for wide, tall in boxes)
        assert max(seen["bars"]) > 50
        assert len(seen["bars"]) == 48
        assert len(set(seen["fills"])) == len(seen["fills"]) > 1


def test_a_screenshot_shows_the_colours_of_the_map(tmp_path: Path, verdicts: list[Verdict]) -> None:
    """The wrong columns are on the picture in the colours of the scale, over a page that isn't blank."""
    colours = colours_on(tmp_path, verdict_page(verdicts[0]), "--window-size=1280,900")
    assert colours["a9cde6"] > 500
    assert sum(colours.get(colour, 0) for colour in ("f2b134", "d55e00", "8a2b00", "3b0a00")) > 500
    assert len(colours) > 20
