"""At the sizes of production: samples of a large output are judged, and all of it is watched, at little cost."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden.inputs.values import draw
from assay.golden.registry import spec
from assay.runtime.environment import standard_environment
from assay.verify import Verdict, examine
from assay.verify.cases.at_shape import at_cases
from assay.verify.cases.case import Case, build
from assay.verify.errors import SettingError
from assay.verify.examination import run
from assay.verify.examination.plan import Plan, make_plan
from assay.verify.examination.repro import run_line
from assay.verify.settings import Settings

from . import large_kernels
from .examined import fails, failure_of
from .large_kernels import EXPERTS, FAULTY, HEADS, HONEST, ROWS, always_off, attention, softmax, tail_unwritten
from .usual import only

_EXAMINE = {"dtype": "float32", "effort": "quick", "examples": 0}


def plan_and_case(kernel: Any, op: str, at: dict[str, int], **settings: Any) -> tuple[Plan, Case]:
    """The question, and its large case."""
    plan = make_plan(kernel, Settings(op, **{"dtype": "float32", "at": [at], **settings}))
    return plan, next(at_cases(plan.sampler, plan.settings.at))


def judged_at(monkeypatch: pytest.MonkeyPatch, kernel: Any, op: str, at: Any, **settings: Any) -> Verdict:
    monkeypatch.setattr(run, "PHASES", [phase for phase in run.PHASES if phase[0] == "at"])
    return examine(kernel, op, **{**_EXAMINE, "at": at, **settings})


USUAL = only(lambda row: row[0] is not attention or "options" in row[3], HONEST)


@pytest.mark.parametrize(("kernel", "op", "at", "settings"), USUAL, ids=lambda value: getattr(value, "__name__", None))
def test_a_million_elements_cost_a_second_beside_the_kernel(
    kernel: Any, op: str, at: dict[str, int], settings: dict[str, Any]
) -> None:
    """An honest kernel passes in three times its own time and a second of processor time; thousands are judged."""
    plan, case = plan_and_case(kernel, op, at, **settings)
    first = case.definition.axes.grid[0]
    plan.harness.try_case(replace(case, sizes={**case.sizes, first: 2}))  # what is loaded only once
    with standard_environment():
        inputs = build(case)
        started = time.process_time()
        kernel(*inputs.positional, **{name: case.options[name] for name in plan.settings.options})
        own = time.process_time() - started
        started = time.process_time()
        result = plan.harness.try_case(case)
        seconds = time.process_time() - started
    assert result.failure is None
    assert sum(output.numel() for output in result.outputs) > 1_000_000
    assert result.judged > 2_000
    assert seconds <= 3 * own + 1


@pytest.mark.parametrize(("kernel", "op", "at", "settings"), USUAL, ids=lambda value: getattr(value, "__name__", None))
def test_honest_kernels_pass_at_odd_sizes(kernel: Any, op: str, at: dict[str, int], settings: dict[str, Any]) -> None:
    odd = {symbol: size + 1 if symbol in ("R", "N", "M", "Sq", "Sk", "T") else size for symbol, size in at.items()}
    plan, case = plan_and_case(kernel, op, odd, seed=1, **settings)
    assert plan.harness.try_case(case).failure is None


AGAIN = (
    large_kernels.one_element_unwritten,
    large_kernels.one_row_skipped,
    large_kernels.last_head_shared_wrongly,
    large_kernels.last_sequence_sees_the_first,
)
"""Faults that are found and told in the way of another one."""


@pytest.mark.parametrize(
    ("kernel", "op", "at", "aspect", "words"),
    only(lambda row: row[0] not in AGAIN, FAULTY),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_fails_only_at_size_is_found_and_named(
    kernel: Any, op: str, at: dict[str, int], aspect: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aspect is told, the place where it begins, and the failure's line shows it again."""
    options = {"options": {"causal": ["top_left"]}} if kernel is large_kernels.late_queries_see_ahead else {}
    verdict = judged_at(monkeypatch, kernel, op, at, **options)
    assert verdict.outcome == "FAIL"
    assert list(verdict.broken) == [aspect]
    failure = failure_of(verdict)
    assert words in failure.message
    assert words in verdict.at[0]
    again = run_line(verdict.repro).failure
    assert (again.kind, again.index) == (failure.kind, failure.index)


def test_an_examination_has_the_case_beside_its_others() -> None:
    """What small cases don't show fails it; where all is right the report says what was judged."""
    settings: dict[str, Any] = {**_EXAMINE, "shapes": {"N": [130]}}
    good, bad = (examine(kernel, "softmax", at=ROWS, **settings) for kernel in (softmax, large_kernels.one_nan))
    assert good.passed
    assert good.phases["at"] == 1
    assert good.at == ("R=9001, N=130: y[256 of 9001, 130] judged; all of it watched",)
    assert "  at          R=9001, N=130: y[256 of 9001, 130] judged" in str(good)
    assert Verdict.from_dict(good.as_dict()).at == good.at
    assert list(bad.broken) == ["shapes"]


