"""The checker itself: a bug planted in any one arithmetic shows, and the sound ones pass on the same cases."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from assay.formats.accumulator import Accumulator
from assay.golden import Golden
from assay.golden.arithmetic import (
    Arb,
    BallArithmetic,
    Exact,
    Multiprecision,
    Real,
    double_double,
    double_double_functions,
    exact,
    ozaki,
)
from assay.golden.arithmetic.ball import Ball, ElementaryBalls
from assay.golden.arithmetic.ball_composites import CompositeBalls
from assay.golden.arithmetic.ball_order import OrderBalls
from assay.golden.arithmetic.double_double import DoubleDouble
from assay.golden.arithmetic.double_double_functions import FUNCTIONS
from tests.golden.drawing import Case
from tests.golden.enclosure import Witnessed, beyond, claimed, double_double_of, escapes, outside, witnessed

RNG = np.random.default_rng(7)


def normal(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(shape)).float()


CASES = {
    "softmax": Case("softmax", (normal(2, 5),), {}),
    "logsumexp": Case("logsumexp", (normal(2, 5),), {}),
    "layernorm": Case("layernorm", (normal(2, 5), normal(5), normal(5)), {}),
    "layernorm, large mean": Case("layernorm", (normal(2, 5) + 1e4, normal(5), normal(5)), {}),
    "rmsnorm": Case("rmsnorm", (normal(2, 5), normal(5)), {}),
    "gelu": Case("gelu", (normal(2, 5),), {}),
    "gelu, tanh": Case("gelu", (normal(2, 5),), {"approximate": "tanh"}),
    "silu": Case("silu", (normal(2, 5),), {}),
    "gemm": Case("gemm", (normal(3, 3), normal(3, 3)), {}),
    "gemm, float64": Case("gemm", (normal(3, 4).double() * math.pi, normal(4, 3).double() / 3), {}),
    "gemm, wide": Case("gemm", (torch.tensor([[1.0, 2.0**60, -(2.0**60)]]), torch.tensor([[1.0], [1.0], [1.0]])), {}),
    "attention": Case("attention", (normal(1, 2, 3, 4), normal(1, 1, 3, 4), normal(1, 1, 3, 4)), {"return_lse": True}),
    "causal": Case("attention", (normal(1, 1, 3, 4), normal(1, 1, 4, 4), normal(1, 1, 4, 4)), {"causal": "top_left"}),
    "route": Case("moe_route", (normal(2, 4),), {"renormalize": False}),
    "exp2": Case("exp2", (normal(2, 5),), {}),
    "sine": Case("sin", (normal(2, 5) * 100,), {}),
    "slope": Case("swiglu_backward", (normal(2, 5), normal(2, 5), normal(2, 5)), {}),
    "loss": Case("cross_entropy", (normal(3, 4), torch.tensor([1, -100, 3])), {"label_smoothing": 0.1}),
    "gradient": Case("attention_backward", tuple(normal(1, 2, 3, 4) for _ in range(4)), {"causal": "bottom_right"}),
}
Change = Callable[[Any], Any]


def nudged(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, its midpoints off by 1e-12."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        result = method(*arguments, **options)
        if isinstance(result, Ball):
            return Ball(result.mid * (1 + 1e-12), result.rad, result.model)
        return result * (1 + 1e-12)

    return wrapped


def shrunk(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, the radii of its results forgotten."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        result = method(*arguments, **options)
        bare = [Ball(part.mid, None, part.model) for part in (result if isinstance(result, tuple) else (result,))]
        return tuple(bare) if isinstance(result, tuple) else bare[0]

    return wrapped


def first_dropped(method: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction that leaves out its first term."""
    return lambda xp, x, *rest, **options: method(xp, x[..., 1:], *rest, **options)


