"""The pytest plugin: fixture, marker, options, reports and summary, in runs of pytest inside of pytest."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from textwrap import dedent
from typing import Any

import pytest
import torch

from assay.verify import examine
from assay.verify.interpreter import faithful

pytest_plugins = ["pytester"]

KERNELS = """
import pytest
import torch

def softmax(x):
    return torch.softmax(x, -1)

def doubled(x):
    return torch.softmax(x, -1) * 2
"""


@pytest.fixture(scope="module", autouse=True)
def everything_imported() -> None:
    """What a run inside of this process imports is forgotten after it; torch can't be imported twice."""
    with faithful():
        examine(lambda x: torch.softmax(x, -1), "softmax", dtype="float32", examples=1).to_json()


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of pytest over a file of tests, in this process or in one of its own."""

    def run_tests(tests: str, *options: str, apart: bool = False) -> pytest.RunResult:
        worker = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
        for name in (*worker, "GITHUB_STEP_SUMMARY"):
            monkeypatch.delenv(name, raising=False)
        pytester.makepyfile(test_kernels=(KERNELS if "softmax" in tests else "") + dedent(tests))
        start = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
        return start("-p", "no:cacheprovider", *options)

    return run_tests


def test_a_kernel_that_keeps_its_contract_passes_and_is_listed(run: Any) -> None:
    """The summary has a line for each verdict: kernel, spec, dtype, cases, worst ratio, outcome."""
    result = run(
        """
        def test_softmax(assay):
            verdict = assay.check(softmax, "softmax", dtype="bfloat16", examples=2)
            assert verdict.passed
        """
    )
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines([r"=+ assay =+", r"softmax +softmax +bfloat16 +\d+ cases +worst +0\.\d+ +PASS"])


def test_a_run_without_the_fixture_has_no_summary(run: Any) -> None:
    """Other people's tests are left alone."""
    result = run("def test_plain(): pass")
    result.assert_outcomes(passed=1)
    result.stdout.no_re_match_line("=+ assay =+")


@pytest.mark.parametrize("style", ["auto", "short", "long"])
def test_a_faulty_kernel_fails_the_test_with_its_report_alone(run: Any, style: str) -> None:
    """The failure shows the test's own line and the report, and no line of ours."""
    result = run(
        """
        def test_doubled(assay):
            assay.check(doubled, "softmax", dtype="bfloat16", examples=2)
        """,
        f"--tb={style}",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*assay.check(doubled, *",
            "E *FAIL  doubled as softmax in bfloat16",
            "E *worst at*got *golden *",
            "E *repeat *assay repro '*test_kernels:doubled*",
            "doubled *softmax *bfloat16 * FAIL",
        ]
    )
    for ours in ("plugin.py", "examination.py", "def check", "raise VerificationError"):
        result.stdout.no_fnmatch_line(f"*{ours}*")


def test_examine_lists_a_failure_and_leaves_the_test_to_decide(run: Any) -> None:
    """`assay.examine` returns the verdict whatever it is."""
    result = run(
        """
        def test_doubled(assay):
            assert assay.examine(doubled, "softmax", dtype="float32", examples=0).outcome == "FAIL"
            assert assay.examine(softmax, "softmax", dtype="float32", examples=0).outcome == "PASS"
        """
    )
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines(["doubled .* FAIL", "softmax .* PASS"])


PRECEDENCE = """
@pytest.mark.assay(examples=3, seed=7)
class TestMarked:
    def seen(self, assay, **settings):
        verdict = assay.examine(softmax, "softmax", dtype="float32", **settings)
        return verdict.phases.get("fuzz", 0), verdict.seed

    def test_class(self, assay):
        assert self.seen(assay) == {class_}

    @pytest.mark.assay(examples=2)
    def test_closest(self, assay):
        assert self.seen(assay) == {closest}

    @pytest.mark.assay(examples=2)
    def test_call(self, assay):
        assert self.seen(assay, examples=4) == {call}
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"class_": (3, 7), "closest": (2, 7), "call": (4, 7)}),
        (["--assay-examples=1"], {"class_": (1, 7), "closest": (1, 7), "call": (1, 7)}),
        (["--assay-seed", "9"], {"class_": (3, 9), "closest": (2, 9), "call": (4, 9)}),
        (["--assay-examples=0", "--assay-seed=0"], {"class_": (0, 0), "closest": (0, 0), "call": (0, 0)}),
    ],
    ids=["none", "examples", "seed", "zeros"],
)
def test_options_outrank_the_call_and_the_call_the_marker(run: Any, options: list[str], expected: Any) -> None:
    """Of several markers the closest counts; zero given on the command line counts as given."""
    run(PRECEDENCE.format(**expected), *options).assert_outcomes(passed=3)


def test_the_device_is_handed_on(run: Any) -> None:
    """A device that isn't there is one clear line, not a wrong verdict."""
    result = run('def test_softmax(assay): assay.check(softmax, "softmax", dtype="float32")', "--assay-device=tpu:7")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*device='tpu:7' can't be used*"])


