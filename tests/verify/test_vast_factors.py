"""Scales, weights and slopes over the whole range of their dtype: whoever holds them in a narrower one is found."""

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.formats.format import format_named
from assay.golden.inputs.distributions import names_of
from assay.golden.registry import spec, specs
from assay.verify import examine
from assay.verify.cases.sampler import Sampler
from assay.verify.examination.phases import range_cases

from .test_structured import drawn

FACTORS = ("scale", "weight", "slope")


def as_two_halves(scale: Tensor) -> Tensor:
    """The scale as two numbers of float16, which have its digits and not its range."""
    high = scale.to(torch.float16)
    return high.float() + (scale - high.float()).to(torch.float16).float()


def dequantize(codes: Tensor, scale: Tensor, *, narrow: bool = False) -> Tensor:
    """Codes times their block's scale."""
    kept = as_two_halves(scale) if narrow else scale
    rows, columns = codes.shape
    whole = kept.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (codes.float() * whole).to(torch.bfloat16)


def narrow_dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """The same, of a scale that was cast."""
    return dequantize(codes, scale, narrow=True)


def gemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, narrow: bool = False) -> Tensor:
    """An 8-bit product, scaled by row and column."""
    kept = as_two_halves(scale_a) if narrow else scale_a
    return ((a.double() @ b.double()).float() * kept * scale_b).to(torch.bfloat16)


def narrow_gemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The same, of scales that were cast."""
    return gemm(a, b, scale_a, scale_b, narrow=True)


@pytest.mark.parametrize(
    ("op", "dtype", "honest", "faulty"),
    [("dequantize_fp8", "float8_e4m3fn", dequantize, narrow_dequantize), ("gemm_int8", None, gemm, narrow_gemm)],
)
def test_a_scale_that_is_cast_to_float16_is_found(op: str, dtype: Any, honest: Any, faulty: Any) -> None:
    asked: dict[str, Any] = {"dtype": dtype, "effort": "quick", "examples": 2, "shrinking": False}
    assert (verdict := examine(honest, op, **asked)).outcome == "PASS", str(verdict)
    verdict = examine(faulty, op, **asked)
    assert verdict.outcome == "FAIL"
    assert "range" in verdict.broken, str(verdict)


@pytest.mark.parametrize("op", specs())
def test_every_factor_reaches_its_ends(op: str) -> None:
    """Each op with scales, weights or slopes has such cases, in which all of them are drawn so and nothing else is."""
    options = {name: list(option.usual) for name, option in spec(op).options.items() if option.usual}
    sampler = Sampler(spec(op), "float8_e4m3fn" if op == "gemm_fp8" else "bfloat16", options)
    factors = {t.name for signature in spec(op).signatures for t in signature.tensors if t.role in FACTORS}
    found = [{name for name, kind in case.values.items() if kind == "vast"} for case in range_cases(sampler)]
    reached = set().union(*found) if found else set()
    expected = {name for name in factors if not _own_inputs(op, name)}
    assert reached <= factors
    assert bool(reached) == bool(expected)


def _own_inputs(op: str, name: str) -> bool:
    return all("vast" not in names_of(t) for s in spec(op).signatures for t in s.tensors if t.name == name)


def test_the_range_is_that_of_the_dtype() -> None:
    """e8m0 to both ends, float32 beyond both ends of float16 and to its own; all are positive numbers of it."""
    scale = drawn("gemm_mxfp8", "vast", "scale_a", M=200, K=256, N=2).double()
    assert {scale.min().item(), scale.max().item()} == {2.0**-127, 2.0**127}
    wide = drawn("gemm_int8", "vast", "scale_a", M=500, K=2, N=2).double()
    float16, float32 = format_named("float16"), format_named("float32")
    assert float32.smallest_normal <= wide.min() < float16.smallest_subnormal
    assert float16.largest < 2.0**126 < wide.max() <= float32.largest