def transposed(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda xp, a, b, plus=None: method(xp, a, xp.swap(b), plus)


def shifted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Attention whose queries see the keys one place on."""

    def wrapped(xp: Any, scores: Any, visible: Any, *rest: Any) -> Any:
        return method(xp, scores, np.roll(np.asarray(visible), 1, -1), *rest)

    return wrapped


PLANTS: tuple[tuple[str, type, str, Change, str, int | None], ...] = (
    ("Ball's exp is off by 1e-12", ElementaryBalls, "_exp", nudged, "logsumexp", None),
    ("Ball's erf is off by 1e-12", ElementaryBalls, "erf", nudged, "gelu", None),
    ("Ball's tanh is off by 1e-12", ElementaryBalls, "tanh", nudged, "gelu, tanh", None),
    ("Ball's sigmoid has no radius", ElementaryBalls, "sigmoid", shrunk, "silu", None),
    ("Ball's rsqrt is off by 1e-12", ElementaryBalls, "rsqrt", nudged, "rmsnorm", None),
    ("Ball's products have no radius", ElementaryBalls, "matmul", shrunk, "gemm, wide", None),
    ("Ball's products are transposed", ElementaryBalls, "matmul", transposed, "gemm", None),
    ("Ball's standardisation has no radius", BallArithmetic, "standardize", shrunk, "layernorm, large mean", None),
    ("Real's softmax is off by 1e-12", Real, "attention_weights", lambda method: _off(method), "attention", None),
    ("Arb's exp is off by 1e-12", Arb, "apply", nudged, "logsumexp", 30),
    ("Arb's sum drops a term", Arb, "sum", first_dropped, "softmax", 30),
    ("Arb's sum drops a term, as a witness", Arb, "sum", first_dropped, "softmax", None),
    ("Arb's mask is shifted", Arb, "attend", shifted, "causal", None),
    ("mpmath's products are transposed", Multiprecision, "matmul", transposed, "gemm", None),
    ("mpmath's mask is shifted", Multiprecision, "attend", shifted, "causal", None),
    ("mpmath's sum drops a term", Multiprecision, "sum", first_dropped, "rmsnorm", None),
    ("mpmath's erf is off by 1e-12", Multiprecision, "apply", nudged, "gelu", None),
    ("Ball's functions are off by 1e-12", OrderBalls, "function", nudged, "exp2", None),
    ("Ball's functions have no radius", OrderBalls, "function", shrunk, "sine", None),
    ("Ball's slope of silu is off by 1e-12", CompositeBalls, "silu_slope", nudged, "slope", None),
    ("Ball's gradients of attention have no radius", BallArithmetic, "attend_backward", shrunk, "gradient", None),
    ("Arb's functions are off by 1e-12", Arb, "function", nudged, "sine", 30),
    ("mpmath's functions are off by 1e-12", Multiprecision, "function", nudged, "exp2", None),
)


def _off(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any) -> Any:
        weights, lse = method(*arguments)
        return weights * (1 + 1e-12), lse

    return wrapped


def off(method: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its double-double results off by 2^-95 of themselves."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        x = method(*arguments, **options)
        return DoubleDouble(x.high, x.rest + x.high * 2.0**-95, x.rad)

    return wrapped


def without_error(method: Callable[..., Any]) -> Callable[..., Any]:
    """An error-free transform that returns no error."""

    def wrapped(*arguments: Any) -> Any:
        high, low = method(*arguments)
        return high, low * 0

    return wrapped


def without_radius(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        x = method(*arguments, **options)
        return DoubleDouble(x.high, x.low)

    return wrapped


DOUBLE_DOUBLE_PLANTS: tuple[tuple[str, Any, str, Change, str], ...] = (
    ("exp is off by 2^-95", exact, "exp", off, "logsumexp"),
    ("the sum of weights is off by 2^-95", exact, "exact_sum", off, "softmax"),
    ("products of matrices are off by 2^-95", exact, "exact_matmul", off, "gemm, float64"),
    ("the root is off by 2^-95", double_double_functions, "square_root", off, "rmsnorm"),
    ("TwoSum forgets its error", double_double, "two_sum", without_error, "silu"),
    ("FastTwoSum forgets its error", double_double, "fast_two_sum", without_error, "softmax"),
    ("TwoProduct forgets its error", double_double, "product_and_excess", without_error, "rmsnorm"),
    ("TwoSum forgets its error in a table's index", double_double_functions, "two_sum", without_error, "attention"),
    ("TwoProduct forgets its error in exp", double_double_functions, "product_and_excess", without_error, "logsumexp"),
    ("sums of slices forget their error", ozaki, "two_sum", without_error, "gemm, float64"),
    ("quotients have no radius", DoubleDouble, "__truediv__", without_radius, "softmax"),
    ("log is off by 2^-95", FUNCTIONS, "log", off, "logsumexp"),
    ("tanh is off by 2^-95", FUNCTIONS, "tanh", off, "gelu, tanh"),
    ("erf is off by 2^-95", FUNCTIONS, "erf", off, "gelu"),
)


@cache
def exact_results(name: str) -> Witnessed:
    """The results of a case by mpmath and Arb, in which nothing of double-double numbers is used."""
    return witnessed(CASES[name], 120)


def double_double_escapes(name: str) -> list[str]:
    witnesses = exact_results(name)
    return beyond(claimed(double_double_of(CASES[name])), witnesses)


@pytest.mark.parametrize("name", CASES)
def test_sound_arithmetics_agree(name: str) -> None:
    """On the cases that planted bugs are sought with, nothing is found where nothing was planted."""
    for digits in (None, 30):
        assert escapes(CASES[name], digits=digits, witness_digits=80) == []
    assert double_double_escapes(name) == []


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "change", "case"), DOUBLE_DOUBLE_PLANTS, ids=[row[0] for row in DOUBLE_DOUBLE_PLANTS]
)
def test_a_bug_planted_in_double_double_numbers_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: Any, attribute: str, change: Change, case: str
) -> None:
    """A bug of 2^-95 in one primitive or function, or an error or a radius forgotten, makes the checker report it."""
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, attribute, change(owner[attribute]))
    else:
        monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    assert double_double_escapes(case), name


def test_double_double_functions_reach_thirty_digits() -> None:
    """For arguments of ordinary size every function has 29 digits and most have 30, without Arb."""
    x = torch.linspace(0.01, 6, 97, dtype=torch.float64)[None]
    for name, function in FUNCTIONS.items():
        y = function(DoubleDouble(x))
        assert (y.radius / y.high.abs()).max().item() < 1e-29, name


def test_what_has_no_fast_way_goes_through_arb() -> None:
    """Codes are those of Arb's exact fractions, which tell a tie from what lies 2^-100 beside it."""
    x = DoubleDouble(torch.tensor([2.5, 2.5]).double(), torch.tensor([0.0, 2.0**-100]).double())
    codes = Exact().quantize(x, DoubleDouble(torch.ones(2).double()), "int8")
    assert codes.high.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("name", "owner", "method", "change", "case", "digits"), PLANTS, ids=[row[0] for row in PLANTS]
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: type, method: str, change: Change, case: str, digits: int | None
) -> None:
    """A bug in one arithmetic makes the checker report elements of a case that otherwise passes."""
    monkeypatch.setattr(owner, method, change(getattr(owner, method)))
    assert escapes(CASES[case], digits=digits, witness_digits=80), name


