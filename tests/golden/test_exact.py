"""A bug planted in double-double arithmetic is found; test_containment.py checks every op under the sound one."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from assay.golden.arithmetic import Exact, double_double, double_double_functions, exact, ozaki
from assay.golden.arithmetic.double_double import DoubleDouble
from assay.golden.arithmetic.double_double_functions import FUNCTIONS
from tests.golden.drawing import Case
from tests.golden.enclosure import Witnessed, beyond, claimed, double_double_of, witnessed


@cache
def exact_results(name: str) -> Witnessed:
    return witnessed(SOUGHT[name], 120)


def escapes(name: str) -> list[str]:
    """Elements that the double-double evaluation alone does not hold, by mpmath and by Arb, which no plant changes."""
    exact = exact_results(name)
    return beyond(claimed(double_double_of(SOUGHT[name])), exact)


RNG = torch.Generator().manual_seed(3)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=RNG)


SOUGHT = {
    "softmax": Case("softmax", (normal(2, 5),), {}),
    "logsumexp": Case("logsumexp", (normal(2, 5),), {}),
    "gelu": Case("gelu", (normal(2, 5),), {}),
    "gelu, tanh": Case("gelu", (normal(2, 5),), {"approximate": "tanh"}),
    "silu": Case("silu", (normal(2, 5),), {}),
    "rmsnorm": Case("rmsnorm", (normal(2, 5), normal(5)), {}),
    "gemm": Case("gemm", (normal(3, 4).double() * math.pi, normal(4, 3).double() / 3), {}),
    "attention": Case("attention", (normal(1, 2, 3, 4), normal(1, 1, 3, 4), normal(1, 1, 3, 4)), {"return_lse": True}),
}
Change = Callable[[Any], Any]


def off(method: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its results off by 2^-95 of themselves."""

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


PLANTS: tuple[tuple[str, Any, str, Change, str], ...] = (
    ("exp is off by 2^-95", exact, "exp", off, "logsumexp"),
    ("the sum of weights is off by 2^-95", exact, "exact_sum", off, "softmax"),
    ("products of matrices are off by 2^-95", exact, "exact_matmul", off, "gemm"),
    ("the root is off by 2^-95", double_double_functions, "square_root", off, "rmsnorm"),
    ("TwoSum forgets its error", double_double, "two_sum", without_error, "silu"),
    ("FastTwoSum forgets its error", double_double, "fast_two_sum", without_error, "softmax"),
    ("TwoProduct forgets its error", double_double, "product_and_excess", without_error, "rmsnorm"),
    ("TwoSum forgets its error in a table's index", double_double_functions, "two_sum", without_error, "attention"),
    ("TwoProduct forgets its error in exp", double_double_functions, "product_and_excess", without_error, "logsumexp"),
    ("sums of slices forget their error", ozaki, "two_sum", without_error, "gemm"),
    ("quotients have no radius", DoubleDouble, "__truediv__", without_radius, "softmax"),
)


@pytest.mark.parametrize("name", SOUGHT)
def test_nothing_is_found_where_nothing_was_planted(name: str) -> None:
    """The cases that planted bugs are sought with are held by the sound arithmetic."""
    assert escapes(name) == []


@pytest.mark.parametrize(("name", "owner", "attribute", "change", "case"), PLANTS, ids=[row[0] for row in PLANTS])
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: Any, attribute: str, change: Change, case: str
) -> None:
    """A bug of 2^-95 in one primitive, or an error or a radius forgotten, makes the checker report elements."""
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    assert escapes(case), name


@pytest.mark.parametrize("function", ["log", "tanh", "erf"])
def test_a_bug_in_a_function_is_found(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """The same for the functions that stand in a table."""
    case = {"log": "logsumexp", "tanh": "gelu, tanh", "erf": "gelu"}[function]
    monkeypatch.setitem(FUNCTIONS, function, off(FUNCTIONS[function]))
    assert escapes(case)


def test_functions_reach_thirty_digits() -> None:
    """For arguments of ordinary size every function has 29 digits and most have 30, without Arb."""
    x = torch.linspace(0.01, 6, 97, dtype=torch.float64)[None]
    for name, function in FUNCTIONS.items():
        y = function(DoubleDouble(x))
        share = (y.radius / y.high.abs()).max().item()
        assert share < 1e-29, name


def test_what_has_no_fast_way_goes_through_arb() -> None:
    """Codes are those of Arb's exact fractions, which tell a tie from what lies 2^-100 beside it."""
    x = DoubleDouble(torch.tensor([2.5, 2.5]).double(), torch.tensor([0.0, 2.0**-100]).double())
    codes = Exact().quantize(x, DoubleDouble(torch.ones(2).double()), "int8")
    assert codes.high.tolist() == [2.0, 3.0]
