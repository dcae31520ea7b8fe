"""Sizes of published models are examined by default."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from assay.configs import table
from assay.golden.inputs.recipe import check_sizes
from assay.golden.inputs.values import torch_dtype
from assay.golden.registry import spec, specs
from assay.golden.signature import symbols_in
from assay.verify import examine
from assay.verify.cases.at_shape import at_cases
from assay.verify.cases.case import all_contents
from assay.verify.cases.production import LEVELS, large_pairs, production_cases, production_rows, rows_of
from assay.verify.cases.sampler import Sampler
from assay.verify.comparison.sampled import cuts_of
from assay.verify.examination import run
from assay.verify.examination.plan import make_plan
from assay.verify.examination.run import Run
from assay.verify.settings import Settings

from .large_kernels import softmax
from .production_kernels import PAIRS, embedding, words_of_18_bits

TABLE = table("production_sizes")


def sampler(op: str, **fields: Any) -> Sampler:
    """A sampler of an op over all its usual options."""
    usual = spec(op).default_settings
    return Sampler(spec(op), usual["dtype"] or "float8_e4m3fn", **{"options": usual["options"], **fields})


def test_every_op_has_two_or_three_rows_or_more() -> None:
    """No row is of an op that there isn't, and every model has a source and is used."""
    ops = [op for entry in TABLE["sizes"] for op in entry["ops"]]
    assert {*ops} == {*specs()}
    assert all(len(rows_of(op)) >= 2 for op in specs())
    assert all(model["source"] for model in TABLE["models"].values())
    assert {*TABLE["models"]} == {model for entry in TABLE["sizes"] for model in entry["of"]}


def test_every_number_of_a_model_is_used() -> None:
    """So that each stands for a size that some op has."""
    for model, numbers in TABLE["models"].items():
        texts = [text for entry in TABLE["sizes"] if model in entry["of"] for text in entry.values()]
        used = {symbol for text in texts if isinstance(text, str) for symbol in symbols_in(text)}
        assert {*numbers} - {"source"} <= used, model


@pytest.mark.parametrize("op", specs())
def test_rows_are_sizes_of_the_op_and_give_cases_that_can_be_judged(op: str) -> None:
    """Complete sizes that the op allows; some case keeps each of the model's sizes, and judged samples of a result."""
    chosen, definition = sampler(op), spec(op)
    for row in production_rows(definition):
        for options in chosen.option_sets():
            check_sizes(definition, definition.signature(options), options, row.sizes)
        assert all(row.sizes[symbol] in sizes for symbol, sizes in definition.sizes.allowed.items())
        assert row.own
    cases = next(filter(None, (list(production_cases(chosen, level)) for level in range(len(LEVELS)))))
    for _, case in cases:
        check_sizes(definition, case.signature, case.options, case.sizes)
    _, case = cases[0]
    outputs = tuple(
        torch.zeros(case.shape(tensor)).to(torch_dtype(dtype))
        for tensor, dtype in zip(case.signature.returns, case.result_dtypes, strict=True)
    )
    cuts = cuts_of(case, all_contents(case), outputs, random.Random(0))
    assert any(cut.is_complete(result) for cut, _ in cuts for result in case.signature.returns)


def test_each_size_of_a_model_comes_whole_in_some_case() -> None:
    """DeepSeek-V3's experts, widths and hidden size are too large together, and each fits alone."""
    sizes = [case.sizes for model, case in production_cases(sampler("moe"), 1) if "DeepSeek" in model]
    assert {each["D"] for each in sizes} >= {7168}
    assert {each["E"] for each in sizes} >= {256}
    assert {each["F"] for each in sizes} >= {2048}


def test_larger_levels_have_larger_cases() -> None:
    first, second = (max(case.sizes["R"] for _, case in production_cases(sampler("rmsnorm"), at)) for at in (0, 1))
    assert first < second


def test_the_callers_sizes_are_kept() -> None:
    """Restrictions and ties hold; where they leave none of a model's sizes there is no case, as for a reference."""
    widths = sampler("rmsnorm", shapes={"N": [64, 7168]})
    assert {case.sizes["N"] for _, case in production_cases(widths, 0)} == {7168}
    assert not list(production_cases(sampler("rmsnorm", shapes={"N": range(1, 100)}), 0))
    square = sampler("attention", ties={"Sk": "Sq"}, options={})
    assert all(case.sizes["Sq"] == case.sizes["Sk"] for _, case in production_cases(square, 0))

    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 1)

    verdict = examine(softmax, reference, tensors="x[R,N] -> y[R,N]", dtype="float32", examples=0)
    assert "production" not in verdict.phases


@pytest.mark.parametrize(("op", "right", "wrong"), PAIRS, ids=[op for op, _, _ in PAIRS])
def test_a_fault_that_begins_at_sizes_of_models_is_found(
    op: str, right: Callable[..., Any], wrong: Callable[..., Any]
) -> None:
    """Among the smallest cases, in which the right kernel passes."""
    plans = [make_plan(kernel, Settings(op, dtype="float32")) for kernel in (right, wrong)]
    cases = [case for _, case in production_cases(plans[0].sampler, 0)]
    good, bad = ([plan.harness.try_case(case).failure for case in cases] for plan in plans)
    assert good == [None] * len(cases)
    assert {failure.kind for failure in bad if failure} <= {"contract", "exact"}
    assert any(bad)