def test_what_fails_at_any_size_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that the large case shows first, and small ones too, is put down to numbers and shrunk to one element."""
    verdict = judged_at(monkeypatch, always_off, "softmax", ROWS)
    assert list(verdict.broken) == ["numbers"]
    assert verdict.failure.case.sizes == {"R": 1, "N": 1}
    assert verdict.failure.case.protocol == "once"


def test_what_cannot_be_judged_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over everything isn't judged at a size that is too large, nor a sum over rows: the verdict names them."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits, target)

    def mean_of_nothing(logits: Tensor, target: Tensor) -> Tensor:
        return torch.zeros(())

    large = {"T": 4096, "V": 16_384}
    verdict = judged_at(monkeypatch, loss, "cross_entropy", large)
    why = "it can't be evaluated in parts, and is too large as a whole"
    assert verdict.at == (f"T=4096, V=16384: loss not judged: {why}; all of it watched",)
    fails(judged_at(monkeypatch, mean_of_nothing, "cross_entropy", {"T": 300, "V": 1000}))


def test_options_and_several_shapes_are_all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape under each of the listed options; a size that shapes= restricts may be left out."""
    sizes = {symbol: size for symbol, size in HEADS.items() if symbol != "Dv"}
    several = [{**sizes, "Sq": 200}, {**sizes, "Sq": 300}]
    options = {"causal": ["none", "top_left"]}
    verdict = judged_at(monkeypatch, attention, "attention", several, options=options, shapes={"Dv": [32, 64]})
    assert verdict.passed
    assert verdict.phases["at"] == 4
    assert ["causal=top_left" in words for words in verdict.at] == [False, True, False, True]
    assert all("Dv=64" in words for words in verdict.at)


@pytest.mark.parametrize(
    ("op", "at", "words"),
    [
        ("softmax", {"R": 8192}, "at: no size for N; softmax has R, N"),
        ("softmax", {"R": 8192, "M": 3}, "at: unknown dimension 'M'"),
        ("softmax", {"R": 8192, "N": "x"}, "at: softmax: N='x'; expected a whole number"),
        ("softmax", {"R": 8192, "N": 0}, "at: N=0; expected 1 or more"),
        ("softmax", {"R": 2**20, "N": 2**20}, "at: x[R,N] would have 1,099,511,627,776 elements; at most 2^31"),
        ("softmax", 8192, "at=8192; expected sizes"),
        ("attention", {**HEADS, "H": 15}, "at: attention: H=15 must be a multiple of Hkv=4"),
        ("moe_route", {"T": 9, "E": 1}, "at: moe_route: E=1 must be at least top_k=2"),
    ],
)
def test_impossible_sizes_are_one_clear_line(op: str, at: Any, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        examine(softmax, op, dtype="float32", at=at)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_sizes_are_part_of_the_question() -> None:
    settings = Settings("softmax", dtype="float32", at=[ROWS])
    assert settings.as_table()["at"] == [ROWS]
    assert Settings.from_table(settings.as_table()) == settings
    assert settings.anywhere().at == settings.at


def test_an_isolated_kernel_is_run_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged_at(monkeypatch, softmax, "softmax", ROWS, isolate=True).passed
    assert list(judged_at(monkeypatch, tail_unwritten, "softmax", ROWS, isolate=True).broken) == ["memory"]


def test_large_inputs_repeat_at_a_prime() -> None:
    """They are drawn once for 262,139 elements, so that an offset that wraps at a power of two meets other numbers."""
    x = spec("softmax").tensors[0]
    large = draw(x, {"R": 1000, "N": 1000}, "float32", "tiled", 0).reshape(-1)
    assert torch.equal(large[:1000], large[262_139:263_139])
    for bits in (15, 16, 17, 18, 19):
        assert float((large[: -(2**bits)] == large[2**bits :]).double().mean()) < 1e-3
    small = {"R": 3, "N": 5}
    assert torch.equal(draw(x, small, "float32", "tiled", 0), draw(x, small, "float32", "", 0))


def test_experts_that_no_token_asks_for_cost_nothing() -> None:
    """Of 2,048 experts no more are evaluated than the sampled tokens name."""
    plan, case = plan_and_case(large_kernels.moe, "moe", {**EXPERTS, "T": 64, "D": 64, "F": 32, "E": 2048})
    started = time.process_time()
    assert plan.harness.try_case(case).failure is None
    assert time.process_time() - started < 20
