"""The exhaustive phase: every number of a 16-bit format reaches a kernel that works element by element."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.formats.codes import all_values
from assay.golden import spec, specs
from assay.golden.inputs.distributions import EVERY
from assay.golden.inputs.values import draw
from assay.verify import Contract
from assay.verify.cases.sampler import Sampler
from assay.verify.examination.phases import every_cases
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness

from .examined import fails, quick

WRONG_AT = 0x5A4B  # 1.43e16 in bfloat16


def wrong_at(pattern: int | None) -> Callable[[Tensor], Tensor]:
    """sin of which at most a single bit pattern's value is one ulp off."""

    def kernel(x: Tensor) -> Tensor:
        y = torch.sin(x.float()).to(x.dtype)
        if pattern is None:
            return y
        off = (x.contiguous().view(torch.int16) == pattern).reshape(y.shape)
        return torch.where(off, torch.nextafter(y, torch.full_like(y, 9.0)), y)

    return kernel


def test_one_wrong_number_of_65536_fails_an_examination() -> None:
    verdict = fails(quick(wrong_at(WRONG_AT), "sin", "bfloat16", layouts=["contiguous"]))
    assert verdict.failure is not None
    (number,) = (value for _, _, value in verdict.failure.case.edits)
    assert number == torch.tensor(WRONG_AT, dtype=torch.int16).view(torch.bfloat16).item()
    assert verdict.phases["every"] == 1


@pytest.mark.parametrize(("shapes", "calls"), [({}, 1), ({"N": [64, 100]}, 3), ({"R": [16], "N": range(1, 3000)}, 16)])
def test_one_wrong_number_is_found_whatever_the_sizes(shapes: dict[str, Any], calls: int) -> None:
    """Of few large calls or many small ones, just one shows the wrong number; a right kernel passes all."""
    cases = list(every_cases(Sampler(spec("sin"), "bfloat16", shapes=shapes)))
    assert len(cases) == calls
    for kernel, failures in ((wrong_at(WRONG_AT), 1), (wrong_at(None), 0)):
        harness = KernelHarness(Call(kernel, {}), Contract())
        assert sum(harness.try_case(case).failure is not None for case in cases) == failures


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [{}, {"N": [64]}, {"R": [7], "N": [300]}])
def test_the_cases_hold_every_number(dtype: str, sizes: dict[str, list[int]]) -> None:
    sampler = Sampler(spec("exp"), dtype, shapes=sizes)
    (tensor,) = spec("exp").tensors
    drawn = [draw(tensor, case.sizes, dtype, EVERY, case.seed).reshape(-1) for case in every_cases(sampler)]
    seen = {str(value) for value in torch.cat(drawn).double().tolist()}
    assert seen == {str(value) for value in all_values(dtype).tolist()}


def test_wider_formats_and_other_ops_are_not_swept() -> None:
    """No case for float32, for an op along rows, or where the sizes allowed would take thousands of calls."""
    assert not list(every_cases(Sampler(spec("exp"), "float32")))
    assert not list(every_cases(Sampler(spec("softmax"), "bfloat16")))
    assert not list(every_cases(Sampler(spec("exp"), "bfloat16", shapes={"N": [3]})))
    assert not list(every_cases(Sampler(spec("exp"), "bfloat16", shapes={"N": [0]})))


@pytest.mark.parametrize("op", [op for op in specs() if spec(op).axes.elementwise])
def test_an_elementwise_op_has_one_tensor_and_a_result_of_its_shape(op: str) -> None:
    signature = spec(op).signature()
    assert [tensor.dims for tensor in (*signature.tensors, *signature.returns)] == [("R", "N"), ("R", "N")]
