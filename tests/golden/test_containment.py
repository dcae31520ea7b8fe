"""Goldens hold the exact result: float64 balls, double-double and digits=30 against mpmath and Arb's enclosures.

The claims of all arithmetics are checked against one evaluation of a case by each witness, the slowest part.
More cases of each op: `./dev test -m evidence tests/golden/test_containment.py`.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.golden import Golden, spec, specs
from assay.golden.arithmetic import Arb, Exact, Multiprecision
from assay.golden.evaluation.call import bind, grid, run
from tests.golden.drawing import OPTIONS, Case, cases, values_of
from tests.golden.enclosure import beyond, claimed, double_double_of, escapes, goldens_of, witnessed

INF = math.inf
DIGITS = 50
GUARD = 1e-48  # relative: mpmath's own last places
steady = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def test_every_option_is_drawn() -> None:
    """The default, each usual value and nothing that it does not accept; `OPTIONS` names no option that is none."""
    options = [(name, option) for op in specs() for name, option in spec(op).options.items()]
    assert set(OPTIONS) <= {name for name, _ in options}
    for name, option in options:
        drawn = values_of(name, option)
        assert {option.default, *option.usual} <= set(drawn)
        assert all(map(option.accepts, drawn))


def escaping(case: Case, *digits: int) -> dict[str, list[str]]:
    """Elements that the float64 golden, its double-double evaluation, or one of that many digits does not hold.

    The last row of the double-double evaluation alone, and its first and last column, must be what they are in it.
    """
    double_double = double_double_of(case)
    assert_parts_agree(case, double_double)
    claims = {"float64": goldens_of(case), "double-double": claimed(double_double)}
    claims |= {f"{count} digits": goldens_of(case, count) for count in digits}
    exact = witnessed(case, 400)
    return {name: found for name, goldens in claims.items() if (found := beyond(goldens, exact))}


def assert_parts_agree(case: Case, double_double: tuple[Golden, ...]) -> None:
    call = bind(spec(case.op), case.tensors, case.options)
    if call.rows is None or call.size(call.rows) == 0:
        return
    index = {call.rows: torch.tensor([call.size(call.rows) - 1])}
    if call.columns is not None and call.size(call.columns):
        index[call.columns] = torch.tensor(sorted({0, call.size(call.columns) - 1}))
    for whole, part, tensor in zip(double_double, call.part(index).under(Exact()), call.signature.returns, strict=True):
        elements = grid(tensor, whole.value, index)
        value, radius = whole.value[elements], whole.radius[elements] + part.radius
        assert value.shape == part.value.shape
        off = (value - part.value).abs()
        tolerance = radius * 2 + value.abs() * 2.0**-50  # only high words are compared
        assert bool(((off <= tolerance) | (value == part.value) | value.isnan() | radius.isinf()).all())


@pytest.mark.parametrize("op", specs())
@settings(calm, max_examples=12)
@given(data=st.data())
def test_a_golden_holds_the_exact_result(op: str, data: st.DataObject) -> None:
    """|value + low - exact| <= radius for all finite inputs; with thirty digits too, unless some are huge."""
    digits = data.draw(st.sampled_from(((), (30,))))
    assert escaping(data.draw(cases(op, without=("huge",) if digits else ())), *digits) == {}


def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    """Normal numbers, the same for a shape every time."""
    drawn = np.random.default_rng(math.prod(shape)).standard_normal(shape)
    return torch.from_numpy(drawn * scale + mean).float()


MASKED = torch.tensor([[-INF, 0.0, 2.0], [1.0, -INF, -INF], [-INF, 3e38, -3e38], [-1e-45, -INF, 88.7]])
DEEP = torch.full((1, 3), 2.0**-538, dtype=torch.float64)
LONG: tuple[Case, ...] = (
    Case("softmax", (normal(1, 2000, scale=20),), {}),
    Case("softmax", (normal(1, 2000).sort().values,), {}),
    Case("logsumexp", (normal(1, 2000, mean=-300),), {}),
    Case("log_softmax", (normal(1, 1000, scale=300),), {}),
    Case("layernorm", (normal(1, 2000, mean=2e4), normal(2000), normal(2000)), {}),
    Case("rmsnorm", (normal(1, 2000, scale=1e-20), normal(2000)), {"eps": 1e-30}),
    Case("gemm", (normal(1, 5000, mean=1), normal(5000, 1, mean=1)), {}),
    Case("gemm", (normal(1, 5000), normal(5000, 1)), {}),
    Case("attention", (normal(1, 1, 2, 8, scale=30), normal(1, 1, 300, 8), normal(1, 1, 300, 1)), {"return_lse": True}),
    Case("attention", (normal(1, 1, 2, 8), normal(1, 1, 300, 8), normal(1, 1, 300, 1, mean=1e4)), {"softcap": 5.0}),
    Case("moe", (normal(1, 70), normal(1, 80, 70), normal(1, 70, 40), torch.ones(1, 1), torch.zeros(1, 1).int()), {}),
)
STEEP = torch.tensor([[[[900.3], [1e7]]]])
FAINT = (torch.tensor([[[[1.0123], [0.111]]]]), torch.tensor([[[[0.0], [1e-44]]]]))
"""A value of zero takes all the weight, and the square of what is left underflows."""
STEPS = torch.full((1, 1, 3), -20.0), torch.full((1, 2), -30.0), torch.tensor([[[1.0] * 3, [-1.0] * 3]])
"""Steps whose decays grow: of two states of either sign float64 has no third one."""
EDGES: tuple[Case, ...] = (
    Case(
        "selective_scan", (torch.full((1, 1, 3), 1e11), *STEPS, torch.tensor([[[3.0] * 3, [2.0] * 3]]), normal(1)), {}
    ),
    *(Case(op, (MASKED[:, :columns],), {}) for op in ("softmax", "log_softmax", "logsumexp") for columns in (2, 3)),
    Case("attention", (normal(1, 2, 3, 2), normal(1, 1, 0, 2), normal(1, 1, 0, 3)), {"return_lse": True}),
    Case("attention", (normal(1, 2, 3, 2), normal(1, 1, 0, 2), normal(1, 1, 0, 3)), {"sinks": normal(2)}),
    Case("attention", (normal(1, 2, 3, 2), normal(1, 1, 2, 2), normal(1, 1, 2, 0)), {"return_lse": True}),
    Case("attention", (normal(1, 2, 3, 0), normal(1, 1, 2, 0), normal(1, 1, 2, 3)), {"return_lse": True}),
    Case("attention", (normal(1, 1, 1, 2), normal(1, 1, 2, 2), normal(1, 1, 2, 2)), {"sinks": torch.tensor([-INF])}),
    Case("attention", (STEEP, *FAINT), {"scale": 0.6}),
    Case("softmax", (torch.zeros(2, 0),), {}),
    Case("logsumexp", (torch.zeros(2, 0),), {}),
    Case("gemm", (torch.tensor([[1e-200]], dtype=torch.float64), torch.tensor([[1e-200]], dtype=torch.float64)), {}),
    Case("gemm", (DEEP, DEEP.T), {}),
    Case("moe_route", (torch.tensor([[-104.0, -745.2, -709.9]]),), {"scoring": "sigmoid"}),
    Case("moe_route", (torch.tensor([[40.0, 41.0, 42.0]]),), {"scoring": "sigmoid"}),
    Case("silu", (torch.tensor([[-709.0, -710.0, -745.0, -3e38, 3e38]]),), {}),
)


@pytest.mark.parametrize("case", LONG, ids=lambda case: f"{case.op} {tuple(case.tensors[0].shape)}")
def test_a_golden_holds_the_exact_result_of_long_sums(case: Case) -> None:
    assert escaping(case) == {}


@pytest.mark.parametrize("case", EDGES, ids=lambda case: f"{case.op} {tuple(case.tensors[-1].shape)}")
def test_a_golden_holds_the_exact_result_at_the_edges(case: Case) -> None:
    assert escaping(case, 30) == {}


def disagreements(case: Case) -> list[str]:
    """Where mpmath's value lies outside Arb's enclosure at the same precision, by more than that enclosure's width.

    Rounding errors of both grow alike with cancellation, so Arb's radius is the measure of what mpmath may have lost.
    """
    definition = spec(case.op)
    witnesses = Arb(DIGITS), Multiprecision(DIGITS)
    balls, values = (run(definition, xp, case.tensors, case.options) for xp in witnesses)
    found = []
    for place, (ball, value) in enumerate(zip(balls, values, strict=True)):
        if ball.shape != value.shape:
            found.append(f"result {place}: shapes {ball.shape} and {value.shape}")
        elif ball.dtype != object:
            found += [f"result {place}: {ball} and {value}"] if not np.array_equal(ball, value) else []
        else:
            found += [
                f"result {place}{list(index)}: Arb {ball[index]}, mpmath {value[index]}"
                for index in np.ndindex(ball.shape)
                if not _agree(witnesses[0], ball[index], value[index])
            ]
    return found


def _agree(arb: Arb, ball: Any, value: Any) -> bool:
    if not ball.is_finite() or value != value:
        return True  # no number is claimed
    if abs(value) == float("inf"):
        return False
    with arb.precision():
        number = arb.flint.arb(str(value))
        slack = 16 * ball.rad() + GUARD * abs(ball.mid())
        return bool((number - ball.mid()).abs_upper() <= slack.abs_upper() + arb.flint.arb("1e-400000"))


@pytest.mark.parametrize("op", specs())
@settings(steady, max_examples=5)
@given(data=st.data())
def test_the_witnesses_agree(op: str, data: st.DataObject) -> None:
    """Arb and mpmath, each with its own numbers and functions, find the same fifty digits."""
    assert disagreements(data.draw(cases(op))) == []


@pytest.mark.evidence
@pytest.mark.parametrize("op", specs())
@settings(steady, max_examples=60)
@given(data=st.data())
def test_the_witnesses_agree_on_more_cases(op: str, data: st.DataObject) -> None:
    assert disagreements(data.draw(cases(op))) == []


@pytest.mark.evidence
@pytest.mark.parametrize("op", specs())
@settings(steady, max_examples=300)
@given(data=st.data())
def test_more_goldens_hold_the_exact_result(op: str, data: st.DataObject) -> None:
    """|value - exact| <= radius, proven by Arb and confirmed by mpmath."""
    assert escapes(data.draw(cases(op))) == []


def test_a_witness_that_is_off_in_the_fortieth_digit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is as sharp as it says: 1e-40 in one witness's elementary functions shows."""
    case = Case("logsumexp", (torch.tensor([[0.5, -1.25, 3.0]]),), {})
    assert disagreements(case) == []
    plain = Multiprecision.apply
    monkeypatch.setattr(
        Multiprecision, "apply", lambda self, name, x: plain(self, name, x) * (1 + self.number(2.0**-133))
    )
    assert disagreements(case)