def test_marker_and_fixture_are_documented(run: Any) -> None:
    """`--markers`, `--fixtures` and `--help` say what there is; the marker is no unknown one to --strict-markers."""
    tests = '@pytest.mark.assay(examples=0)\ndef test_s(assay): assay.check(softmax, "softmax", dtype="float32")'
    run(tests, "--strict-markers").assert_outcomes(passed=1)
    run(tests, "--markers").stdout.fnmatch_lines(["@pytest.mark.assay(*): settings of examine for this test*"])
    run(tests, "--fixtures").stdout.fnmatch_lines(["assay -- *", "*Examine kernels*"])
    run(tests, "--help").stdout.fnmatch_lines(["*--assay-examples=N*", "*--assay-report=DIR*"])


REPORTED = """
@pytest.mark.parametrize("name", ["plain", "a/b c", "%s"])
def test_softmax(assay, name):
    assay.check(softmax, "softmax", dtype="float32", examples=0)

def test_twice(assay):
    assay.check(softmax, "softmax", dtype="float32", examples=0)
    assay.check(doubled, "softmax", dtype="float32", examples=0)
"""


def test_reports_are_written_for_passes_and_failures(run: Any, pytester: pytest.Pytester) -> None:
    """Each verdict has a page and its JSON in the folder, which is made; names come from the tests, without slashes."""
    result = run(REPORTED % "plus", "--assay-report=out/reports")
    result.assert_outcomes(passed=3, failed=1)
    folder = pytester.path / "out" / "reports"
    names = sorted(path.stem for path in folder.glob("*.json"))
    assert names == sorted(path.stem for path in folder.glob("*.html"))
    assert len(names) == 5
    assert all(re.fullmatch(r"test_kernels\.py-test_(softmax|twice)[\w.-]*", name) for name in names), names
    outcomes = [json.loads((folder / f"{name}.json").read_text())["outcome"] for name in names]
    assert sorted(outcomes) == ["FAIL", "PASS", "PASS", "PASS", "PASS"]
    assert all("<html" in (folder / f"{name}.html").read_text() for name in names)


def test_a_long_name_is_no_error(run: Any) -> None:
    """The report of a test whose name is longer than a file's may be is written under a shorter one."""
    test = f'def test_{"x" * 300}(assay): assay.check(softmax, "softmax", dtype="float32", examples=0)'
    run(test, "--assay-report=reports").assert_outcomes(passed=1)


def test_reports_of_different_tests_have_different_names(run: Any, pytester: pytest.Pytester) -> None:
    """Two ids that differ only in punctuation don't share a file."""
    run(REPORTED % "a b/c", "--assay-report=reports")
    assert len(list((pytester.path / "reports").glob("*.json"))) == 5


def test_workers_send_their_verdicts_home(run: Any, pytester: pytest.Pytester) -> None:
    """Under xdist the summary lists the verdicts of all workers once, and the reports are all there."""
    tests = """
def test_softmax(assay):
    assay.check(softmax, "softmax", dtype="float32", examples=0)

def test_doubled(assay):
    assay.check(doubled, "softmax", dtype="bfloat16", examples=0)
"""
    result = run(tests, "-n2", "--assay-report=reports", apart=True)
    result.assert_outcomes(passed=1, failed=1)
    listed = [line.split()[0] for line in result.outlines if re.search(r"cases  worst .* (PASS|FAIL)$", line)]
    assert sorted(listed) == ["doubled", "softmax"]
    assert len(list((pytester.path / "reports").glob("*.html"))) == 2


def test_a_run_without_kernels_loads_nothing_heavy(run: Any) -> None:
    """Neither torch nor hypothesis nor numpy is imported for tests that don't ask for the fixture."""
    heavy = ("torch", "hypothesis", "numpy", "assay.golden", "assay.verify.examination")
    test = f"""
        def test_light():
            import sys
            assert [name for name in {heavy} if name in sys.modules] == []
            assert "assay.verify.plugin" in sys.modules
        """
    run(test, "--strict-markers", "--assay-examples=3", apart=True).assert_outcomes(passed=1)