def test_a_radius_a_thousandth_too_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Radii that forget the number of terms are found: one unit roundoff for a sum of 4096 is too few."""
    x = torch.full((1, 4096), 1.1)
    assert escapes(Case("gemm", (x, x.T.contiguous()), {})) == []
    monkeypatch.setattr(Accumulator, "gamma", lambda self, terms: 2.0**-60)
    assert escapes(Case("gemm", (x, x.T.contiguous()), {}))


@pytest.mark.parametrize(
    ("value", "radius", "is_sound"),
    [
        (2.5, 0.5, True),
        (2.5, math.inf, True),
        (2.5, 0.4999, False),
        (3.0, 0.0, True),
        (3.0, -1.0, False),
        (3.0, math.nan, False),
        (math.nan, math.inf, False),
        (math.inf, math.inf, False),
    ],
)
def test_the_checker_reads_radii_as_claims(value: float, radius: float, is_sound: bool) -> None:
    """Of an exact 3, an infinite radius claims nothing and passes; NaN, infinity or a radius too small do not."""
    golden = Golden(torch.tensor([value]).double(), torch.tensor([radius]).double())
    for witness in (Multiprecision(50), Arb(50)):
        assert (outside(golden, witness.exact(np.array([3.0])), witness) == []) is is_sound


def test_object_arithmetics_share_no_elementary_function() -> None:
    """The two witnesses are independent where it counts: each brings its own numbers and functions."""
    for name in ("number", "pi", "value", "larger", "ends", "hull"):
        assert name in vars(Arb), name
        assert name in vars(Multiprecision), name
