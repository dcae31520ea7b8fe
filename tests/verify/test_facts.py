"""Facts about a failure: relations between wrong outputs and goldens, and what a kernel reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden import spec
from assay.verify import Contract, Verdict, examine
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.explanation.facts import breaking_calls, measured_facts
from assay.verify.explanation.reads import _filled
from assay.verify.explanation.relations import Wrong, _number
from assay.verify.findings import Fact, Failure
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness
from assay.verify.report.html import verdict_page
from assay.verify.report.pictures import pictured
from assay.verify.report.text import text_report


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), -1)


def facts_of(*given: Any, **fields: Any) -> list[str]:
    """The words of `measured`."""
    return [fact.words for fact in measured(*given, **fields)]


def measured(
    kernel: Callable[..., Tensor],
    op: str = "softmax",
    dtype: str = "bfloat16",
    *,
    is_explained: bool = True,
    **fields: Any,
) -> tuple[Fact, ...]:
    """The facts about the failure of a kernel in an ordinary case: its relations, and, unexplained, what it reads."""
    sampler = Sampler(spec(op), dtype, **fields)
    case = with_values(
        sampler.case(seeded(1), style="tile"), "normal", unused="plain", protocol="once", layouts={}, memory="plain"
    )
    harness = KernelHarness(Call(lambda *tensors: kernel(*tensors).to(tensors[0].dtype).contiguous(), {}), Contract())
    failure = harness.try_case(case).failure or Failure("contract", case, "")
    calls = breaking_calls(harness, failure, case, sampler)
    facts = measured_facts(harness, calls, "numbers", is_explained=is_explained)
    assert {fact.kind for fact in facts} <= {"relation"} if is_explained else {"relation", "reads"}
    return facts


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)


RELATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "factor": (lambda x: softmax(x) * 1.05, "all elements of y are 1.05 times the right ones"),
    "sign": (lambda x: -softmax(x), "all elements of y have the opposite sign"),
    "size": (lambda x: softmax(x) * x.shape[-1], "of y are N times the right ones"),
    "root": (lambda x: softmax(x) / x.shape[-1] ** 0.5, "of y are 1/sqrt(N) times the right ones"),
    "offset": (lambda x: softmax(x) + 0.125, "all elements of y are the right ones plus 0.125"),
    "constant": (lambda x: torch.zeros_like(x), "elements of y are 0"),
    "rolled": (lambda x: softmax(x).roll(1, 0), "the right ones rolled by 1 along R"),
    "reversed": (lambda x: softmax(x).flip(1), "the right ones in reverse order along N"),
    "first": (lambda x: softmax(x)[:1].expand(x.shape), "the wrong elements of y are the right ones of the first R"),
    "tail": (
        lambda x: torch.cat([softmax(x)[:, :8], softmax(x)[:, 8:] * 2], 1),
        "the wrong elements of y are 2 times the right ones",
    ),
    "exchanged": (
        lambda x: softmax(x)[torch.tensor([min(row ^ 1, len(x) - 1) for row in range(len(x))])],
        "neighbours along R exchanged",
    ),
}


@pytest.mark.parametrize("name", RELATIONS)
def test_a_relation_is_told(name: str) -> None:
    kernel, words = RELATIONS[name]
    (fact,) = facts_of(kernel)
    assert words in fact


def test_a_verdict_has_its_facts() -> None:
    """In the report, in the JSON, and of one aspect alone."""
    few: dict[str, Any] = {"effort": "quick", "examples": 0, "layouts": ["contiguous"], "dtype": "float32"}
    few["shapes"] = {"R": [4, 5, 6], "N": [12, 20]}
    verdict = examine(lambda x: softmax(x) * 1.25, "softmax", **few)
    (fact,) = verdict.facts
    assert (fact.kind, fact.aspect) == ("relation", "numbers")
    assert re.search(r"measured +all elements of y are 1\.25 times the right ones \(\d calls\)", text_report(verdict))
    assert Verdict.from_dict(verdict.as_dict()).facts == verdict.facts
    assert fact.picture is not None
    assert all(got == pytest.approx(1.25 * right, rel=1e-5) for right, got in fact.picture.points)
    page = verdict_page(verdict)
    assert page.count('id="picture-numbers-1"') == 1
    assert page.count('<svg class="mark dot bad"') == len(fact.picture.points) >= 20
    assert '<figure class="chart"' not in verdict_page(examine(softmax, "softmax", **few))
    assert examine(softmax, "softmax", **few).facts == []


def test_a_transposed_result_and_a_result_of_few_digits() -> None:
    """Between dimensions of equal size; in float32, numbers of bfloat16."""
    square = {"M": (24,), "N": (24,)}
    (fact,) = facts_of(lambda a, b: (a.float() @ b.float()).T, "gemm", "float32", shapes=square)
    assert "with M and N exchanged" in fact
    (fact,) = facts_of(lambda x: softmax(x).bfloat16(), dtype="float32")
    assert "8 significant bits, as bfloat16 has, beside the right ones" in fact
    (fact,) = facts_of(lambda x: (softmax(x) * (1 + 0.03 * torch.sin(999 * x))).bfloat16(), dtype="float32")
    assert re.search(r"8 significant bits, as bfloat16 has, up to \d of their units off", fact)


def noisy(x: Tensor) -> Tensor:
    """Errors that differ from element to element."""
    noise = torch.Generator().manual_seed(int(x.float().sum().nan_to_num().clamp(-9, 9) * 1000) % 7919)
    return softmax(x) * (1 + 0.5 * torch.rand(x.shape, generator=noise))


@pytest.mark.parametrize("kernel", [noisy, lambda x: softmax(x) ** 1.1, lambda x: softmax(x).sqrt(), softmax])
def test_errors_without_a_pattern_have_no_relation(kernel: Callable[[Tensor], Tensor]) -> None:
    assert facts_of(kernel) == []


READS: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "tail of a weight": (
        lambda x, w: norm(x, torch.where(torch.arange(len(w)) < 32, w, 1.0)),
        "rmsnorm",
        r"weight is not read at N 32 to \d+ \(the last \d+\)",
    ),
    "a tensor": (lambda x, w: norm(x, torch.ones_like(w)), "rmsnorm", "weight is not read: nothing changes with it"),
    "last term": (lambda a, b: a[:, :-1].float() @ b[:-1].float(), "gemm", r"[ab] is not read at K \d+ \(of \d+\)"),
    "a row below": (
        lambda x: softmax(x + 0.1 * x.roll(1, 0).nan_to_num(0, 0, 0)),
        "softmax",
        r"x at .*R.* changes outputs that don't depend on it \(e\.g\. y\[\d+, \d+\] of R \d+\)",
    ),
}


@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_told(name: str) -> None:
    """Places of inputs that matter and aren't read, or are read where they don't matter."""
    kernel, op, words = READS[name]
    facts = facts_of(kernel, op, is_explained=False)
    assert any(re.search(words, fact) for fact in facts), facts


def test_a_map_of_what_is_read_has_all_indices() -> None:
    """Each index of the dimension at its level, as the words say; the picture of an input read wholly has none."""
    tail = READS["tail of a weight"][0]
    (fact,) = (fact for fact in measured(tail, "rmsnorm", is_explained=False) if fact.kind == "reads")
    assert fact.picture is not None
    levels = {int(index): fact.picture.levels[int(level)] for index, level in fact.picture.points}
    assert [levels[index] for index in (0, 31, 32, len(levels) - 1)] == ["read", "read", "not read", "not read"]
    assert fact.words.endswith(f"N={len(levels)}")
    assert all(label in pictured(fact, "map") for label in ("not read", "N of weight"))


def test_what_was_not_measured_is_not_told() -> None:
    """Unknown indices count between ones that aren't read, and not at the ends or beside one that is."""
    assert _filled([None, True, None, True, None]) == [False, True, True, True, False]
    assert _filled([False, None, True, None, False]) == [False, False, True, False, False]


