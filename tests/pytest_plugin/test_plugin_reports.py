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
@pytest.mark.parametrize("name", ["plain", "a/b c", "a b/c"])
def test_softmax(assay, name):
    assay.check(softmax, "softmax", dtype="float32", effort="quick", examples=0)

def test_twice(assay):
    assay.check(softmax, "softmax", dtype="float32", effort="quick", examples=0)
    assay.check(doubled, "softmax", dtype="float32", effort="quick", examples=0)
"""


def test_passes_and_failures_are_reported(run: Any, pytester: pytest.Pytester) -> None:
    """Pages with their JSON, in a folder that is made, an index that begins with failures, and properties in JUnit's.

    Names come from the tests, without slashes; two ids that differ only in punctuation don't share a file.
    """
    result = run(REPORTED, "--assay-report=out/reports", "--junitxml=junit.xml")
    result.assert_outcomes(passed=3, failed=1)
    folder = pytester.path / "out" / "reports"
    names = sorted(path.stem for path in folder.glob("*.json"))
    assert sorted(["index", *names]) == sorted(path.stem for path in folder.glob("*.html"))
    assert len(names) == 5
    assert all(re.fullmatch(r"test_kernels\.py-test_(softmax|twice)[\w.-]*", name) for name in names), names
    verdicts = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    assert sorted(verdict["outcome"] for verdict in verdicts.values()) == ["FAIL", "PASS", "PASS", "PASS", "PASS"]

    index = (folder / "index.html").read_text()
    links = re.findall(r'<a href="([^"]+)">(\w+)</a>', index)
    assert [kernel for _, kernel in links] == ["doubled", "softmax", "softmax", "softmax", "softmax"]
    assert {page for page, _ in links} == {f"{name}.html" for name in names}
    assert "test_kernels.py::test_twice" in index

    for name in names:
        about, page = verdicts[name]["about"], (folder / f"{name}.html").read_text()
        assert "<html" in page
        assert about["test"].startswith("test_kernels.py::test_")
        assert about["source"] == f"test_kernels.py:{ {'softmax': 4, 'doubled': 7}[verdicts[name]['kernel']] }"
        assert about["device"].startswith("cpu, ")
        assert f"assay {version('kernel-assay')}, torch {version('torch')}" in about["versions"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d[+-]\d\d:\d\d", about["date"])
        assert all(words.replace("+", "&#43;") in page or words in page for words in about.values())

    cases = {case.get("name"): case for case in ElementTree.parse(pytester.path / "junit.xml").iter("testcase")}
    values = {item.get("name"): item.get("value", "") for item in cases["test_twice"].iter("property")}
    assert (values["assay.outcome"], values["assay.2.outcome"]) == ("PASS", "FAIL")
    assert (values["assay.kernel"], values["assay.spec"], values["assay.dtype"]) == ("softmax", "softmax", "float32")
    assert float(values["assay.worst"]) <= 1 < float(values["assay.2.worst"])
    assert int(values["assay.cases"]) > int(values["assay.2.cases"]) > 0
    assert values["assay.2.repro"].startswith("assay repro '")
    assert "assay.repro" not in values


def test_a_long_name_is_no_error(run: Any) -> None:
    """The report of a test whose name is longer than a file's may be is written under a shorter one."""
    test = f'def test_{"x" * 300}(assay): assay.check(softmax, "softmax", dtype="float32", effort="quick", examples=0)'
    run(test, "--assay-report=reports").assert_outcomes(passed=1)


def test_workers_send_their_verdicts_home(run: Any, pytester: pytest.Pytester) -> None:
    result = run(REPORTED, "-n2", "-k", "plain or twice", "--assay-report=reports", apart=True)
    result.assert_outcomes(passed=1, failed=1)
    listed = [line.split()[0] for line in result.outlines if re.search(r"cases  worst .* (PASS|FAIL)(: \w+)?$", line)]
    assert sorted(listed) == ["doubled", "softmax", "softmax"]
    assert len(list((pytester.path / "reports").glob("*.html"))) == 4  # with the index


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
