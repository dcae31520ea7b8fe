"""What makes a check fit to be required: warnings with their case, time limits, a baseline, kept verdicts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["pytester"]

KERNELS = """
import torch

def swallowing(x):
    return torch.softmax(x.float().nan_to_num(0.0), -1).to(x.dtype)

def wrong(x):
    return torch.softmax(x, -1) * 2

def right(x):
    return torch.softmax(x, -1)
"""
FEW = 'FEW = {"dtype": "float32", "effort": "quick", "examples": 0, "shapes": {"R": [3], "N": [5]}, "shrinking": False}'


@pytest.fixture
def module(pytester: pytest.Pytester) -> None:
    """A module of kernels beside the tests."""
    pytester.makepyfile(kernels_of_mine=KERNELS)


def checks_of(*names: str) -> str:
    """The text of one test for each kernel."""
    lines = ["import kernels_of_mine", FEW]
    for name in names:
        lines += [f"def test_{name}(assay):", f"    assay.check(kernels_of_mine.{name}, 'softmax', **FEW)"]
    return "\n".join(lines)


def test_a_warning_has_its_case_and_repeat_line(run: Any, module: None) -> None:
    """In the warning and in the summary; with --assay-strict the test fails."""
    result = run(checks_of("swallowing"))
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.re_match_lines(
        [
            r".*UserWarning: assay: swallowing .*strict=True.*= (-?inf|nan): .*right nan; repeat: assay repro '",
            r"swallowing +softmax +float32 .* WARN: special",
            r"  case +.* = (-?inf|nan): y\[.*\] came .*, right nan",
            r"  repeat +assay repro '\{\"target\":\"kernels_of_mine:swallowing\"",
        ]
    )
    run(checks_of("swallowing"), "--assay-strict").assert_outcomes(failed=1)


def test_a_baseline_lets_known_findings_pass_and_no_others(run: Any, module: None, pytester: pytest.Pytester) -> None:
    """Until its expiry, which the summary says; afterwards and for other kernels the test fails."""
    from assay.cli.main import main

    result = run(checks_of("swallowing", "wrong"), "--assay-report", "reports")
    result.assert_outcomes(passed=1, failed=1, warnings=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(pytester.path)
        assert main(["baseline", "add", "known.toml", "reports", "--reason", "#12", "--expires", "2999-12-31"]) == 0
    tests = checks_of("swallowing", "wrong", "right")
    result = run(tests, "--assay-baseline", "known.toml")
    result.assert_outcomes(passed=3)
    result.stdout.re_match_lines(
        [
            "swallowing .* KNOWN: special",
            "  baseline +special is known until 2999-12-31: #12",
            "wrong .* KNOWN: numbers",
        ]
    )
    result.stdout.re_match_lines([r"right .* PASS$"])
    text = (pytester.path / "known.toml").read_text()
    (pytester.path / "known.toml").write_text(text.replace("2999-12-31", "2020-01-31"))
    result = run(tests, "--assay-baseline", "known.toml")
    result.assert_outcomes(passed=2, failed=1, warnings=1)
    result.stdout.re_match_lines([r"E +baseline +numbers was known until 2020-01-31: #12"])
    (pytester.path / "known.toml").write_text(text.replace("kernels_of_mine:wrong", "kernels_of_mine:other"))
    result = run(tests, "--assay-baseline", "known.toml")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.re_match_lines([r"E +baseline +numbers is new"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--assay-report=file"], "--assay-report file: File exists; expected a folder that can be written"),
        (
            ["--assay-keep=file/below"],
            "--assay-keep file/below: Not a directory; expected a folder that can be written",
        ),
        (["--assay-baseline=none.toml"], "--assay-baseline: none.toml: *; make one with assay baseline add"),
        (["--assay-baseline=file"], "--assay-baseline: file:1: is no TOML*"),
        (["--assay-timeout=0"], "*--assay-timeout: expected seconds, more than 0, got '0'"),
        (["--assay-budget=soon"], "*--assay-budget: expected seconds, more than 0, got 'soon'"),
    ],
)
def test_what_cannot_be_used_stops_the_run_at_once(
    run: Any, pytester: pytest.Pytester, options: list[str], words: str
) -> None:
    (pytester.path / "file").write_text("[[finding")
    result = run("def test_plain(): pass", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{words}*"])


def test_a_full_disk_fails_no_kernel(run: Any, module: None, pytester: pytest.Pytester) -> None:
    """A report that can't be written is a warning, and an index a line."""
    pytester.makeconftest(
        """
        import pytest

        def pytest_configure(config):
            from importlib import import_module

            def fails(*arguments):
                raise OSError(28, "No space left on device")

            patch = pytest.MonkeyPatch()
            config.add_cleanup(patch.undo)
            patch.setattr(import_module("assay.verify.report.html"), "verdict_page", fails)
            patch.setattr(import_module("assay.verify.report.index"), "_written", fails)
        """
    )
    result = run(checks_of("right"), "--assay-report", "reports")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*the report could not be written to reports: No space left on device"])
    result.stdout.fnmatch_lines(["*the index of reports could not be written to reports: No space left on device"])