def test_another_relation_of_the_same_output_is_another_fact() -> None:
    """And the same one from other calls is not."""
    twice, again, nan = (
        Fact("relation", words)
        for words in (
            "all elements of y are 2 times the right ones (8 calls)",
            "the wrong elements of y are 2 times the right ones (3 calls)",
            "the wrong elements of y are NaN (3 calls)",
        )
    )
    assert twice.subject == again.subject != nan.subject


def test_a_number_with_two_names_has_none() -> None:
    """1.41 to 1.45 holds sqrt(2) and 1 / ln 2."""
    case = Sampler(spec("softmax"), "bfloat16").case(seeded(1), style="tile")
    nothing = torch.zeros(0)
    calls = [Wrong(case, *[nothing] * 6)]
    assert "(" not in _number(1.41, 1.45, calls)
    assert _number(1.44, 1.45, calls).endswith("(1 / ln 2)")


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        (lambda x: softmax(x) * 1.5, "softmax"),
        (lambda x, w: norm(x, w) * 3, "rmsnorm"),
        (lambda x, w: norm(x, w) * torch.nan, "rmsnorm"),
    ],
)
def test_what_is_read_rightly_is_not_told(kernel: Callable[..., Tensor], op: str) -> None:
    """Of a wrong kernel that reads what it should."""
    assert [fact for fact in facts_of(kernel, op, is_explained=False) if " read" in fact or "changes" in fact] == []
