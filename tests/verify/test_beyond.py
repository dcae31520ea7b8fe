"""One size beyond what a block holds or 16 bits count, and one tensor unlike the others."""

import math
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden.inputs.distributions import names_of
from assay.golden.registry import spec, specs
from assay.verify import examine
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler
from assay.verify.examination import run
from assay.verify.examination.phases import GROWTH, block_boundary_cases, over_limit_cases, single_operand_cases

from .test_structured import drawn


def sampler(op: str, **fields: Any) -> Sampler:
    """A sampler of an op with every restriction that is not given left out."""
    return Sampler(spec(op), "float8_e4m3fn" if op == "gemm_fp8" else "bfloat16", **fields)


@pytest.mark.parametrize("op", specs())
def test_one_size_grows_beyond_16_bits(op: str) -> None:
    """Each series ends with one size above 65,536, grows no faster than it says, and has 3 million numbers at most."""
    for series in over_limit_cases(sampler(op)):
        largest = [max(case.sizes.values()) for case in series]
        assert largest[-1] > 65_536
        assert all(more <= GROWTH * 1.1 * less for less, more in pairwise(largest))
        assert sum(size > 4096 for size in series[-1].sizes.values()) == 1
        assert max(map(math.prod, shapes_of(series[-1]))) < 3e6


def test_a_first_dimension_that_is_a_quotient_is_no_size() -> None:
    for series in over_limit_cases(sampler("dequantize_int4")):
        assert all(set(case.sizes) == {"K", "N", "g"} and case.sizes["K"] % case.sizes["g"] == 0 for case in series)


def shapes_of(case: Case) -> list[tuple[int, ...]]:
    """The shapes of a case's tensors."""
    return [case.shape(tensor) for tensor in case.signature.tensors]


def test_most_ops_have_such_rows() -> None:
    assert all(list(over_limit_cases(sampler(op))) for op in specs())
    rows, classes = (series[-1] for series in over_limit_cases(sampler("cross_entropy")))
    assert (rows.sizes["T"], classes.sizes["V"], classes.values["target"]) == (65_601, 65_601, "last")


def test_sizes_that_the_caller_gave_do_not_grow() -> None:
    assert not list(over_limit_cases(sampler("softmax", shapes={"R": [3, 5]})))
    (series,) = over_limit_cases(sampler("softmax", shapes={"N": [7, 9]}))
    assert {case.sizes["N"] for case in series} == {7}


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), 1).to(x.dtype)


ASKED: list[int] = []


def slow_softmax(x: Tensor) -> Tensor:
    """Honest, half a millisecond of the processor a row; it notes how many it was asked for."""
    ASKED.append(x.shape[0])
    until = time.thread_time() + 0.0005 * x.shape[0]
    while time.thread_time() < until:
        pass
    return softmax(x)


def interrupted_softmax(x: Tensor) -> Tensor:
    """Honest; others have the processor for a while before it."""
    time.sleep(0.1)
    return softmax(x)


def test_a_slow_kernel_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that would take half a minute for so many rows is not asked for them; a quick one is."""
    monkeypatch.setattr(run, "PHASES", [phase for phase in run.PHASES if phase[0] == "beyond"])
    shapes = {"N": [3]}
    quick = examine(softmax, "softmax", dtype="float32", examples=0, shapes=shapes)
    assert quick.passed
    assert quick.phases["beyond"] == 5
    assert examine(slow_softmax, "softmax", dtype="float32", examples=0, shapes=shapes).passed
    assert 256 < max(ASKED) < 65_536


def test_a_busy_machine_spares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes while others have the processor doesn't count: the verdict is that of an idle machine."""
    monkeypatch.setattr(run, "PHASES", [phase for phase in run.PHASES if phase[0] == "beyond"])
    verdicts = [
        examine(kernel, "softmax", dtype="float32", examples=0, effort="quick", shapes={"N": [3]})
        for kernel in (softmax, interrupted_softmax)
    ]
    assert verdicts[0].phases == verdicts[1].phases
    assert verdicts[0].elements == verdicts[1].elements
    assert verdicts[0].phases["beyond"] == 5


def test_seams_lie_behind_a_block() -> None:
    """Rows of 513 and of 1,025 numbers, as many as a case may have, and a few of 2,049 and 4,097."""
    sizes = {tuple(case.sizes.values()) for case in block_boundary_cases(sampler("rmsnorm"))}
    assert sizes == {(31, 513), (127, 1025), (3, 2049), (3, 4097)}


def test_one_tensor_alone_is_zero_or_subnormal() -> None:
    kinds = {
        (name, case.values[name]) for case in single_operand_cases(sampler("merge_states")) for name in ("o_a", "o_b")
    }
    assert {("o_a", "zeros"), ("o_b", "zeros"), ("o_a", "subnormal"), ("o_b", "subnormal")} <= kinds
    assert {case.values["lse_a"] for case in single_operand_cases(sampler("merge_states"))} == {"far"}
    assert not list(single_operand_cases(sampler("softmax")))


def test_scales_reach_the_least_code() -> None:
    """2^-127 among scales in e8m0, which a float32 holds as a subnormal number only."""
    scale = drawn("gemm_mxfp8", "least", "scale_a", M=20, K=128, N=2).double()
    assert set(scale.unique().tolist()) == {2.0**-127, 1.0, 2.0**112}
    assert "least" in names_of(spec("gemm_mxfp8").tensors[2])
