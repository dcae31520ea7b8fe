"""Means of a reference: kernels may divide before they add, as programs that add their share to one result do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.formats.format import format_named
from assay.golden.arithmetic import BallArithmetic
from assay.golden.evaluation.call import run
from assay.golden.evaluation.golden import golden_of
from assay.golden.lowering import reference_spec
from assay.verify import examine
from assay.verify.contract import Contract

TENSORS = "x[M,N] -> y[N]"


def mean(x: Tensor) -> Tensor:
    return x.float().mean(0).to(x.dtype)


def sum_divided(x: Tensor) -> Tensor:
    return (x.float().sum(0) / x.shape[0]).to(x.dtype)


def in_parts(x: Tensor, rows: int = 16, least: int = 1, kept: torch.dtype = torch.float32) -> Tensor:
    """Each program divides the sum of its rows, and adds it to the result."""
    result = torch.zeros(x.shape[1])
    for part in x.float().split(rows):
        result += (part.sum(0) / max(x.shape[0], least)).to(kept).float()
    return result.to(x.dtype)


REFERENCES = pytest.mark.parametrize("reference", [mean, sum_divided])


@REFERENCES
@pytest.mark.parametrize("kernel", [in_parts, lambda x: in_parts(x, rows=1), lambda x: mean(x.flip(0))])
def test_a_mean_may_be_divided_before_it_is_added_up(
    reference: Callable[[Tensor], Tensor], kernel: Callable[[Tensor], Tensor]
) -> None:
    verdict = examine(kernel, reference, tensors=TENSORS, dtype="float32", effort="quick", shrinking=False)
    assert verdict.outcome == "PASS", str(verdict)


@REFERENCES
@pytest.mark.parametrize("fault", [{"least": 2}, {"kept": torch.bfloat16}])
def test_a_wrong_mean_is_found(reference: Callable[[Tensor], Tensor], fault: dict[str, Any]) -> None:
    """Divided by two where there is one row; shares in bfloat16."""
    wrong = examine(
        lambda x: in_parts(x, **fault), reference, tensors=TENSORS, dtype="float32", effort="quick", shrinking=False
    )
    assert wrong.outcome == "FAIL", str(wrong)


def radius(reference: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    definition = reference_spec(reference, TENSORS)
    model = Contract().model(definition, format_named("float32"))
    return golden_of(run(definition, BallArithmetic(model), [x], {})[0]).radius


@REFERENCES
def test_a_mean_of_integers_over_a_power_of_two_is_exact(reference: Callable[[Tensor], Tensor]) -> None:
    """Each way of computing it gives the same bits; over other counts a share is rounded, though its sum is zero."""
    whole = torch.tensor([[3.0], [5.0], [-9.0], [1.0]])
    assert not bool(radius(reference, whole).any())
    third = radius(reference, torch.tensor([[5.0], [-7.0], [2.0]]))
    assert 0 < float(third) < 14 / 3 * 7 * 2.0**-24
    assert not bool(radius(lambda x: x.sum(0), torch.tensor([[5.0], [-7.0], [2.0]])).any())


def test_a_sum_that_was_changed_since_is_no_mean() -> None:
    """What is written into the sum is divided as it is; only what was summed may be divided first."""

    def changed(x: Tensor) -> Tensor:
        total = x.sum(0)
        total[0] = 1.0
        return total / 3

    x = torch.tensor([[5.0, 5.0], [-7.0, -7.0], [2.0, 2.0]])
    allowed = radius(changed, x)
    assert float(allowed[0]) < 2.0**-23
    assert float(allowed[1]) < 2.0**-140  # a subnormal quotient of zero
