"""The summary in Markdown: of a pytest run, of the command line, and as a text in which nothing is markup."""

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.cli.main import main
from assay.verify import examine
from assay.verify.report.summary import Line, append, line_of, markdown

pytest_plugins = ["pytester"]

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
FAILED = Line(
    "my.kernel",
    "softmax",
    "float32",
    "FAIL",
    3,
    "2.5",
    "N=2: y[0, 0] came 1",
    "first met in y of shape [2, 2]",
    "assay repro '{}'",
)
PASSED = Line("fine", "softmax", "float32", "PASS", 30, "0.5")
SMALL = {"R": [2], "N": [5]}


@pytest.fixture(scope="module", autouse=True)
def everything_imported() -> None:
    """What a run of pytest inside of this process imports is forgotten after it; torch can't be imported twice."""
    line_of(
        examine(
            lambda x: torch.softmax(x, -1) * 2, "softmax", dtype="float32", shapes=SMALL, effort="quick", examples=1
        )
    )


def test_the_table_begins_with_what_failed() -> None:
    """A row for each verdict, failures first; folded details with the repro line for failures alone."""
    text = markdown([PASSED, FAILED])
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert text.startswith("### assay: 1 of 2 kernels keep their contract")
    assert [re.findall(r"PASS|FAIL", row) for row in rows[1:]] == [["FAIL"], ["PASS"]]
    assert text.count("<details>") == text.count("</details>") == 1
    assert "\n```sh\nassay repro '{}'\n```\n" in text
    assert "first met in y" in text


@given(st.text(max_size=40), st.text(alphabet="`a\n", max_size=12))
def test_nothing_in_a_line_is_markup(words: str, repro: str) -> None:
    """Names and messages neither add cells nor open tags, and no repro line ends its own fence."""
    line = Line("k", "softmax", "float32", "FAIL", 1, "2", words, words, f"assay {repro}".replace("\n", " "))
    text = markdown([line])
    row = next(part for part in text.split("\n") if part.startswith("| ❌"))
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 9
    assert "<" not in row
    fences = re.findall(r"^(`{3,})(?:sh)?$", text, re.MULTILINE)
    assert fences[0] == fences[-1]
    assert fences[0] not in line.repro
    assert set(re.findall(r"</?\w+>", text)) == {"<details>", "</details>", "<summary>", "</summary>"}


def test_a_verdict_gives_its_line(tmp_path: Path) -> None:
    """The first violation in words, where it was first met, and the repro line; files are appended to."""
    found = line_of(
        examine(
            lambda x: torch.softmax(x, -1) * 2, "softmax", dtype="float32", shapes=SMALL, effort="quick", examples=0
        )
    )
    assert found.outcome == "FAIL"
    assert "came" in found.words
    assert found.where.startswith("first met in y of shape [")
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    append(path, [found])
    append(path, [PASSED])
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.count("### assay") == 2


@pytest.mark.parametrize("way", ["option", "environment", "neither"])
def test_pytest_appends_its_summary(way: str, pytester: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the file that the option or GitHub names, with all verdicts; else nothing is written."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "by_github.md" if way == "environment" else "")
    pytester.makepyfile(test_kernels=dedent(TESTS))
    options = ["--assay-summary=summary.md"] if way == "option" else []
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
    result.assert_outcomes(passed=1, failed=1)
    written = list(pytester.path.glob("*.md"))
    assert len(written) == (way != "neither")
    for path in written:
        text = path.read_text()
        assert "1 of 2 kernels keep" in text
        assert "doubled" in text
        assert "assay repro" in text


def test_a_summary_that_cannot_be_written_is_one_line(pytester: Any) -> None:
    pytester.makepyfile(test_kernels=dedent(TESTS))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "softmax", "--assay-summary=none/such.md")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["the summary could not be written to none/such.md: No such file or directory"])


def test_the_command_line_appends_one_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`assay verify --summary FILE`; a folder that isn't there is a usage error, before anything is examined."""
    command = [
        "verify",
        "torch.nn.functional:softmax",
        "--spec",
        "softmax",
        "--dtype",
        "float32",
        "--effort",
        "quick",
        "--examples",
        "0",
    ]
    assert main([*command, "--summary", str(tmp_path / "s.md")]) in (0, 1)
    assert "softmax" in (tmp_path / "s.md").read_text()
    assert main([*command, "--summary", str(tmp_path / "none" / "s.md")]) == 2
    assert "expected a file that can be written" in capfd.readouterr().err
