"""NaN, infinities and the ends of domains in references: what PyTorch's rules say, and open where nothing is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch

from assay.golden.arithmetic import BallArithmetic
from assay.golden.evaluation.call import run
from assay.golden.evaluation.golden import golden_of
from assay.golden.lowering import reference_spec
from tests.golden.lowering.test_small_references import FLOAT32

VALUES = (0.0, 1.0, -1.0, 0.5, -2.0, 1e30, math.inf, -math.inf, math.nan, 3.0, -20.0, 100.0)
ROWS = [
    [1.0, 2.0, 3.0, 4.0],
    [math.nan, 1.0, 2.0, math.nan],
    [math.inf, 1.0, 2.0, -math.inf],
    [-math.inf] * 4,
    [math.nan] * 4,
    [3.0, math.nan, math.inf, -math.inf],
    [1e30, 1.0, -1e30, 1.0],
]


def holds(reference: Callable[..., Any], tensors: str, *given: torch.Tensor, off: float = 1e-13) -> None:
    """The golden is of the class that eager mode gives in float64, and as near as its radius says; nowhere open.

    ``off``: what PyTorch itself is off, of the value.
    """
    right = reference(*(x.double() for x in given)).double()
    golden = golden_of(run(reference_spec(reference, tensors), BallArithmetic(), list(given), {})[0])
    value, radius = golden.value.double(), golden.radius.double()
    alike = (value == right) | (value.isnan() & right.isnan())
    near = (value - right).abs() <= radius + off * right.abs()
    wrong = ~torch.where(value.isfinite(), near & radius.isfinite(), alike)
    assert not wrong.any(), f"{given}: {value[wrong]} +- {radius[wrong]}, expected {right[wrong]}"


PAIRED = ("fmax", "fmin", "maximum", "minimum", "xlogy", "fmod", "remainder", "floor_divide", "hypot", "pow", "atan2")


@pytest.mark.parametrize("name", PAIRED)
def test_a_function_of_two_follows_the_rules_for_infinities(name: str) -> None:
    function = getattr(torch, name)
    x = torch.tensor(VALUES)
    holds(lambda a, b: function(a, b), "a[N], b[N] -> y[N]", x.repeat_interleave(len(x)), x.repeat(len(x)))


@pytest.mark.parametrize("name", ["logit", "sinc", "acos", "asin", "atanh", "erfinv", "log1p", "rsqrt", "digamma"])
def test_a_function_is_right_at_the_ends_of_its_domain(name: str) -> None:
    function = getattr(torch, name)
    holds(lambda x: function(x), "x[N] -> y[N]", torch.tensor([*VALUES, 1 - 2.0**-24, -1 + 2.0**-24]))


REDUCED: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x.argmax(-1) * 1.0,
    "argmin": lambda x: x.argmin(-1) * 1.0,
    "max": lambda x: x.max(-1).values,
    "min": lambda x: x.min(-1).values,
    "median": lambda x: x.median(-1).values,
    "all finite": lambda x: x.isfinite().all(-1) * 1.0,
    "logsumexp": lambda x: (x / 1e28).logsumexp(-1),
}


@pytest.mark.parametrize("name", REDUCED)
def test_a_reduction_follows_the_rules_for_nan(name: str) -> None:
    holds(REDUCED[name], "x[R,N] -> y[R]", torch.tensor(ROWS))


@pytest.mark.parametrize("descending", [False, True])
def test_nan_is_sorted_last_as_the_largest(descending: bool) -> None:
    holds(lambda x: x.sort(-1, descending=descending).values, "x[R,N] -> y[R,N]", torch.tensor(ROWS))


MASKED: dict[str, Callable[[Any], Any]] = {
    "logsumexp": lambda x: x.logsumexp(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "softmax of computed scores": lambda x: (x * 1.5 + 0.25).softmax(-1),
    "shifted by hand": lambda x: ((x + 0.25) - (x + 0.25).amax(-1, keepdim=True)).exp(),
    "largest": lambda x: (x + 0.25).amax(-1),
}


@pytest.mark.parametrize("certified", [True, False])
@pytest.mark.parametrize("name", MASKED)
def test_masked_places_leave_nothing_open(name: str, certified: bool) -> None:
    infinite = -math.inf
    x = torch.tensor([[infinite, 1.0, infinite, 2.0], [0.5, infinite, infinite, infinite], [infinite] * 4])
    if "by hand" in name or "computed" in name:
        x = x[:2]  # NaN
    reference = MASKED[name]
    right = reference(x.double())
    arithmetic = BallArithmetic() if certified else BallArithmetic(FLOAT32)
    signature = f"x[R,N] -> y[{'R,N' if right.ndim == 2 else 'R'}]"
    golden = golden_of(run(reference_spec(reference, signature), arithmetic, [x], {})[0])
    numbers = golden.value.isfinite()
    assert torch.equal(numbers, right.isfinite())
    assert torch.equal(golden.value.isnan(), right.isnan())
    assert bool((golden.radius[numbers] < 1e-5).all())
    assert bool(((golden.value - right).abs() <= golden.radius + 1e-13)[numbers].all())


PRODUCTS = [
    [1e-38, 1e-38, 1e38, 1.0, 1.0, 1.0],
    [1e-30, 1e-20, 1e30, 1e20, 2.0, 1.0],
    [1e-45, 0.5, 2.0, 1.0, 1.0, 1.0],
    [3.0, -0.25, 7.0, 1.5, 1.0, 1.0],
    [0.0, 1e-30, 1e-30, 3.0, 1.0, 1.0],
]


def test_a_product_may_lose_a_factor_to_underflow_in_any_order() -> None:
    x = torch.tensor(PRODUCTS)
    definition = reference_spec(lambda x: x.prod(-1), "x[R,N] -> y[R]")
    allowed = golden_of(run(definition, BallArithmetic(FLOAT32), [x], {})[0])
    for order in itertools.permutations(range(6)):
        got = torch.ones(len(x))
        for place in order:
            got = got * x[:, place]
        off = (allowed.value - got.double()).abs()
        assert bool((off <= allowed.radius + 2.0**-24 * got.abs()).all()), order
    assert float(allowed.radius[3]) < 1e-4


def test_a_product_that_overflows_on_the_way_is_the_number_or_open() -> None:
    x = torch.tensor([[1e30] * 200 + [1e-30] * 200, [1e30] * 200 + [0.0] * 200])
    golden = golden_of(run(reference_spec(lambda x: x.prod(-1), "x[R,N] -> y[R]"), BallArithmetic(), [x], {})[0])
    assert not bool(golden.value.isinf().any())
    assert not bool(golden.value.isnan().any())


def test_the_tail_of_erfc_is_known_relative_to_itself() -> None:
    x = torch.linspace(-3, 9, 100)
    golden = golden_of(run(reference_spec(lambda x: x.erfc().log(), "x[N] -> y[N]"), BallArithmetic(), [x], {})[0])
    right = [float(mpmath.log(mpmath.erfc(float(place)))) for place in x]
    off = (golden.value - torch.tensor(right, dtype=torch.float64)).abs()
    assert float(golden.radius.max()) < 1e-13
    assert bool((off <= golden.radius + 2.0**-52 * golden.value.abs()).all())


def test_nan_has_a_place_among_the_sorted_and_is_known() -> None:
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([math.nan, 2.0, math.inf, -math.inf])
    holds(lambda x, y: torch.searchsorted(x, y) * 1.0, "x[N], y[M] -> z[M]", x, y)
    holds(lambda x, y: torch.searchsorted(x, y, right=True) * 1.0, "x[N], y[M] -> z[M]", x, y)
    holds(lambda x: x.nanmedian(-1).values, "x[R,N] -> y[R]", torch.tensor(ROWS))


def test_of_a_number_that_may_overflow_the_kind_is_open() -> None:

    def number_or_zero(x: Any) -> Any:
        return torch.where(torch.isfinite(x * 1.1), x, torch.zeros_like(x))

    definition = reference_spec(number_or_zero, "x[N] -> y[N]")
    given = torch.tensor([3.2e38, 2.0])
    allowed = golden_of(run(definition, BallArithmetic(FLOAT32), [given], {})[0])
    least, most = allowed.value - allowed.radius, allowed.value + allowed.radius
    assert bool(least[0] <= 0.0)
    assert bool(most[0] >= given[0].double())
    assert (float(allowed.value[1]), float(allowed.radius[1])) == (2.0, 0.0)


def test_a_product_that_overflows_or_vanishes_by_turns_is_open() -> None:
    definition = reference_spec(lambda x: x.prod(-1), "x[R,N] -> y[R]")
    given = [torch.tensor([[1e30, 1e30, 1e-30, 1e-30], [2.0, 3.0, 1.0, 1.0]])]
    allowed = golden_of(run(definition, BallArithmetic(FLOAT32), given, {})[0])
    assert float(allowed.radius[0]) == math.inf
    assert float(allowed.radius[1]) < 1e-5
    assert float(golden_of(run(definition, BallArithmetic(), given, {})[0]).radius[0]) < 1e-12


@pytest.mark.parametrize(("least", "most"), [(1.0, math.inf), (-math.inf, 2.0), (-math.inf, math.inf)])
def test_an_interval_without_an_end_is_open(least: float, most: float) -> None:
    ball = BallArithmetic().interval(torch.tensor([least]).double(), torch.tensor([most]).double())
    assert bool(ball.mid.isfinite().all())
    assert bool((ball.radius == math.inf).all())


@pytest.mark.parametrize("name", ["polygamma", "bessel_y0", "modified_bessel_k0", "zeta"])
def test_a_special_function_has_a_class_beyond_its_domain(name: str) -> None:
    x = torch.tensor([-1.5, -0.25, 0.0, 0.5, 3.0])
    functions: dict[str, Callable[..., Any]] = {
        "polygamma": lambda x: torch.polygamma(1, x),
        "bessel_y0": torch.special.bessel_y0,
        "modified_bessel_k0": torch.special.modified_bessel_k0,
        "zeta": lambda x: torch.special.zeta(x, 2.0),
    }
    holds(lambda x: functions[name](x), "x[N] -> y[N]", x, off=1e-6)
