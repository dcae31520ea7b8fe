"""An error in a step of an examination becomes one line of the verdict; findings stay, and nothing passes by it."""

import itertools
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from assay.verify import Verdict, examine
from assay.verify.errors import SettingError
from assay.verify.examination.steps import in_words
from assay.verify.report.text import text_report

EXAMINED: dict[str, Any] = {
    "tensors": "x[R,N] -> y[R,N]",
    "dtype": "bfloat16",
    "effort": "quick",
    "examples": 1,
    "layouts": ("contiguous",),
    "shapes": {"R": [2], "N": [2, 4]},
}
EXAMINATION = "assay.verify.examination"


def rows(x: Any) -> Any:
    return torch.softmax(x.float(), -1).to(x.dtype)


def last_column_wrong(x: Any) -> Any:
    y = rows(x)
    if x.shape[-1] > 2:
        y[..., -1] *= 1.5
    return y


def raising(target: str, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the function ``module:name`` raise at every so many of its calls."""
    module, _, name = target.partition(":")
    *outer, name = name.split(".")
    holder: Any = resolve_name(f"{module}:{'.'.join(outer)}" if outer else module)
    real, count = getattr(holder, name), itertools.count(1)

    def broken(*arguments: Any, **named: Any) -> Any:
        if next(count) % every == 0:
            raise KeyError("planted")
        return real(*arguments, **named)

    monkeypatch.setattr(holder, name, broken)


OF_THE_RUN = {
    "the sensitivity check": (f"{EXAMINATION}.procedure:sensitivity_check", 1),
    "drawing the cases of exact": (f"{EXAMINATION}.phases:exact_cases", 1),
    "a case of lengths": (f"{EXAMINATION}.run:judge_statistically", 1),
    "the phase fuzz": (f"{EXAMINATION}.phases:covering_cases", 1),
}
DESCRIBING = {
    "counting what was covered": (f"{EXAMINATION}.run:Covering", 1),
    "remarks on the reference": (f"{EXAMINATION}.procedure:_remarks", 1),
    "naming the machine": (f"{EXAMINATION}.procedure:about", 1),
}
OF_A_CASE = {
    "tying": ("assay.verify.cases.sampler:Sampler.tied", 3),
    "aspects": (f"{EXAMINATION}.run:aspects_of", 3),
    "building": ("assay.verify.harness.runner:build", 3),
    "golden": ("assay.verify.comparison.oracle:run", 3),
    "comparison": ("assay.verify.comparison.oracle:judge", 5),
}
EXPLAINING = {
    "attribution": (f"{EXAMINATION}.run:attributed_to", 1),
    "diagnosis": (f"{EXAMINATION}.procedure:diagnosed", 1),
    "all of an aspect": (f"{EXAMINATION}.diagnosis:_explained", 1),
    "shrinking": (f"{EXAMINATION}.diagnosis:shrink", 1),
    "classification": (f"{EXAMINATION}.diagnosis:_classified", 1),
    "explanation": (f"{EXAMINATION}.diagnosis:explain", 1),
    "facts": (f"{EXAMINATION}.diagnosis:measured_facts", 1),
    "sizes": (f"{EXAMINATION}.diagnosis:_known", 1),
    "sample": (f"{EXAMINATION}.diagnosis:sample_of", 1),
    "contracts": (f"{EXAMINATION}.diagnosis:_admitting", 1),
    "repeat line": (f"{EXAMINATION}.diagnosis:repro_line", 1),
}


def check_lines(verdict: Verdict) -> None:
    """Check that the report names the planted errors, each in one line."""
    report = text_report(verdict)
    assert verdict.errors
    lines = [line for line in verdict.errors if not line.startswith("and ")]
    assert all("planted" in line and "\n" not in line for line in lines), lines
    assert "  error       " in report
    assert "Traceback" not in report


@pytest.mark.parametrize(("steps", "outcome"), [(OF_THE_RUN, "INCONCLUSIVE"), (DESCRIBING, "PASS")])
def test_nothing_passes_by_an_error_of_a_step_that_looks_for_faults(
    steps: dict[str, tuple[str, int]], outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target, every in steps.values():
        raising(target, every, monkeypatch)
    honest = examine(rows, rows, **EXAMINED)
    assert honest.outcome == outcome, str(honest)
    check_lines(honest)
    assert [name for name in steps if not any(line.startswith(name) for line in honest.errors)] == []


def test_a_case_without_a_golden_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(*OF_A_CASE["golden"], monkeypatch)
    honest = examine(rows, rows, **EXAMINED)
    assert honest.outcome == "INCONCLUSIVE"
    assert honest.note.startswith("not all could be tried: ")
    check_lines(honest)


@pytest.mark.parametrize("step", [*EXPLAINING, *OF_A_CASE])
def test_a_finding_stays(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(*(EXPLAINING | OF_A_CASE)[step], monkeypatch)
    faulty = examine(last_column_wrong, rows, **EXAMINED, every_aspect=False)
    assert faulty.outcome == "FAIL", str(faulty)
    check_lines(faulty)
    assert faulty.failure is not None
    assert faulty.failure.golden is not None


def test_a_section_of_the_report_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = examine(last_column_wrong, rows, **EXAMINED, every_aspect=False, shrinking=False)
    raising("assay.verify.report.text:_numbers", 1, monkeypatch)
    report = text_report(faulty)
    assert "error       the report of it: KeyError: 'planted'" in report
    assert "  repeat      assay repro" in report


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "there wasn't enough memory for it"),
        (OSError(28, "No space left on device", "/x"), "/x: No space left on device"),
        (SettingError("N=1; expected 2"), "N=1; expected 2"),
        (ValueError("one\ntwo"), "an error of assay's own (ValueError: one two); please report it"),
    ],
)
def test_words_of_an_error(error: Exception, words: str) -> None:
    assert in_words(error).startswith(words)
