"""The page of an audit: one small file, with every chart's numbers in it and their units, in a real browser too."""

import copy
import html
import re
from pathlib import Path
from typing import Any

import pytest

from assay.precision.report import page, summary
from assay.precision.report.page import undrawn
from assay.precision.report.summary import headline
from assay.precision.units import format_bytes, format_error
from tests.browser import WIDTHS, browse, colours_on, complaints, framed, needs_browser, printed
from tests.precision.reported import small_content

POSITIONS = {
    "steps": [
        {"end": end, "error": 0.01 * place, "interval": {"low": 0.008 * place, "high": 0.013 * place}}
        for place, end in enumerate((16, 64, 256, 1024), 1)
    ],
    "base": 64,
    "growth": 2.0,
    "apart": {"low": 1.5, "high": 2.6},
}


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    """An audit with baselines, and with errors over positions."""
    return {**small_content(beside=True), "positions": POSITIONS}


@pytest.fixture(scope="module")
def shown(content: dict[str, Any]) -> str:
    """Its page."""
    return page(content)


def titles(shown: str, name: str) -> list[str]:
    """What a reader is told at the points of a chart."""
    (figure,) = re.findall(rf'<figure class="chart" id="{name}">(.*?)</figure>', shown, re.DOTALL)
    return [html.unescape(title) for title in re.findall("<title>(.*?)</title>", figure, re.DOTALL)]


def test_errors_over_positions_say_what_they_rest_on(content: dict[str, Any]) -> None:
    """Page and terminal tell that long sequences were measured and no interval was calibrated on them, and so they do
    where the growth isn't known."""
    rests = "measured there; the intervals of predictions are for sequences as long as those chosen on"
    unknown = {**content, "positions": {**POSITIONS, "growth": None, "apart": None}}
    for each in (content, unknown):
        assert rests in " ".join(summary(each).split())
        assert rests in " ".join(page(each).split())


def test_the_page_is_one_small_file(shown: str) -> None:
    assert len(shown.encode()) < 300_000
    assert not re.search(r"<(script|link|img|iframe|image|use)[^>]*\s(src|href)=", shown)
    assert not re.search(r"https?://|url\(|@import", shown)
    assert "<b>bold</b>" not in shown
    assert "&lt;b&gt;bold" in shown


def test_a_large_model_has_a_page_below_the_limit(content: dict[str, Any]) -> None:
    site = next(site for site in content["sites"] if site["place"] == "linear")
    alone = {f"w4a16-g128-long{number}": 1.23456e-4 * (number + 1) for number in range(24)}
    sites = [
        {**site, "name": f"model.layers.{place // 7}.mlp.down_proj", "layer": place // 7, "alone": alone}
        for place in range(560)
    ]
    outlier = {
        "site": "model.layers.3",
        "outlier": 40.0,
        "channels": 8192,
        "largest": [1.0 + n % 7 for n in range(1024)],
    }
    assert len(page({**content, "sites": sites, "outliers": [outlier] * 6}).encode()) < 1_500_000


def test_every_point_of_the_front_is_told_with_units(content: dict[str, Any], shown: str) -> None:
    told = "\n\n".join(titles(shown, "pareto"))
    unit = content["settings"]["unit"]
    visible = [point for point in content["pareto"] if float(point["prediction"]["error"]) > 0]
    assert len(visible) > 2
    for point in [*visible, content["recommended"]]:
        assert f"weights {format_bytes(point['bytes'])}\npredicted {format_error(point['prediction']['error'])}" in told
    drawn = [each for each in content["baselines"] if f"{each['name']}\n" in told]
    assert len(drawn) + undrawn(content) == len(content["baselines"])
    assert any(each["name"].endswith(", first and last layers kept") for each in drawn)
    for each in drawn:
        assert (
            f"{each['name']}\nweights {format_bytes(each['bytes'])}\nmeasured {format_error(each['measured'])}" in told
        )
    assert all(unit in title for title in titles(shown, "pareto"))


def test_the_other_charts_have_their_numbers(content: dict[str, Any], shown: str) -> None:
    unit = content["settings"]["unit"]
    pairs = "\n\n".join(titles(shown, "measured"))
    for pair in content["calibration"]:
        if float(pair["measured"]) > 0:
            assert f"measured {format_error(pair['measured'])} {unit}" in pairs
    assert titles(shown, "positions")[1] == f"up to position 64\n0.02 (95 %: 0.016 to 0.026) {unit}"
    (weights,) = re.findall(r'<div class="heat" id="weights".*?</table>', shown, re.DOTALL)
    for site in content["sites"]:
        if site["place"] == "linear":
            for error in site["alone"].values():
                assert f'title="{float(error):.3g} {unit}"' in weights
    first = content["outliers"][0]
    assert f": {max(first['largest']):.3g}, " in "".join(titles(shown, "outlier0"))


def test_what_lies_outside_of_its_interval_is_red(content: dict[str, Any], shown: str) -> None:
    spoilt = copy.deepcopy(content)
    spoilt["calibration"][0] |= {"measured": 50.0}
    assert "outside of it" not in "".join(re.findall(r"measured to calibrate, [\w ]+", shown))
    assert "measured to calibrate, outside of it" in page(spoilt)


def test_errors_that_have_no_place_are_counted(content: dict[str, Any], shown: str) -> None:
    before = re.findall(r"(\d+) of the points ha", shown)
    spoilt = copy.deepcopy(content)
    spoilt["pareto"][0]["prediction"] |= {"error": "inf", "high": "inf"}
    after = re.findall(r"(\d+) of the points ha", page(spoilt))
    assert int(after[0]) == int(before[0] if before else 0) + 1


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("kl", "output probabilities differ by 0.0087 nats per token (KL divergence)"),
        ("relative", "outputs differ by a relative error of 0.0087"),
        ("loss", "measured error 0.0087, change of the loss"),
    ],
)
def test_the_first_line_is_in_plain_words(content: dict[str, Any], metric: str, words: str) -> None:
    units = {"kl": "nats per token", "relative": "relative error", "loss": "change of the loss"}
    told = copy.deepcopy(content)
    told["settings"] |= {"metric": metric, "unit": units[metric]}
    told["recommended"] |= {"measured": 0.0087, "bytes": 1_010_000}
    told["untouched"]["bytes"] = 4_200_000
    assert f"weights take 1.01 MB instead of 4.2 MB (24 %); {words}" in headline(told)
    assert f"weights take 1.01 MB instead of 4.2 MB (24\xa0%); {words}" in html.unescape(page(told))


