"""The certificate of exactness: a radius of zero where every partial sum is exact, and only there."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.formats.format import format_named
from assay.golden import Golden, evaluate, spec
from assay.golden.arithmetic import BallArithmetic
from assay.golden.arithmetic.ball import Ball
from assay.golden.arithmetic.ball_attention import _spread_about
from assay.golden.arithmetic.model import lowest_bit
from assay.golden.evaluation.call import run
from assay.verify.contract import Contract

calm = settings(deadline=None)
E4M3 = torch.float8_e4m3fn


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def whole(*shape: int, below: int = 9) -> torch.Tensor:
    return torch.from_numpy(rng(math.prod(shape)).integers(-below + 1, below, shape)).float()


def powers(*shape: int, low: int = -4, high: int = 5) -> torch.Tensor:
    drawn = rng(math.prod(shape))
    return torch.from_numpy(
        np.asarray(drawn.choice([-1.0, 1.0], shape) * 2.0 ** drawn.integers(low, high, shape))
    ).float()


def scales(*shape: int) -> torch.Tensor:
    return powers(*shape).abs()


def code_bytes(*shape: int) -> torch.Tensor:
    return torch.from_numpy(rng(1).integers(0, 256, shape)).to(torch.uint8)


def words(*shape: int) -> torch.Tensor:
    return torch.from_numpy(rng(2).integers(-(2**31), 2**31, shape)).to(torch.int32)


def finite_codes(*shape: int) -> torch.Tensor:
    """Any finite e4m3 numbers."""
    codes = rng(3).integers(0, 256, shape)
    codes[(codes & 127) == 127] = 126
    return torch.from_numpy(codes).to(torch.uint8).view(E4M3)


def only(golden: Golden | tuple[Golden, ...]) -> Golden:
    return golden[-1] if isinstance(golden, tuple) else golden


ANGLES = torch.tensor([[0.0, 1.0], [-1.0, 0.5], [0.25, -0.5]])
EXACT: dict[str, tuple[str, Sequence[Any], dict[str, Any]]] = {
    "gemm of integers": ("gemm", (whole(5, 300), whole(300, 7)), {}),
    "gemm of bfloat16 integers": ("gemm", (whole(5, 300).bfloat16(), whole(300, 7).bfloat16()), {}),
    "gemm of large integers": ("gemm", (whole(3, 60, below=2**20), whole(60, 3, below=2**20)), {}),
    "gemm of powers": ("gemm", (powers(5, 300), powers(300, 7)), {}),
    "gemm of nothing": ("gemm", (torch.zeros(2, 0), torch.zeros(0, 3)), {}),
    "gemm with a row of zeros": ("gemm", (torch.zeros(1, 9), torch.randn(9, 3) * 1e30), {}),
    "linear of integers": ("linear", (whole(5, 64), whole(7, 64), whole(7)), {}),
    "linear of powers": ("linear", (powers(5, 64), powers(7, 64), powers(7)), {}),
    "linear of one-hot rows": ("linear", (torch.eye(6), torch.randn(5, 6), torch.zeros(5)), {}),
    "fp8, tensor": ("gemm_fp8", (finite_codes(3, 64), finite_codes(64, 5), scales(), scales()), {}),
    "fp8, row": (
        "gemm_fp8",
        (finite_codes(3, 64), finite_codes(64, 5), scales(3, 1), scales(1, 5)),
        {"granularity": "row"},
    ),
    "fp8, block": (
        "gemm_fp8",
        (finite_codes(3, 300), finite_codes(300, 130), scales(3, 3), scales(3, 2)),
        {"granularity": "block"},
    ),
    "int8": ("gemm_int8", (whole(3, 64).to(torch.int8), whole(64, 5).to(torch.int8), scales(3, 1), scales(1, 5)), {}),
    "int4, plain": ("gemm_int4", (whole(3, 64), code_bytes(32, 8), scales(2, 8), code_bytes(2, 8) % 16), {}),
    "int4, awq": ("gemm_int4", (powers(3, 64), words(64, 1), scales(2, 8), words(2, 1)), {"packing": "awq"}),
    "int4, gptq": ("gemm_int4", (powers(3, 64), words(8, 8), scales(2, 8), words(2, 1)), {"packing": "gptq"}),
    "rope": ("rope", (whole(2, 3, 2, 4), ANGLES, ANGLES.flip(0)), {}),
    "rope of neighbours": ("rope", (powers(2, 3, 2, 4), ANGLES, ANGLES.flip(0)), {"interleaved": True}),
    "x + residual": ("add_rmsnorm", (torch.randn(4, 9).bfloat16(), torch.randn(4, 9).bfloat16(), torch.ones(9)), {}),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_has_radius_zero(name: str) -> None:
    """Integers, powers of two and one-hot operands need no tolerance, whatever the op's packing and granularity."""
    op, tensors, options = EXACT[name]
    assert bool((only(evaluate(op, *tensors, **options)).radius == 0).all())


