"""Judging codes: the whole set that a contract allows, no code beside it, and a kernel's own scale as evidence."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.formats.codes import all_values
from assay.formats.format import format_named
from assay.golden.evaluation.golden import Golden
from assay.verify import Contract
from assay.verify.cases.case import Case
from assay.verify.comparison.judge import judge, tolerance
from assay.verify.comparison.oracle import Oracle

FORMATS = ("int8", "uint8", "float8_e4m3fn")


def hull(low: float, high: float, count: int = 1) -> Golden:
    """The golden of as many codes between two."""
    return Golden(*(torch.full((count,), part, dtype=torch.float64) for part in ((low + high) / 2, (high - low) / 2)))


@pytest.mark.parametrize("rounding", ["nearest", "toward_zero", "stochastic"])
@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_just_the_codes_of_the_hull_are_kept(format: str, rounding: str, data: st.DataObject) -> None:
    """Every code of the format: kept within the least and the largest, broken beside them, and never unresolved."""
    codes = all_values(format)
    codes = codes[codes.isfinite()].unique()
    place, width = data.draw(st.integers(0, len(codes) - 1)), data.draw(st.integers(0, 3))
    last = min(place + width, len(codes) - 1)
    own = data.draw(st.integers(place, last))
    contract = Contract(rounding=rounding, overflow="saturate")
    allowed = hull(float(codes[place]), float(codes[last]), len(codes))
    golden = hull(float(codes[own]), float(codes[own]), len(codes))
    judgement = judge(codes, tolerance(golden, allowed, format_named(format), contract, rounded=True))
    number = torch.arange(len(codes))
    assert torch.equal(judgement.broken, (number < place) | (number > last))
    assert torch.equal(judgement.ratio > 1, judgement.broken)
    assert not bool(judgement.unresolved.any())


def test_nan_is_no_code_of_a_number() -> None:
    """An e4m3 kernel that gives NaN breaks its contract, and one that isn't judged does not."""
    nan = torch.tensor([float("nan")])
    for radius, broken in ((0.0, True), (float("inf"), False)):
        allowed = Golden(torch.zeros(1, dtype=torch.float64), torch.full((1,), radius, dtype=torch.float64))
        limits = tolerance(hull(0, 0), allowed, format_named("float8_e4m3fn"), Contract(), rounded=True)
        assert bool(judge(nan, limits).broken) is broken


def accepted(x: Tensor, codes: list[float], scale: float, **options: Any) -> bool:
    """Whether a kernel's int8 codes and scale of one row keep the default contract."""
    sizes = {"R": 1, "N": x.shape[1]}
    case = Case("quantize_int8", sizes, {"x": "float32"}, {"granularity": "row", **options})
    outputs = torch.tensor([codes]).to(torch.int8), torch.tensor([[scale]])
    return Oracle(Contract()).judge(case, {"x": x}, outputs).failure is None


def test_a_tie_is_free_only_where_the_scale_is_rounded() -> None:
    """2.5 and 3.5 steps: to even if the kernel's scale is one, to either side if its division was off by an ulp."""
    x, ulp = torch.tensor([[127.0, 2.5, 3.5]]), 2.0**-23
    assert accepted(x, [127, 2, 4], 1.0)
    assert not accepted(x, [127, 3, 4], 1.0)
    assert not accepted(x, [127, 2, 3], 1.0)
    assert accepted(x, [127, 3, 4], 1.0 - ulp / 2)
    assert accepted(x, [127, 2, 3], 1.0 + ulp)
    assert not accepted(x, [127, 4, 4], 1.0 + ulp)
    assert not accepted(x, [127, 2, 4], 1.0 + 8 * ulp)


def test_codes_of_int4_are_judged_by_the_kernels_own_zero_point() -> None:
    x = torch.tensor([[1.0, -1.0, 0.2, -0.2]])
    case = Case("quantize_int4", {"R": 1, "N": 4}, {"x": "float32"}, {"group": 128, "symmetric": False})
    for codes, zero, right in (
        ([15, 0, 9, 5], 7, True), ([15, 0, 10, 6], 8, True), ([15, 0, 10, 6], 7, False), ([15, 1, 11, 7], 9, False),
    ):  # fmt: skip
        outputs = (
            torch.tensor([codes]).to(torch.uint8),
            torch.tensor([[2 / 15]]),
            torch.tensor([[zero]]).to(torch.uint8),
        )
        failure = Oracle(Contract()).judge(case, {"x": x}, outputs).failure
        assert (failure is None) is right
        if zero == 9:
            assert failure is not None
            assert failure.output == "zero"


@pytest.mark.parametrize("scale", [0.0, 1.0, -3e38, float("nan"), float("inf")])
def test_a_group_of_zeros_has_any_finite_scale(scale: float) -> None:
    x = torch.zeros(1, 3)
    assert accepted(x, [0, 0, 0], scale) is bool(torch.isfinite(torch.tensor(scale)))
    assert not accepted(x, [0, 1, 0], 1.0)


def test_a_row_that_is_not_finite_may_hold_anything() -> None:
    x = torch.tensor([[127.0, float("nan"), 3.5]])
    assert accepted(x, [5, -7, 99], float("nan"))
    assert accepted(torch.tensor([[float("inf"), 1.0, 3.5]]), [0, 0, 0], float("inf"))
