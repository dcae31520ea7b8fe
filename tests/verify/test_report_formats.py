"""Verdicts beside their page: JSON and its schema, the summary in Markdown, and the page in a real browser."""

import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from assay.cli.main import main
from assay.kernels.libraries.pytorch import softmax
from assay.verify import Contract, Verdict
from assay.verify.campaign.page import survey_page
from assay.verify.campaign.survey import Entry, Row
from assay.verify.findings import OUTCOMES
from assay.verify.report import schema
from assay.verify.report.html import verdict_page
from assay.verify.report.summary import Line, append, line_of, markdown
from assay.verify.settings import Settings
from tests.browser import WIDTHS, colours_on, framed, needs_browser, printed

from .examined import quick

pytest_plugins = ["pytester"]

SCHEMA_TEXT = (files("assay.verify") / "verdict.schema.json").read_text(encoding="utf-8")
SCHEMA = Draft202012Validator(json.loads(SCHEMA_TEXT))
SMALL = {"R": [2], "N": [5]}


def crashes(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no")


def flips(x: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
    """Other bits every second time."""
    seen.append(0)
    return torch.softmax(x, -1) if len(seen) % 2 else torch.softmax(x.double(), -1).to(x.dtype)


def overwrites(x: torch.Tensor) -> torch.Tensor:
    y = torch.softmax(x, -1)
    x.zero_()
    return y


KERNELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "PASS": softmax,
    "WARN": lambda x: torch.softmax(torch.nan_to_num(x, nan=0.0), -1),
    "contract": lambda x: torch.softmax(x, -1) * 1.01,
    "nonfinite": lambda x: torch.softmax(x, -1) * torch.nan,
    "crash": crashes,
    "shape": lambda x: x[0],
    "dtype": lambda x: torch.softmax(x, -1).half(),
    "nondeterministic": flips,
    "input_mutated": overwrites,
}


@pytest.fixture(scope="module")
def failed() -> Verdict:
    """A failure with all that a failure may have; what it imports isn't forgotten after a run of pytest in here."""
    return quick(KERNELS["contract"], shapes=SMALL, shrinking=True)


def test_the_schema_is_what_the_dataclasses_say() -> None:
    Draft202012Validator.check_schema(json.loads(SCHEMA_TEXT))
    assert schema.text() == SCHEMA_TEXT, "python -m assay.verify.report.schema writes it anew"


@pytest.mark.parametrize("kind", KERNELS)
def test_verdicts_of_every_kind_fit(kind: str, failed: Verdict) -> None:
    verdict = failed if kind == "contract" else quick(KERNELS[kind], shapes=SMALL, shrinking=kind == "nonfinite")
    assert kind in (verdict.outcome, verdict.failure and verdict.failure.kind), str(verdict)
    content = json.loads(verdict.to_json())
    SCHEMA.validate(content)
    assert Verdict.from_dict(content).to_json() == verdict.to_json()


def test_outcomes_without_a_failure_fit() -> None:
    vacuous = quick(softmax, contract=Contract(ulps={"exp": 1e12}))
    assert vacuous.outcome == "VACUOUS"
    bare = [Verdict(outcome, "k", "softmax", "float32", "float32 inside", note="why") for outcome in OUTCOMES[3:]]
    for verdict in (vacuous, *bare):
        SCHEMA.validate(json.loads(verdict.to_json()))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("aspects"),
        lambda content: content.update(extra=1),
        lambda content: content.update(outcome="FINE"),
        lambda content: content.update(cases=-1),
        lambda content: content.update(worst="nan"),
        lambda content: content.update(failure=None),
        lambda content: content["histogram"].pop(),
        lambda content: content["failure"].update(kind="mood"),
        lambda content: content["failure"]["case"].pop("sizes"),
        lambda content: content["aspects"]["numbers"]["map"]["cells"][0].append("many"),
        lambda content: content["aspects"]["numbers"]["map"].update(block=[1]),
        lambda content: content["aspects"]["numbers"]["sample"]["output"]["got"].append(None),
        lambda content: content["aspects"]["numbers"]["sample"]["inputs"][0].pop("values"),
    ],
)
def test_what_is_not_as_stated_does_not_fit(failed: Verdict, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(failed.to_json())
    change(content)
    assert list(SCHEMA.iter_errors(content))


TESTS = """
    import torch

    def softmax(x):
        return torch.softmax(x, -1)

    def doubled(x):
        return torch.softmax(x, -1) * 2

    def test_softmax(assay):
        assay.check(softmax, "softmax", dtype="float32", shapes={"R": [2]}, effort="quick", examples=0)

    def test_doubled(assay):
        assay.check(doubled, "softmax", dtype="bfloat16", shapes={"R": [2]}, effort="quick", examples=0)
"""
PASSED = Line("fine", "softmax", "float32", "PASS", 30, "0.5")


def test_the_table_begins_with_what_failed() -> None:
    failed = Line("my.kernel", "softmax", "float32", "FAIL", 3, "2.5", "came 1", "first met in y", "assay repro '{}'")
    text = markdown([PASSED, failed])
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert text.startswith("### assay: 1 of 2 kernels keep their contract")
    assert [re.findall(r"PASS|FAIL", row) for row in rows[1:]] == [["FAIL"], ["PASS"]]
    assert text.count("<details>") == text.count("</details>") == 1
    assert "\n```sh\nassay repro '{}'\n```\n" in text
    assert "first met in y" in text


@given(st.text(max_size=40), st.text(alphabet="`a\n", max_size=12))
def test_nothing_in_a_line_is_markup(words: str, repro: str) -> None:
    line = Line("k", "softmax", "float32", "FAIL", 1, "2", words, words, f"assay {repro}".replace("\n", " "))
    text = markdown([line])
    row = next(part for part in text.split("\n") if part.startswith("| ❌"))
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 9
    assert "<" not in row
    fences = re.findall(r"^(`{3,})(?:sh)?$", text, re.MULTILINE)
    assert fences[0] == fences[-1]
    assert fences[0] not in line.repro
    assert set(re.findall(r"</?\w+>", text)) == {"<details>", "</details>", "<summary>", "</summary>"}


def test_a_verdict_gives_its_line(tmp_path: Path, failed: Verdict) -> None:
    line = line_of(failed)
    assert line.outcome == "FAIL"
    assert "came" in line.words
    assert line.where.startswith("first met in y of shape [")
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    append(path, [line])
    append(path, [PASSED])
    assert path.read_text().startswith("before\n")
    assert path.read_text().count("### assay") == 2


@pytest.mark.usefixtures("failed")
@pytest.mark.parametrize("way", ["option", "environment", "neither"])
def test_pytest_appends_its_summary(way: str, pytester: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "by_github.md" if way == "environment" else "")
    pytester.makepyfile(test_kernels=dedent(TESTS))
    options = ["--assay-summary=summary.md"] if way == "option" else []
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
    result.assert_outcomes(passed=1, failed=1)
    written = list(pytester.path.glob("*.md"))
    assert len(written) == (way != "neither")
    for path in written:
        assert all(words in path.read_text() for words in ("1 of 2 kernels keep", "doubled", "assay repro"))


@pytest.mark.usefixtures("failed")
def test_a_summary_that_cannot_be_written_is_one_line(pytester: Any) -> None:
    pytester.makepyfile(test_kernels=dedent(TESTS))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "softmax", "--assay-summary=none/such.md")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["the summary could not be written to none/such.md: No such file or directory"])


