"""What published quantisers do: a floor under amax, groups of any size, scales of powers of two, or reciprocals."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden.arithmetic import Arb, BallArithmetic, Multiprecision
from assay.golden.evaluation import evaluate
from assay.verify import Contract
from tests.zoo.numerics import load
from tests.zoo.quantizers import flat, magnitude, split, to_fp8, to_int8

from .examined import first

Scale = Callable[[Tensor], Tensor]


def plain(span: Tensor) -> Tensor:
    """amax over the largest code of e4m3."""
    return span / 448


def ceiling(span: Tensor) -> Tensor:
    """The power of two at or above amax / 448, by bits (DeepGEMM's ue8m0)."""
    bits = (span / 448).view(torch.int32)
    return (((bits >> 23) + ((bits & 0x7FFFFF) > 0)) << 23).view(torch.float32)


def by_logarithm(span: Tensor) -> Tensor:
    """The same by a logarithm (vLLM, SGLang)."""
    return torch.exp2(torch.ceil(torch.log2(span / 448)).clamp(min=-127))


def shared_exponent(span: Tensor) -> Tensor:
    """The power of two at or below amax, over 256, as far as e8m0 goes (OCP MX)."""
    return torch.exp2((torch.floor(torch.log2(span)) - 8).clamp(min=-127))


def quantize(
    x: Tensor,
    *,
    size: int | None = None,
    floor: float | None = None,
    scale_of: Scale = plain,
    code: Callable[[Tensor], Tensor] = to_fp8,
    gives_reciprocal: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows, or of groups of ``size``; ``options`` are what the examination passes."""
    parts = split(load(x), size or max(x.shape[1], 1))
    span = magnitude(parts)
    if floor is not None:
        span = span.clamp(min=floor)
    scale = torch.where(span == 0, 1.0, scale_of(span))
    given = 1 / scale if gives_reciprocal else scale
    return flat(code(parts / scale), x.shape[1]), given[..., 0].contiguous()


def away(quotient: Tensor) -> Tensor:
    """Ties go away from zero, as C's round has it."""
    return torch.trunc(quotient + torch.where(quotient < 0, -0.5, 0.5)).clamp(-128, 127).to(torch.int8)


def in_int8(span: Tensor) -> Tensor:
    """amax over the largest code of int8."""
    return span / 127


FLOOR = 1e-4
POWERS = {"floor": [FLOOR], "granularity": ["row"]}
INT8 = partial(quantize, scale_of=in_int8, code=to_int8)
ROWS: dict[str, tuple[str, Callable[..., Any], dict[str, list[Any]], dict[str, list[Any]]]] = {
    "floor": ("quantize_fp8", partial(quantize, floor=FLOOR), {}, {"floor": [FLOOR]}),
    "another floor": ("quantize_fp8", partial(quantize, floor=FLOOR), {"floor": [1e-10]}, {"floor": [FLOOR]}),
    "int8 floor": ("quantize_int8", partial(INT8, floor=1e-10), {}, {"floor": [1e-10]}),
    "group": (
        "quantize_fp8", partial(quantize, size=32),
        {"granularity": ["group128"]}, {"granularity": ["group"], "group": [32]},
    ),
    "int8 group": (
        "quantize_int8", partial(INT8, size=64),
        {"granularity": ["group"], "group": [128]}, {"granularity": ["group"], "group": [64]},
    ),
    "e8m0": ("quantize_fp8", partial(quantize, scale_of=ceiling), {}, {"scales": ["e8m0"]}),
    "e8m0 by logarithm": (
        "quantize_fp8", partial(quantize, scale_of=by_logarithm), {"scales": ["mx"]}, {"scales": ["e8m0"]},
    ),
    "mx": ("quantize_fp8", partial(quantize, scale_of=shared_exponent), {"scales": ["e8m0"]}, {"scales": ["mx"]}),
    "reciprocal": ("quantize_fp8", partial(quantize, gives_reciprocal=True), {}, {"reciprocal": [True]}),
    "reciprocal of e8m0": (
        "quantize_fp8", partial(quantize, scale_of=ceiling, gives_reciprocal=True),
        {"scales": ["e8m0"]}, {"scales": ["e8m0"], "reciprocal": [True]},
    ),
}  # fmt: skip


def outcome_of(op: str, kernel: Callable[..., Any], options: dict[str, list[Any]], **settings: Any) -> str:
    """The outcome of a short examination; the kernel takes its options as its own."""

    def called(x: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        given.pop("floor", None)
        return kernel(x, **given)

    shapes = {"R": range(1, 20), "N": range(1, 300)}
    return first(called, op, "bfloat16", options=options, effort="usual", examples=4, shapes=shapes, **settings).outcome


@pytest.mark.parametrize(("op", "kernel", "broken", "kept"), ROWS.values(), ids=ROWS)
def test_a_quantiser_keeps_what_its_options_say(
    op: str, kernel: Callable[..., Any], broken: dict[str, list[Any]], kept: dict[str, list[Any]]
) -> None:
    assert outcome_of(op, kernel, kept) in ("PASS", "WARN")
    assert outcome_of(op, kernel, broken) == "FAIL"


def test_ties_away_is_a_rounding_of_its_own() -> None:
    contract = Contract(rounding="nearest_away")
    assert outcome_of("quantize_int8", partial(INT8, code=away), {}) == "FAIL"
    assert outcome_of("quantize_int8", partial(INT8, code=away), {}, contract=contract) == "PASS"
    assert outcome_of("quantize_int8", INT8, {}, contract=contract) == "FAIL"


@pytest.mark.parametrize("options", [{"scales": "e8m0"}, {"scales": "mx"}, {"floor": 0.3}, {"reciprocal": True}])
def test_arithmetics_agree(options: dict[str, Any]) -> None:
    """Arb's fractions and float64's balls give the same codes and scales, at powers of two too."""
    x = torch.tensor([[448.0, 1.0, -3.5], [0.25, 0.1, 0.0], [449.0, 7.0, -8.0], [256.0, 255.0, 1.0]])
    quick, sure = evaluate("quantize_fp8", x, **options), evaluate("quantize_fp8", x, digits=30, **options)
    for left, right in zip(quick, sure, strict=True):
        assert torch.allclose(left.value, right.value, rtol=1e-14, atol=0)


@pytest.mark.parametrize("above", [True, False])
def test_powers_of_two_are_exact(above: bool) -> None:
    values = torch.tensor([1.0, 1 - 2.0**-53, 1 + 2.0**-52, 0.0, 2.0**-120, 3.0], dtype=torch.float64)
    expected = [1.0, 1.0, 2.0, 0.0, 2.0**-120, 4.0] if above else [1.0, 0.5, 1.0, 0.0, 2.0**-120, 2.0]
    assert BallArithmetic().power_of_two(BallArithmetic().exact(values), above=above).mid.tolist() == expected
    for xp in (Arb(30), Multiprecision(30)):
        with xp.precision():
            assert [float(x) for x in xp.power_of_two(xp.exact(values), above=above)] == expected
