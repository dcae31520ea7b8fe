"""Sums and composites at and beyond overflow: each honest order is inside, and what no order gives is outside."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.formats.format import format_named
from assay.golden import spec
from assay.golden.arithmetic import EVALUATION, Ball, BallArithmetic
from assay.golden.evaluation.golden import golden_of
from assay.verify.comparison.judge import Tolerance, judge, tolerance
from assay.verify.contract import Contract
from tests.golden.honest_overflow import COMPOSITES, ORDERS, Composite

Tensor = torch.Tensor
FLOAT32 = format_named("float32")
LARGEST = FLOAT32.largest
MODEL = Contract().model(spec("gemm"), FLOAT32)
INF, NAN = math.inf, math.nan

calm = settings(deadline=None, derandomize=True)
magnitudes = st.sampled_from([0.0, 1e-30, 1.0, 3.0, 1e10, 1e19, 1.8e19, 3e19, 1e37, 1e38, 1.7e38, 3e38, LARGEST])
numbers = st.builds(
    lambda size, less, sign: sign * size * (1 - less), magnitudes, st.sampled_from([0.0, 2.0**-4, 2.0**-9]),
    st.sampled_from([1.0, -1.0]),
)  # fmt: skip
specials = st.one_of(numbers, numbers, numbers, st.sampled_from([INF, -INF, NAN]))


def allowed(definition: Any, *tensors: Tensor) -> Tolerance:
    """What the default contract allows of a definition's result, as an examination has it."""

    def evaluated(model: Any) -> Any:
        xp = BallArithmetic(model)
        return golden_of(definition(xp, *(xp.exact(tensor) for tensor in tensors)))

    golden, own = evaluated(EVALUATION), evaluated(MODEL)
    unbounded, followed = (evaluated(replace(MODEL, beyond=beyond)) for beyond in ("nothing", "infinity"))
    return tolerance(golden, own, FLOAT32, Contract(), overflow_evaluations=(unbounded, followed))


def broken(y: Tensor, limits: Tolerance) -> Tensor:
    return judge(y.float().broadcast_to(limits.golden.shape), limits).broken


def tensors_of(composite: Composite, data: st.DataObject, elements: st.SearchStrategy[float]) -> list[Tensor]:
    shapes = composite.shapes(data.draw(st.integers(1, 5)))
    rows = (data.draw(st.lists(elements, min_size=math.prod(shape), max_size=math.prod(shape))) for shape in shapes)
    return [torch.tensor(row, dtype=torch.float32).reshape(shape) for row, shape in zip(rows, shapes, strict=True)]


@pytest.mark.parametrize("name", COMPOSITES)
@settings(calm, max_examples=25)
@given(data=st.data())
def test_every_honest_order_is_inside(name: str, data: st.DataObject) -> None:
    composite = COMPOSITES[name]
    tensors = tensors_of(composite, data, data.draw(st.sampled_from([numbers, specials])))
    limits = allowed(composite.definition, *tensors)
    for kernel, y in composite.kernels(*tensors):
        assert not bool(broken(y, limits).any()), (kernel, y, limits.golden)


@settings(calm, max_examples=150)
@given(values=st.lists(numbers, min_size=1, max_size=4))
def test_what_no_order_of_a_sum_gives_is_outside(values: list[float]) -> None:
    """By every order in float32, and the exact sum in fractions."""
    x = torch.tensor([values], dtype=torch.float32)
    exact = sum((Fraction(float(value)) for value in x[0]), Fraction(0))
    limits = allowed(lambda xp, x: xp.sum(x), x)
    results = {float(ORDERS["forward"](x[:, list(order)])) for order in itertools.permutations(range(len(values)))}
    if len(values) == 4:  # trees
        pairs = ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]])
        results |= {float(x[0, a].sum() + x[0, b].sum()) for a, b in pairs}
    assert bool(limits.judged.all())
    for y in results:
        assert not bool(broken(torch.tensor([[y]]), limits)), (y, results)
    size = max(1e30, float(sum(abs(Fraction(float(value))) for value in x[0])))
    off = float(exact) + 0.01 * size
    if abs(off) < LARGEST:
        assert bool(broken(torch.tensor([[off]]), limits)), (off, results)
    if all(math.isinf(y) for y in results) and abs(exact) > 1.001 * LARGEST:
        assert bool(broken(torch.tensor([[math.copysign(LARGEST, exact)]]), limits))
        if len(results) == 1:  # every order ends at one infinity
            assert bool(broken(torch.tensor([[-results.pop()]]), limits))
    elif not any(math.isinf(y) or math.isnan(y) for y in results) and size < 0.999 * LARGEST:
        for wrong in (INF, -INF, NAN):
            assert bool(broken(torch.tensor([[wrong]]), limits))