@pytest.mark.parametrize("name", [name for name, row in EXACT.items() if "gemm of" in name or name == "int8"])
def test_zero_digits_are_missing_at_thirty(name: str) -> None:
    """Asked for thirty digits, an exact result is exact too, and the same."""
    op, tensors, options = EXACT[name]
    plain, more = only(evaluate(op, *tensors, **options)), only(evaluate(op, *tensors, digits=30, **options))
    assert more.low is not None
    assert bool((more.radius == 0).all())
    assert bool((plain.value == more.value).all())
    assert bool((more.low == 0).all())


def test_e4m3_products_are_always_exact() -> None:
    """4096 products of any e4m3 numbers add up without error, and so do those of the largest ones."""
    a, b = finite_codes(8, 4096), finite_codes(4096, 8)
    extreme = torch.full((1, 4096), 448.0).to(E4M3)
    extreme[0, 0] = 2.0**-9
    for left, right in ((a, b), (extreme, extreme.T)):
        golden = only(evaluate("gemm_fp8", left, right, torch.tensor(1.0), torch.tensor(1.0)))
        assert bool((golden.radius == 0).all())
    assert golden.value.item() == 4095 * 448**2 + 2.0**-18


INEXACT: dict[str, tuple[str, Sequence[Any], dict[str, Any]]] = {
    "float32 numbers": ("gemm", (torch.randn(3, 64) * 1.1, torch.randn(64, 3)), {}),
    "a small one beside large ones": ("gemm", (torch.tensor([[2.0**60, 1.0]]), torch.tensor([[1.0], [1.0]])), {}),
    "a bias far below": ("linear", (whole(2, 64), whole(3, 64), torch.full((3,), 2.0**-60)), {}),
    "products below 2^-1074": (
        "gemm",
        (torch.tensor([[1e-200]], dtype=torch.float64), torch.tensor([[1e-200]], dtype=torch.float64)),
        {},
    ),
    "scales that are no powers": (
        "gemm_fp8",
        (finite_codes(3, 64), finite_codes(64, 5), torch.rand(3, 1), torch.rand(1, 5)),
        {"granularity": "row"},
    ),
    "angles": ("rope", (torch.randn(2, 3, 2, 4), torch.rand(3, 2).double().cos(), torch.rand(3, 2).double().sin()), {}),
    "x + residual, far apart": ("add_rmsnorm", (torch.full((1, 2), 2.0**60), torch.ones(1, 2), torch.ones(2)), {}),
}


@pytest.mark.parametrize("name", INEXACT)
def test_what_is_not_exact_has_a_radius(name: str) -> None:
    """Where float64 can't hold the sum, the radius is larger than zero."""
    op, tensors, options = INEXACT[name]
    assert bool((only(evaluate(op, *tensors, **options)).radius > 0).all())


numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.builds(math.ldexp, st.integers(-300, 300).map(float), st.integers(-560, 100)),
)


@settings(calm, max_examples=300)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6), st.none() | numbers)
def test_zero_is_never_claimed_in_vain(pairs: list[tuple[float, float]], bias: float | None) -> None:
    """A radius of zero means that value is, as a fraction, the exact dot product; any other radius holds it."""
    a = torch.tensor([[pair[0] for pair in pairs]], dtype=torch.float64)
    b = torch.tensor([[pair[1] for pair in pairs]], dtype=torch.float64)
    exact = sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(bias or 0.0))
    golden = only(
        evaluate("gemm", a, b.T)
        if bias is None
        else evaluate("linear", a, b, torch.tensor([bias], dtype=torch.float64))
    )
    assert abs(Fraction(golden.value.item()) - exact) <= Fraction(golden.radius.item())


@settings(calm, max_examples=300)
@given(st.floats(allow_nan=False, allow_infinity=False).filter(bool))
def test_the_lowest_bit_is_the_lowest(x: float) -> None:
    """|x| is an odd multiple of its lowest bit, which is a power of two."""
    bit = lowest_bit(torch.tensor([x], dtype=torch.float64)).item()
    assert math.frexp(bit)[0] == 0.5
    multiple = Fraction(abs(x)) / Fraction(bit)
    assert multiple.denominator == 1
    assert multiple.numerator % 2 == 1