MEASURE = """
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument;
    for (const details of page.querySelectorAll("details")) details.open = true;
    const box = (part) => part.getBoundingClientRect();
    const plot = page.querySelector("#pareto .plot"), tip = plot.querySelector(".tip");
    const press = (key) => plot.dispatchEvent(new KeyboardEvent("keydown", {key}));
    press("ArrowRight");
    const told = tip.textContent, shown = !tip.hidden, inside = box(tip).right <= frame.clientWidth;
    press("Escape");
    return {width: frame.clientWidth, content: page.documentElement.scrollWidth,
      told, shown, inside, hidden: tip.hidden,
      plots: [...page.querySelectorAll(".chart, .heat")].map((part) => {
        const drawing = part.querySelector("svg, table");
        return [part.id, box(drawing).width, box(drawing).height,
          part.querySelectorAll(".plot .mark path, td[title]").length, part.querySelectorAll("text, thead th").length];
      })};
  });
  document.querySelector("pre").textContent = JSON.stringify(found);
});
"""


@needs_browser
def test_the_page_fits_and_draws_every_chart(tmp_path: Path, content: dict[str, Any], shown: str) -> None:
    """At the width of a phone and of a desk it is as wide as its window, each chart has its marks, and the arrow keys
    tell what a point is."""
    for seen, width in zip(printed(tmp_path, framed(shown, MEASURE)), WIDTHS, strict=True):
        assert seen["width"] == seen["content"] == width
        charts = {name: rest for name, *rest in seen["plots"]}
        assert {"pareto", "measured", "positions", "weights", "values", "outlier0"} <= set(charts)
        for name, (wide, tall, marks, labels) in charts.items():
            assert 100 < wide <= max(width, 1320), name
            assert tall > 50, name
            assert marks > 0, name
            assert labels >= 2, name
        assert seen["shown"]
        assert seen["inside"]
        assert seen["hidden"]
        assert "weights " in seen["told"]
        assert content["settings"]["unit"] in seen["told"]


@needs_browser
def test_a_browser_has_nothing_to_complain_of(tmp_path: Path, shown: str) -> None:
    assert complaints(tmp_path / "sound", shown) == []
    planted = shown.replace("for (const plot of", "planted();\nfor (const plot of", 1)
    (line,) = complaints(tmp_path / "spoilt", planted)
    assert "planted is not defined" in line


@needs_browser
def test_a_screenshot_shows_the_recommended_point(tmp_path: Path, shown: str) -> None:
    colours = colours_on(tmp_path, shown, "--window-size=1280,3200")
    assert colours.get("d55e00", 0) > 40
    assert colours.get("1d6fa8", 0) > 200
    assert len(colours) > 60


@needs_browser
def test_without_a_script_everything_is_there(tmp_path: Path, shown: str) -> None:
    dumped = browse(tmp_path, "--dump-dom", page=re.sub(r"<script>.*?</script>", "", shown, flags=re.DOTALL))
    assert dumped.count("<title>") == shown.count("<title>")
    assert dumped.count('class="mark') == shown.count('class="mark')
