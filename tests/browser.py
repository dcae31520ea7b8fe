"""Pages in a real browser, at the width of a phone and of a desk."""

import base64
import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS = (400, 1280)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")

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


def browse(folder: Path, *options: str, page: str) -> str:
    """What the browser prints of a page."""
    return _opened(folder, page, options).stdout


def complaints(folder: Path, page: str) -> list[str]:
    """The lines that a page leaves on the browser's console, those of scripts that fail among them."""
    done = _opened(folder, page, ("--dump-dom", "--enable-logging=stderr"))
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _opened(folder: Path, page: str, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    assert BROWSER is not None
    settings = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'user'}",
    )
    command = [BROWSER, *settings, *options, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)


def framed(page: str, script: str) -> str:
    """A page that shows another at every width, and runs a script."""
    source = html.escape(page)
    frames = "".join(f'<iframe style="width:{w}px;height:900px;border:0" srcdoc="{source}"></iframe>' for w in WIDTHS)
    return f"<!doctype html><body>{frames}<pre></pre><script>{script}</script>"


def printed(folder: Path, page: str, *options: str) -> Any:
    """What a page's script writes, as JSON, into its last <pre>."""
    shown = re.findall(r"<pre>(.*?)</pre>", browse(folder, "--dump-dom", *options, page=page), re.DOTALL)
    return json.loads(html.unescape(shown[-1]))


def colours_on(folder: Path, page: str, *options: str) -> dict[str, int]:
    """How often each colour occurs on a picture of a page, counted by the browser itself."""
    picture = folder / "page.png"
    browse(folder, *options, f"--screenshot={picture}", page=page)
    data = base64.b64encode(picture.read_bytes()).decode()
    shown = f'<!doctype html><body><img src="data:image/png;base64,{data}"><pre></pre><script>{COUNT}</script>'
    return dict(printed(folder, shown))
