"""The pages in a real browser, at the width of a phone and of a desk: nothing overflows, pictures are drawn."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.verify import Verdict, examine
from assay.verify.report import survey_page, verdict_page
from assay.verify.survey import Entry, Row

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS = (400, 1280)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")

MEASURE = """
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
"""

COUNT = """
addEventListener("load", () => {
  const picture = document.querySelector("img"), canvas = document.createElement("canvas"), colours = {};
  canvas.width = picture.naturalWidth;
  canvas.height = picture.naturalHeight;
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  for (let place = 0; place < data.length; place += 4) {
    const code = ((data[place] << 16) | (data[place + 1] << 8) | data[place + 2]).toString(16).padStart(6, "0");
    colours[code] = (colours[code] || 0) + 1;
  }
  document.querySelector("pre").textContent = JSON.stringify(colours);
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
    return [examine(kernel, "softmax", dtype="bfloat16", shapes={"R": [4]}, examples=0) for kernel in kernels]


def browse(folder: Path, *options: str, page: str) -> str:
    """What the browser prints of a page."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    assert BROWSER is not None
    settings = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'user'}",
    ]
    command = [BROWSER, *settings, *options, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def framed(page: str) -> str:
    """A page that shows another at every width."""
    source = html.escape(page)
    frames = "".join(f'<iframe style="width:{w}px;height:900px;border:0" srcdoc="{source}"></iframe>' for w in WIDTHS)
    return f"<!doctype html><body>{frames}<pre></pre><script>addEventListener('load', () => {{{MEASURE}}})</script>"


def printed(folder: Path, page: str) -> Any:
    """What a page's script writes, as JSON, into its only <pre>."""
    shown = re.search(r"<pre>(.*?)</pre>", browse(folder, "--dump-dom", page=page), re.DOTALL)
    assert shown is not None
    return json.loads(html.unescape(shown[1]))


def test_no_page_overflows_and_pictures_have_a_size(tmp_path: Path, verdicts: list[Verdict]) -> None:
    """At both widths a survey with every row unfolded is as wide as its window, pictures inside of it."""
    rows = [Row(Entry("k" * 60, "a:b", "softmax"), "bfloat16", verdict.outcome, verdict) for verdict in verdicts]
    for seen, width in zip(printed(tmp_path, framed(survey_page(rows, {"torch": "2"}))), WIDTHS, strict=True):
        assert seen["width"] == seen["content"] == width
        assert [len(seen["boxes"][name]) for name in (".map svg", ".levels", ".bars", ".bins")] == [1, 1, 2, 2]
        for boxes in seen["boxes"].values():
            assert all(0 < wide <= width and tall > 10 for wide, tall in boxes)
        assert max(seen["bars"]) > 50
        assert len(seen["bars"]) == 48
        assert len(set(seen["fills"])) == len(seen["fills"]) > 1


def test_a_screenshot_shows_the_colours_of_the_map(tmp_path: Path, verdicts: list[Verdict]) -> None:
    """The wrong columns are on the picture in the colours of the scale, over a page that isn't blank."""
    picture = tmp_path / "page.png"
    browse(tmp_path, "--window-size=1280,900", f"--screenshot={picture}", page=verdict_page(verdicts[0]))
    colours = colours_of(tmp_path, picture)
    assert colours["a9cde6"] > 500
    assert sum(colours.get(colour, 0) for colour in ("f2b134", "d55e00", "8a2b00", "3b0a00")) > 500
    assert len(colours) > 20


def colours_of(folder: Path, picture: Path) -> dict[str, int]:
    """How often each colour occurs in a picture, counted by the browser itself."""
    data = base64.b64encode(picture.read_bytes()).decode()
    page = f'<!doctype html><body><img src="data:image/png;base64,{data}"><pre></pre><script>{COUNT}</script>'
    return dict(printed(folder, page))
