"""What every arithmetic must do alike: its operators, and a working precision of its own."""

import threading
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.formats.format import format_named
from assay.golden.arithmetic import Arb, Arithmetic, BallArithmetic, Exact, Multiprecision, Real, RoundingModel
from assay.golden.evaluation.call import run
from assay.golden.registry import spec
from assay.verify.contract import Contract

ARITHMETICS: dict[str, Callable[[], Arithmetic[Any, Any]]] = {
    "Real": Real, "Ball": BallArithmetic, "Exact": Exact, "Arb": Arb, "mpmath": Multiprecision
}  # fmt: skip
REFLECTED: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, x: a + x, "-": lambda a, x: a - x, "*": lambda a, x: a * x, "/": lambda a, x: a / x
}  # fmt: skip
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: abs(x) > 2.0**-100)


def values(x: Any) -> list[float]:
    """The float64 nearest to each number."""
    return [float(value.mid()) if hasattr(value, "mid") and callable(value.mid) else float(value) for value in _flat(x)]


def _flat(x: Any) -> list[Any]:
    for name in ("high", "mid"):
        x = getattr(x, name, x) if not isinstance(x, np.ndarray) else x
    return list(x.flatten())


@pytest.mark.parametrize("operator", REFLECTED)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_float_may_stand_on_the_left(arithmetic: str, operator: str) -> None:
    """1.5 op x is a number of the arithmetic, and the right one, for each operator."""
    x = torch.tensor([0.5, -3.0, 4.0]).double()
    found = REFLECTED[operator](1.5, ARITHMETICS[arithmetic]().exact(x))
    assert values(found) == pytest.approx(REFLECTED[operator](1.5, x).tolist(), rel=1e-15)


@given(st.floats(-1e6, 1e6, width=32), st.lists(NUMBERS, min_size=1, max_size=4))
@pytest.mark.parametrize("model", [None, Contract().model], ids=["float64", "contract"])
def test_a_quotient_of_a_float_by_a_ball_holds_the_exact_one(
    model: Callable[..., RoundingModel] | None, a: float, numbers: list[float]
) -> None:
    """a / x, by mpmath at fifty digits, lies within the ball, whose divisor has a radius of its own."""
    xp = BallArithmetic() if model is None else BallArithmetic(model(spec("silu"), format_named("float32")))
    divisor = xp.exact(torch.tensor(numbers).double()) * 3.1
    quotient = a / divisor
    with mpmath.workdps(50):
        for x, mid, rad in zip(numbers, quotient.mid.tolist(), quotient.radius.tolist(), strict=True):
            assert abs(mpmath.mpf(a) / (mpmath.mpf(x) * mpmath.mpf(3.1)) - mid) <= mpmath.mpf(rad) * (1 + 2.0**-30)


def _digits_of(found: Any) -> float:
    return float(-mpmath.log10(mpmath.mpf(float(found.rad())) / abs(float(found.mid()))))


def test_each_arb_keeps_its_own_digits_and_leaves_flint_as_it_was() -> None:
    """Two that are alive at once, of 50 and 20 digits, in an evaluation, a constant and a function."""
    from flint import ctx

    before = ctx.prec
    sharp, rough = Arb(50), Arb(20)
    x = torch.tensor([[0.3, 0.7]]).double()
    for xp, digits in ((sharp, 50), (rough, 20), (sharp, 50)):
        (y,) = run(spec("softmax"), xp, (x,), {})
        of_constant = xp.constant(lambda sqrt, pi: sqrt(2 / pi))[()]
        for found in (y[0, 0], of_constant, xp.exp(xp.exact(x))[0, 0]):
            assert digits - 3 < _digits_of(found) < digits + 5
    assert ctx.prec == before


def test_threads_do_not_disturb_each_others_precision() -> None:
    """Softmax at 50 and at 20 digits in two threads at once: each result has the digits that were asked for."""
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found: dict[int, list[float]] = {20: [], 50: []}

    def work(digits: int) -> None:
        for _ in range(30):
            (y,) = run(spec("softmax"), Arb(digits), (x,), {})
            found[digits].append(_digits_of(y[0, 0]))

    threads = [threading.Thread(target=work, args=(digits,)) for digits in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(found[50]) > 45
    assert max(found[20]) < 25
    assert len(found[20]) == len(found[50]) == 30
