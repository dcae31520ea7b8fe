"""Of an interpreted launch at a size of production some programs run, if they can be judged by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from assay.interpreter import DependentPrograms
from assay.interpreter.races import sampled
from assay.verify import examine
from assay.verify.cases.at_shape import at_case
from assay.verify.comparison.result import Result
from assay.verify.examination import run
from assay.verify.examination.phases import ordinary_cases
from assay.verify.examination.plan import make_plan
from assay.verify.harness import runner
from assay.verify.settings import Settings

from . import sampled_kernels

SIZES = {"R": 400, "N": 61}


def tried(kernel: Callable[..., Any], most: int = 12, sizes: dict[str, int] | None = None) -> Result:
    plan = make_plan(kernel, Settings("softmax", dtype="float32"))
    plan.harness.try_case(next(ordinary_cases(plan.sampler, "small")))
    harness = replace(plan.harness, most_programs=most)
    return harness.try_case(at_case(plan.sampler, sizes or SIZES, {}))


@pytest.mark.parametrize("name", ["by_row", "by_row_into_zeros", "by_row_then_copied"])
def test_what_a_few_programs_store_is_judged(name: str) -> None:
    """Twelve rows, whatever the output held before, and after an operator of torch."""
    result = tried(getattr(sampled_kernels, name))
    assert result.failure is None
    assert result.judged == 12 * SIZES["N"]
    assert not result.unjudged
    assert result.sampled == f"R=400, N=61: {12 * 61} elements judged that a few programs of each launch store"


def test_a_fault_of_a_program_that_runs_is_found() -> None:
    """And judged again with all programs, as without sampling."""
    result = tried(sampled_kernels.offsets_that_wrap)
    assert result.failure is not None
    assert result.failure.kind == "contract"
    assert result.judged > 12 * SIZES["N"]


@pytest.mark.parametrize("name", ["in_two_launches", "by_atomics", "normalised_by_torch"])
def test_programs_that_depend_on_each_other_are_none(name: str) -> None:
    """Of many nothing is judged; few all run, and pass."""
    with pytest.raises(DependentPrograms):
        tried(getattr(sampled_kernels, name))
    few = tried(getattr(sampled_kernels, name), sizes={"R": 40, "N": 61})
    assert few.failure is None
    assert few.judged == 40 * 61


def test_an_examination_goes_on_without_what_it_could_not_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no programs stand for themselves the models are named as not tried; where they do, none of its cases is."""
    monkeypatch.setattr(runner, "_MOST_DEPENDENT", 0)
    monkeypatch.setattr(run, "PHASES", [phase for phase in run.PHASES if phase[0] == "production"])
    monkeypatch.setattr(run.Run, "allowance", lambda *_: 60.0)
    settings: dict[str, Any] = {"dtype": "float32", "shapes": {"R": [128], "N": [32768, 4096]}}
    alone, together = (
        examine(kernel, "softmax", **settings) for kernel in (sampled_kernels.by_row, sampled_kernels.in_two_launches)
    )
    assert alone.passed
    assert together.passed
    assert alone.phases["production"] >= 1
    assert "production" not in together.phases
    words = "sizes of deepseek-ai/DeepSeek-V3: not tried, as "
    assert words in together.coverage.left_out
    assert together.coverage.left_out.partition(words)[2].strip()
    assert "DeepSeek" not in alone.coverage.left_out


def test_few_programs_are_first_and_last_and_between() -> None:
    """In order, each once, and all of a small grid."""
    chosen = sampled((5, 7, 300), 12)
    flat = [int(np.ravel_multi_index(each, (5, 7, 300))) for each in chosen]
    assert flat == sorted(set(flat))
    assert {0, 1, 5 * 7 * 300 - 1} <= {*flat}
    assert len(flat) <= 12
    assert sampled((2, 1, 1), 12) == [(0, 0, 0), (1, 0, 0)]
