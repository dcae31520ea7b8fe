"""What is recommended where budgets are out of reach, what it says of itself, and how it is printed."""

import copy
import itertools
import json
import math
import pickle
from typing import Any

import pytest
import torch

from assay.formats.errors import UnknownOption
from assay.precision import Assignment, Prediction, audit
from assay.precision.auditing import Audit
from assay.precision.choice.roofline import Cost
from assay.precision.errors import BadAssignment
from assay.precision.units import format_bytes, format_error, format_seconds
from tests.precision.small_models import FORMATS, made

ARGUMENTS = ("max_error", "max_bytes", "max_kv_bytes", "max_prefill", "max_time")


@pytest.fixture(scope="module")
def audited() -> Audit:
    """An audit of the small model in four schemes, its interval from few measurements."""
    found = audit(*made(), "relative", FORMATS, "h100")
    found.calibrate(8)
    return found


@pytest.fixture(scope="module")
def every(audited: Audit) -> list[tuple[Cost, dict[str, str]]]:
    """The cost of each of the 625 assignments."""
    sites = [str(site) for site in audited.sites if "fp8" in audited.menu(site)]
    found = []
    for schemes in itertools.product(["", *FORMATS], repeat=len(sites)):
        assignment = {site: scheme for site, scheme in zip(sites, schemes, strict=True) if scheme}
        found.append((audited.cost(assignment), assignment))
    return found


@pytest.mark.parametrize(
    ("budget", "what"), [("max_bytes", "bytes"), ("max_time", "decode"), ("max_prefill", "prefill")]
)
def test_out_of_reach_the_least_is_recommended(
    audited: Audit, every: list[tuple[Cost, dict[str, str]]], budget: str, what: str
) -> None:
    found = audited.recommend(**{budget: 1.0 if budget == "max_bytes" else 1e-15})
    least = min(getattr(cost, what) for cost, _ in every)
    alike = [assignment for cost, assignment in every if getattr(cost, what) <= least * (1 + 1e-12)]
    assert not found.met
    assert getattr(found.cost, what) == pytest.approx(least, rel=1e-12)
    assert audited.predictor.squares(found) == pytest.approx(min(map(audited.predictor.squares, alike)), rel=1e-9)


def test_sites_that_are_fixed_keep_their_own_format(audited: Audit) -> None:
    least = {
        site: min(audited.menu(site), key=lambda s: audited.cost({site: s}).bytes) for site in map(str, audited.sites)
    }
    budget = audited.cost({"layers.0.proj": least["layers.0.proj"], "head": least["head"]}).bytes
    free, found = audited.recommend(max_bytes=budget), audited.recommend(max_bytes=budget, fixed=["layers.1.proj"])
    assert "layers.1.proj" in free
    assert "layers.1.proj" not in found
    assert found.met
    assert found.cost.bytes <= budget
    with pytest.raises(BadAssignment):
        audited.recommend(max_bytes=budget, fixed=["layers.9.proj"])


def test_two_budgets_out_of_reach_are_missed_by_the_least(
    audited: Audit, every: list[tuple[Cost, dict[str, str]]]
) -> None:
    whole = audited.cost({})
    for share in (0.04, 1e-6):
        limits = {"bytes": share * whole.bytes, "prefill": share * whole.prefill}
        found = audited.recommend(max_bytes=limits["bytes"], max_prefill=limits["prefill"])
        excess = [max(getattr(cost, name) / limit for name, limit in limits.items()) for cost, _ in every]
        reached = max(getattr(found.cost, name) / limit for name, limit in limits.items())
        assert reached == pytest.approx(min(excess), rel=1e-9)


@pytest.mark.parametrize(
    ("budgets", "words"),
    [
        ({"max_bytes": 1.0}, ["max_bytes can't be kept with the 4 formats", "at most 1 B", "kB where max_bytes"]),
        ({"max_time": 1e-15}, ["max_time can't be kept with the 4 formats", "at most 1e-06 ns", "ns where max_time"]),
        ({"max_prefill": 2e-9}, ["max_prefill can't be kept", "at most 2 ns", "where max_prefill asks"]),
        ({"max_bytes": 1.0, "max_time": 1e-15}, ["max_bytes can't be kept, nor max_time, with the 4 formats"]),
        (
            {"max_error": 1e-6, "max_bytes": 5000.0, "max_time": 1e-15},
            ["max_time can't be kept, nor max_error and max_bytes together, with the 4 formats"],
        ),
        (
            {"max_error": 1e-6, "max_bytes": 5000.0},
            ["max_error and max_bytes can't be kept together", "error where max_error", "at most 1e-06", "5 kB"],
        ),
    ],
)
def test_budgets_that_can_t_be_kept_are_named_as_they_were_given(
    audited: Audit, budgets: dict[str, float], words: list[str]
) -> None:
    found = audited.recommend(**budgets)
    assert not found.met
    assert "that this audit looked at" in found.why
    assert "decode" not in found.why
    assert [name for name in ARGUMENTS if name in found.why] == list(budgets), found.why
    assert [part for part in words if part not in found.why] == [], found.why


@pytest.mark.parametrize("budget", ARGUMENTS)
def test_a_budget_of_nothing_is_refused_by_its_name(audited: Audit, budget: str) -> None:
    with pytest.raises(UnknownOption, match=f"expected {budget} above 0, got -1"):
        audited.recommend(**{budget: -1.0})