def test_zero_has_no_lowest_bit() -> None:
    """Zero, of either sign, is a multiple of everything."""
    assert lowest_bit(torch.tensor([0.0, -0.0], dtype=torch.float64)).tolist() == [math.inf, math.inf]


def orders(products: torch.Tensor) -> list[torch.Tensor]:
    """Sums in float32 along the last axis: forwards, backwards, in pairs, and torch's own."""
    forward = backward = products.new_zeros(products.shape[:-1])
    for place in range(products.shape[-1]):
        forward = forward + products[..., place]
        backward = backward + products[..., -1 - place]
    pairs = products
    while pairs.shape[-1] > 1:
        pairs = torch.nn.functional.pad(pairs, (0, pairs.shape[-1] % 2))
        pairs = pairs[..., 0::2] + pairs[..., 1::2]
    return [forward, backward, pairs[..., 0], products.sum(-1)]


@settings(calm, max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(-110, 60), st.integers(1, 12), st.integers(1, 4000))
def test_a_contracts_zero_holds_in_float32(seed: int, exponent: int, terms: int, below: int) -> None:
    """Where the default contract allows a product no error, float32 makes none, in any order, near underflow too."""
    drawn = np.random.default_rng(seed)
    a, b = (torch.from_numpy(drawn.integers(-below, below + 1, (1, terms))).float() for _ in range(2))
    a, b = a * 2.0 ** (exponent // 2), b * 2.0 ** (exponent - exponent // 2)
    definition = spec("gemm")
    model = Contract().model(definition, format_named("float32"))
    (ball,) = run(definition, BallArithmetic(model), (a, b.T), {})
    for total in orders(a * b):
        assert abs(total.double() - ball.mid).item() <= ball.radius.item()


def test_scores_of_a_query_with_a_radius_hold_its_ends() -> None:
    """Rows' certificates know what a query is off by: q + r and q - r give scores within the ball."""
    xp = BallArithmetic()
    q, k = (torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(2))
    rad = torch.full_like(q, 1e-12)
    found = xp.scores(Ball(q, rad, xp.model), xp.exact(k), 1.0)
    for end in (q + rad, q - rad):
        assert bool(((end @ k.T - found.mid).abs() <= found.radius + 1e-15).all())


@pytest.mark.parametrize("keys", [8, 3000])
def test_cancellation_in_the_spread_about_the_output_is_covered(keys: int) -> None:
    """Values that lie beside a large output: the bound holds sum w |v - O|, whatever cancels on the way."""
    generator = torch.Generator().manual_seed(keys)
    weights = torch.rand(2, keys, dtype=torch.float64, generator=generator) / keys
    values = 1e6 + 1e-6 * torch.randn(keys, 3, dtype=torch.float64, generator=generator)
    out, total = torch.full((2, 3), 1e6 + 2e-6).double(), weights.sum(-1, keepdim=True)
    bound = _spread_about(out, weights, total, values.abs(), values)
    exact = (weights[..., None] * (values - out[:, None]).abs()).sum(-2)
    assert bool((exact <= bound * (1 + 2.0**-30)).all())


@given(st.floats(1e-3, 1e3), st.integers(0, 2**40))
def test_a_difference_with_a_radius_is_taken_outward(x: float, steps: int) -> None:
    """1 / x, log x and 1 / sqrt x of a ball that nearly holds zero: what its least number gives lies within."""
    xp = BallArithmetic()
    least = x * (steps + 1) * 2.0**-52
    ball = Ball(torch.tensor([x], dtype=torch.float64), torch.tensor([x - least], dtype=torch.float64), xp.model)
    with mpmath.workdps(50):
        end = mpmath.mpf(x) - mpmath.mpf(x - least)
        ends = [] if end <= 0 else [1 / end, mpmath.log(end), 1 / mpmath.sqrt(end)]
    for found, exact in zip((1.0 / ball, xp.log(ball), xp.rsqrt(ball)), ends, strict=False):
        if not bool(found.radius.isinf()):
            with mpmath.workdps(50):
                _assert_held(found, exact)


def _assert_held(found: Ball, exact: Any) -> None:
    assert abs(mpmath.mpf(found.mid.item()) - exact) <= mpmath.mpf(found.radius.item()) * (1 + 2.0**-30)
