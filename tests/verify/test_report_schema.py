"""The JSON of a verdict against its JSON Schema: every outcome fits, and what is not as stated does not."""

import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from assay.verify import Contract, Verdict, examine
from assay.verify.findings import OUTCOMES
from assay.verify.report import schema

SCHEMA = json.loads((files("assay.verify") / "verdict.schema.json").read_text(encoding="utf-8"))
SCHEMA_CHECK = Draft202012Validator(SCHEMA)
SMALL = {"R": [2], "N": [5]}


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def crashes(x: torch.Tensor) -> torch.Tensor:
    """A kernel that gives nothing."""
    raise RuntimeError("no")


def flips(x: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
    """A kernel that gives other bits every second time."""
    seen.append(0)
    return torch.softmax(x, -1) if len(seen) % 2 else torch.softmax(x.double(), -1).to(x.dtype)


def overwrites(x: torch.Tensor) -> torch.Tensor:
    """A kernel that writes to its input."""
    y = torch.softmax(x, -1)
    x.zero_()
    return y


KERNELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "PASS": softmax,
    "WARN": lambda x: torch.softmax(torch.nan_to_num(x, nan=0.0), -1),
    "contract": lambda x: torch.softmax(x, -1) * 1.01,
    "nonfinite": lambda x: torch.softmax(x, -1) * torch.nan,
    "crash": crashes,
    "shape": lambda x: x[0],
    "dtype": lambda x: torch.softmax(x, -1).half(),
    "nondeterministic": flips,
    "input_mutated": overwrites,
}


@pytest.fixture(scope="module", params=list(KERNELS))
def verdict(request: pytest.FixtureRequest) -> Verdict:
    kind = request.param
    whole = kind in ("contract", "nonfinite")
    found = examine(
        KERNELS[kind], "softmax", dtype="float32", shapes=SMALL, effort="quick", examples=0, shrinking=whole
    )
    assert kind in (found.outcome, found.failure and found.failure.kind), str(found)
    return found


@pytest.fixture(scope="module")
def failed() -> str:
    """The JSON of a failure with all that a failure may have."""
    return examine(KERNELS["contract"], "softmax", dtype="float32", shapes=SMALL, effort="quick", examples=0).to_json()


def test_the_schema_is_one() -> None:
    """The file keeps the rules of JSON Schema 2020-12, and is what the dataclasses say."""
    Draft202012Validator.check_schema(SCHEMA)
    mend = "python -m assay.verify.report.schema writes it anew"
    assert (files("assay.verify") / "verdict.schema.json").read_text(encoding="utf-8") == schema.text(), mend


def test_verdicts_of_every_kind_fit(verdict: Verdict) -> None:
    content = json.loads(verdict.to_json())
    SCHEMA_CHECK.validate(content)
    assert Verdict.from_dict(content).to_json() == verdict.to_json()


@pytest.mark.parametrize("outcome", [outcome for outcome in OUTCOMES if outcome not in ("PASS", "WARN", "FAIL")])
def test_outcomes_without_a_failure_fit(outcome: str) -> None:
    if outcome == "VACUOUS":
        found = examine(
            softmax, "softmax", dtype="float32", contract=Contract(ulps={"exp": 1e12}), effort="quick", examples=0
        )
        assert found.outcome == outcome
    else:
        found = Verdict(outcome, "k", "softmax", "float32", "float32 inside", note="why")
    SCHEMA_CHECK.validate(json.loads(found.to_json()))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("aspects"),
        lambda content: content.update(extra=1),
        lambda content: content.update(outcome="FINE"),
        lambda content: content.update(cases=-1),
        lambda content: content.update(worst="nan"),
        lambda content: content.update(failure=None),
        lambda content: content["histogram"].pop(),
        lambda content: content["failure"].update(kind="mood"),
        lambda content: content["failure"]["case"].pop("sizes"),
        lambda content: content["aspects"]["numbers"]["map"]["cells"][0].append("many"),
        lambda content: content["aspects"]["numbers"]["map"].update(block=[1]),
        lambda content: content["aspects"]["numbers"]["sample"]["output"]["got"].append(None),
        lambda content: content["aspects"]["numbers"]["sample"]["inputs"][0].pop("values"),
    ],
)
def test_what_is_not_as_stated_does_not_fit(failed: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Missing and unknown keys, unknown words, and numbers where none belong are all found."""
    content = json.loads(failed)
    SCHEMA_CHECK.validate(content)
    change(content)
    assert list(SCHEMA_CHECK.iter_errors(content))
