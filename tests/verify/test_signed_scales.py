"""Scales of either sign and zero: whoever takes their size, or holds them away from zero, is found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.formats.format import format_named
from assay.golden.registry import spec, specs
from assay.verify import examine
from assay.verify.cases.sampler import Sampler
from assay.verify.examination.phases import range_cases
from assay.verify.explanation.fault_models.evaluation import kernel_of
from tests.zoo import products

from .test_structured import drawn

HONEST = {
    "gemm_int8": products.gemm_int8,
    "gemm_int4": products.gemm_int4,
    "gemm_fp8": products.gemm_fp8_dequantised,
    "moe_int4": kernel_of(None, "moe_int4"),
    "dequantize_int4": kernel_of(None, "dequantize_int4"),
    "gemm_nvfp4": kernel_of(None, "gemm_nvfp4"),
}
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the size alone": torch.abs,
    "at least a little": lambda scale: scale.clamp(min=1e-8),
    "one where zero": lambda scale: torch.where(scale == 0, torch.ones_like(scale), scale),
}


def altered(op: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The honest kernel of changed scales."""

    def kernel(*tensors: Tensor, **options: Any) -> Any:
        own = {name: value for name, value in options.items() if name in spec(op).options}
        changed = [
            change(tensor.float()).to(tensor.dtype) if known.role == "scale" else tensor
            for tensor, known in zip(tensors, spec(op).signature(own).tensors, strict=True)
        ]
        return HONEST[op](*changed, **options)

    return kernel


def asked(op: str) -> dict[str, Any]:
    """A quick examination of the whole op."""
    return {**spec(op).default_settings, "effort": "quick", "shrinking": False, "every_aspect": False}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("op", ["gemm_int8", "gemm_int4", "gemm_fp8", "moe_int4", "dequantize_int4", "gemm_nvfp4"])
def test_a_kernel_of_other_scales_is_found(op: str, fault: str) -> None:
    """By quick effort, as a fault of ordinary numbers: nothing about such a case is extreme."""
    verdict = examine(altered(op, FAULTS[fault]), op, **asked(op))
    assert verdict.outcome == "FAIL", str(verdict)
    assert "cycled" in verdict.failure.case.values.values()
    assert set(verdict.broken) <= {"numbers", "shapes"}


@pytest.mark.parametrize("op", ["gemm_int8", "gemm_int4", "gemm_fp8", "moe_int4", "dequantize_int4", "gemm_nvfp4"])
def test_a_kernel_of_the_scales_as_they_are_passes(op: str) -> None:
    """By the same examination."""
    verdict = examine(HONEST[op], op, **asked(op))
    assert verdict.outcome == "PASS", str(verdict)


@pytest.mark.parametrize("op", specs())
def test_each_signed_scale_is_drawn_so_by_itself(op: str) -> None:
    """Under each set of options, in a small case and a larger one; one of e8m0, which has no sign, in none."""
    options = {name: list(option.usual) for name, option in spec(op).options.items() if option.usual}
    sampler = Sampler(spec(op), "bfloat16" if op != "gemm_fp8" else "float8_e4m3fn", options)
    cases = [case for case in range_cases(sampler) if "cycled" in case.values.values()]
    seen: dict[str, int] = {}
    for case in cases:
        (name,) = (name for name, kind in case.values.items() if kind == "cycled")
        assert format_named(case.dtypes[name]).signed
        seen[name] = seen.get(name, 0) + 1
    scales = [t for t in spec(op).tensors if t.role == "scale" and t.dtype != "float8_e8m0fnu"]
    assert set(seen) == {tensor.name for tensor in scales}
    assert set(seen.values()) <= {2 * min(len(sampler.option_sets()), 4)}


def test_every_axis_and_a_single_scale_have_all_three() -> None:
    """Negative, zero and positive in turn along rows and columns; of one scale by the seed."""
    scale = drawn("dequantize_fp8", "cycled", "scale", M=1024, N=1024)
    assert scale.sign()[0].tolist() == [-1, 0, 1, -1, 0, 1, -1, 0] == scale.sign()[:, 0].tolist()
    single = [float(drawn("gemm_fp8", "cycled", "scale_a", seed, M=1, K=1, N=1).sign()) for seed in range(3)]
    assert single == [-1, 0, 1]
    assert (drawn("gemm_mxfp8", "cycled", "scale_a", M=4, K=64, N=1).double() > 0).all()