def test_what_bound_the_choice_is_told(audited: Audit) -> None:
    whole = audited.cost({})
    found = audited.recommend(max_bytes=0.5 * whole.bytes, max_time=2 * whole.decode)
    assert found.why.startswith(f"bound by max_bytes ({format_bytes(found.cost.bytes)} of at most")
    assert "max_time" not in found.why
    found = audited.recommend(max_error=0.01)
    assert found.why.startswith(f"bound by max_error ({format_error(found.measured)} relative error of at most 0.01)")
    assert audited.recommend(max_bytes=2 * whole.bytes).why.startswith("no budget binds: the model as it is")
    found = audited.recommend(max_error=10.0)
    assert "the fewest bytes that there are with the 4 formats" in found.why
    assert found.cost.bytes == audited.recommend(max_bytes=1.0).cost.bytes


def test_figures_that_differ_are_told_apart(audited: Audit) -> None:
    least = audited.recommend(max_bytes=1.0).cost.bytes
    found = audited.recommend(max_bytes=least - 0.5)
    assert not found.met
    assert f"{format_bytes(least, 6)} where max_bytes asks for at most {format_bytes(least - 0.5, 6)}" in found.why


def test_a_prediction_that_was_off_is_told(audited: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing that is predicted to keep the error does so when measured, the measured error is told, after a
    bounded number of measurements, with a prediction from all that was learnt of them."""
    off, runs = copy.copy(audited), itertools.count()
    monkeypatch.setattr(off, "trial", lambda assignment: 0.5 if next(runs) >= 0 else 0.0)
    found = off.recommend(max_error=0.01)
    assert not found.met
    assert found.prediction == off.predict(found)
    assert next(runs) < 250
    assert "predicted to keep max_error, but measured 0.5 relative error where at most 0.01 was asked for" in found.why


@pytest.mark.parametrize("budget", [{"max_bytes": 7776.0}, {"max_error": 0.01}])
def test_what_is_predicted_far_too_small_is_found_by_measuring(audited: Audit, budget: dict[str, float]) -> None:
    honest, fooled = audited.recommend(**budget), copy.copy(audited)
    one = {"layers.1.proj": "w4a16-g32"}
    for _ in range(3):
        fooled.predictor = fooled.predictor.corrected(one, fooled.predictor.uncalibrated(one)[0] / 10**0.5)
    found = fooled.recommend(**budget)
    assert found.met
    assert found.measured <= honest.measured * 1.01 or "max_error" in budget
    assert found.cost.bytes <= honest.cost.bytes * 1.01 or "max_bytes" in budget
    assert fooled.predict(one).error == pytest.approx(fooled.measure(one), rel=0.05)


def test_a_scheme_that_breaks_the_model_is_no_option(audited: Audit) -> None:
    broken = copy.copy(audited)
    least = min(broken.menu("head"), key=lambda scheme: broken.cost({"head": scheme}).bytes)
    assert broken.recommend(max_bytes=1.0)["head"] == least
    broken.predictor = broken.predictor.corrected({"head": least}, math.inf)
    found = broken.recommend(max_error=10.0)
    assert found["head"] != least
    assert "the fewest bytes that there are" in found.why
    assert broken.recommend(max_bytes=1.0).cost.bytes == found.cost.bytes


def test_an_assignment_is_printed_in_a_line_and_stays_a_dict() -> None:
    found = Assignment({f"model.layers.{layer}.mlp": "fp8" if layer < 60 else "w8a8" for layer in range(100)})
    found.prediction, found.measured, found.met = Prediction(0.25, 0.125, 0.5), 0.3, False
    found.cost = Cost(bytes=1.25e9, kv_bytes=2e6, prefill=0.25, decode=1.5e-3)
    assert repr(found) == f"Assignment({found})"
    assert str(found) == (
        "100 sites: 60 fp8, 40 w8a8; error predicted 0.25 (0.125 to 0.5); measured 0.3; "
        "weights 1.25 GB, KV cache 2 MB; prefill 250 ms, decode step 1.5 ms; budgets not met"
    )
    assert json.loads(json.dumps(found)) == found == dict(found)
    for same in (copy.copy(found), pickle.loads(pickle.dumps(found))):
        assert repr(same) == repr(found)


def test_an_assignment_without_figures_is_printed() -> None:
    assert repr(Assignment()) == "Assignment(0 sites)"
    assert repr(Assignment(head="fp8")) == "Assignment(1 site: 1 fp8)"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (format_bytes(999.7e6), "1 GB"),
        (format_bytes(1.2345e9, 6), "1.2345 GB"),
        (format_bytes(12), "12 B"),
        (format_bytes(2e15), "2000000 GB"),
        (format_seconds(0.9996e-3), "1 ms"),
        (format_seconds(2.5e-9), "2.5 ns"),
        (format_seconds(0.0), "0 ns"),
        (format_error(math.inf), "∞"),
        (format_error(None), "not measured"),
    ],
)
def test_amounts(words: str, value: str) -> None:
    assert words == value


def test_a_model_of_one_linear() -> None:
    torch.manual_seed(0)
    data: list[Any] = [torch.randn(8, 32) for _ in range(2)]
    found = audit(torch.nn.Linear(32, 32), data, "relative", ["w8a16"])
    found.calibrate(6)
    assert found.recommend(max_bytes=1.0)
    assert found.recommend(max_bytes=1e9) == {}
