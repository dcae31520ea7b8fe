"""Pairs of distributions that differ in their tails alone, and amplitudes of matrices: drawn, and telling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden.inputs.distributions import names_of
from assay.golden.registry import spec
from assay.golden.signature import TensorSpec
from assay.verify import Contract, examine
from assay.verify.cases.case import Case, all_contents
from assay.verify.cases.sampler import Sampler
from assay.verify.comparison.oracle import Oracle
from assay.verify.examination.phases import range_cases

OPTIONS: dict[str, Any] = {"reduction": ["none"]}


def divergence(logits: Tensor, target_logits: Tensor, least: float = 0.0, **_: object) -> Tensor:
    """The divergence of each row; shares below ``least`` are taken for it in logarithms."""
    q, p = (torch.softmax(x.float(), 1) for x in (logits, target_logits))
    middle = (p + q) / 2

    def log(share: Tensor) -> Tensor:
        return share.clamp_min(max(least, 1e-37)).log()

    return ((p * (log(p) - log(middle))).sum(1) + (q * (log(q) - log(middle))).sum(1)) / 2


def peaked_cases() -> list[Case]:
    cases = range_cases(Sampler(spec("jsd"), "bfloat16", OPTIONS))
    return [case for case in cases if {*case.values.values()} == {"one_peak"}]


def test_rows_peak_in_the_same_place_above_other_tails() -> None:
    (case,) = peaked_cases()
    q, p = all_contents(case).values()
    assert torch.equal(q.argmax(1), p.argmax(1))
    assert len(q.argmax(1).unique()) > 8
    tails = [x.float().median(1).values for x in (q, p)]
    assert float((tails[0] - tails[1]).abs().max()) > 10
    softmax = range_cases(Sampler(spec("softmax"), "bfloat16"))
    assert not [case for case in softmax if "one_peak" in case.values.values()]


@pytest.mark.parametrize("least", [0.0, 1e-5])
def test_shares_kept_from_zero_are_found_in_the_tails(least: float) -> None:
    """An honest kernel is right there; one that keeps shares above 1e-5 is right on all ordinary logits alone."""
    (case,) = peaked_cases()
    values = all_contents(case)
    failure = Oracle(Contract()).judge(case, values, (divergence(*values.values(), least=least),)).failure
    assert (failure is not None) == (least > 0)


def log_determinant(m: Any) -> Any:
    return 2 * torch.diagonal(torch.linalg.cholesky(m), dim1=-2, dim2=-1).log().sum(-1)


def log_of_product(m: Tensor) -> Tensor:
    """Of many pivots the product leaves the range."""
    return 2 * torch.diagonal(torch.linalg.cholesky(m), dim1=-2, dim2=-1).prod(-1).log()


@pytest.mark.parametrize("kernel", [log_determinant, log_of_product])
def test_amplitudes_of_matrices_tell_a_product_from_a_sum_of_logarithms(kernel: Any) -> None:
    verdict = examine(
        kernel, log_determinant, tensors="m[D,D]=spd -> y[]", dtype="float32", shapes={"D": [20]},
        effort="quick", examples=0, shrinking=False, every_aspect=False,
    )  # fmt: skip
    assert verdict.outcome == ("PASS" if kernel is log_determinant else "FAIL")
    assert verdict.aspects["range"].status == ("kept" if kernel is log_determinant else "broken")


def test_matrices_have_amplitudes() -> None:
    assert {"loud", "small"} <= {*names_of(TensorSpec("m", ("N", "N"), role="spd"))}