def test_the_command_line_appends_one_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A folder that isn't there is a usage error, before anything is examined."""
    words = "verify torch.nn.functional:softmax --spec softmax --dtype float32 --effort quick --examples 0 --summary"
    assert main([*words.split(), str(tmp_path / "s.md")]) in (0, 1)
    assert "softmax" in (tmp_path / "s.md").read_text()
    assert main([*words.split(), str(tmp_path / "none" / "s.md")]) == 2
    assert "expected a file that can be written" in capfd.readouterr().err


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


def late(x: torch.Tensor) -> torch.Tensor:
    y = torch.softmax(x, -1).clone()
    y[:, 5:] *= 1.25
    return y


@pytest.fixture(scope="module")
def drawn() -> list[Verdict]:
    """A kernel that fails in its later columns, and one that passes."""
    return [quick(kernel, dtype="bfloat16", shapes={"R": [4]}, shrinking=True) for kernel in (late, softmax)]


@needs_browser
def test_no_page_overflows_and_pictures_have_a_size(tmp_path: Path, drawn: list[Verdict]) -> None:
    rows = [Row(Entry("k" * 60, "a:b", Settings("softmax")), "bfloat16", one.outcome, one) for one in drawn]
    for seen, width in zip(printed(tmp_path, framed(survey_page(rows, {"torch": "2"}), MEASURE)), WIDTHS, strict=True):
        assert seen["width"] == seen["content"] == width
        assert [len(seen["boxes"][name]) for name in (".map svg", ".levels", ".bars", ".bins")] == [1, 1, 2, 2]
        for boxes in seen["boxes"].values():
            assert all(0 < wide <= width and tall > 10 for wide, tall in boxes)
        assert max(seen["bars"]) > 50
        assert len(seen["bars"]) == 48
        assert len(set(seen["fills"])) == len(seen["fills"]) > 1


@needs_browser
def test_a_screenshot_shows_the_colours_of_the_map(tmp_path: Path, drawn: list[Verdict]) -> None:
    """The wrong columns are on the picture in the colours of the scale, over a page that isn't blank."""
    colours = colours_on(tmp_path, verdict_page(drawn[0]), "--window-size=1280,900")
    assert colours["a9cde6"] > 500
    assert sum(colours.get(colour, 0) for colour in ("f2b134", "d55e00", "8a2b00", "3b0a00")) > 500
    assert len(colours) > 20
