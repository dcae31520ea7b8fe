"""A night's worth of cases (`./dev test -m evidence tests/golden/test_nightly.py`): containment, and the two witnesses.

A usual run draws fewer of the same cases, in `test_containment.py`.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.golden import spec, specs
from assay.golden.arithmetic import Arb, Multiprecision
from assay.golden.evaluation.call import run
from tests.golden.drawing import Case, cases
from tests.golden.enclosure import escapes

_DIGITS = 50
_GUARD = 1e-48  # relative: mpmath's own last places
calm = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def disagreements(case: Case) -> list[str]:
    """Where mpmath's value lies outside Arb's enclosure at the same precision, by more than that enclosure's width.

    Rounding errors of both grow alike with cancellation, so Arb's radius is the measure of what mpmath may have lost.
    """
    definition = spec(case.op)
    witnesses = Arb(_DIGITS), Multiprecision(_DIGITS)
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
        slack = 16 * ball.rad() + _GUARD * abs(ball.mid())
        return bool((number - ball.mid()).abs_upper() <= slack.abs_upper() + arb.flint.arb("1e-400000"))


@pytest.mark.parametrize("op", specs())
@settings(calm, max_examples=5)
@given(data=st.data())
def test_the_witnesses_agree(op: str, data: st.DataObject) -> None:
    """Arb and mpmath, each with its own numbers and functions, find the same fifty digits."""
    assert disagreements(data.draw(cases(op))) == []


@pytest.mark.evidence
@pytest.mark.parametrize("op", specs())
@settings(calm, max_examples=1_000)
@given(data=st.data())
def test_the_witnesses_agree_on_a_thousand_cases(op: str, data: st.DataObject) -> None:
    assert disagreements(data.draw(cases(op))) == []


@pytest.mark.evidence
@pytest.mark.parametrize("op", specs())
@settings(calm, max_examples=10_000)
@given(data=st.data())
def test_ten_thousand_goldens_hold_the_exact_result(op: str, data: st.DataObject) -> None:
    """|value - exact| <= radius, proven by Arb and confirmed by mpmath, on ten thousand cases of every op."""
    assert escapes(data.draw(cases(op))) == []


def test_a_witness_that_is_off_in_the_fortieth_digit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is as sharp as it says: 1e-40 in one witness's elementary functions shows."""
    import torch

    case = Case("logsumexp", (torch.tensor([[0.5, -1.25, 3.0]]),), {})
    assert disagreements(case) == []
    plain = Multiprecision.apply
    monkeypatch.setattr(
        Multiprecision, "apply", lambda self, name, x: plain(self, name, x) * (1 + self.number(2.0**-133))
    )
    assert disagreements(case)