HUGE = 3e38


@pytest.mark.parametrize(
    ("values", "right", "wrong"),
    [
        ([HUGE, HUGE], [INF], [-INF, LARGEST, 0.0]),
        ([-HUGE, -HUGE, 1.0], [-INF], [INF, -LARGEST]),
        ([HUGE, HUGE, -HUGE], [INF, HUGE], [HUGE / 2, -HUGE, 0.0]),
        ([HUGE, HUGE, -HUGE, -HUGE], [INF, -INF, NAN, 0.0], [HUGE, 1e36]),
        ([HUGE, HUGE, HUGE, HUGE, -HUGE, -HUGE], [INF, -INF, NAN], [LARGEST, 0.0]),
        ([INF, -HUGE, -HUGE], [INF, NAN], [LARGEST, 0.0]),
        ([INF, HUGE, HUGE], [INF], [0.0, LARGEST]),
        ([INF, -HUGE], [INF], [NAN, -INF]),
        ([INF, -INF], [NAN], [INF, 0.0]),
    ],
)  # fmt: skip
def test_a_sum_is_what_some_order_gives(values: list[float], right: list[float], wrong: list[float]) -> None:
    limits = allowed(lambda xp, x: xp.sum(x), torch.tensor([values]))
    assert [y for y in right if bool(broken(torch.tensor([[y]]), limits))] == []
    assert [y for y in wrong if not bool(broken(torch.tensor([[y]]), limits))] == []


def test_positive_terms_that_vanish_beside_the_negative_ones_still_overflow() -> None:
    """A float64 sum of both loses the positive ones, which overflow float32 all the same."""
    xp = BallArithmetic(replace(MODEL, beyond="infinity"))
    products = Ball(torch.tensor([[4e40, -2.0087e59]], dtype=torch.float64), None, EVALUATION)
    total = xp._partly_overflowing(products.mid.sum(-1), torch.zeros(1).double(), products.mid.abs().sum(-1))
    assert bool(total.unspecified.all())
    x, w = torch.tensor([[2e20, -1e38]]), torch.tensor([[2e20], [2.0087e21]])
    limits = allowed(lambda xp, a, b: xp.function("tanh", xp.matmul(a, b)), x, w)
    assert not bool(broken(torch.tensor([[NAN]]), limits))


def test_sums_that_overflow_to_either_side_may_go_on_from_one_another() -> None:
    """Two products added in one accumulator: what reaches an infinity stays there, or is NaN; no number is right."""
    x, w, h, u = (torch.tensor([[value]]) for value in (4.0, 1.7e38, 3.0, -2.5e38))
    limits = allowed(lambda xp, *parts: xp.matmul(*parts[:2]) + xp.matmul(*parts[2:]), x, w, h, u)
    assert [y for y in (INF, -INF, NAN) if bool(broken(torch.tensor([[y]]), limits))] == []
    assert bool(broken(torch.tensor([[1.0]]), limits))
    given = allowed(lambda xp, x, y: x + y, torch.tensor([[INF]]), torch.tensor([[-INF]]))
    assert bool(broken(torch.tensor([[INF]]), given))


def test_what_an_operand_leaves_open_stays_open() -> None:
    xp = BallArithmetic(replace(MODEL, beyond="infinity"))
    anything = Ball(torch.tensor([1e40, 2.0], dtype=torch.float64), torch.tensor([INF, INF]).double(), xp.model)
    infinite = xp.exact(torch.tensor([INF, -INF]))
    for y in (anything + infinite, anything * infinite, infinite / anything, xp.exp(anything), xp.log(anything * 0.0)):
        assert bool(y.mid.isfinite().all() & y.radius.isinf().all()), y
    both = xp.sum(xp.stack([anything, infinite]))
    assert bool(both.unspecified.all())
    assert bool((anything + xp.exact(torch.tensor([NAN, NAN]))).mid.isnan().all())


def test_what_overflows_for_certain_leads_on() -> None:
    """Of one infinity the sigmoid is one, and a reciprocal zero; of a sum that may overflow to either, anything."""
    x = torch.tensor([[HUGE, HUGE, 1.0], [HUGE, HUGE, -HUGE]])
    limits = allowed(lambda xp, x: xp.function("sigmoid", -xp.sum(x)), x)
    assert broken(torch.tensor([[0.0], [0.0]]), limits).tolist() == [[False], [False]]
    assert broken(torch.tensor([[0.5], [0.5]]), limits)[0, 0]
