"""Kernels against references as people write them: honest ones pass, faulty ones of each kind are found."""

from __future__ import annotations

from typing import Any

import pytest

from assay.verify import Verdict, examine

from .references import CASES, Case

FAULTY = [(case, fault) for case in CASES for fault in case.faulty]


def asked(case: Case, kernel: Any, **more: Any) -> Verdict:
    settings = {"dtype": case.dtype, "effort": "quick", "shrinking": False, **case.asked, **more}
    return examine(kernel, case.reference, tensors=case.tensors, **settings)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_honest_kernel_is_not_failed(case: Case) -> None:
    verdict = asked(case, case.honest)
    assert verdict.outcome in ("PASS", "WARN"), str(verdict)
    assert verdict.outcome == "PASS" or verdict.aspects["special"].status == "broken", str(verdict)


@pytest.mark.parametrize(("case", "fault"), FAULTY, ids=[f"{case.name}-{fault}" for case, fault in FAULTY])
def test_a_faulty_kernel_is_found(case: Case, fault: str) -> None:
    verdict = asked(case, case.faulty[fault], every_aspect=False)
    assert verdict.outcome == ("WARN" if fault in case.warned else "FAIL"), str(verdict)
