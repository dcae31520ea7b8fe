"""Power: what is caught, what gets through, and what a plain tolerance lets through."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from assay.pytest_plugin.plugin import SCHEDULE, Assay
from assay.pytest_plugin.schedule import Schedule
from assay.verify import Contract
from assay.verify.errors import SettingError
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.power import power
from assay.verify.power_report import PowerReport

SMALL = {"R": [1, 2, 3, 17], "N": [1, 5, 17, 33]}


@pytest.fixture(scope="module")
def report() -> PowerReport:
    """The power of a small examination of silu, and of a plain check."""
    families = ["formula", "store", "special values", "state"]
    settings = {"dtype": "bfloat16", "shapes": SMALL, "effort": "quick", "examples": 0, "families": families}
    return power("silu", against="allclose(1e-2,1e-2)", **settings)


def test_the_figures_add_up(report: PowerReport) -> None:
    assert sum(of for _, of in report.by_family.values()) == len(report.trials)
    assert sum(caught for caught, _ in report.by_family.values()) == report.caught
    assert report.caught + len(report.survivors) == len(report.trials)
    assert report.caught >= 0.9 * len(report.trials), str(report)
    against = sum(caught for caught, _ in report.by_family_against.values())
    assert against == sum(bool(trial.against) for trial in report.trials)


def test_a_plain_check_catches_less(report: PowerReport) -> None:
    """`allclose` on normal numbers of one size sees no truncation, no state, and no dropped NaN."""
    plain = {trial.name for trial in report.trials if trial.against}
    assert len(plain) < report.caught
    assert not plain & {"truncating_store", "nan_read_as_zero", "answer_kept_by_shape", "silu_of_minus_infinity"}
    assert "silu_factor_dropped" in plain


def test_the_report_holds_the_same_in_text_and_json(report: PowerReport, tmp_path: Path) -> None:
    content = json.loads(report.to_json(tmp_path / "power.json"))
    assert json.loads((tmp_path / "power.json").read_text()) == content
    assert content["caught"] == report.caught
    assert content["of"] == len(content["trials"])
    assert content["survivors"] == [trial.name for trial in report.survivors]
    for family, (caught, of) in report.by_family.items():
        assert (content["by_family"][family]["caught"], content["by_family"][family]["of"]) == (caught, of)
        assert f"{family} " in str(report)


def test_survivors_say_what_they_would_need() -> None:
    families = ["layout", "unwritten"]
    settings: dict[str, Any] = {"dtype": "bfloat16", "effort": "quick", "examples": 0, "families": families}
    found = power("silu", shapes={"R": [4], "N": [8]}, layouts=["contiguous"], **settings)
    survivors = {trial.name: trial for trial in found.survivors}
    assert "strides_ignored" in survivors
    assert "last_columns_unwritten" in survivors
    assert "view" in survivors["strides_ignored"].needs
    assert survivors["strides_ignored"].needs in str(found)


def test_what_a_contract_allows_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a contract of sums in float16 a sum in float16 is not among the fault models."""
    found = tuple(fault for fault in fault_models_of("softmax") if fault.name == "accumulated_in_float16")
    monkeypatch.setattr("assay.verify.power.fault_models_of", lambda op: found)
    settings = {"dtype": "bfloat16", "shapes": {"R": [2], "N": [4]}, "effort": "quick", "examples": 0}
    contracts = (Contract(), Contract(accumulate="float16"))
    strict, loose = (power("softmax", contract=c, families=["accumulator"], **settings) for c in contracts)
    assert "accumulated_in_float16" in {trial.name for trial in strict.trials}
    assert "accumulated_in_float16" not in {trial.name for trial in loose.trials}


TINY = {"shapes": {"R": [2], "N": [3]}, "effort": "quick", "examples": 0}


@pytest.mark.parametrize(
    ("op", "settings", "message"),
    [
        ("exp", {"dtype": "float64", "families": ["formula"]}, "a fault, in float32 inside, passes; got FAIL"),
        ("exp", {"dtype": "bfloat16", "contract": Contract(rounding="toward_zero")}, "passes; got FAIL"),
        ("softmax", {"dtype": "float32", "against": "allclose(0,0)"}, r"against='allclose\(0,0\)' fails the kernel"),
        ("exp", {"dtype": "bfloat16", "families": ["stores"]}, "did you mean 'store'"),
        *(
            ("exp", {"dtype": "bfloat16", "against": against}, "expected allclose")
            for against in ("close", "allclose(1)", "allclose(a,b)")
        ),
    ],
)
def test_what_tells_nothing_is_refused(op: str, settings: dict[str, Any], message: str) -> None:
    """A check that the right kernel fails (float64, another store, no tolerance), and words that can't be read."""
    with pytest.raises(SettingError, match=message):
        power(op, shapes={"R": [4], "N": [40]}, effort="quick", examples=0, **settings)


def test_a_crash_catches_only_a_fault_model_that_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault model that merely raises is broken, and counts neither for the examination nor for the plain check."""

    def raises(*_: object) -> tuple[object, ...]:
        raise KeyError("x")

    broken = FaultModel("broken", "formula", "broken", ("exp",), results=raises)
    crashing = replace(broken, name="crashing", crashes=True)
    monkeypatch.setattr("assay.verify.power.fault_models_of", lambda op: (broken, crashing))
    found = power("exp", dtype="bfloat16", against="allclose(1e-2,1e-2)", **TINY)
    assert [(t.name, t.caught, t.against) for t in found.trials] == [("broken", False, False), ("crashing", True, True)]


def told_by_plugin(kernel: Any, *, power: bool, **settings: Any) -> str:
    """What the summary's row of one examination says of power."""
    options = {"assay_power": power}
    config = SimpleNamespace(getoption=options.get)
    config.stash = {SCHEDULE: Schedule(cast(Any, config), None, None)}
    node = SimpleNamespace(config=config, stash={}, user_properties=[], nodeid="test")
    Assay(cast(Any, node), {}, {}).examine(kernel, "exp", **settings)
    ((row,),) = node.stash.values()
    return str(row["power"])


def test_the_plugin_measures_passing_examinations_only() -> None:
    """Under --assay-power a verdict that passes comes with its power; one that fails, and a run without it, do not."""
    small = {"dtype": "bfloat16", "shapes": {"R": [2], "N": [3]}, "effort": "quick", "examples": 0}
    honest, faulty = (lambda x: torch.exp(x.double()).to(x.dtype)), (lambda x: torch.exp2(x))
    assert re.fullmatch(r"\d+ of \d+", told_by_plugin(honest, power=True, **small))
    assert told_by_plugin(faulty, power=True, **small) == told_by_plugin(honest, power=False, **small) == ""


def test_the_plugin_says_why_there_is_no_power() -> None:
    """An examination that passes, but that no float32 kernel passes, is recorded with a warning in place of a rate."""
    with pytest.warns(pytest.PytestWarning, match="without a fault"):
        assert told_by_plugin(lambda x: torch.exp(x), power=True, dtype="float64", **TINY) == ""