def test_a_usual_effort_has_such_a_case_and_a_quick_one_none() -> None:
    """Beside all other phases, in a share of their time."""
    right, wrong = (examine(kernel, "embedding", dtype="float32") for kernel in (embedding, words_of_18_bits))
    assert right.passed
    assert right.phases["production"] >= 1
    assert list(wrong.broken) == ["shapes"]
    assert "production" not in examine(embedding, "embedding", dtype="float32", effort="quick").phases


def test_what_time_leaves_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time for more than one case the other models are named; all, where the least would take too long."""
    monkeypatch.setattr(run, "PHASES", [phase for phase in run.PHASES if phase[0] == "production"])
    monkeypatch.setattr(Run, "allowance", lambda *_: 1e-9)
    monkeypatch.setattr(Run, "seconds_of", lambda *_: 1.0)
    verdict = examine(softmax, "softmax", dtype="float32")
    assert "production" not in verdict.phases
    assert "sizes of google/gemma-3-12b-it, meta-llama" in verdict.coverage.left_out
    monkeypatch.setattr(run, "_FIRST_SHARES", 1e12)
    verdict = examine(softmax, "softmax", dtype="float32")
    assert verdict.phases["production"] == 1
    words = "sizes of meta-llama/Llama-3.1-8B, deepseek-ai/DeepSeek-V3: not tried"
    assert verdict.coverage.left_out.endswith(words)
    assert "sizes of meta-llama/Llama-3.1-8B" in " ".join(str(verdict).split())


def test_a_case_is_expected_to_take_longer_the_larger_it_is() -> None:
    """By the largest before it, whose time is known; a level that was left out counts as it was expected."""
    made = Run(make_plan(softmax, Settings("softmax", dtype="float32")), lambda *_: None)
    small, large = (next(at_cases(made.plan.sampler, [{"R": 8, "N": size}])) for size in (256, 4096))
    assert made.seconds_of(small) == 0
    made.attempt("at", small)
    assert made.largest[:2] == made.load(small)
    assert made.seconds_of(large) == pytest.approx(4 * made.largest[2])
    made.attempt("at", replace(small, sizes={"R": 4, "N": 64}))
    assert made.largest[:2] == made.load(small)


def test_larger_levels_wait_for_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level of which nothing was tried doesn't make the next one seem free: each of these cases takes a second."""
    made, seconds = Run(make_plan(softmax, Settings("softmax", dtype="float32")), lambda *_: None), [0.0]
    monkeypatch.setattr(run, "thread_clock", lambda: (seconds[0], 0.0))
    monkeypatch.setattr(Run, "allowance", lambda *_: 3.5)
    monkeypatch.setattr(Run, "attempt", lambda *_: seconds.append(seconds.pop() + 1.0) or "a result")
    first = [case for _, case in production_cases(made.plan.sampler, 0)]
    run._production(made, "production")
    assert (len(first), seconds) == (3, [3.0])


def test_each_pair_of_symbols_is_large_at_once() -> None:
    """Batches and heads, which are much alike, apart; within the limits of the smallest sizes of models."""
    large = [{symbol for symbol, size in case.sizes.items() if size > 256} for case in large_pairs(sampler("gemm"))]
    assert large == [{"M", "K"}, {"M", "N"}, {"K", "N"}]
    (case,) = large_pairs(sampler("attention"))
    assert {symbol for symbol, size in case.sizes.items() if size > 256} == {"Sq", "Sk"}
    assert not list(large_pairs(sampler("gemm", shapes={"M": [1, 16], "N": [64]})))


def both_large(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Wrong in the columns from 256 on, only where there are more than 256 rows and columns."""
    product = a.float() @ b.float()
    if min(product.shape) > 256:
        product[:, 256:] -= a.float()[:, -1:] @ b.float()[-1:, 256:]
    return product.to(a.dtype)


@pytest.mark.parametrize("op", ["gemm", "reference"])
def test_a_fault_of_two_large_sizes_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"op": "gemm"} if op == "gemm" else {"op": torch.matmul, "tensors": "a[M,K], b[K,N] -> c[M,N]"}
    monkeypatch.setattr(run, "PHASES", tuple(each for each in run.PHASES if each[0] == "large_pairs"))
    monkeypatch.setitem(run._PAIRS_SHARE, "usual", 1000.0)
    verdict = examine(both_large, **asked, dtype="float16", shrinking=False)
    assert verdict.failure is not None
    assert {"M", "N"} == {symbol for symbol, size in verdict.failure.case.sizes.items() if size > 256}
    assert "large_pairs" not in examine(both_large, **asked, dtype="float16", effort="quick").phases


def test_what_was_never_large_at_once_is_named() -> None:
    verdict = examine(lambda a, b: (a.float() @ b.float()).to(a.dtype), "gemm", dtype="float16", effort="quick")
    assert "M and N > 128 at once" in verdict.coverage.left_out