FAITHFUL = """
import pytest, torch, triton
import triton.language as tl

@triton.jit
def rounding_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(y_ptr + places, tl.load(x_ptr + places).to(tl.bfloat16))

def rounded(x):
    y = torch.empty_like(x, dtype=torch.bfloat16)
    rounding_kernel[(1,)](x, y, SIZE=x.numel())
    return y

X = torch.linspace(1, 2, 128)

@pytest.fixture
def by_a_fixture():
    return rounded(X)

def test_plain(by_a_fixture):
    assert torch.equal(rounded(X), X.bfloat16()) and torch.equal(by_a_fixture, X.bfloat16())

def test_beside_the_fixture(assay):
    assert torch.equal(rounded(X), X.bfloat16())
"""


def test_the_whole_run_may_be_interpreted_faithfully(run: Any) -> None:
    """With the option Triton kernels run on a CPU and round to nearest, in any test and fixture; else they don't."""
    run(FAITHFUL, "--assay-faithful").assert_outcomes(passed=2)
    run(FAITHFUL, "-k", "plain").assert_outcomes(errors=1)


def test_without_triton_the_option_is_a_usage_error(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what to install."""
    monkeypatch.setitem(sys.modules, "triton", None)
    result = run("def test_plain(): pass", "--assay-faithful")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--assay-faithful needs Triton, which is not installed*"])


DOT = """
import torch, triton
from triton import language as tl

@triton.jit
def dot_kernel(a_ptr, c_ptr):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    a = tl.load(a_ptr + at)
    tl.store(c_ptr + at, tl.dot(a, a))

def test_dot():
    a, c = torch.full((64, 64), 1.125).to(torch.float8_e4m3fn), torch.empty(64, 64)
    a[0, 0] = 448.0
    dot_kernel[(1,)](a, c)
    assert float(c[0, 1]) == (448 * 1.125 + 63 * 1.125**2) - %s
"""


def test_the_whole_run_may_have_the_tensor_cores_of_a_device(run: Any) -> None:
    """With --assay-faithful-device alone dots lose what that device's lose; an unknown one is one line."""
    run(DOT % "0", "--assay-faithful").assert_outcomes(passed=1)
    run(DOT % "0.9843750", "--assay-faithful-device", "h200").assert_outcomes(passed=1)
    result = run(DOT % "0", "--assay-faithful-device", "h2000")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--assay-faithful-device: unknown device*did you mean 'h200'*"])


def test_junit_xml_carries_the_verdicts(run: Any, pytester: pytest.Pytester) -> None:
    """Each verdict's facts are properties of its test, failing ones included, those of later verdicts numbered."""
    run(REPORTED % "plus", "--junitxml=junit.xml")
    cases = {case.get("name"): case for case in ElementTree.parse(pytester.path / "junit.xml").iter("testcase")}
    values = {item.get("name"): item.get("value", "") for item in cases["test_twice"].iter("property")}
    assert (values["assay.outcome"], values["assay.2.outcome"]) == ("PASS", "FAIL")
    assert (values["assay.kernel"], values["assay.spec"], values["assay.dtype"]) == ("softmax", "softmax", "float32")
    assert float(values["assay.worst"]) <= 1 < float(values["assay.2.worst"])
    assert int(values["assay.cases"]) > int(values["assay.2.cases"]) > 0
    assert values["assay.2.repro"].startswith("assay repro '")
    assert "assay.repro" not in values


def test_stored_goldens_are_tried_too(run: Any, tmp_path: Any) -> None:
    """`--assay-golden STORE` adds the store's cases: a fault at a size that only they have fails the test."""
    from assay.golden.inputs.recipe import recipe
    from assay.golden.store import Store, make_record

    store = Store(str(tmp_path))
    store.put(make_record(recipe("softmax", {"R": 2, "N": 977}, "float32")))
    tests = """
        def test_softmax(assay):
            kernel = lambda x: softmax(x) * (2 if x.shape[-1] == 977 else 1)
            assay.check(kernel, "softmax", dtype="float32", examples=0, shapes={"N": range(1, 2000)})
    """
    run(tests).assert_outcomes(passed=1)
    result = run(tests, "--assay-golden", store.url)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*FAIL  (1 of them stored)"])
    result = run(tests, "--assay-golden", f"{store.url}/nothing")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["store *nothing*"])
    result.stdout.no_fnmatch_line("*plugin.py*")