def test_a_test_has_its_time_and_the_run_its_budget(run: Any, module: None) -> None:
    """What is left out is listed; a test that tried too little isn't passed, and one without time is skipped."""
    tests = "import kernels_of_mine, time\nTHOROUGH = {'dtype': 'float32', 'effort': 'thorough'}\n" + "\n".join(
        f"def test_{index}(assay):\n    assay.check(kernels_of_mine.right, 'softmax', **THOROUGH){more}"
        for index, more in enumerate(("", "\n    time.sleep(1)", ""))
    )
    result = run(tests, "--assay-timeout", "0.02", "-k", "test_0")
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([r"right .* INCONCLUSIVE", r"  cut +after 0.0\d* s; cases left out: .*200 of fuzz.*"])
    result = run(tests, "--assay-budget", "2", "-rs")
    counts = result.parseoutcomes()
    assert sum(counts.get(name, 0) for name in ("passed", "failed", "skipped")) == 3
    result.stdout.re_match_lines([r"assay: 3 tests with kernels; budget 2 s"])
    cut = [float(number) for number in re.findall(r"cut +after ([\d.e-]+) s", result.stdout.str())]
    assert cut
    assert max(cut) < 1.5
    result = run(tests, "--assay-budget", "0.2", "-rs")
    result.stdout.re_match_lines([r"right .* NOT TRIED", r"  why +the 0.2 s of --assay-budget were over"])


def test_verdicts_of_unchanged_kernels_are_kept(run: Any, module: None, pytester: pytest.Pytester) -> None:
    """Until their module changes; neither of failing kernels nor of those that no name leads to."""
    tests = checks_of("right", "wrong") + (
        "\ndef test_nameless(assay):\n    assay.check(lambda x: kernels_of_mine.right(x), 'softmax', **FEW)\n"
    )
    run(tests, "--assay-keep", "kept").assert_outcomes(passed=2, failed=1)
    assert len(list((pytester.path / "kept").iterdir())) == 1
    result = run(tests, "--assay-keep", "kept")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.re_match_lines([r"right .* PASS  \(kept verdict\)", r"wrong .* FAIL: numbers$"])
    result.stdout.re_match_lines([r".*<lambda> .* PASS$"])
    result = run(tests, "--assay-keep", "kept", "--assay-seed=1")
    result.stdout.re_match_lines([r"right .* PASS$"])
    pytester.makepyfile(kernels_of_mine=KERNELS.replace("torch.softmax(x, -1)\n", "torch.softmax(x, -1) + 0.1\n"))
    shutil.rmtree(pytester.path / "__pycache__", ignore_errors=True)
    result = run(tests, "--assay-keep", "kept")
    result.assert_outcomes(failed=3)


def test_the_next_run_is_estimated(pytester: pytest.Pytester, module: None, everything_imported: None) -> None:
    """By the times of the tests' last runs, in pytest's cache."""
    pytester.makepyfile(test_kernels=checks_of("right", "wrong"))
    pytester.runpytest_inprocess("-k", "right").stdout.fnmatch_lines(["assay: 1 test with kernels"])
    result = pytester.runpytest_inprocess()
    result.stdout.re_match_lines(
        [r"assay: 2 tests with kernels, about \d+ s by their last times and 1 of unknown time"]
    )


def test_a_long_test_tells_how_far_it_is(
    pytester: pytest.Pytester, module: None, everything_imported: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines on standard error where that is no terminal, past pytest's capture."""
    pytester.makepyfile(
        conftest="from assay.pytest_plugin import schedule\nschedule._BETWEEN = 0.05\n",
        test_kernels=checks_of("right") + "\n    import time; time.sleep(0.5)\n",
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stderr.re_match_lines([r"assay: test_kernels.py::test_right: \d+ s, \w+ \d+ of \d+"])


def test_verdicts_travel_from_workers(run: Any, module: None) -> None:
    """With xdist, cut ones too."""
    result = run(checks_of("right", "swallowing"), "-n", "2", "--assay-budget", "60", apart=True)
    result.assert_outcomes(passed=2, warnings=1)
    result.stdout.re_match_lines([r"right .* PASS$", r"swallowing .* WARN: special"])


def test_kept_verdicts_are_whole(run: Any, module: None, pytester: pytest.Pytester) -> None:
    """One that the time cut isn't kept; a kept one serves a test with less time."""
    tests = "import kernels_of_mine\ndef test_right(assay):\n    assay.check(kernels_of_mine.right, 'softmax', **FEW)\n"
    tests = f"{FEW}\n{tests}".replace('"examples": 0', '"examples": 12').replace('"shapes": {"R": [3], "N": [5]}, ', "")
    run(tests, "--assay-keep", "kept", "--assay-timeout", "0.3")
    assert not list((pytester.path / "kept").iterdir())
    run(tests, "--assay-keep", "kept").assert_outcomes(passed=1)
    (path,) = (pytester.path / "kept").iterdir()
    assert json.loads(Path(path).read_text())["cut"] == ""
    result = run(tests, "--assay-keep", "kept", "--assay-timeout", "0.3")
    result.stdout.re_match_lines([r"right .* PASS  \(kept verdict\)"])
