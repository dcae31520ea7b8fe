"""What the pytest plugin writes: pages, their index, properties in JUnit's form, and warnings told once."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from typing import Any

import pytest

pytest_plugins = ["pytester"]

REPORTED = """
@pytest.mark.parametrize("name", ["plain", "a/b c", "%s"])
def test_softmax(assay, name):
    assay.check(softmax, "softmax", dtype="float32", effort="quick", examples=0)

def test_twice(assay):
    assay.check(softmax, "softmax", dtype="float32", effort="quick", examples=0)
    assay.check(doubled, "softmax", dtype="float32", effort="quick", examples=0)
"""


def test_reports_are_written_for_passes_and_failures(run: Any, pytester: pytest.Pytester) -> None:
    """Each verdict has a page and its JSON in the folder, which is made; names come from the tests, without slashes."""
    result = run(REPORTED % "plus", "--assay-report=out/reports")
    result.assert_outcomes(passed=3, failed=1)
    folder = pytester.path / "out" / "reports"
    names = sorted(path.stem for path in folder.glob("*.json"))
    assert sorted(["index", *names]) == sorted(path.stem for path in folder.glob("*.html"))
    assert len(names) == 5
    assert all(re.fullmatch(r"test_kernels\.py-test_(softmax|twice)[\w.-]*", name) for name in names), names
    outcomes = [json.loads((folder / f"{name}.json").read_text())["outcome"] for name in names]
    assert sorted(outcomes) == ["FAIL", "PASS", "PASS", "PASS", "PASS"]
    assert all("<html" in (folder / f"{name}.html").read_text() for name in names)


def test_a_long_name_is_no_error(run: Any) -> None:
    test = f'def test_{"x" * 300}(assay): assay.check(softmax, "softmax", dtype="float32", effort="quick", examples=0)'
    run(test, "--assay-report=reports").assert_outcomes(passed=1)


def test_reports_of_different_tests_have_different_names(run: Any, pytester: pytest.Pytester) -> None:
    run(REPORTED % "a b/c", "--assay-report=reports")
    assert len(list((pytester.path / "reports").glob("*.json"))) == 5


def test_workers_send_their_verdicts_home(run: Any, pytester: pytest.Pytester) -> None:
    tests = """
def test_softmax(assay):
    assay.check(softmax, "softmax", dtype="float32", effort="quick", examples=0)

def test_doubled(assay):
    assay.check(doubled, "softmax", dtype="bfloat16", effort="quick", examples=0)
"""
    result = run(tests, "-n2", "--assay-report=reports", apart=True)
    result.assert_outcomes(passed=1, failed=1)
    listed = [
        line.split()[0] for line in result.outlines if re.search(r"cases  worst .* (PASS|FAIL)(: [a-z, ]+)?$", line)
    ]
    assert sorted(listed) == ["doubled", "softmax"]
    assert len(list((pytester.path / "reports").glob("*.html"))) == 3  # with the index


def test_junit_xml_carries_the_verdicts(run: Any, pytester: pytest.Pytester) -> None:
    run(REPORTED % "plus", "--junitxml=junit.xml")
    cases = {case.get("name"): case for case in ElementTree.parse(pytester.path / "junit.xml").iter("testcase")}
    values = {item.get("name"): item.get("value", "") for item in cases["test_twice"].iter("property")}
    assert (values["assay.outcome"], values["assay.2.outcome"]) == ("PASS", "FAIL")
    assert (values["assay.kernel"], values["assay.spec"], values["assay.dtype"]) == ("softmax", "softmax", "float32")
    assert float(values["assay.worst"]) <= 1 < float(values["assay.2.worst"])
    assert int(values["assay.cases"]) > int(values["assay.2.cases"]) > 0
    assert values["assay.2.repro"].startswith("assay repro '")
    assert "assay.repro" not in values


def test_a_page_tells_what_it_is_of(run: Any, pytester: pytest.Pytester) -> None:
    run(REPORTED % "plus", "-k", "twice", "--assay-report=reports").assert_outcomes(failed=1)
    for file in (pytester.path / "reports").glob("*.json"):
        verdict = json.loads(file.read_text())
        about, page = verdict["about"], file.with_suffix(".html").read_text()
        line = {"softmax": 4, "doubled": 7}[verdict["kernel"]]
        assert about["test"] == "test_kernels.py::test_twice"
        assert about["source"] == f"test_kernels.py:{line}"
        assert about["device"].startswith("cpu, ")
        assert f"assay {version('kernel-assay')}, torch {version('torch')}" in about["versions"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d[+-]\d\d:\d\d", about["date"])
        assert all(words.replace("+", "&#43;") in page or words in page for words in about.values())


def test_the_folder_of_reports_has_an_index(run: Any, pytester: pytest.Pytester) -> None:
    run(REPORTED % "a b/c", "--assay-report=reports")
    index = (pytester.path / "reports" / "index.html").read_text()
    links = re.findall(r'<a href="([^"]+)">(\w+)</a>', index)
    assert [kernel for _, kernel in links] == ["doubled", "softmax", "softmax", "softmax", "softmax"]
    pages = {page.name for page in (pytester.path / "reports").glob("*.html")}
    assert {page for page, _ in links} == pages - {"index.html"}
    assert "test_kernels.py::test_twice" in index


def test_a_kernels_warning_is_told_once(run: Any) -> None:
    tests = """
        import warnings

        def warning_softmax(x):
            warnings.warn(f"{x.numel()} elements", stacklevel=1)
            return softmax(x)

        def test_softmax(assay):
            assay.check(warning_softmax, "softmax", dtype="float32", effort="quick", examples=0)
    """
    result = run(tests)
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.re_match_lines([r".*test_kernels\.py:\d+: UserWarning: \d+ elements"])
